// Before each collective is issued: compares it with other ranks, and records it for the ledger
// and for error messages.
#include "base/mix.h"
#include "core/schedule/pipeline.h"

namespace fsdp {

// Ranks of another mesh may send other sizes, and may cut a bucket into more or fewer pieces: Note
// [several meshes]. All ranks compare one history, so it has one entry for all pieces of such a
// bucket, without their sizes.
void Pipeline::record_issue(const CollectiveOver& over, const Bucket& bucket,
                            const NextMessage& message) {
  const bool of_group = over.op == Collective::GroupAllGather;
  const bool gathers = over.op == Collective::AllGather || of_group;
  const bool is_first = message.piece == 0;
  if (gathers && is_first && options_.check_order && order_check_.is_due(passes_.in_backward())) {
    order_check_.compare(bucket);
  }
  const bool of_some = of_group || bucket.mesh != nullptr;
  const auto ranks = static_cast<std::uint64_t>(of_some ? over.communicator.size() : 0);
  const std::uint64_t identity =
      mix(bucket.identity, static_cast<std::uint64_t>(over.op) + (ranks << 8));
  CollectiveHistory& history = over.lane.history();
  if (bucket.mesh == nullptr) {
    over.communicator.announce(over.label, history.add(identity, over.label, message.bytes));
  } else {
    const std::uint64_t tag = is_first ? history.add(identity, over.label, 0) : history.last_tag();
    over.communicator.announce(over.label, mix(mix(tag, message.piece), message.bytes));
  }
  ledger_.count_collective(over.op, bucket.numbers(), message.bytes);
}

}  // namespace fsdp
