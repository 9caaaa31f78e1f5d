// The driver's functions for virtual memory, implemented with host memory. They refuse calls in an
// order that the driver refuses.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

namespace fsdp::test {

struct FakeMapping {
  std::size_t bytes = 0;
  CUmemAllocationProp properties{};
  std::vector<CUmemAccessDesc> access;
};

// What a test can set and read.
struct FakeDriver {
  // Whether memory of the fake NCCL is of this kind, as without NCCL_CUMEM_ENABLE=0.
  std::atomic<bool> is_used_by_nccl{false};
  std::atomic<int> creations_to_fail{0};
  std::atomic<std::size_t> most_bytes{~std::size_t{0}};  // of one creation
  std::atomic<int> accesses_to_fail{0};
  std::atomic<int> handles{0};       // that are not released
  std::atomic<int> reservations{0};  // of addresses
  std::atomic<int> refusals{0};      // of calls in a wrong order, or with wrong arguments

  // What is mapped at the address.
  std::optional<FakeMapping> mapping_at(const void* address);
  int mappings();

  std::mutex mutex;
  std::map<CUdeviceptr, FakeMapping> mapped;
};

FakeDriver& fake_driver();

}  // namespace fsdp::test
