// Captures, and the graphs that they become.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "emulated_gpu.h"
#include "races.h"
#include "streams.h"

namespace emulated_gpu {

struct Node {
  std::shared_ptr<const Origin> origin;
  Work work;
  std::set<std::size_t> after;  // the numbers of the nodes that come before it
};

struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;  // that began it
  bool is_invalid = false;
  std::vector<Node> nodes;
  std::vector<std::shared_ptr<Stream>> streams;  // empty once it has ended
};

// Guards all captures, and what streams and events know of them.
std::mutex& capture_mutex();

bool is_captured(const Stream& stream);

// Moves the work into the stream's capture and returns true, or returns false if it has none.
bool add_to_capture(Stream& stream, const std::shared_ptr<const Origin>& origin, Work& work);

void invalidate_capture(Stream& stream);

// An error that invalidates the capture, if the stream is captured.
cudaError_t refuse_when_captured(Stream& stream);

// An error for calls that CUDA calls unsafe, while a capture forbids them to this thread. It
// invalidates the capture.
cudaError_t refuse_during_captures(const char* call);

// Has the stream wait for nodes of a capture, which it joins. The caller holds the mutex.
cudaError_t join_capture(Stream& stream, const std::shared_ptr<Capture>& capture,
                         const std::set<std::size_t>& heads);

}  // namespace emulated_gpu
