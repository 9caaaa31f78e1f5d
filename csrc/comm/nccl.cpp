#include "comm/nccl.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "base/check.h"
#include "comm/nccl_join.h"
#include "comm/nccl_watchdog.h"

namespace fsdp {
namespace {

using nccl::Api;
using nccl::Comm;

// When a program ends because a peer has failed, closing should not wait much longer for that peer.
constexpr auto kLongestClose = std::chrono::milliseconds(30000);

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
  throw Error("A reduction got bytes. Pass a floating-point dtype.");
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
        watchdog_(api, device, comm, options, name_) {}

  // The owner has synchronised the stream.
  ~NcclCommunicator() override {
    watchdog_.stop();
    if (!watchdog_.has_failed()) {
      close();
    }
  }

  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  const char* transport() const override { return "nccl"; }
  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  GatherBy gather_by() const override { return gather_by_of(transport(), /*on_gpu=*/true); }
  int registered_buffers() const override { return registered_buffers_; }

  void announce(const std::string& what, std::uint64_t /*tag*/) override { what_ = what; }

  void group_start() override {
    check();
    throw_on_error(api_.GroupStart(), "start a group");
    in_group_ = true;
  }

  void group_end() override {
    in_group_ = false;
    if (watchdog_.has_failed()) {
      api_.GroupEnd();  // NCCL counts groups by thread, over all communicators
      check();
    }
    const NcclWatchdog::BlockingCall blocking(watchdog_, what_);
    throw_on_error(api_.GroupEnd(), "launch a group");
    watchdog_.watch_collective(*grouped_on_, what_);
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

  // NCCL has no barrier. A one-byte all-gather serves as one.
  void barrier(Stream& stream) override {
    grow_exchange_buffer(stream, 1);
    auto* mine = static_cast<char*>(exchange_.get());
    all_gather(stream, mine, mine + 1, 1);
  }

  // Goes through a device buffer that this communicator owns.
  void host_all_gather(Stream& stream, const void* input, void* output,
                       std::size_t bytes) override {
    const auto ranks = static_cast<std::size_t>(options_.size);
    grow_exchange_buffer(stream, bytes);
    auto* mine = static_cast<char*>(exchange_.get());
    char* all = mine + bytes;
    device_.copy_from_host(stream, input, mine, bytes);
    all_gather(stream, mine, all, bytes);
    // A copy to memory that is not pinned blocks until the stream has reached it.
    const NcclWatchdog::BlockingCall blocking(watchdog_, what_);
    device_.copy_to_host(stream, all, output, bytes * ranks);
  }

  std::shared_ptr<void> allocate(Device& device, std::size_t bytes, BufferUse use) override;

  void abort(const std::string& reason) override { watchdog_.abort(reason); }
  std::string async_error() override { return watchdog_.error(); }

 private:
  void throw_on_error(nccl::Result result, const char* what) {
    // NCCL_COMM_BLOCKING=0 in the environment makes every communicator non-blocking.
    while (result == nccl::kInProgress && !watchdog_.has_failed()) {
      nccl::Result state = nccl::kSuccess;
      result = api_.CommGetAsyncError(comm_, &state);
      result = result == nccl::kSuccess ? state : result;
      std::this_thread::yield();
    }
    if (result == nccl::kSuccess) {
      return;
    }
    if (std::exchange(in_group_, false)) {
      api_.GroupEnd();  // or this thread stays in the group, with all its communicators
    }
    check();  // if the watchdog has aborted meanwhile, its reason says more
    abort(detail::concat("rank ", options_.rank, ": NCCL could not ", what, " (", what_,
                         "): ", api_.describe(comm_, result)));
    check();
  }

  // Closing waits for peers, because the network may still carry data that they have not received.
  // If peers do not close within the limit, or a CUDA graph holds the communicator, the process
  // goes on and the detached thread finishes the closing.
  void close() {
    auto closed = std::make_shared<std::promise<nccl::Result>>();
    std::future<nccl::Result> done = closed->get_future();
    std::thread([&api = api_, comm = comm_, closed] {
      const nccl::Result finalized = api.CommFinalize(comm);
      const nccl::Result destroyed = api.CommDestroy(comm);
      closed->set_value(finalized != nccl::kSuccess ? finalized : destroyed);
    }).detach();
    const bool captured = watchdog_.has_captured();
    const auto limit =
        captured ? std::chrono::milliseconds(0) : std::min(options_.timeout, kLongestClose);
    if (done.wait_for(limit) == std::future_status::ready) {
      print_error(done.get(), "close");
    } else if (!captured) {
      std::fprintf(stderr,
                   "fsdp_ext: rank %d waited %d ms for all ranks to close the %s communicator and"
                   " went on without them. Some rank has failed.\n",
                   options_.rank, static_cast<int>(limit.count()), name_.c_str());
    }
  }

  // For calls whose caller cannot handle an error.
  void print_error(nccl::Result result, const char* what) {
    if (result != nccl::kSuccess && !watchdog_.has_failed()) {
      std::fprintf(stderr, "fsdp_ext: rank %d: NCCL could not %s the %s communicator: %s\n",
                   options_.rank, what, name_.c_str(), api_.GetErrorString(result));
    }
  }

  template <typename Call>
  void issue(Stream& stream, const Call& collective) {
    if (in_group_) {
      grouped_on_ = &stream;
      throw_on_error(collective(stream.native_handle()), "add a collective to a group");
      return;
    }
    check();
    const NcclWatchdog::BlockingCall blocking(watchdog_, what_);
    throw_on_error(collective(stream.native_handle()), "launch a collective");
    watchdog_.watch_collective(stream, what_);
  }

  // Makes room for `bytes` bytes of this rank, followed by as many bytes of every rank.
  void grow_exchange_buffer(Stream& stream, std::size_t bytes) {
    if (exchange_bytes_ < bytes) {
      exchange_ = device_.allocate(bytes * (static_cast<std::size_t>(options_.size) + 1));
      exchange_bytes_ = bytes;
      order_after_compute(stream);
    }
  }

  // See Note [memory and the compute stream].
  void order_after_compute(Stream& stream) {
    const std::unique_ptr<Event> reached = device_.new_event();
    device_.compute_stream().record(*reached);
    stream.wait(*reached, what_);
  }

  struct Registration {
    nccl::Window window = nullptr;
    void* handle = nullptr;

    bool is_registered() const { return window != nullptr || handle != nullptr; }
  };

  Registration register_buffer(void* memory, std::size_t bytes);
  void free_buffer(const Registration& registration, void* memory);

  const Api& api_;
  Device& device_;
  Comm comm_;
  NcclOptions options_;
  std::string name_;
  std::string what_ = "a collective";
  bool in_group_ = false;
  Stream* grouped_on_ = nullptr;
  std::atomic<int> registered_buffers_{0};
  std::shared_ptr<void> exchange_;
  std::size_t exchange_bytes_ = 0;
  NcclWatchdog watchdog_;
};

std::shared_ptr<void> NcclCommunicator::allocate(Device& device, std::size_t bytes, BufferUse use) {
  const bool can_register =
      options_.register_buffers && options_.size > 1 && api_.registration() != std::string("none");
  if (!can_register || use == BufferUse::Shard) {  // a shard may outlive the communicator
    return device.allocate(bytes);
  }
  FSDP_CHECK(
      !device.is_capturing(), "A CUDA graph capture would allocate ", bytes,
      " bytes, but all buffers must exist before it. Run a few whole steps before capturing one.");
  const std::shared_ptr<void> guard = device.make_current();
  const NcclWatchdog::BlockingCall blocking(watchdog_, "to register a buffer");
  void* memory = nullptr;
  const nccl::Result allocated = api_.MemAlloc(&memory, bytes);
  // No fallback to other memory: either all ranks register the buffer, or none does.
  FSDP_CHECK(allocated == nccl::kSuccess && memory != nullptr, "NCCL could not allocate ", bytes,
             " more bytes of GPU memory for buffers of the largest unit: ",
             api_.describe(comm_, allocated),
             ". Call fully_shard on smaller modules, use more ranks or a smaller batch, or set "
             "FSDP_EXT_NCCL_REGISTER=0 to allocate them with PyTorch's allocator.");
  const Registration registration = register_buffer(memory, bytes);
  registered_buffers_ += registration.is_registered() ? 1 : 0;
  return {memory, [this, registration](void* freed) { free_buffer(registration, freed); }};
}

// Where registration fails, the buffer is used without it.
NcclCommunicator::Registration NcclCommunicator::register_buffer(void* memory, std::size_t bytes) {
  Registration registration;
  const nccl::Result result =
      api_.registration() == std::string("window")
          ? api_.CommWindowRegister(comm_, memory, bytes, &registration.window,
                                    nccl::kWindowCollSymmetric)
          : api_.CommRegister(comm_, memory, bytes, &registration.handle);
  return result == nccl::kSuccess ? registration : Registration{};
}

// NCCL unmaps the memory even if the device still reads it, so this synchronises first.
void NcclCommunicator::free_buffer(const Registration& registration, void* memory) {
  try {
    device_.synchronize();
  } catch (const std::exception&) {
    // Work has failed. Its waiters get the error.
  }
  registered_buffers_ -= registration.is_registered() ? 1 : 0;
  if (!watchdog_.has_failed()) {
    const NcclWatchdog::BlockingCall blocking(watchdog_, "to deregister a buffer");
    if (registration.window != nullptr) {
      print_error(api_.CommWindowDeregister(comm_, registration.window), "deregister a buffer of");
    } else if (registration.handle != nullptr) {
      print_error(api_.CommDeregister(comm_, registration.handle), "deregister a buffer of");
    }
  }
  print_error(api_.MemFree(memory), "free a buffer of");
}

}  // namespace

std::pair<std::unique_ptr<Communicator>, std::unique_ptr<Communicator>> make_nccl_communicators(
    const Api& api, Device& device, const nccl::UniqueId& id, const NcclOptions& options) {
  const std::shared_ptr<void> guard = device.make_current();
  NcclJoined joined = join_nccl_ranks(api, id, options);
  auto make = [&](NcclCommGuard& comm, const char* name) {
    auto made = std::make_unique<NcclCommunicator>(api, device, comm.get(), options, name);
    comm.release();
    return made;
  };
  std::unique_ptr<Communicator> gather = make(joined.gather, "gather");
  return {std::move(gather), make(joined.reduce, "reduce")};
}

}  // namespace fsdp
