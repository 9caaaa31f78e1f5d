#include "fake_cudart.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "base/check.h"
#include "device/cuda_check.h"
#include "device/cuda_transfer.h"
#include "device/host_clock.h"
#include "device/host_stream.h"

namespace fsdp::test {
namespace {

constexpr std::chrono::milliseconds kTimeout{120000};
const std::string kWait = "another stream";

struct Node {
  std::function<void()> work;
  std::set<std::size_t> after;
};

struct FakeStream;

struct Capture {
  unsigned long long id;
  std::vector<Node> nodes;
  std::vector<FakeStream*> streams;
};

// How much work of each stream some work comes after. Work of captures does not count.
using Reached = std::map<const FakeStream*, std::size_t>;

struct FakeStream {
  explicit FakeStream(const std::string& name) : queue(name, kTimeout) {}
  HostStream queue;
  std::mutex mutex;  // of `after`: a stream's thread enqueues work when it frees memory
  Reached after;
  std::shared_ptr<Capture> capture;
  std::set<std::size_t> heads;  // the nodes that the next captured node comes after

  Reached reached() {
    const std::lock_guard<std::mutex> lock(mutex);
    return after;
  }
};

struct FakeEvent {
  HostEvent event;
  Reached after;
  std::shared_ptr<Capture> capture;  // of the last record
  std::set<std::size_t> heads;
  bool has_time = false;
  Stamp reached{0};
};

// From cudaHostAlloc.
class PinnedMemory {
 public:
  void add(const void* memory, std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_[static_cast<const char*>(memory)] = static_cast<const char*>(memory) + bytes;
  }
  void remove(const void* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_.erase(static_cast<const char*>(memory));
  }
  bool has(const void* memory) {
    const auto* address = static_cast<const char*>(memory);
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto after = ends_.upper_bound(address);
    return after != ends_.begin() && address < std::prev(after)->second;
  }

 private:
  std::mutex mutex_;
  std::map<const char*, const char*> ends_;  // by begin
};
PinnedMemory pinned;

thread_local std::vector<FakeStream*> streams;  // each rank's thread has a GPU of its own
thread_local int current_device = 0;
std::atomic<unsigned long long> captures{0};

FakeStream* as_stream(void* stream) { return static_cast<FakeStream*>(stream); }
FakeEvent* as_event(cudaEvent_t event) { return reinterpret_cast<FakeEvent*>(event); }

bool is_active(const std::shared_ptr<Capture>& capture) { return !capture->streams.empty(); }

}  // namespace

void enqueue(void* stream, std::function<void()> work) {
  FakeStream& on = *as_stream(stream);
  if (on.capture != nullptr) {
    on.capture->nodes.push_back({std::move(work), on.heads});
    on.heads = {on.capture->nodes.size() - 1};
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(on.mutex);
    on.after[&on] += 1;
  }
  on.queue.enqueue(std::move(work));
  HostEvent begun;  // rings the doorbell: a GPU starts work without a record behind it
  on.queue.record(begun);
}

cudaStream_t new_stream(const std::string& name) {
  auto* made = new FakeStream(name);
  streams.push_back(made);
  return reinterpret_cast<cudaStream_t>(made);
}

void synchronize(cudaStream_t stream) { as_stream(stream)->queue.synchronize(); }

bool waits_for_all_of(void* stream, void* other) {
  FakeStream* const last = as_stream(other);
  return as_stream(stream)->reached()[last] == last->reached().at(last);
}

void begin_capture(cudaStream_t origin) {
  FakeStream& stream = *as_stream(origin);
  stream.capture = std::make_shared<Capture>();
  stream.capture->id = ++captures;
  stream.capture->streams.push_back(&stream);
  stream.heads.clear();
}

FakeGraph end_capture(cudaStream_t origin) {
  FakeStream& stream = *as_stream(origin);
  const std::shared_ptr<Capture> capture = std::exchange(stream.capture, nullptr);
  std::set<std::size_t> reached;
  std::vector<std::size_t> pending(stream.heads.begin(), stream.heads.end());
  while (!pending.empty()) {
    const std::size_t node = pending.back();
    pending.pop_back();
    if (reached.insert(node).second) {
      const auto& after = capture->nodes[node].after;
      pending.insert(pending.end(), after.begin(), after.end());
    }
  }
  for (FakeStream* joined : std::exchange(capture->streams, {})) {
    joined->capture = nullptr;
  }
  FSDP_CHECK(reached.size() == capture->nodes.size(), "A capture has ", capture->nodes.size(),
             " nodes, but its origin waits for ", reached.size(),
             " of them. Join all streams before the end of the capture.");
  std::vector<std::function<void()>> work;
  for (Node& node : capture->nodes) {
    work.push_back(std::move(node.work));
  }
  return FakeGraph(std::move(work));
}

}  // namespace fsdp::test

using fsdp::test::as_event;
using fsdp::test::as_stream;
using fsdp::test::FakeEvent;
using fsdp::test::FakeStream;
using fsdp::test::is_active;

