// Streams, events and memory of one GPU.
//
// Note [graph capture]
// A whole step may be captured into a CUDA graph: the compute stream is captured by the user, and
// the lanes join when they wait for an event of it. Events do not cross the border: CUDA refuses to
// wait inside a capture for work outside of it, and the other way round. Nothing is lost by leaving
// such waits out: who captures synchronises the device first, and the first thing that an
// iteration does on a lane is to wait for the compute stream, on which the graph runs.
#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtCudaRt.h>

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
#include "device/host_clock.h"
#include "device/stream.h"

namespace fsdp {
namespace {

// 0 where `stream` is not being captured.
unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  FSDP_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
  FSDP_CHECK(status != cudaStreamCaptureStatusInvalidated,
             "a CUDA graph capture was invalidated by an earlier call that cannot be captured");
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

class CudaEvent final : public Event {
 public:
  CudaEvent() { FSDP_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~CudaEvent() override { cudaEventDestroy(event_); }

  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  // What was captured has not run, and is behind the graph's own order when it does.
  bool query() const override {
    if (capture_ != 0) {
      return true;
    }
    const cudaError_t result = cudaEventQuery(event_);
    if (result == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    FSDP_CUDA_CHECK(result);
    return true;
  }

  void synchronize(std::chrono::milliseconds timeout, const std::string& what) override {
    const auto start = std::chrono::steady_clock::now();
    auto pause = std::chrono::microseconds(1);
    while (!query()) {
      if (std::chrono::steady_clock::now() - start > timeout) {
        throw TimeoutError(detail::concat("waited ", timeout.count(), " ms for ", what,
                                          ", which has not finished; a rank that failed, or runs "
                                          "something else, never takes part"));
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, std::chrono::microseconds(1000));
    }
  }

  void record(cudaStream_t stream, unsigned long long capture) {
    FSDP_CUDA_CHECK(cudaEventRecord(event_, stream));
    capture_ = capture;
  }

  // `capture`: the one under way, on whichever stream.
  bool make_wait(cudaStream_t stream, unsigned long long capture) const {
    if (capture_ != capture) {  // see Note [graph capture]
      return false;
    }
    FSDP_CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0));
    return true;
  }

 private:
  cudaEvent_t event_ = nullptr;
  unsigned long long capture_ = 0;  // in which it was last recorded
};

// Note [two clocks]
// Events tell milliseconds between each other, as a float, of which few digits are left when they
// are far apart. So times are told from one iteration's first moment to the next one's, and from
// the last one's to an anchor: a moment that the host waited for, by its own clock. What that is
// off by (some microseconds) is the same for all streams.
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

  double lead(std::size_t number, double reached) const override {
    return reached - host_clock::seconds(marked_[number]);
  }

  // The try that took least is the most exact.
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
        throw TimeoutError(detail::concat("waited ", timeout_.count(),
                                          " ms for a moment of a profiled step, which its stream "
                                          "has not reached"));
      }
      std::this_thread::yield();
      result = cudaEventQuery(events_[number]);
    }
    FSDP_CUDA_CHECK(result);
  }

  int index_;
  std::chrono::milliseconds timeout_;
  Stream& compute_;
  std::vector<cudaEvent_t> events_;
  std::vector<std::int64_t> marked_;  // when, by the host: ticks of device/host_clock.h
};

class CudaDevice;

class CudaStream final : public Stream {
 public:
  // With `own` null this is the compute stream: whatever the framework's current one is.
  CudaStream(CudaDevice& device, std::string name, cudaStream_t own)
      : device_(device), name_(std::move(name)), own_(own) {}
  ~CudaStream() override {
    if (own_ != nullptr) {
      cudaStreamDestroy(own_);
    }
  }

  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  const std::string& name() const override { return name_; }
  void* native_handle() const override;
  void record(Event& event) override;
  bool wait(Event& event, const std::string& what) override;
  void synchronize() override;

 private:
  CudaDevice& device_;
  std::string name_;
  cudaStream_t own_;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(int index, std::chrono::milliseconds timeout, CudaFramework framework)
      : index_(index),
        timeout_(timeout),
        framework_(framework),
        compute_(*this, "compute", nullptr) {}

