// Note [blocking communicators]
// Communicators come up without blocking the host, so that a rank that never comes is a timeout.
// But a communicator without blocking launches each collective from a new thread (NCCL 2.28,
// src/group.cc, ncclGroupEndInternal), which takes longer than all the rest of a launch. So that
// one only brings the ranks together; the two that the lanes use are split off it, with blocking,
// and it goes. What may block on those (the first collective makes connections) is watched by a
// thread that aborts them.
//
// Note [watchdog]
// No host waits for a collective in a step, so nobody would notice one that hangs but for the
// watchdog. It looks at NCCL's asynchronous error and at events behind the newest collectives. When
// something is wrong it revokes the communicator (aborts it where NCCL cannot), which ends the
// kernels that wait for peers, says so on stderr, and every later call throws. What was computed
// since is not to be used: the optimizer's step checks, too.

#include "comm/nccl.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <future>
#include <mutex>
#include <thread>

#include "base/check.h"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;
using nccl::Api;
using nccl::Comm;

constexpr auto kLongestPause = std::chrono::milliseconds(1000);  // of the watchdog
// A program that ends because a peer has failed is not to wait for that peer much longer.
constexpr auto kLongestClose = std::chrono::milliseconds(30000);

std::string text_of(const Api& api, Comm comm, nccl::Result result) {
  const char* last = api.GetLastError(comm);
  return detail::concat(api.GetErrorString(result), last != nullptr && last[0] != '\0' ? ": " : "",
                        last != nullptr ? last : "");
}

nccl::DataType data_type(DType dtype) {
  switch (dtype) {
    case DType::Float32:
      return nccl::kFloat32;
    case DType::BFloat16:
      return nccl::kBfloat16;
    case DType::Float16:
      return nccl::kFloat16;
    case DType::Float64:
      return nccl::kFloat64;
    case DType::Bytes:
      break;
  }
  throw Error("a reduction expects a floating dtype but got bytes");
}

