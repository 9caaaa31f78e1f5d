// Streams, events and memory of one GPU.
//
// Note [graph capture]
// A whole step may be captured into a CUDA graph. The user captures the compute stream, and the
// lanes join the capture when they wait for an event of it. CUDA refuses to wait inside a capture
// for work outside of it, and the other way round. So such waits are left out. They are not needed:
// the user synchronises the device before a capture, and an iteration begins on a lane with a wait
// for the compute stream, on which the graph runs.
//
// A replay waits for the compute stream alone. So after a capture, the compute stream waits for the
// gathers' lane and for the reductions at the end of each pass of every model on these lanes.
// Otherwise one rank could run the first collective of the replay before the last one of the step,
// such as the exchange at the end of backward, while another rank runs it after that one.
//
// Note [lasting streams]
// Streams of lanes are never destroyed. An attached optimizer and hooks of the user run with a
// lane's stream as the current one, so torch's allocator may have a pool for it. The allocator
// records events on such a stream and, with expandable segments, synchronises it when it unmaps
// memory, even if the lane is gone. New lanes take the streams of old ones.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "device/cuda_check.h"
#include "device/cuda_transfer.h"
#include "device/cuda_virtual_memory.h"
#include "device/host_clock.h"
#include "device/nvtx.h"
#include "device/stream.h"

namespace fsdp {
namespace {

// The id of the capture that `stream` takes part in; 0 if none.
unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  FSDP_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
  FSDP_CHECK(status != cudaStreamCaptureStatusInvalidated,
             "The CUDA graph capture is invalid, because an earlier call cannot be captured. Run a "
             "few whole steps before capturing one, and capture nothing but steps.");
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

class CudaEvent final : public Event {
 public:
  CudaEvent() { FSDP_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~CudaEvent() override { cudaEventDestroy(event_); }

  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  // A captured event is never pending for the host: the graph orders its work when it runs.
  bool query() const override {
    if (capture_ != 0) {
      return true;
    }
    const cudaError_t result = cudaEventQuery(event_);
    if (result == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    check_cuda(result, "cudaEventQuery");
    return true;
  }

  void synchronize(std::chrono::milliseconds timeout, const std::string& what) override {
    const auto start = std::chrono::steady_clock::now();
    auto pause = std::chrono::microseconds(1);
    while (!query()) {
      if (std::chrono::steady_clock::now() - start > timeout) {
        throw_timeout(timeout, what);
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, std::chrono::microseconds(1000));
    }
  }

  void record(cudaStream_t stream, unsigned long long capture) {
    FSDP_CUDA_CHECK(cudaEventRecord(event_, stream));
    capture_ = capture;
  }

  // `capture` is the capture in progress on any stream; 0 if none. Returns false if there is
  // nothing to wait for.
  bool make_wait(cudaStream_t stream, unsigned long long capture) const {
    if (capture_ != capture) {  // see Note [graph capture]
      return false;
    }
    FSDP_CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0));
    return true;
  }

 private:
  cudaEvent_t event_ = nullptr;
  unsigned long long capture_ = 0;  // of the last record
};

// Note [two clocks]
// CUDA gives the time between two events as a float in milliseconds, which loses digits if they are
// far apart. So times are chained: from one iteration's first moment to the next one's, and from
// the last one's to an anchor. The anchor is a moment that the host waits for and reads its own
// clock at. Its error of a few microseconds is the same for all streams.
class CudaMoments final : public Moments {
 public:
  CudaMoments(int index, std::chrono::milliseconds timeout, Stream& compute)
      : index_(index), timeout_(timeout), compute_(compute) {}
  ~CudaMoments() override {
    for (cudaEvent_t event : events_) {
      cudaEventDestroy(event);
    }
  }

  CudaMoments(const CudaMoments&) = delete;
  CudaMoments& operator=(const CudaMoments&) = delete;

  void mark(std::size_t number, Stream& stream) override {
    const CudaDeviceGuard guard(index_);
    reserve(number + 1);
    marked_[number] = host_clock::now();
    FSDP_CUDA_CHECK(
        cudaEventRecord(events_[number], static_cast<cudaStream_t>(stream.native_handle())));
  }