  const char* name() const override { return "cuda"; }
  int index() const override { return index_; }
  Stream& compute_stream() override { return compute_; }
  cudaStream_t current_stream() const {
    return static_cast<cudaStream_t>(framework_.current_stream(index_));
  }
  unsigned long long capture() const { return capture_of(current_stream()); }

  // Of the highest priority: what waits for a collective is the rest of the step.
  std::unique_ptr<Stream> new_stream(const std::string& name) override {
    const CudaDeviceGuard guard(index_);
    int lowest = 0;
    int highest = 0;
    FSDP_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    cudaStream_t stream = nullptr;
    FSDP_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest));
    nvtxNameCudaStreamA(stream, ("fsdp_ext " + name).c_str());
    return std::make_unique<CudaStream>(*this, name, stream);
  }

  std::unique_ptr<Event> new_event() override {
    const CudaDeviceGuard guard(index_);
    return std::make_unique<CudaEvent>();
  }

  std::unique_ptr<Moments> new_moments() override {
    return std::make_unique<CudaMoments>(index_, timeout_, compute_);
  }

  std::shared_ptr<void> allocate(std::size_t bytes) override {
    FSDP_CHECK(capture() == 0, "a CUDA graph capture expects all buffers to exist but ", bytes,
               " bytes are to be allocated in it; run a few whole steps before capturing one");
    return framework_.allocate(index_, bytes);
  }

  void fill(Stream& stream, void* data, int value, std::size_t bytes) override {
    const CudaDeviceGuard guard(index_);
    FSDP_CUDA_CHECK(
        cudaMemsetAsync(data, value, bytes, static_cast<cudaStream_t>(stream.native_handle())));
  }

  std::shared_ptr<void> make_current() override {
    return std::make_shared<CudaDeviceGuard>(index_);
  }

  void synchronize() override {
    const CudaDeviceGuard guard(index_);
    FSDP_CUDA_CHECK(cudaDeviceSynchronize());
  }

  void copy_to_host(Stream& stream, const void* data, void* host, std::size_t bytes) override {
    FSDP_CUDA_CHECK(cudaMemcpyAsync(host, data, bytes, cudaMemcpyDeviceToHost,
                                    static_cast<cudaStream_t>(stream.native_handle())));
  }

  void copy_from_host(Stream& stream, const void* host, void* data, std::size_t bytes) override {
    FSDP_CUDA_CHECK(cudaMemcpyAsync(data, host, bytes, cudaMemcpyHostToDevice,
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
  void push_range(const std::string& name) override { nvtxRangePushA(name.c_str()); }
  void pop_range() override { nvtxRangePop(); }

  // Another thread that looks at events would end a capture that is strict about such calls.
  void this_thread_only_watches() override {
    FSDP_CUDA_CHECK(cudaSetDevice(index_));
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    FSDP_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  }

  std::chrono::milliseconds timeout() const override { return timeout_; }

 private:
  // For transfers of `stream` to remember when they began.
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
  std::map<Stream*, std::shared_ptr<void>> start_words_;  // of streams that have had transfers
};

void* CudaStream::native_handle() const {
  return own_ != nullptr ? own_ : device_.current_stream();
}

void CudaStream::record(Event& event) {
  const CudaDeviceGuard guard(device_.index());  // the default stream is the current device's
  auto* stream = static_cast<cudaStream_t>(native_handle());
  const unsigned long long capture = capture_of(stream);
  FSDP_CHECK(own_ == nullptr || capture == device_.capture(),
             "a CUDA graph capture expects a whole step, from before forward to after backward; "
             "begin it before the forward, or run without");
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

std::unique_ptr<Device> make_cuda_device(int index, std::chrono::milliseconds timeout,
                                         CudaFramework framework) {
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  FSDP_CHECK(result == cudaSuccess, "expects a GPU but CUDA says: ", cudaGetErrorString(result),
             " (", cudaGetErrorName(result),
             "); install or update the NVIDIA driver, or use a mesh of device type 'cpu'");
  FSDP_CHECK(index >= 0 && index < count, "expects a GPU of index ", index, " but there are ",
             count, "; set CUDA_VISIBLE_DEVICES or torch.cuda.set_device");
  static std::once_flag nvtx;  // it would set itself up with whoever comes first, unguarded
  std::call_once(nvtx, [] { nvtxInitialize(nullptr); });
  return std::make_unique<CudaDevice>(index, timeout, framework);
}

}  // namespace fsdp