// Waits for calls on a communicator that does not block. See Note [blocking communicators].
void wait_until_ready(const Api& api, Comm comm, nccl::Result result, const NcclOptions& options,
                      const char* what) {
  const auto start = Clock::now();
  while (result == nccl::kInProgress || result == nccl::kSuccess) {
    nccl::Result state = nccl::kSuccess;
    result = api.CommGetAsyncError(comm, &state);
    if (result != nccl::kSuccess) {
      break;
    }
    if (state == nccl::kSuccess) {
      return;
    }
    result = state;
    if (state == nccl::kInProgress && Clock::now() - start > options.timeout) {
      throw TimeoutError(
          detail::concat("rank ", options.rank, " waited ", options.timeout.count(),
                         " ms for NCCL to ", what, " ", options.size,
                         " ranks; some rank has failed or has not come that far (NCCL_DEBUG=INFO "
                         "says more)"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const std::string text = text_of(api, comm, result);
  const bool shares_gpu = text.find("Duplicate GPU") != std::string::npos ||
                          text.find("using the same GPU") != std::string::npos;
  FSDP_CHECK(!shares_gpu, "NCCL could not ", what, " ", options.size, " ranks: ", text,
             "; give each rank a GPU of its own with torch.cuda.set_device(local_rank). To let "
             "ranks share one for tests, see docs/gpu-status.md");
  throw Error(detail::concat("rank ", options.rank, ": NCCL could not ", what, " ", options.size,
                             " ranks: ", text, " (NCCL_DEBUG=WARN says more)"));
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const Api& api, Device& device, Comm comm, const NcclOptions& options,
                   std::string name)
      : api_(api),
        device_(device),
        comm_(comm),
        options_(options),
        name_(std::move(name)),
        watchdog_([this] { watch(); }) {}

  // Whoever owns this has waited for its stream.
  ~NcclCommunicator() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    stop_.notify_one();
    watchdog_.join();
    if (!failed_) {
      close();
    }
  }

  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  const char* transport() const override { return "nccl"; }
  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  GatherBy gather_by() const override { return GatherBy::Size; }
  int registered_buffers() const override { return registered_buffers_; }

  void announce(const std::string& what) override { what_ = what; }

  void group_start() override {
    check();
    call(api_.GroupStart(), "start a group");
    in_group_ = true;
  }

  void group_end() override {
    in_group_ = false;
    if (failed_) {
      api_.GroupEnd();  // NCCL counts groups by thread, for everybody's communicators
      check();
    }
    const Busy busy(*this, what_);
    call(api_.GroupEnd(), "launch a group");
    watch_stream(*grouped_on_);
  }

  void all_gather(Stream& stream, const void* input, void* output, std::size_t bytes) override {
    issue(stream,
          [&](void* on) { return api_.AllGather(input, output, bytes, nccl::kInt8, comm_, on); });
  }

  void reduce_scatter(Stream& stream, const void* input, void* output, std::size_t numel,
                      DType dtype) override {
    issue(stream, [&](void* on) {
      return api_.ReduceScatter(input, output, numel, data_type(dtype), nccl::kSum, comm_, on);
    });
  }

  void all_reduce(Stream& stream, void* data, std::size_t numel, DType dtype) override {
    issue(stream, [&](void* on) {
      return api_.AllReduce(data, data, numel, data_type(dtype), nccl::kSum, comm_, on);
    });
  }

  void broadcast(Stream& stream, void* data, std::size_t bytes, int root) override {
    issue(stream, [&](void* on) {
      return api_.Broadcast(data, data, bytes, nccl::kInt8, root, comm_, on);
    });
  }

  // NCCL has none; to have everybody's byte is as much.
  void barrier(Stream& stream) override {
    exchange(stream, 1);
    auto* mine = static_cast<char*>(exchange_.get());
    all_gather(stream, mine, mine + 1, 1);
  }

  // Through a buffer of the device that lives as long as this does.
  void host_all_gather(Stream& stream, const void* input, void* output,
                       std::size_t bytes) override {
    const auto ranks = static_cast<std::size_t>(options_.size);
    exchange(stream, bytes);
    auto* mine = static_cast<char*>(exchange_.get());
    char* all = mine + bytes;
    device_.copy_from_host(stream, input, mine, bytes);
    all_gather(stream, mine, all, bytes);
    const Busy busy(*this, what_);  // a copy to memory that is not pinned waits for the stream
    device_.copy_to_host(stream, all, output, bytes * ranks);
  }

  std::shared_ptr<void> allocate(Device& device, std::size_t bytes, BufferUse use) override;

  void abort(const std::string& reason) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (failed_) {
        return;
      }
      error_ = reason;
      failed_ = true;
    }
    std::fprintf(stderr, "fsdp_ext: %s\n", reason.c_str());
    // Revoking ends what runs and, unlike aborting, frees nothing that another thread may be about
    // to use. What is left of the communicator stays until the process ends, which is to be soon.
    if (api_.CommRevoke != nullptr && api_.CommRevoke(comm_, 0) == nccl::kSuccess) {
      return;
    }
    if (captured_) {  // aborting waits until no graph holds the communicator
      std::thread([&api = api_, comm = comm_] { api.CommAbort(comm); }).detach();
    } else {
      api_.CommAbort(comm_);
    }
  }

  std::string async_error() override {
    if (!failed_) {
      return "";
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }

 private:
  // What the watchdog knows of a collective that was issued.
  struct Outstanding {
    std::unique_ptr<Event> event;
    std::string what;
    Clock::time_point since;
    bool pending = false;
  };

  // For as long as it lives, the calling thread may block in NCCL.
  class Busy {
   public:
    Busy(NcclCommunicator& owner, const std::string& what) : owner_(owner) {
      const std::lock_guard<std::mutex> lock(owner_.mutex_);
      owner_.busy_with_ = what;
      owner_.busy_since_ = Clock::now();
      owner_.busy_ = true;
    }
    ~Busy() {
      const std::lock_guard<std::mutex> lock(owner_.mutex_);
      owner_.busy_ = false;
    }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    NcclCommunicator& owner_;
  };

  void call(nccl::Result result, const char* what) {
    // Where NCCL_COMM_BLOCKING=0 in the environment has the better of us.
    while (result == nccl::kInProgress && !failed_) {
      nccl::Result state = nccl::kSuccess;
      result = api_.CommGetAsyncError(comm_, &state);
      result = result == nccl::kSuccess ? state : result;
      std::this_thread::yield();
    }
    if (result == nccl::kSuccess) {
      return;
    }
    if (std::exchange(in_group_, false)) {
      api_.GroupEnd();  // or the thread stays in the group, with everybody's communicators
    }
    check();  // aborted meanwhile, for a reason that says more
    const std::string text = text_of(api_, comm_, result);
    abort(detail::concat("rank ", options_.rank, ": NCCL could not ", what, " (", what_,
                         "): ", text));
    check();
  }

  // Waits for peers, since the network may still carry what they have not got; but if they do not
  // come, or a CUDA graph still holds the communicator, the process goes on without.
  void close() {
    auto closed = std::make_shared<std::promise<nccl::Result>>();
    std::future<nccl::Result> done = closed->get_future();
    std::thread([&api = api_, comm = comm_, closed] {
      const nccl::Result finalized = api.CommFinalize(comm);
      const nccl::Result destroyed = api.CommDestroy(comm);
      closed->set_value(finalized != nccl::kSuccess ? finalized : destroyed);
    }).detach();
    const auto limit =
        captured_ ? std::chrono::milliseconds(0) : std::min(options_.timeout, kLongestClose);
    if (done.wait_for(limit) == std::future_status::ready) {
      report(done.get(), "close");
    } else if (!captured_) {
      std::fprintf(stderr,
                   "fsdp_ext: rank %d waited %d ms for all ranks to close the %s communicator"
                   " and went on without; some rank has failed\n",
                   options_.rank, static_cast<int>(limit.count()), name_.c_str());
    }
  }

  // Of a call that nobody waits for any more.
  void report(nccl::Result result, const char* what) {
    if (result != nccl::kSuccess && !failed_) {
      std::fprintf(stderr, "fsdp_ext: rank %d: NCCL could not %s the %s communicator: %s\n",
                   options_.rank, what, name_.c_str(), api_.GetErrorString(result));
    }
  }

  template <typename Call>
  void issue(Stream& stream, const Call& collective) {
    if (in_group_) {
      grouped_on_ = &stream;
      call(collective(stream.native_handle()), "add a collective to a group");
      return;
    }
    check();
    const Busy busy(*this, what_);
    call(collective(stream.native_handle()), "launch a collective");
    watch_stream(stream);
  }

  // What is captured runs when the graph does, of which only the user knows.
  void watch_stream(Stream& stream) {
    if (device_.is_capturing()) {
      captured_ = true;
      return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    Outstanding& newest = outstanding_[next_];
    next_ = (next_ + 1) % outstanding_.size();
    if (newest.event == nullptr) {
      newest.event = device_.new_event();
    }
    stream.record(*newest.event);
    newest.what = what_;
    newest.since = Clock::now();
    newest.pending = true;
  }

  // Sees to a buffer with room for `bytes` bytes and those of all ranks.
  void exchange(Stream& stream, std::size_t bytes) {
    if (exchange_bytes_ < bytes) {
      exchange_ = device_.allocate(bytes * (static_cast<std::size_t>(options_.size) + 1));
      exchange_bytes_ = bytes;
      stream_follows_compute(stream);
    }
  }

  void stream_follows_compute(Stream& stream) {
    const std::unique_ptr<Event> reached = device_.new_event();
    device_.compute_stream().record(*reached);
    stream.wait(*reached, what_);
  }

  void watch() {
    try {
      device_.this_thread_only_watches();
      const auto pause = std::min<Clock::duration>(kLongestPause, options_.timeout / 10);
      std::unique_lock<std::mutex> lock(mutex_);
      while (!stop_.wait_for(lock, pause, [this] { return stopping_; })) {
        const std::string reason = failed_ ? "" : what_is_wrong();
        if (!reason.empty()) {
          lock.unlock();
          abort(reason);
          lock.lock();
        }
      }
    } catch (const std::exception& error) {
      // The device is gone: the process ends, or an error of its own has stopped it.
      const std::lock_guard<std::mutex> lock(mutex_);
      error_ = detail::concat("rank ", options_.rank, ": nothing can be said of the ", name_,
                              " communicator any more: ", error.what());
      failed_ = true;
    }
  }

  // Under the lock. Empty if nothing is.
  std::string what_is_wrong() {
    nccl::Result state = nccl::kSuccess;
    if (api_.CommGetAsyncError(comm_, &state) == nccl::kSuccess && state != nccl::kSuccess &&
        state != nccl::kInProgress) {
      return detail::concat("rank ", options_.rank, ": NCCL reports an error of the ", name_,
                            " communicator: ", text_of(api_, comm_, state));
    }
    const auto now = Clock::now();
    if (busy_ && now - busy_since_ > options_.timeout) {
      return late(busy_with_);
    }
    const Outstanding* oldest = nullptr;
    for (Outstanding& candidate : outstanding_) {
      if (candidate.pending && candidate.event->query()) {
        candidate.pending = false;
      }
      if (candidate.pending && (oldest == nullptr || candidate.since < oldest->since)) {
        oldest = &candidate;
      }
    }
    if (oldest != nullptr && now - oldest->since > options_.timeout) {
      return late(oldest->what);
    }
    return "";
  }

  std::string late(const std::string& what) const {
    return detail::concat("rank ", options_.rank, " of ", options_.size, " waited ",
                          options_.timeout.count(), " ms for ", what,
                          "; a rank that failed, or runs something else, never takes part, and "
                          "communication was aborted");
  }

  // NCCL unmaps what it frees, whoever may still read it.
  void free_registered(nccl::Window window, void* handle, void* memory) {
    try {
      device_.synchronize();
    } catch (const std::exception&) {
      // Of work that failed; whoever waits for that is told.
    }
    registered_buffers_ -= window != nullptr || handle != nullptr ? 1 : 0;
    if (!failed_) {
      const Busy busy(*this, "to deregister a buffer");
      if (window != nullptr) {
        report(api_.CommWindowDeregister(comm_, window), "deregister a buffer of");
      } else if (handle != nullptr) {
        report(api_.CommDeregister(comm_, handle), "deregister a buffer of");
      }
    }
    report(api_.MemFree(memory), "free a buffer of");
  }

  const Api& api_;
  Device& device_;
  Comm comm_;
  NcclOptions options_;
  std::string name_;
  std::string what_ = "a collective";
  bool in_group_ = false;
  bool captured_ = false;  // into a CUDA graph, which then holds the communicator
  Stream* grouped_on_ = nullptr;
  std::atomic<int> registered_buffers_{0};
  std::shared_ptr<void> exchange_;
  std::size_t exchange_bytes_ = 0;

  std::mutex mutex_;  // of what follows
  std::condition_variable stop_;
  bool stopping_ = false;
  std::atomic<bool> failed_{false};
  std::string error_;
  bool busy_ = false;
  std::string busy_with_;
  Clock::time_point busy_since_;
  // Of the newest collectives. A hang is of the oldest that is not done; if the ring has gone
  // around, of the oldest that it still knows.
  std::array<Outstanding, 64> outstanding_;
  std::size_t next_ = 0;
  std::thread watchdog_;  // last: starts when everything above exists
};

// Where NCCL cannot register, its own memory, or plain memory, does as well.
std::shared_ptr<void> NcclCommunicator::allocate(Device& device, std::size_t bytes, BufferUse use) {
  const std::string kind = api_.registration();
  if (!options_.register_buffers || kind == "none" || options_.size == 1 ||
      use == BufferUse::Shard) {  // which may outlive the communicator
    return device.allocate(bytes);
  }
  FSDP_CHECK(!device.is_capturing(),
             "a CUDA graph capture expects all buffers to exist; run a few "
             "whole steps before capturing one");
  const std::shared_ptr<void> guard = device.make_current();
  const Busy busy(*this, "to register a buffer");
  void* memory = nullptr;
  const nccl::Result allocated = api_.MemAlloc(&memory, bytes);
  // Other memory would do, but all ranks register, or none does.
  FSDP_CHECK(allocated == nccl::kSuccess && memory != nullptr, "expects ", bytes,
             " more bytes of GPU memory for buffers of the largest unit but NCCL says: ",
             text_of(api_, comm_, allocated),
             "; call fully_shard on smaller modules, use more ranks or a smaller batch, or set "
             "FSDP_EXT_NCCL_REGISTER=0, which leaves them to PyTorch's allocator");
  nccl::Window window = nullptr;
  void* handle = nullptr;
  const nccl::Result result =
      kind == "window"
          ? api_.CommWindowRegister(comm_, memory, bytes, &window, nccl::kWindowCollSymmetric)
          : api_.CommRegister(comm_, memory, bytes, &handle);
  if (result != nccl::kSuccess) {
    window = nullptr;
    handle = nullptr;
  }
  registered_buffers_ += window != nullptr || handle != nullptr ? 1 : 0;
  return {memory, [this, window, handle](void* freed) { free_registered(window, handle, freed); }};
}

// Aborts at the end of the block, unless it was released.
class CommGuard {
 public:
  CommGuard(const Api& api, Comm comm) : api_(api), comm_(comm) {}
  ~CommGuard() {
    if (comm_ != nullptr) {
      api_.CommAbort(comm_);
    }
  }
  CommGuard(const CommGuard&) = delete;
  CommGuard& operator=(const CommGuard&) = delete;

  Comm get() const { return comm_; }
  Comm release() { return std::exchange(comm_, nullptr); }

 private:
  const Api& api_;
  Comm comm_;
};

// `child` outlives the parent: NCCL may write to it until that is gone.
void split_off(const Api& api, Comm parent, const NcclOptions& options, Comm& child) {
  nccl::Config config;
  config.blocking = 1;
  const nccl::Result result = api.CommSplit(parent, /*color=*/0, options.rank, &child, &config);
  wait_until_ready(api, parent, result, options, "make communicators for");
  FSDP_CHECK(child != nullptr, "NCCL expects to make a communicator for rank ", options.rank,
             " but made none");
}

}  // namespace

std::pair<std::unique_ptr<Communicator>, std::unique_ptr<Communicator>> make_nccl_communicators(
    const Api& api, Device& device, const nccl::UniqueId& id, const NcclOptions& options) {
  nccl::Config config;
  config.blocking = 0;
  Comm joined = nullptr;
  Comm children[2] = {nullptr, nullptr};
  const std::shared_ptr<void> guard = device.make_current();
  const nccl::Result result =
      api.CommInitRankConfig(&joined, options.size, id, options.rank, &config);
  CommGuard parent(api, joined);
  wait_until_ready(api, parent.get(), result, options, "join");
  split_off(api, parent.get(), options, children[0]);
  CommGuard gather(api, children[0]);
  split_off(api, parent.get(), options, children[1]);
  CommGuard reduce(api, children[1]);
  wait_until_ready(api, parent.get(), api.CommFinalize(parent.get()), options, "part the first of");
  api.CommDestroy(parent.release());
  auto make = [&](CommGuard& comm, const char* name) {
    auto made = std::make_unique<NcclCommunicator>(api, device, comm.get(), options, name);
    comm.release();
    return made;
  };
  std::unique_ptr<Communicator> first = make(gather, "gather");
  return {std::move(first), make(reduce, "reduce")};
}

}  // namespace fsdp