  void reserve(std::size_t count) override {
    const CudaDeviceGuard guard(index_);
    while (events_.size() < count) {
      events_.push_back(nullptr);
      FSDP_CUDA_CHECK(cudaEventCreateWithFlags(&events_.back(), cudaEventDefault));
      marked_.push_back(0);
    }
  }

  double seconds_to(std::size_t number, const Moments& later, std::size_t other) const override {
    const auto& second = static_cast<const CudaMoments&>(later);
    wait_for(number);
    second.wait_for(other);
    float milliseconds = 0.0F;
    FSDP_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, events_[number], second.events_[other]));
    return static_cast<double>(milliseconds) / 1e3;
  }

  // Nothing is known about a device that has failed. cudaGetLastError clears the error.
  bool is_reached(std::size_t number) const override {
    const cudaError_t result = cudaEventQuery(events_[number]);
    if (result != cudaSuccess) {
      cudaGetLastError();
    }
    return result == cudaSuccess;
  }

  double lead(std::size_t number, double reached) const override {
    return reached - host_clock::seconds(marked_[number]);
  }

  // The shortest of several tries is the most exact.
  double anchor() override {
    constexpr int kTries = 5;
    const CudaDeviceGuard guard(index_);
    compute_.synchronize();
    double least = 1e9;
    double at = 0.0;
    for (std::size_t i = 1; i <= kTries; ++i) {
      const double before = host_clock::seconds(host_clock::now());
      mark(i, compute_);
      wait_for(i);
      const double taken = host_clock::seconds(host_clock::now()) - before;
      if (taken < least) {
        least = taken;
        at = before + taken / 2;
        std::swap(events_[0], events_[i]);
      }
    }
    return at;
  }

 private:
  void wait_for(std::size_t number) const {
    const auto start = std::chrono::steady_clock::now();
    cudaError_t result = cudaEventQuery(events_[number]);
    while (result == cudaErrorNotReady) {
      cudaGetLastError();
      if (std::chrono::steady_clock::now() - start > timeout_) {
        throw_timeout(timeout_, "a moment of a profiled step");
      }
      std::this_thread::yield();
      result = cudaEventQuery(events_[number]);
    }
    check_cuda(result, "cudaEventQuery");
  }

  int index_;
  std::chrono::milliseconds timeout_;
  Stream& compute_;
  std::vector<cudaEvent_t> events_;
  std::vector<std::int64_t> marked_;  // when the host marked each: ticks of device/host_clock.h
};

// See Note [lasting streams].
class StreamsOfOldLanes {
 public:
  // Returns an idle stream, or null.
  cudaStream_t take(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<cudaStream_t>& of_device = of_devices_[device];
    const auto idle = std::find_if(of_device.begin(), of_device.end(), [](cudaStream_t stream) {
      const cudaError_t result = cudaStreamQuery(stream);
      if (result != cudaSuccess) {
        cudaGetLastError();
      }
      return result == cudaSuccess;
    });
    if (idle == of_device.end()) {
      return nullptr;
    }
    cudaStream_t const taken = *idle;
    of_device.erase(idle);
    return taken;
  }
  void add(int device, cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    of_devices_[device].push_back(stream);
  }

 private:
  std::mutex mutex_;
  std::map<int, std::vector<cudaStream_t>> of_devices_;
};

StreamsOfOldLanes& streams_of_old_lanes() {
  static auto& streams = *new StreamsOfOldLanes;  // never destroyed
  return streams;
}

class CudaDevice;

class CudaStream final : public Stream {
 public:
  enum class Kind : std::uint8_t {
    Current,   // the framework's current stream at each call; it has no handle of its own
    Borrowed,  // one of the framework's streams
    OfLane,
  };

  CudaStream(CudaDevice& device, std::string name, Kind kind, cudaStream_t handle)
      : device_(device), name_(std::move(name)), kind_(kind), handle_(handle) {}
  ~CudaStream() override;

  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  const std::string& name() const override { return name_; }
  bool is_capturing() const override {
    return capture_of(static_cast<cudaStream_t>(native_handle())) != 0;
  }
  void* native_handle() const override;
  void record(Event& event) override;
  bool wait(Event& event, const std::string& what) override;
  void synchronize() override;

