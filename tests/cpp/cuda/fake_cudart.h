// The part of CUDA's runtime that csrc/device/cuda_stream uses, over threads of the host. Streams
// run concurrently with the caller. Uses of events and graph captures that CUDA forbids are errors
// here, too.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::test {

// Runs work of a test in order of a stream, or captures it.
void enqueue(void* stream, std::function<void()> work);

constexpr int kDevices = 2;
inline std::atomic<bool> has_context_on[kDevices];  // since a thread has chosen the device

// The result of loading kernels.
inline std::atomic<cudaError_t> kernels_loaded{cudaSuccess};

cudaStream_t new_stream(const std::string& name);
void synchronize(cudaStream_t stream);

// Whether the next work of `stream` begins only after all work that `other` has got.
bool waits_for_all_of(void* stream, void* other);

// A captured graph. Replaying it runs its nodes one after another on the calling thread.
class FakeGraph {
 public:
  explicit FakeGraph(std::vector<std::function<void()>> nodes) : nodes_(std::move(nodes)) {}
  void replay() const {
    for (const auto& node : nodes_) {
      node();
    }
  }
  std::size_t size() const { return nodes_.size(); }

 private:
  std::vector<std::function<void()>> nodes_;
};

void begin_capture(cudaStream_t origin);
// Throws if a stream that joined the capture has work that `origin` does not wait for.
FakeGraph end_capture(cudaStream_t origin);

}  // namespace fsdp::test
