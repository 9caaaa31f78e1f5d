// Which gradients have had NaN or Inf.
//
// Note [NaN and Inf]
// Packing marks each parameter whose own gradient, before it is reduced, has NaN or Inf. The mark
// is the number of the packing, so nothing has to be cleared. UnitGradients has the number of
// the first packing in the last reduction, so a mark of that number or a later one counts. A
// sharded gradient that was added to also has earlier reductions, which do not count. Replays of a
// CUDA graph write a mark of their own. It counts until it is read, which clears it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/units/bucket.h"
#include "core/units/unit.h"
#include "device/stream.h"

namespace fsdp {

// The mark of packings in a CUDA graph.
constexpr std::uint64_t kCapturedPacking = kNoPacking - 1;

class NonfiniteGradients {
 public:
  explicit NonfiniteGradients(Device& device) : device_(device) {}

  // Makes the marks of each bucket's units one array, into which each unit has a pointer.
  // Units keep the values of their marks. Returns the old marks, from which the compute stream
  // copies. Free them after the copies.
  [[nodiscard]] std::shared_ptr<void> place(const std::vector<std::unique_ptr<Bucket>>& buckets);

  // For each of `units` units, by number, whether this rank's own gradients in the unit's last
  // reduction had NaN or Inf. Waits for the device.
  std::vector<char> find(const std::vector<std::unique_ptr<Bucket>>& buckets,
                         std::size_t units) const;

 private:
  Device& device_;
  std::shared_ptr<void> marks_;  // of all buckets, one after another
  std::size_t count_ = 0;
};

}  // namespace fsdp
