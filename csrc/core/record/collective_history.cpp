#include "core/record/collective_history.h"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "base/check.h"
#include "comm/communicator.h"

namespace fsdp {
namespace {

std::vector<IssuedRecord> in_order(const CollectiveHistory::Records& records) {
  std::vector<IssuedRecord> ordered;
  for (const IssuedRecord& record : records) {
    if (record.number > 0) {
      ordered.push_back(record);
    }
  }
  std::sort(ordered.begin(), ordered.end(),
            [](const IssuedRecord& a, const IssuedRecord& b) { return a.number < b.number; });
  return ordered;
}

std::string list_of(int rank, const std::vector<IssuedRecord>& records) {
  std::string text = detail::concat("\nThe last collectives of rank ", rank, ":");
  for (const IssuedRecord& record : records) {
    text += detail::concat("\n  ", record.number, ". ", record.describe(), " in iteration ",
                           record.iteration);
  }
  return text;
}

}  // namespace

std::string IssuedRecord::describe() const { return detail::concat(label, " (", bytes, " bytes)"); }

std::uint64_t CollectiveHistory::add(std::uint64_t identity, const std::string& label,
                                     std::size_t bytes) {
  const std::uint64_t tag = mix(mix(identity, bytes), iteration_);
  hash_ = mix(hash_, tag);
  IssuedRecord& record = records_[count_ % kKept];
  record.tag = tag;
  record.number = ++count_;
  record.iteration = iteration_;
  record.bytes = bytes;
  const std::size_t length = std::min(label.size(), sizeof(record.label) - 1);
  label.copy(record.label, length);
  record.label[length] = '\0';
  return tag;
}

std::string describe_difference(const char* lane, int rank, const CollectiveHistory::Records& mine,
                                int other_rank, const CollectiveHistory::Records& theirs) {
  const std::vector<IssuedRecord> my_last = in_order(mine);
  const std::vector<IssuedRecord> their_last = in_order(theirs);
  std::string text = detail::concat("Ranks ", rank, " and ", other_rank,
                                    " issued different collectives on the ", lane, " lane");
  for (const IssuedRecord& record : my_last) {
    const auto other = std::find_if(
        their_last.begin(), their_last.end(),
        [&record](const IssuedRecord& candidate) { return candidate.number == record.number; });
    if (other != their_last.end() && other->tag != record.tag) {
      text += detail::concat(": number ", record.number, " was ", record.describe(), " on rank ",
                             rank, " and ", other->describe(), " on rank ", other_rank);
      break;
    }
  }
  return text + ", so parameters or gradients of this step are wrong. " + kRunTheSameUnits +
         " Start again from a checkpoint." + list_of(rank, my_last) +
         list_of(other_rank, their_last);
}

}  // namespace fsdp
