// The schedule: which unit is gathered, released and reduced when. One piece of code for every
// device and transport, free of torch.
//
// One iteration, for units 0 (the root) to L with prefetch depth 1:
//
//   pre_forward(i)    unit i gathered and attached; the gather of i + 1 is on its way
//   post_forward(i)   unit i detached, its slot released (the root stays)
//   pre_backward(i)   as pre_forward, in reverse order of post_forward
//   gradient_arrived  counts; the last one of a unit packs and reduces its gradients
//   post_backward(i)  backward has passed the unit's inputs: detached, slot released
//   end_backward      reduces what is left over; the compute stream waits for all reductions
//
// What is gathered and reduced is a unit's whole bucket (core/bucket.h), so calls for its other
// units find that done, or wait for them.
//
// Not thread-safe: forward runs on the caller's thread and backward on the autograd engine's,
// never at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/bucket.h"
#include "core/gatherer.h"
#include "core/lanes.h"
#include "core/ledger.h"
#include "core/merging.h"
#include "core/order_check.h"
#include "core/reducer.h"
#include "core/unit.h"

namespace fsdp {

struct PipelineOptions {
  int prefetch_depth = 1;   // gathers of buckets in flight ahead of the unit in use
  int nesting = 1;          // units below the root that enclose each other, at most
  bool check_order = true;  // compare the first iteration's collectives across ranks
};

class Pipeline {
 public:
  // The lanes outlive the pipeline. What is in flight is waited for when it goes.
  Pipeline(Lanes& lanes, PipelineOptions options);

  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // Units in order of registration; the port outlives the pipeline. Returns the unit's number.
  int add_unit(UnitConfig config, UnitPort& port);

  // - Forward. begin_forward and end_forward enclose the outermost unit's forward, unless that is
  //   a recomputation inside backward.
  void begin_forward(int outermost = 0);
  void end_forward(bool with_gradient = true);
  void pre_forward(int unit);
  // Returns the number of this forward call, for pre_backward. `with_gradient`: whether autograd
  // recorded it (Note [reentrant checkpointing]); end_forward has it of the outermost unit.
  int post_forward(int unit, bool with_gradient = true);

  // - Backward.
  void begin_backward();
  void end_backward();
  void pre_backward(int unit, int forward_call);
  void gradient_arrived(int unit, std::size_t trainable);
  void post_backward(int unit);

  bool in_forward() const { return in_forward_; }
  bool in_backward() const { return in_backward_; }

  // - By hand.
  void unshard(int unit);           // issues
  void wait_for_unshard(int unit);  // makes the compute stream wait, attaches
  void reshard(int unit);
  // After an exception in forward or backward: waits for what is in flight, reshards every unit,
  // forgets gradients that are not reduced. begin_forward does it where the last iteration did
  // not end.
  void reset_iteration();

  // - Settings, effective from the next use on.
  void set_reshard_after_forward(int unit, bool value);
  void set_reshard_after_backward(int unit, bool value);
  void set_requires_gradient_sync(int unit, bool value);
  void set_gradient_scales(int unit, double pack_scale, double reduce_scale);
  void set_forward_prefetch(int unit, std::vector<int> targets);
  void set_backward_prefetch(int unit, std::vector<int> targets);
  void set_bucket_bytes(int unit, std::size_t bytes);
  void set_prefetch_depth(int depth);
  void set_is_last_backward(bool value) { is_last_backward_ = value; }

  int unit_count() const { return static_cast<int>(units_.size()); }
  const Unit& unit(int number) const { return *units_.at(static_cast<std::size_t>(number)); }
  // Forms the buckets, if it is not yet known which the unit is in.
  const Bucket& bucket_of(int unit);
  // Empty before the first iteration.
  const std::vector<std::unique_ptr<Bucket>>& buckets() const { return buckets_; }
  Ledger& ledger() { return ledger_; }
  // See Ledger::keep_times.
  void keep_times(std::size_t iterations, bool drained);
  Gatherer& gatherer() { return gatherer_; }
  Reducer& reducer() { return reducer_; }

 private:
  // In order of post_forward. `first` is the first call of the same forward of the root.
  struct ForwardCall {
    int unit;
    int first;
  };

  Unit& unit_at(int number) { return *units_.at(static_cast<std::size_t>(number)); }
  void plan();
  void compare_ranks(const Partition& partition);
  bool has_run(int number) const;
  void know_order();
  Partition partition() const;
  void form_buckets(const Partition& partition);
  void plan_memory();
  void note_forward(const Unit& unit);
  void prefetch_forward(const Unit& unit);
  void prefetch_backward(const Unit& unit, int forward_call);
  void release_behind(Unit& unit);
  void begin_times();
  void begin_computing(Unit& unit, Work work, bool has_waited);
  bool awaits_recomputation(const Unit& unit) const;
  void complete(Unit& unit);
  void announce(Collective op, const Bucket& bucket, std::size_t bytes);
  bool comparing_ranks() const;

  Lanes& lanes_;
  Device& device_;
  PipelineOptions options_;
  int world_size_;
  Ledger ledger_;
  // What work in flight uses comes before the two that wait for it when they go.
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  OrderCheck order_check_;
  Gatherer gatherer_;
  Reducer reducer_;
  Partition partition_;           // that buckets_ has
  bool partition_is_old_ = true;  // what it follows from has changed
  bool memory_planned_ = false;

  bool in_forward_ = false;
  bool in_backward_ = false;
  bool is_last_backward_ = true;
  bool backward_ended_ = false;  // since the last begin_forward
  bool awaiting_backward_ = false;
  IterationIndex pass_;  // forward, or backward
  bool first_forward_done_ = false;
  bool first_backward_done_ = false;
  std::vector<int> forward_order_;  // units in order of pre_forward, of the last whole forward
  std::vector<int> current_order_;  // of the forward that runs
  // Of the first iteration: until its backward ends, or forward begins where it has begun before.
  std::vector<ForwardEvent> first_events_;
  bool order_is_known_ = false;
  bool compared_ = false;                   // across ranks, the first buckets
  bool second_compared_ = false;            // and those of the order that is known
  std::size_t next_in_order_ = 0;           // in forward_order_, behind the unit that runs
  std::vector<ForwardCall> forward_calls_;  // since the last backward
  int first_call_ = 0;                      // of the forward that runs, in forward_calls_
};

}  // namespace fsdp