 private:
  CudaDevice& device_;
  std::string name_;
  Kind kind_;
  cudaStream_t handle_;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(int index, std::chrono::milliseconds timeout, CudaFramework framework)
      : index_(index),
        timeout_(timeout),
        framework_(framework),
        compute_(*this, "compute", CudaStream::Kind::Current, nullptr) {
    const CudaDeviceGuard guard(index_);
    load_transfer_kernels();
  }

  bool is_host() const override { return false; }
  int index() const override { return index_; }
  Stream& compute_stream() override { return compute_; }
  Stream& stream_of(void* native_handle) override {
    std::unique_ptr<CudaStream>& stream = borrowed_[native_handle];
    if (stream == nullptr) {
      stream = std::make_unique<CudaStream>(*this, "another stream of the user",
                                            CudaStream::Kind::Borrowed,
                                            static_cast<cudaStream_t>(native_handle));
    }
    return *stream;
  }
  cudaStream_t current_stream() const {
    return static_cast<cudaStream_t>(framework_.current_stream(index_));
  }
  unsigned long long capture() const { return capture_of(current_stream()); }

  // Streams of lanes have the highest priority, because the rest of the step waits for collectives.
  std::unique_ptr<Stream> new_stream(const std::string& name) override {
    const CudaDeviceGuard guard(index_);
    cudaStream_t stream = streams_of_old_lanes().take(index_);
    if (stream == nullptr) {
      int lowest = 0;
      int highest = 0;
      FSDP_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
      FSDP_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest));
    }
    nvtx::name_stream(stream, ("fsdp_ext " + name).c_str());
    return std::make_unique<CudaStream>(*this, name, CudaStream::Kind::OfLane, stream);
  }

  std::unique_ptr<Event> new_event() override {
    const CudaDeviceGuard guard(index_);
    return std::make_unique<CudaEvent>();
  }

  std::unique_ptr<Moments> new_moments() override {
    return std::make_unique<CudaMoments>(index_, timeout_, compute_);
  }

  std::shared_ptr<void> allocate_for(Stream& stream, std::size_t bytes) override {
    FSDP_CHECK(capture() == 0, "A CUDA graph capture would allocate ", bytes,
               " bytes, but all buffers must exist before it. Run a few whole steps before "
               "capturing one.");
    return framework_.allocate(index_, bytes, stream.native_handle());
  }

  Allocator allocator_like(const void* sample) override {
    const CudaDeviceGuard guard(index_);
    return cuda_allocator_like(sample);
  }

  std::shared_ptr<void> allocate_on_host(std::size_t bytes) override {
    const CudaDeviceGuard guard(index_);
    void* memory = nullptr;
    FSDP_CUDA_CHECK(cudaHostAlloc(&memory, bytes, cudaHostAllocDefault));
    return {memory, [](void* owned) { cudaFreeHost(owned); }};
  }

  void fill(Stream& stream, void* data, int value, std::size_t bytes) override {
    const CudaDeviceGuard guard(index_);
    FSDP_CUDA_CHECK(
        cudaMemsetAsync(data, value, bytes, static_cast<cudaStream_t>(stream.native_handle())));
  }

  std::shared_ptr<void> make_current() override {
    return std::make_shared<CudaDeviceGuard>(index_);
  }

  std::function<void()> selector() const override {
    return [index = index_] { FSDP_CUDA_CHECK(cudaSetDevice(index)); };
  }

  void free_cached_memory() override {
    if (framework_.free_cached != nullptr) {
      framework_.free_cached();
    }
  }

  std::function<void()> synchronizer() const override {
    return [index = index_] {
      const CudaDeviceGuard guard(index);
      FSDP_CUDA_CHECK(cudaDeviceSynchronize());
    };
  }

  void copy(Stream& stream, const void* source, void* destination, std::size_t bytes) override {
    const CudaDeviceGuard guard(index_);
    FSDP_CUDA_CHECK(cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDefault,
                                    static_cast<cudaStream_t>(stream.native_handle())));
  }

  void transfer(Stream& stream, std::chrono::nanoseconds duration, const std::vector<Move>& moves,
                int multiprocessors) override {
    const CudaDeviceGuard guard(index_);
    auto* handle = static_cast<cudaStream_t>(stream.native_handle());
    if (multiprocessors > 0) {
      launch_transfer(handle, duration, moves, multiprocessors);
    } else {
      launch_transfer_by_engines(handle, duration, moves,
                                 moves.empty() ? nullptr : start_word(stream));
    }
  }

  bool is_capturing() const override { return capture() != 0; }
  void push_range(const std::string& name) override { nvtx::push(name.c_str()); }
  void pop_range() override { nvtx::pop(); }

  // By default, a query on this thread would invalidate a capture of another thread.
  void allow_event_queries_during_capture() override {
    FSDP_CUDA_CHECK(cudaSetDevice(index_));
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    FSDP_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  }

  std::chrono::milliseconds timeout() const override { return timeout_; }

 private:
  // Device memory in which transfers on `stream` store their start time.
  std::uint64_t* start_word(Stream& stream) {
    std::shared_ptr<void>& word = start_words_[&stream];
    if (word == nullptr) {
      word = allocate(sizeof(std::uint64_t));
      const std::unique_ptr<Event> reached = new_event();  // Note [memory and the compute stream]
      compute_.record(*reached);
      stream.wait(*reached, name_of_compute_);
    }
    return static_cast<std::uint64_t*>(word.get());
  }

  int index_;
  std::chrono::milliseconds timeout_;
  CudaFramework framework_;
  const std::string name_of_compute_ = "the compute stream";
  CudaStream compute_;
  std::map<void*, std::unique_ptr<CudaStream>> borrowed_;  // by handle
  std::map<Stream*, std::shared_ptr<void>> start_words_;   // of streams that have had transfers
};

