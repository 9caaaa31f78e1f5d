#include "core/gather/bucket_gather.h"

#include <string>

#include "base/align.h"
#include "base/check.h"
#include "core/units/bucket_names.h"

namespace fsdp {
namespace {

Communicator& communicator_of(const std::vector<Unit*>& units, Lanes& lanes) {
  return lanes.of_mesh(units.front()->mesh).gather.communicator();
}

// All units of a bucket have the same group.
std::unique_ptr<GroupShard> group_shard_of(const UnitLayout& layout,
                                           const std::vector<Unit*>& units, Lanes& lanes) {
  const int ranks = units.front()->reshard_group;
  if (ranks == 0) {
    return nullptr;
  }
  Communicator& group = lanes.of_mesh(units.front()->mesh).group_of(ranks).gather.communicator();
  const std::string what = detail::concat("the all-gather over ", ranks, " ranks");
  return std::make_unique<GroupShard>(group, layout, units, label_of(what, units), lanes);
}

}  // namespace

BucketGather::BucketGather(const UnitLayout& layout, const std::vector<Unit*>& units, Lanes& lanes)
    : all_ranks_(Collective::AllGather, communicator_of(units, lanes), layout, units,
                 label_of("the all-gather", units), lanes),
      group_(group_shard_of(layout, units, lanes)) {}

std::size_t BucketGather::buffer_bytes(const BucketBuffers& planned) const {
  return (persistent_slot_ != nullptr ? persistent_slot_->bytes : 0) +
         (input_ != nullptr ? align_up(planned.gather_input, kRegionAlignment) : 0) +
         (group_ != nullptr && group_->memory != nullptr ? planned.group_shard : 0);
}

}  // namespace fsdp
