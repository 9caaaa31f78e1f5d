#include "core/schedule/announcer.h"

#include "base/mix.h"

namespace fsdp {
namespace {

Work work_of(Collective op) {
  return op == Collective::AllGather        ? Work::Gather
         : op == Collective::GroupAllGather ? Work::GroupGather
         : op == Collective::ReduceScatter  ? Work::Reduce
                                            : Work::AllReduce;
}

}  // namespace

// All ranks compare one history of collectives. Ranks of another mesh may send messages of other
// sizes, and cut a bucket into more or fewer pieces (Note [several meshes]). So the history has one
// entry for all pieces of a bucket on another mesh, without their sizes.
Sending Announcer::announce(const Bucket& bucket, const NextMessage& message) {
  const bool of_group = message.op == Collective::GroupAllGather;
  const bool gathers = message.op == Collective::AllGather || of_group;
  const bool is_first = message.piece == 0;
  if (gathers && is_first && options_.check_order && order_check_.is_due(passes_.in_backward())) {
    order_check_.compare(bucket);
  }
  const bool of_some = of_group || bucket.mesh != nullptr;
  const auto ranks = static_cast<std::uint64_t>(of_some ? message.communicator.size() : 0);
  const std::uint64_t identity =
      mix(bucket.identity, static_cast<std::uint64_t>(message.op) + (ranks << 8));
  CollectiveHistory& history = message.lane.history();
  if (bucket.mesh == nullptr) {
    message.communicator.announce(message.label,
                                  history.add(identity, message.label, message.bytes));
  } else {
    const std::uint64_t tag =
        is_first ? history.add(identity, message.label, 0) : history.last_tag();
    message.communicator.announce(message.label, mix(mix(tag, message.piece), message.bytes));
  }
  ledger_.count_collective(message.op, bucket.numbers(), message.bytes);
  Stream& stream = message.lane.stream();
  return {InFlight(message.lane.flights(), stream, message.communicator,
                   {message.op, ledger_.phase(), message.bytes, message.dtype}, message.label),
          Timed(ledger_, stream, work_of(message.op), bucket.numbers(),
                {message.bytes, message.issue}, message.follows)};
}

}  // namespace fsdp
