// The schedule: when each unit is gathered, released and reduced. The same code runs on every
// device and transport, without torch.
//
// One iteration, for units 0 (the root) to L with prefetch depth 1:
//
//   pre_forward(i)    unit i gathered and attached; the gather of i + 1 is in flight
//   post_forward(i)   unit i detached, its slot released (the root stays, if backward follows)
//   pre_backward(i)   as pre_forward, in reverse order of post_forward
//   gradient_arrived  the gradient is noted
//   post_backward(i)  backward has passed the unit's inputs: its gradients are packed and reduced,
//                     the unit is detached, and its slot is released
//   end_backward      the remaining units' steps; the compute stream waits for all reductions
//
// The hooks of backward (backward_schedule.h) take all steps up to their own: Note [order of
// backward] in core/schedule/backward_order.h.
//
// Gathers and reductions carry a unit's whole bucket (core/units/bucket.h). Calls for the bucket's
// other units find the gather issued already, and the last unit that backward passes reduces for
// all.
//
// Note [gathers ahead of forward]
// After the optimizer's step the user may call prefetch_next_forward. It begins an iteration and
// issues the first gathers of the next forward, so that they overlap the loader. begin_forward
// continues this iteration. If the version of a unit's shards has changed since the call,
// begin_forward reshards the unit, and forward gathers it again.
//
// Not thread-safe. Forward runs on the caller's thread and backward on the autograd engine's, but
// never at the same time: Note [turns] in torch/torch_root.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/agree/order_check.h"
#include "core/agree/rank_exchange.h"
#include "core/gather/gatherer.h"
#include "core/lanes.h"
#include "core/record/ledger.h"
#include "core/reduce/reducer.h"
#include "core/schedule/announcer.h"
#include "core/schedule/backward_schedule.h"
#include "core/schedule/forward_order.h"
#include "core/schedule/passes.h"
#include "core/schedule/pipeline_options.h"
#include "core/schedule/prefetcher.h"
#include "core/units/bucket.h"
#include "core/units/unit.h"
#include "core/units/unit_set.h"

namespace fsdp {

class Pipeline {
 public:
  // The lanes outlive the pipeline. `replicas` are those of the ranks with the same shard, if there
  // are several: Note [replicas] in core/reduce/reducer.h. The destructor waits for work in flight.
  Pipeline(Lanes& lanes, PipelineOptions options, Lanes* replicas = nullptr);

  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // - Forward. begin_forward and end_forward enclose the outermost unit's forward, except when it
  //   is recomputed in backward.
  // `with_gradient` says whether autograd records this forward. Returns the smallest id of a call
  // that a backward may still come for.
  CallId begin_forward(int outermost = 0, bool with_gradient = true);
  void end_forward(bool with_gradient = true);
  // Returns the id of this call, which the hooks of backward pass on. It is kNoCall if
  // checkpointing that is not reentrant recomputes the call, because no hook of it runs. A unit of
  // several modules calls this for each of them, and post_forward once.
  CallId pre_forward(int unit);
  // `with_gradient`: autograd recorded this call.
  CallId post_forward(int unit, bool with_gradient = true);

  // Whether a backward may come for a recorded call of the unit: ForwardOrder::awaits_backward_of.
  // None comes once the unit's shards have changed.
  bool awaits_backward_of(int number) const {
    return unit(number).gather.followed_version() == unit(number).shard_version() &&
           forward_order_.awaits_backward_of(number);
  }
  // ForwardOrder::take_left_out.
  int take_left_out() { return forward_order_.take_left_out(); }
  BackwardSchedule& backward() { return backward_; }

  // - Passes that fail.
  // Cleans up after an exception in forward or backward: waits for work in flight and reshards
  // every unit. After a failed backward it drops gradients that are not reduced, because they may
  // include a part of that backward's. After a failed forward they stay, because a forward adds no
  // gradients. After::Anything drops them in any case. After::FailureInForward is for a backward
  // inside a forward that goes on. Returns whether gradients of earlier backwards are lost.
  // begin_forward calls this function if the last pass did not end.
  enum class After : std::uint8_t { Failure, FailureInForward, Anything };
  bool reset(After what = After::Anything);
  const std::shared_ptr<Passes>& passes() const { return shared_passes_; }

  // Called between passes. Issues the gathers of as many buckets as the first unit of forward does.
  // It issues none before the first forward, nor once a CUDA graph has captured a step on these
  // lanes, because replays use the lanes and perhaps the slots, too.
  void prefetch_next_forward();

  // - unshard() and reshard(), called by the user.
  // Issues the gather. `expected`: backward may come through the output of this call, although the
  // output has no hook.
  void unshard(int unit, CallId expected = kNoCall);
  // Makes the compute stream wait, and attaches. If the unit has run since unshard(), a stream
  // that has not waited yet waits, too. Does nothing if the unit was resharded.
  void wait_for_unshard(int unit);
  void reshard(int unit);

  // - Between passes.
  // Makes the compute stream wait for the reductions of earlier backwards.
  void wait_for_reductions();
  // The same for one unit, before its gradients change.
  void wait_before_change(int unit);
  // Makes the buckets and their memory as the next forward would.
  void update_buckets();
  // Forms the buckets without planning their memory, if there are none.
  void form_buckets();

  // The prefetch depth and is_last_backward may change, between passes.
  PipelineOptions& options() { return options_; }

  // - The parts of the pipeline.
  UnitSet& units() { return units_; }
  Unit& unit(int number) const { return units_.at(number); }
  Ledger& ledger() { return ledger_; }
  RankExchange& exchange() { return exchange_; }
  Gatherer& gatherer() { return gatherer_; }
  Reducer& reducer() { return reducer_; }

 private:
  void reshard_for_capture();
  CallId enter_forward(Unit& unit);
  void note_holder(Unit& unit);
  [[noreturn]] void fail(const Error& error);
  void end_evaluation();
  auto next_of_forward();
  void drop_prefetched();
  void begin_times();

  Lanes& lanes_;
  Lanes* replicas_;
  Device& device_;
  PipelineOptions options_;
  Ledger ledger_;
  // The destructors of the gatherer and the reducer wait for work in flight, which uses the units,
  // the exchange and the buckets. So these come first.
  UnitSet units_;
  RankExchange exchange_;
  OrderCheck order_check_;
  const std::shared_ptr<Passes> shared_passes_ = std::make_shared<Passes>();
  Passes& passes_ = *shared_passes_;
  Announcer announcer_;
  Gatherer gatherer_;
  Reducer reducer_;

  ForwardOrder forward_order_;
  Prefetcher prefetcher_;
  BackwardSchedule backward_;
  bool forward_keeps_ = true;         // whether this forward makes group shards for a backward
  bool shards_have_changed_ = false;  // since the last forward began
};

}  // namespace fsdp
