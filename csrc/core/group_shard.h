// What a rank keeps of a bucket between forward and backward, if the user has asked for
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
//   for it. What is kept is never made in a forward without gradients, because no backward follows.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/gather_piece.h"
#include "core/layout.h"
#include "device/stream.h"
#include "pack/pack.h"

namespace fsdp {

struct GroupShard {
  GroupShard(Communicator& of_group, const UnitLayout& of_bucket)
      : communicator(of_group), layout(of_bucket.regrouped(of_group.size())) {}

  Communicator& communicator;
  const UnitLayout layout;  // of the bucket, over the group
  UnpackPlan keep_plan;
  std::vector<GatherPiece> gathers;
  std::size_t gathered_bytes = 0;        // of all pieces
  std::vector<std::size_t> last_pieces;  // of each unit of the bucket, as Unit::last_piece
  std::string gather_label;

  std::shared_ptr<void> memory;  // layout.gather_bytes()
  ShardStamp kept_from;          // the shards that it was made from
  std::unique_ptr<Event> kept;   // the copy has run
  bool is_due = false;           // the slot's contents are kept when it is released
};

}  // namespace fsdp
