// Captures, which graphs come from.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "graphs.h"
#include "streams.h"

namespace emulated_gpu {

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

// Moves the node into the stream's capture, after what the stream has there, and returns true. Or
// returns false if the stream has none.
bool add_to_capture(Stream& stream, Node& node);

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
