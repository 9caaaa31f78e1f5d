#include "captures.h"

#include <algorithm>
#include <random>
#include <string>
#include <utility>

#include "errors.h"
#include "settings.h"

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

bool add_to_capture(Stream& stream, const std::shared_ptr<const Origin>& origin, Work& work) {
  const std::lock_guard<std::mutex> lock(capture_mutex());
  if (stream.capture == nullptr) {
    return false;
  }
  std::vector<Node>& nodes = stream.capture->nodes;
  nodes.push_back({origin, std::move(work), stream.heads});
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

namespace {

// A graph, or an executable one.
struct Graph {
  std::shared_ptr<const std::vector<Node>> nodes;
  unsigned replays = 0;
};
Graph* as_graph(void* handle) { return static_cast<Graph*>(handle); }

// Runs the nodes in a random order that respects the edges of the graph. So a missing edge gives
// wrong numbers. The seed is the number of the replay, so that all ranks that replay the same graph
// run its collectives in the same order. The first replay shows what nodes use.
void replay(const std::vector<Node>& nodes, unsigned seed) {
  std::vector<GraphNode> noted;
  for (const Node& node : nodes) {
    noted.push_back({node.origin, node.after, {}});
  }
  std::minstd_rand random(seed + 1);
  std::vector<std::size_t> missing(nodes.size());
  std::vector<std::vector<std::size_t>> next(nodes.size());
  std::vector<std::size_t> ready;
  for (std::size_t number = 0; number < nodes.size(); ++number) {
    missing[number] = nodes[number].after.size();
    for (const std::size_t before : nodes[number].after) {
      next[before].push_back(number);
    }
    if (missing[number] == 0) {
      ready.push_back(number);
    }
  }
  while (!ready.empty()) {
    std::swap(ready[random() % ready.size()], ready.back());
    const std::size_t number = ready.back();
    ready.pop_back();
    noted[number].accesses = run_noted(nodes[number].work);
    for (const std::size_t after : next[number]) {
      if (--missing[after] == 0) {
        ready.push_back(after);
      }
    }
  }
  if (seed == 0 && settings().finds_races) {
    check_graph(noted);
  }
}

}  // namespace

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
  auto nodes = std::make_shared<const std::vector<Node>>(std::move(capture->nodes));
  *graph = reinterpret_cast<cudaGraph_t>(new Graph{std::move(nodes)});
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

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long /*flags*/) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*as_graph(graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* /*nodes*/, std::size_t* count) {
  *count = as_graph(graph)->nodes->size();
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete as_graph(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete as_graph(executable);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  Graph& graph = *as_graph(executable);
  enqueue(handle, "a replay of a graph",
          [nodes = graph.nodes, seed = graph.replays++] { replay(*nodes, seed); });
  return outcome();
}
}
