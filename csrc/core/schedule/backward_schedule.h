// What backward does with each unit: when it is gathered, reduced and resharded. The pipeline does
// the rest of the schedule.
//
// Note [order of reductions]
// Ranks match reductions by their order, so all ranks need the same one. It is fixed when backward
// begins. Each bucket takes the place of its last step in Note [order of backward], in
// core/schedule/backward_order.h. A bucket is reduced after all buckets in front of it, when
// backward has passed its units. Parameters without a gradient then send zeros. The last gradient
// of a unit arrives earlier. But the full backward hooks of the unit's modules run after it, and
// they may read and change .grad.
//
// Gradients of units without steps, such as those whose outputs autograd's hooks cannot see, are
// reduced at the end of backward.
#pragma once

#include <cstddef>
#include <vector>

#include "core/agree/order_check.h"
#include "core/agree/rank_exchange.h"
#include "core/gather/gatherer.h"
#include "core/lanes.h"
#include "core/record/ledger.h"
#include "core/reduce/reducer.h"
#include "core/schedule/backward_order.h"
#include "core/schedule/forward_order.h"
#include "core/schedule/passes.h"
#include "core/schedule/pipeline_options.h"
#include "core/schedule/prefetcher.h"
#include "core/units/bucket.h"
#include "core/units/unit.h"
#include "core/units/unit_set.h"

namespace fsdp {

class BackwardSchedule {
 public:
  // All of these outlive this. `replicas` may be null.
  BackwardSchedule(Lanes& lanes, Lanes* replicas, const PipelineOptions& options, Ledger& ledger,
                   UnitSet& units, RankExchange& exchange, OrderCheck& order_check, Passes& passes,
                   Gatherer& gatherer, Reducer& reducer, const Prefetcher& prefetcher,
                   ForwardOrder& forward_order)
      : lanes_(lanes),
        replicas_(replicas),
        device_(*lanes.device),
        options_(options),
        ledger_(ledger),
        units_(units),
        exchange_(exchange),
        order_check_(order_check),
        passes_(passes),
        gatherer_(gatherer),
        reducer_(reducer),
        prefetcher_(prefetcher),
        forward_order_(forward_order) {}

  // With may_reshard=false this backward leaves units unsharded, whatever their settings say.
  void begin_backward(bool may_reshard = true, const BackwardGraph& graph = {});
  void end_backward();
  void pre_backward(int unit, CallId call);
  void gradient_arrived(int unit, std::size_t trainable);
  void post_backward(int unit, CallId call);
  // Takes the steps that are left of regions of reentrant checkpointing that have run again. No
  // hook takes them, since the inputs of a region are leaves. Call it when the outermost backward
  // runs another forward again, but not in a backward inside it, whose region is not over. If the
  // first unit of a region has no graph, the next hook outside of regions takes the steps.
  void end_regions();

  // - Called by the pipeline.
  // The unit's forward runs again inside backward.
  void recompute(Unit& unit);
  // Ends such a run of a region, for whose call BackwardOrder::is_recomputed_call() is true.
  void end_recomputation(Unit& unit, CallId call);
  // Forgets a backward that failed.
  void reset();

 private:
  [[noreturn]] void fail(const Error& error);
  void note_left_out();
  void take_steps(std::size_t count);
  void take(const BackwardStep& step);
  void gather_in_backward(Unit& unit);
  void prefetch_backward(const Unit& unit);
  void return_to_enclosing();
  bool runs_forward(const Unit& unit) const;
  void reshard_in_backward(Unit& unit);
  void order_reductions();
  void reduce_complete();
  void reduce_the_rest();

  Lanes& lanes_;
  Lanes* replicas_;
  Device& device_;
  const PipelineOptions& options_;
  Ledger& ledger_;
  UnitSet& units_;
  RankExchange& exchange_;
  OrderCheck& order_check_;
  Passes& passes_;
  Gatherer& gatherer_;
  Reducer& reducer_;
  const Prefetcher& prefetcher_;
  ForwardOrder& forward_order_;
  BackwardOrder backward_order_;
  std::vector<Bucket*> awaited_;      // to be reduced, the next one last
  bool backward_may_reshard_ = true;  // of the backward that runs
  bool is_second_backward_ = false;   // the last one did not reshard; Note [double backward]
  bool backward_accumulates_ = true;
};

}  // namespace fsdp
