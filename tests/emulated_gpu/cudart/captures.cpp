#include "captures.h"

#include <algorithm>
#include <string>
#include <utility>

#include "errors.h"

namespace emulated_gpu {
namespace {

// Guarded by the mutex.
std::vector<std::shared_ptr<Capture>>& running() {
  static auto* captures = new std::vector<std::shared_ptr<Capture>>;
  return *captures;
}
unsigned long long last_id = 0;
thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

bool forbids_unsafe_calls(const Capture& capture) {
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) {
    return false;
  }
  if (capture.thread == std::this_thread::get_id()) {
    return capture.mode != cudaStreamCaptureModeRelaxed;
  }
  return mode_of_thread == cudaStreamCaptureModeGlobal &&
         capture.mode == cudaStreamCaptureModeGlobal;
}

// Whether every node comes before one of the heads.
bool is_joined(const std::vector<Node>& nodes, const std::set<std::size_t>& heads) {
  std::set<std::size_t> reached;
  std::vector<std::size_t> pending(heads.begin(), heads.end());
  while (!pending.empty()) {
    const std::size_t number = pending.back();
    pending.pop_back();
    if (reached.insert(number).second) {
      pending.insert(pending.end(), nodes[number].after.begin(), nodes[number].after.end());
    }
  }
  return reached.size() == nodes.size();
}

}  // namespace

std::mutex& capture_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

bool is_captured(const Stream& stream) {
  const std::lock_guard<std::mutex> lock(capture_mutex());
  return stream.capture != nullptr;
}

bool add_to_capture(Stream& stream, Node& node) {
  const std::lock_guard<std::mutex> lock(capture_mutex());
  if (stream.capture == nullptr) {
    return false;
  }
  std::vector<Node>& nodes = stream.capture->nodes;
  node.after = stream.heads;
  nodes.push_back(std::move(node));
  stream.heads = {nodes.size() - 1};
  return true;
}

void invalidate_capture(Stream& stream) {
  const std::lock_guard<std::mutex> lock(capture_mutex());
  if (stream.capture != nullptr) {
    stream.capture->is_invalid = true;
  }
}

cudaError_t refuse_when_captured(Stream& stream) {
  const std::lock_guard<std::mutex> lock(capture_mutex());
  if (stream.capture == nullptr) {
    return cudaSuccess;
  }
  stream.capture->is_invalid = true;
  return failed(cudaErrorStreamCaptureUnsupported,
                "operation not permitted when stream is capturing");
}

cudaError_t refuse_during_captures(const char* call) {
  const std::lock_guard<std::mutex> lock(capture_mutex());
  for (const auto& capture : running()) {
    if (forbids_unsafe_calls(*capture)) {
      capture->is_invalid = true;
      return failed(cudaErrorStreamCaptureUnsupported,
                    std::string(call) + " is not permitted when a stream is capturing");
    }
  }
  return cudaSuccess;
}

cudaError_t join_capture(Stream& stream, const std::shared_ptr<Capture>& capture,
                         const std::set<std::size_t>& heads) {
  if (capture->streams.empty() || (stream.capture != nullptr && stream.capture != capture)) {
    return failed(cudaErrorCapturedEvent, "the event is of an ended or another capture");
  }
  if (stream.capture == nullptr) {
    stream.capture = capture;
    stream.heads.clear();
    capture->streams.push_back(stream.shared_from_this());
  }
  stream.heads.insert(heads.begin(), heads.end());
  return cudaSuccess;
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(mode_of_thread, *mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  const std::shared_ptr<Stream> stream = Stream::of(handle);
  const std::lock_guard<std::mutex> lock(capture_mutex());
  if (stream == nullptr || stream->capture != nullptr) {
    return failed(cudaErrorIllegalState, "the stream is captured already, or was destroyed");
  }
  if (handle == nullptr || handle == cudaStreamLegacy) {
    return failed(cudaErrorStreamCaptureUnsupported, "the legacy default stream is not captured");
  }
  stream->capture = std::make_shared<Capture>();
  stream->capture->id = ++last_id;
  stream->capture->mode = mode;
  stream->capture->thread = std::this_thread::get_id();
  stream->capture->streams = {stream};
  stream->heads.clear();
  running().push_back(stream->capture);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  const std::shared_ptr<Stream> stream = Stream::of(handle);
  const std::lock_guard<std::mutex> lock(capture_mutex());
  *graph = nullptr;
  if (stream == nullptr || stream->capture == nullptr) {
    return failed(cudaErrorIllegalState, "the stream is not captured");
  }
  const std::shared_ptr<Capture> capture = stream->capture;
  const bool joined = is_joined(capture->nodes, stream->heads);
  for (const auto& captured : std::exchange(capture->streams, {})) {
    captured->capture = nullptr;
    captured->heads.clear();
  }
  running().erase(std::find(running().begin(), running().end(), capture));
  if (capture->is_invalid) {
    return failed(cudaErrorStreamCaptureInvalidated, "an earlier call has made it invalid");
  }
  if (!joined) {
    return failed(cudaErrorStreamCaptureUnjoined, "its stream does not wait for all of its work");
  }
  *graph = new_graph(std::move(capture->nodes));
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, std::size_t* count) {
  const std::shared_ptr<Stream> stream = Stream::of(handle);
  const std::lock_guard<std::mutex> lock(capture_mutex());
  const Capture* capture = stream != nullptr ? stream->capture.get() : nullptr;
  *status = capture == nullptr    ? cudaStreamCaptureStatusNone
            : capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                  : cudaStreamCaptureStatusActive;
  if (id != nullptr && capture != nullptr) {
    *id = capture->id;
  }
  // torch reads these only to add nodes of its own, which it does for conditional graphs.
  for (void** none : {reinterpret_cast<void**>(graph),
                      reinterpret_cast<void**>(const_cast<cudaGraphNode_t**>(dependencies)),
                      reinterpret_cast<void**>(const_cast<cudaGraphEdgeData**>(edges))}) {
    if (none != nullptr) {
      *none = nullptr;
    }
  }
  if (count != nullptr) {
    *count = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
}
