// CUDA's runtime over threads of the host, as far as csrc/device/cuda_stream uses it: streams run
// beside the caller, and what CUDA forbids about events and graph captures is an error here, too.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::test {

// Work of a test's own on a stream: runs there in order, or is captured.
void enqueue(void* stream, std::function<void()> work);

cudaStream_t new_stream(const std::string& name);
void synchronize(cudaStream_t stream);

// A captured graph; replaying runs its nodes one after another on the calling thread.
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
