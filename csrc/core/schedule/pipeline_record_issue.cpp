// Before each collective is issued: compares it with other ranks, and records it for the ledger
// and for error messages.
#include "base/mix.h"
#include "core/schedule/pipeline.h"

namespace fsdp {

Lane& Pipeline::lane_of(Collective op) {
  switch (op) {
    case Collective::AllGather:
    case Collective::GroupAllGather:
      return lanes_.gather;
    case Collective::ReduceScatter:
      return lanes_.reduce;
    case Collective::AllReduce:
      break;
  }
  return replicas_->reduce;
}

Communicator& Pipeline::communicator_of(Collective op, const Bucket& bucket) {
  switch (op) {
    case Collective::AllGather:
      return bucket.gather.all_ranks().communicator;
    case Collective::GroupAllGather:
      return bucket.gather.group()->source.communicator;
    case Collective::ReduceScatter:
      return bucket.reduction.communicator();
    case Collective::AllReduce:
      break;
  }
  return replicas_->reduce.communicator();
}

// Ranks of another mesh may send other sizes, and may cut a bucket into more or fewer pieces: Note
// [several meshes]. All ranks compare one history, so it has one entry for all pieces of such a
// bucket, without their sizes.
void Pipeline::record_issue(Collective op, const Bucket& bucket, const NextMessage& message) {
  const bool of_group = op == Collective::GroupAllGather;
  const bool gathers = op == Collective::AllGather || of_group;
  const bool is_first = message.piece == 0;
  if (gathers && is_first && options_.check_order && order_check_.is_due(passes_.in_backward())) {
    order_check_.compare(bucket);
  }
  Lane& lane = lane_of(op);
  const std::string& label = gathers                           ? bucket.gather.source().label
                             : op == Collective::ReduceScatter ? bucket.reduction.label
                                                               : bucket.reduction.all_reduce_label;
  Communicator& communicator = communicator_of(op, bucket);
  const bool of_some = of_group || bucket.mesh != nullptr;
  const auto ranks = static_cast<std::uint64_t>(of_some ? communicator.size() : 0);
  const std::uint64_t identity =
      mix(bucket.identity, static_cast<std::uint64_t>(op) + (ranks << 8));
  if (bucket.mesh == nullptr) {
    communicator.announce(label, lane.history().add(identity, label, message.bytes));
  } else {
    CollectiveHistory& history = lane.history();
    const std::uint64_t tag = is_first ? history.add(identity, label, 0) : history.last_tag();
    communicator.announce(label, mix(mix(tag, message.piece), message.bytes));
  }
  ledger_.count_collective(op, bucket.numbers(), message.bytes);
}

}  // namespace fsdp
