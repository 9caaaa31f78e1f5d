// The units of a pipeline, their settings, and the buckets that they share. Forms the buckets and
// plans the memory that they need, again whenever the settings or the order of forward have
// changed.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/agree/order_check.h"
#include "core/agree/rank_exchange.h"
#include "core/gather/gatherer.h"
#include "core/lanes.h"
#include "core/reduce/reducer.h"
#include "core/schedule/forward_order.h"
#include "core/schedule/pipeline_options.h"
#include "core/units/bucket.h"
#include "core/units/merging.h"
#include "core/units/unit.h"

namespace fsdp {

class UnitSet {
 public:
  // The set uses these in its calls only. They may be made after it, and end before it.
  UnitSet(Lanes& lanes, const PipelineOptions& options, ForwardOrder& forward_order,
          Gatherer& gatherer, Reducer& reducer, OrderCheck& order_check, RankExchange& exchange);

  UnitSet(const UnitSet&) = delete;
  UnitSet& operator=(const UnitSet&) = delete;

  // Add units in order of registration. The port outlives the set. Returns the unit's number.
  int add(UnitConfig config, UnitPort& port);
  // Settings are effective from the unit's next use on.
  void apply(int unit, UnitSettings settings);

  Unit& at(int number) const { return *units_.at(static_cast<std::size_t>(number)); }
  const std::vector<std::unique_ptr<Unit>>& all() const { return units_; }
  // Empty until buckets are formed.
  const std::vector<std::unique_ptr<Bucket>>& buckets() const { return buckets_; }

  // Ends the recording of the first order of forward, which decides which units share a bucket.
  void finish_recording() {
    forward_order_.finish_recording();
    invalidate_partition();
  }
  // Whether the next update has something to do.
  bool is_stale() const { return partition_is_stale_ || !memory_is_planned(); }
  // Updates the buckets and plans their memory. If a unit uses a slot of the ring now (the user has
  // unsharded it), memory is planned in a later call. If a bucket has accumulated gradients on any
  // rank, a later call forms the new buckets.
  void update();
  // Forms the buckets without planning their memory, if there are none.
  void form_if_none();

  // Throws if a CUDA graph has captured a step: replays use the buffers of these units.
  void refuse_after_capture() const {
    if (gatherer_.has_been_captured()) {
      fsdp::refuse_after_capture();
    }
  }

  // Gives back the memory of gradients that do not exist: Note [lent gradients]. A captured CUDA
  // graph writes gradients to fixed addresses, so they have to keep their memory.
  void lend_gradients() const {
    if (!gatherer_.has_been_captured()) {
      reducer_.lend_gradients(buckets_);
    }
  }

  // Users see the sharded parameters from now on: Note [after an evaluation] in
  // core/gather/unit_gather.h.
  void put_away_parameters();

 private:
  // The partition that the ranks have compared: of the order of registration, then of the recorded
  // one.
  enum class Compared : std::uint8_t { Nothing, Registration, Recorded };
  static constexpr int kNotPlanned = -1;

  void invalidate_partition() { partition_is_stale_ = true; }
  void invalidate_memory() { planned_depth_ = kNotPlanned; }
  bool memory_is_planned() const { return planned_depth_ == options_.prefetch_depth; }
  bool is_ring_in_use() const;
  bool any_rank_has_accumulated() const;
  bool has_other_groups() const;
  Partition partition() const;
  std::vector<const UnitConfig*> configs() const;
  void note_order();
  void compare_ranks(const Partition& partition);
  void form(const Partition& partition);
  void plan_memory();

  Lanes& lanes_;
  const PipelineOptions& options_;
  ForwardOrder& forward_order_;
  Gatherer& gatherer_;
  Reducer& reducer_;
  OrderCheck& order_check_;
  RankExchange& exchange_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  Partition partition_;  // of buckets_
  bool partition_is_stale_ = true;
  bool runs_in_other_order_ = false;  // than that of registration, on any rank
  int planned_depth_ = kNotPlanned;   // the prefetch depth that memory is planned for
  Compared compared_ = Compared::Nothing;
};

}  // namespace fsdp
