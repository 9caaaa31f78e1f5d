// Where NCCL puts windows. Both libraries that stand for NCCL use it: tests/cpp/fake_nccl.cpp and
// tests/emulated_gpu/nccl.
#pragma once

#include <cstddef>
#include <iterator>
#include <map>

namespace fsdp::test {

// The address space that a rank has for windows of one communicator. As in NCCL, memory gets the
// first gap that is large enough. So offsets are the same on all ranks if all register and
// deregister in the same order.
class WindowSpace {
 public:
  static constexpr std::size_t kGranularity = std::size_t{2} << 20;

  // Returns the offset of memory of so many bytes.
  std::size_t take(std::size_t bytes) {
    const std::size_t needed = (bytes + kGranularity - 1) / kGranularity * kGranularity;
    std::size_t offset = 0;
    for (const auto& [begin, taken] : taken_) {
      if (begin - offset >= needed) {
        break;
      }
      offset = begin + taken;
    }
    taken_[offset] = needed;
    return offset;
  }

  void give_back(std::size_t offset) { taken_.erase(offset); }

 private:
  std::map<std::size_t, std::size_t> taken_;  // bytes, by offset
};

// Returns the entry of a map from begins to objects with `bytes` that the address is in, or end().
template <typename Windows>
auto window_around(Windows& windows, const void* memory) {
  const auto* address = static_cast<const char*>(memory);
  auto after = windows.upper_bound(address);
  if (after == windows.begin()) {
    return windows.end();
  }
  const auto window = std::prev(after);
  return address < window->first + window->second.bytes ? window : windows.end();
}

}  // namespace fsdp::test
