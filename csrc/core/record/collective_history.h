// The collectives that this rank has issued on a lane: the last ones, and a hash of all.
//
// Note [collective tags]
// Ranks match collectives by their order on a lane. If ranks run units of equal size in different
// orders, every transport would add up gradients of different units, and nothing would fail. So
// each collective has a tag: a hash of its units, operation, dtypes, size and iteration. On other
// meshes than the root's, the history has no sizes, and one entry for all pieces of a bucket.
// Shared memory and composed collectives compare the tags when ranks meet. Other transports cannot,
// so in each backward all ranks compare a hash of all their tags (core/agree/rank_exchange.h).
//
// An iteration ends with a backward that reduced gradients. Forwards do not count, because one rank
// alone may run some if its parameters stay unsharded.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/mix.h"

namespace fsdp {

struct IssuedRecord {
  std::uint64_t tag;
  std::uint64_t number;  // counts from 1; a record with 0 is empty
  std::uint64_t iteration;
  std::uint64_t bytes;
  char label[96];  // "the all-gather of unit 'layers.0'"

  std::string describe() const;
};

class CollectiveHistory {
 public:
  static constexpr std::size_t kKept = 16;
  using Records = std::array<IssuedRecord, kKept>;

  // Adds a collective and returns its tag. `identity` is a hash of the facts in the label.
  std::uint64_t add(std::uint64_t identity, const std::string& label, std::size_t bytes);
  void end_iteration() { iteration_ += 1; }

  // The tag of the collective that was added last.
  std::uint64_t last_tag() const { return records_[(count_ - 1) % kKept].tag; }

  std::uint64_t hash() const { return hash_; }
  // The records are not in order; IssuedRecord::number has it.
  const Records& records() const { return records_; }

 private:
  std::uint64_t iteration_ = 0;
  std::uint64_t count_ = 0;
  std::uint64_t hash_ = 0;
  Records records_{};
};

// Says where two ranks' histories of lane `lane` differ, and lists both.
std::string describe_difference(const char* lane, int rank, const CollectiveHistory::Records& mine,
                                int other_rank, const CollectiveHistory::Records& theirs);

}  // namespace fsdp
