// Which units share a bucket. Forms the buckets and plans the memory that they need, again whenever
// the settings or the order of forward have changed.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/agree/backward_exchange.h"
#include "core/agree/order_check.h"
#include "core/gather/gatherer.h"
#include "core/lanes.h"
#include "core/reduce/reducer.h"
#include "core/schedule/forward_order.h"
#include "core/schedule/pipeline_options.h"
#include "core/units/bucket.h"
#include "core/units/merging.h"
#include "core/units/unit.h"

namespace fsdp {

class BucketSet {
 public:
  // All of these outlive the set and may change between its calls.
  BucketSet(Lanes& lanes, const PipelineOptions& options,
            const std::vector<std::unique_ptr<Unit>>& units, OrderCheck& order_check);

  BucketSet(const BucketSet&) = delete;
  BucketSet& operator=(const BucketSet&) = delete;

  // Empty before the first iteration.
  const std::vector<std::unique_ptr<Bucket>>& buckets() const { return buckets_; }

  // A setting has changed that decides which units share a bucket, or how much memory they need.
  void invalidate_partition() { partition_is_stale_ = true; }
  void invalidate_memory() { planned_depth_ = kNotPlanned; }
  // The ranks compare the next partition even if they have compared one before.
  void invalidate_comparison() { compared_ = Compared::Nothing; }

  // Whether the next update has something to do.
  bool is_stale() const { return partition_is_stale_ || !memory_is_planned(); }
  // Updates the buckets and plans their memory. If a unit uses a slot of the ring now (the user has
  // unsharded it), memory is planned in a later call. If a bucket has accumulated gradients on any
  // rank, a later call forms the new buckets.
  void update(const ForwardOrder& order, Gatherer& gatherer, Reducer& reducer,
              BackwardExchange& exchange);
  // Forms the buckets without planning their memory.
  void form(const ForwardOrder& order, Gatherer& gatherer, Reducer& reducer) {
    form(partition(order), gatherer, reducer);
  }

 private:
  // The partition that the ranks have compared: of the order of registration, then of the recorded
  // one.
  enum class Compared : std::uint8_t { Nothing, Registration, Recorded };
  static constexpr int kNotPlanned = -1;

  bool memory_is_planned() const { return planned_depth_ == options_.prefetch_depth; }
  bool is_ring_in_use() const;
  bool any_rank_has_accumulated(BackwardExchange& exchange) const;
  bool has_other_groups() const;
  Partition partition(const ForwardOrder& order) const;
  std::vector<int> parents() const;
  void note_order(const ForwardOrder& order, const Gatherer& gatherer);
  void compare_ranks(const Partition& partition, const ForwardOrder& order);
  void form(const Partition& partition, Gatherer& gatherer, Reducer& reducer);
  void plan_memory(Gatherer& gatherer, Reducer& reducer);

  Lanes& lanes_;
  const PipelineOptions& options_;
  const std::vector<std::unique_ptr<Unit>>& units_;
  OrderCheck& order_check_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  Partition partition_;  // of buckets_
  bool partition_is_stale_ = true;
  bool runs_in_other_order_ = false;  // than that of registration, on any rank
  int planned_depth_ = kNotPlanned;   // the prefetch depth that memory is planned for
  Compared compared_ = Compared::Nothing;
};

}  // namespace fsdp