CudaStream::~CudaStream() {
  if (kind_ == Kind::OfLane) {
    streams_of_old_lanes().add(device_.index(), handle_);
  }
}

void* CudaStream::native_handle() const {
  return kind_ == Kind::Current ? device_.current_stream() : handle_;
}

void CudaStream::record(Event& event) {
  const CudaDeviceGuard guard(device_.index());  // a default stream is that of the current device
  auto* stream = static_cast<cudaStream_t>(native_handle());
  const unsigned long long capture = capture_of(stream);
  FSDP_CHECK(kind_ == Kind::Current || capture == device_.capture(),
             "A CUDA graph capture must contain whole steps. Begin it before forward and end it "
             "after backward, or run without a capture.");
  static_cast<CudaEvent&>(event).record(stream, capture);
}

bool CudaStream::wait(Event& event, const std::string& /*what*/) {
  const CudaDeviceGuard guard(device_.index());
  return static_cast<CudaEvent&>(event).make_wait(static_cast<cudaStream_t>(native_handle()),
                                                  device_.capture());
}

void CudaStream::synchronize() {
  const std::unique_ptr<Event> reached = device_.new_event();
  record(*reached);
  reached->synchronize(device_.timeout(), "stream '" + name_ + "'");
}

}  // namespace

int cuda_driver_version() {
  int version = 0;
  FSDP_CUDA_CHECK(cudaDriverGetVersion(&version));
  return version;
}

std::unique_ptr<Device> make_cuda_device(int index, std::chrono::milliseconds timeout,
                                         CudaFramework framework) {
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  FSDP_CHECK(result == cudaSuccess, "CUDA found no GPU: ", cudaGetErrorString(result), " (",
             cudaGetErrorName(result),
             "). Install or update the NVIDIA driver, or use a mesh of device type 'cpu'.");
  FSDP_CHECK(index >= 0 && index < count, "There is no GPU with index ", index, " among ", count,
             " GPUs. Set CUDA_VISIBLE_DEVICES or call torch.cuda.set_device.");
  static std::once_flag once;  // NVTX initialises itself at its first call, not thread-safely
  std::call_once(once, [] { nvtx::initialize(); });
  return std::make_unique<CudaDevice>(index, timeout, framework);
}

}  // namespace fsdp