extern "C" {

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = fsdp::test::kDevices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = fsdp::test::current_device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 7 : 5;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= fsdp::test::kDevices) {
    return cudaErrorInvalidDevice;
  }
  fsdp::test::current_device = device;
  fsdp::test::has_context_on[device] = true;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t /*error*/) { return "what CUDA says"; }
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorStreamCaptureIsolation ? "cudaErrorStreamCaptureIsolation"
         : error == cudaErrorCapturedEvent        ? "cudaErrorCapturedEvent"
                                                  : "another error";
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0;
  *highest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  if (flags != cudaStreamNonBlocking || priority != -5) {
    return cudaErrorInvalidValue;
  }
  *stream = fsdp::test::new_stream("lane");
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  auto& all = fsdp::test::streams;
  all.erase(std::find(all.begin(), all.end(), as_stream(stream)));
  delete as_stream(stream);
  return cudaSuccess;
}
// Streams of other threads' GPUs are never ready. Otherwise this waits, so that results do not
// depend on time.
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const auto& all = fsdp::test::streams;
  if (std::find(all.begin(), all.end(), as_stream(stream)) == all.end()) {
    return cudaErrorNotReady;
  }
  try {
    fsdp::test::synchronize(stream);
  } catch (const fsdp::Error&) {
    return cudaErrorUnknown;
  }
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  auto* made = new FakeEvent;
  made->has_time = (flags & cudaEventDisableTiming) == 0;
  *event = reinterpret_cast<cudaEvent_t>(made);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  const FakeEvent& first = *as_event(start);
  const FakeEvent& second = *as_event(end);
  if (!first.has_time || !second.has_time) {
    return cudaErrorInvalidResourceHandle;
  }
  if (!first.event.query() || !second.event.query()) {
    return cudaErrorNotReady;
  }
  *milliseconds = static_cast<float>((fsdp::host_clock::seconds(second.reached.load()) -
                                      fsdp::host_clock::seconds(first.reached.load())) *
                                     1e3);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete as_event(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  FakeEvent& recorded = *as_event(event);
  FakeStream& on = *as_stream(stream);
  recorded.capture = on.capture;
  if (on.capture != nullptr) {
    recorded.heads = on.heads;
  } else {
    if (recorded.has_time) {
      on.queue.stamp(recorded.reached);
    }
    recorded.after = on.reached();
    on.queue.record(recorded.event);
  }
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (as_event(event)->capture != nullptr) {
    return cudaErrorCapturedEvent;
  }
  return as_event(event)->event.query() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /*flags*/) {
  FakeEvent& awaited = *as_event(event);
  FakeStream& on = *as_stream(stream);
  if (awaited.capture == nullptr) {
    if (on.capture != nullptr) {
      return cudaErrorStreamCaptureIsolation;
    }
    {
      const std::lock_guard<std::mutex> lock(on.mutex);
      for (const auto& [from, number] : awaited.after) {
        std::size_t& reached = on.after[from];
        reached = std::max(reached, number);
      }
    }
    on.queue.wait(awaited.event, fsdp::test::kWait);
    return cudaSuccess;
  }
  if (!is_active(awaited.capture) || (on.capture != nullptr && on.capture != awaited.capture)) {
    return cudaErrorCapturedEvent;
  }
  if (on.capture == nullptr) {
    on.capture = awaited.capture;
    on.capture->streams.push_back(&on);
    on.heads.clear();
  }
  on.heads.insert(awaited.heads.begin(), awaited.heads.end());
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* /*graph*/,
                                     const cudaGraphNode_t** /*dependencies*/,
                                     const cudaGraphEdgeData** /*edges*/, size_t* /*count*/) {
  const auto& capture = as_stream(stream)->capture;
  *status = capture != nullptr ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id != nullptr && capture != nullptr) {
    *id = capture->id;
  }
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned int /*flags*/) {
  *memory = std::malloc(bytes);
  fsdp::test::pinned.add(*memory, bytes);
  return *memory != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFreeHost(void* memory) {
  fsdp::test::pinned.remove(memory);
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
  fsdp::test::enqueue(stream, [=] { std::memset(data, value, bytes); });
  return cudaSuccess;
}
// Without pinned memory, the copy is done when the call returns: pageable memory looks like that of
// the device.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind /*kind*/,
                            cudaStream_t stream) {
  fsdp::test::enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  if (!fsdp::test::pinned.has(from) && !fsdp::test::pinned.has(to)) {
    fsdp::test::synchronize(stream);
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  for (FakeStream* stream : fsdp::test::streams) {
    stream->queue.synchronize();
  }
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  *mode = cudaStreamCaptureModeGlobal;
  return cudaSuccess;
}

}  // extern "C"

namespace fsdp {

void load_transfer_kernels() { FSDP_CUDA_CHECK(test::kernels_loaded); }

void launch_transfer(cudaStream_t stream, std::chrono::nanoseconds duration,
                     const std::vector<Move>& moves, int /*multiprocessors*/) {
  test::enqueue(stream, [=] {
    for (const Move& move : moves) {
      for (int piece = 0; piece < move.count; ++piece) {
        const auto at = static_cast<std::size_t>(piece);
        if (move.writes(piece)) {
          std::memcpy(static_cast<char*>(move.destination) + at * move.destination_step,
                      static_cast<const char*>(move.source) + at * move.source_step, move.bytes);
        }
      }
    }
    std::this_thread::sleep_for(duration);
  });
}

void launch_transfer_by_engines(cudaStream_t stream, std::chrono::nanoseconds duration,
                                const std::vector<Move>& moves, std::uint64_t* start) {
  test::enqueue(stream, [=] {
    if (start != nullptr) {
      *start = 1;  // shows use after free
    }
  });
  launch_transfer(stream, duration, moves, 0);
}

}  // namespace fsdp
