// The part of a bucket that a rank keeps between forward and backward, if the user has asked for
// reshard_after_forward=k.
//
// Note [group shards]
// The N ranks that share a bucket form N / k groups of k consecutive ranks. After forward each rank
// keeps 1/k of the unsharded buffer, as it lies in the slot: of each region, the chunks of N / k
// ranks, one after another. That is a gather input of the bucket's layout over k ranks
// (UnitLayout::regrouped), whose unsharded buffer has the same bytes at the same places. So later
// gathers of the iteration need only the ranks of one group, and their results are the same bits.
//
// - The copy runs on the stream of the messages, after the gather and before any later gather into
//   the slot. The compute stream waits for the copy only before writing to the slot or freeing it.
// - Gathers of a group run on the stream of the gather lane, too, but over a communicator of their
//   own. All ranks issue the gathers of all groups at the same place in the order of that lane,
//   whose history, comparisons and tags cover them.
// - What is kept is valid as long as a slot's contents are (Note [lazy reshard]), and for one
//   backward. A reshard() of the user ends that, since a write through `.data` may be the reason
//   for it. A forward without gradients makes no group shards, because no backward follows.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/gather/gather_source.h"
#include "core/memory/layout.h"
#include "device/stream.h"
#include "pack/pack.h"

namespace fsdp {

struct GroupShard {
  GroupShard(Communicator& group, const UnitLayout& of_bucket, const std::vector<Unit*>& units,
             std::string label, Lanes& lanes)
      : layout(of_bucket.regrouped(group.size())),
        source(Collective::GroupAllGather, group, layout, units, std::move(label), lanes),
        keep_plan(layout.keep_plan(group.rank())),
        kept(lanes.device->new_event()) {
    lanes.packer->prepare(keep_plan);
  }

  const UnitLayout layout;  // of the bucket, over the group
  const GatherSource source;
  UnpackPlan keep_plan;

  std::shared_ptr<void> memory;  // layout.gather_bytes()
  ShardStamp kept_from;          // the shards that it was made from
  std::unique_ptr<Event> kept;   // the copy has run
  bool is_due = false;           // the slot's contents are kept when it is released
};

}  // namespace fsdp
