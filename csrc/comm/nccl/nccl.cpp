#include "comm/nccl/nccl.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "comm/nccl/nccl_buffers.h"
#include "comm/nccl/nccl_calls.h"
#include "comm/nccl/nccl_join.h"
#include "comm/nccl/nccl_paths.h"
#include "comm/nccl/nccl_watchdog.h"

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

void print_nccl_error(const Api& api, int rank, nccl::Result result, const char* what,
                      const std::string& name) {
  std::fprintf(stderr, "fsdp_ext: rank %d: NCCL could not %s the %s communicator: %s\n", rank, what,
               name.c_str(), api.GetErrorString(result));
}

// Waits for both lanes' communicators to close. Both owners share this object. When the last owner
// has gone, it waits for both communicators at once. Closing waits for peers, because the network
// may still carry data that they have not received. Until all ring neighbours have closed theirs,
// too, NCCL's thread for the network stays. If peers do not close within the limit, or a CUDA graph
// holds a communicator, the process goes on and detached threads finish the closing.
class NcclClosing {
 public:
  NcclClosing(const Api& api, const NcclOptions& options)
      : api_(api), rank_(options.rank), limit_(std::min(options.timeout, kLongestClose)) {}
  NcclClosing(const NcclClosing&) = delete;
  NcclClosing& operator=(const NcclClosing&) = delete;

  ~NcclClosing() {
    const auto end = std::chrono::steady_clock::now() + limit_;
    for (auto& [done, name] : closing_) {
      if (done.wait_until(end) != std::future_status::ready) {
        std::fprintf(stderr,
                     "fsdp_ext: rank %d waited %d ms for all ranks to close the %s communicator and"
                     " went on without them. Some rank has not closed it yet, or has failed.\n",
                     rank_, static_cast<int>(limit_.count()), name.c_str());
      } else if (const nccl::Result result = done.get(); result != nccl::kSuccess) {
        print_nccl_error(api_, rank_, result, "close", name);
      }
    }
  }

  // Nothing waits for what a graph has captured.
  void add(std::future<nccl::Result> done, const std::string& name, bool is_captured) {
    if (!is_captured) {
      closing_.emplace_back(std::move(done), name);
    }
  }

 private:
  const Api& api_;
  const int rank_;
  const std::chrono::milliseconds limit_;
  std::vector<std::pair<std::future<nccl::Result>, std::string>> closing_;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const Api& api, Device& device, Comm comm, const NcclOptions& options,
                   const LanePath& path, const char* name, std::shared_ptr<NcclClosing> closing)
      : Communicator(nccl_traits(), options.rank, options.size),
        api_(api),
        device_(device),
        comm_(comm),
        options_(options),
        closing_(std::move(closing)),
        name_(name),
        watchdog_(api, device, comm, options, name_),
        buffers_(
            api, device, comm, watchdog_, path,
            [this](std::vector<std::uint64_t> mine, const std::string& what) {
              return exchange(std::move(mine), what);
            },
            [this](const std::string& what) { meet(what); },
            [this](nccl::Result result, const char* what) { print_error(result, what); }) {}

  // The owner has synchronised the stream.
  ~NcclCommunicator() override {
    if (options_.other_lane != nullptr) {
      options_.other_lane->stop();  // it reports to this object
    }
    buffers_.close();
    watchdog_.stop();
    if (!watchdog_.has_failed()) {
      close();
    }
  }

  RegisteredMemory* registered_memory() override {
    return buffers_.path().registers ? &buffers_ : nullptr;
  }

  void set_stream(Stream& stream) override { lane_stream_ = &stream; }

  void set_flight_writer(std::function<std::string()> write) override {
    watchdog_.set_flight_writer(std::move(write));
  }

  void all_gather(Stream& stream, const void* input, void* output, std::size_t bytes) override {
    issue(stream,
          [&](void* on) { return api_.AllGather(input, output, bytes, nccl::kInt8, comm_, on); });
  }

  void all_gather_parts(Stream& stream, const std::vector<GatherPart>& parts) override {
    if (!buffers_.path().cuts_groups()) {
      gather_in_a_group(stream, parts.begin(), parts.end());
      return;
    }
    auto part = parts.begin();
    for (const std::size_t number : groups_in_buffers(
             parts, size(), [this](const void* memory) { return buffers_.bytes_left(memory); })) {
      const auto end = part + static_cast<std::ptrdiff_t>(number);
      gather_in_a_group(stream, part, end);
      part = end;
    }
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

  // Goes through a device buffer that this communicator owns.
  void host_all_gather(Stream& stream, const void* input, void* output,
                       std::size_t bytes) override {
    const auto ranks = static_cast<std::size_t>(options_.size);
    grow_exchange_buffer(stream, bytes);
    auto* mine = static_cast<char*>(exchange_.get());
    char* all = mine + bytes;
    device_.copy(stream, input, mine, bytes);
    all_gather(stream, mine, all, bytes);
    // A copy to memory that is not pinned blocks until the stream has reached it.
    const NcclWatchdog::BlockingCall blocking(watchdog_, what());
    device_.copy(stream, all, output, bytes * ranks);
    check();  // an aborted collective leaves what was in the buffer
  }

  void abort(const std::string& reason) override { watchdog_.abort(reason); }
  std::string async_error() override { return watchdog_.error(); }

 private:
  using Parts = std::vector<GatherPart>::const_iterator;

  void gather_in_a_group(Stream& stream, Parts part, Parts end) {
    check();
    throw_on_error(api_.GroupStart(), "start a group");
    nccl::Result added = nccl::kSuccess;
    for (; part != end && added == nccl::kSuccess; ++part) {
      added = api_.AllGather(part->input, part->output, part->bytes, nccl::kInt8, comm_,
                             stream.native_handle());
    }
    if (added != nccl::kSuccess || watchdog_.has_failed()) {
      api_.GroupEnd();  // NCCL counts groups by thread, over all communicators
      throw_on_error(added, "add a collective to a group");
      check();
    }
    const NcclWatchdog::BlockingCall blocking(watchdog_, what());
    throw_on_error(api_.GroupEnd(), "launch a group");
    watchdog_.watch_collective(stream, what());
  }

  void throw_on_error(nccl::Result result, const char* attempt) {
    if (result == nccl::kSuccess) {
      return;
    }
    check();  // if the watchdog has aborted meanwhile, its reason says more
    abort(detail::concat("rank ", options_.rank, ": NCCL could not ", attempt, " (", what(),
                         "): ", api_.describe(comm_, result)));
    check();
  }

  void close() {
    closing_->add(nccl::call_apart(nccl::selector_of(device_),
                                   [&api = api_, comm = comm_] {
                                     const nccl::Result finalized = api.CommFinalize(comm);
                                     const nccl::Result destroyed = api.CommDestroy(comm);
                                     return finalized != nccl::kSuccess ? finalized : destroyed;
                                   }),
                  name_, watchdog_.has_captured());
  }

  // For calls whose caller cannot handle an error.
  void print_error(nccl::Result result, const char* what) {
    if (result != nccl::kSuccess && !watchdog_.has_failed()) {
      print_nccl_error(api_, options_.rank, result, what, name_);
    }
  }

  std::vector<std::uint64_t> exchange(std::vector<std::uint64_t> mine, const std::string& what);

  // See NcclBuffers::Meet.
  void meet(const std::string& what) {
    if (options_.meet != nullptr) {
      const NcclWatchdog::BlockingCall blocking(watchdog_, what);
      options_.meet(detail::concat(name_, "/", ++meetings_),
                    [this] { return watchdog_.has_failed(); });
      check();
    }
  }

  template <typename Call>
  void issue(Stream& stream, const Call& collective) {
    check();
    const NcclWatchdog::BlockingCall blocking(watchdog_, what());
    throw_on_error(collective(stream.native_handle()), "launch a collective");
    watchdog_.watch_collective(stream, what());
  }

  // Makes room for `bytes` bytes of this rank, followed by as many bytes of every rank. Earlier
  // exchanges may still use the buffer that is freed, since copies of pinned memory do not block.
  void grow_exchange_buffer(Stream& stream, std::size_t bytes) {
    if (exchange_bytes_ < bytes) {
      const std::shared_ptr<void> larger =
          device_.allocate(bytes * (static_cast<std::size_t>(options_.size) + 1));
      stream.synchronize();
      exchange_ = larger;
      exchange_bytes_ = bytes;
      order_after_compute(stream);
    }
  }

  // See Note [memory and the compute stream].
  void order_after_compute(Stream& stream) {
    const std::unique_ptr<Event> reached = device_.new_event();
    device_.compute_stream().record(*reached);
    stream.wait(*reached, what());
  }

  const Api& api_;
  Device& device_;
  Comm comm_;
  NcclOptions options_;
  std::shared_ptr<NcclClosing> closing_;
  std::string name_;
  Stream* lane_stream_ = nullptr;  // null if no lane uses this communicator
  std::shared_ptr<void> exchange_;
  std::size_t exchange_bytes_ = 0;
  std::uint64_t exchanges_ = 0;
  std::uint64_t meetings_ = 0;
  std::string exchange_name_;  // of the last exchange, for errors
  NcclWatchdog watchdog_;
  NcclBuffers buffers_;
};

// See NcclBuffers::Exchange. Each rank's numbers follow the number of the exchange. If NCCL has
// aborted the collective, the buffer does not have that number.
std::vector<std::uint64_t> NcclCommunicator::exchange(std::vector<std::uint64_t> mine,
                                                      const std::string& what) {
  Stream& stream = lane_stream_ != nullptr ? *lane_stream_ : device_.compute_stream();
  exchange_name_ = what;
  announce(exchange_name_, 0);
  exchanges_ += 1;
  mine.insert(mine.begin(), exchanges_);
  std::vector<std::uint64_t> received(mine.size() * static_cast<std::size_t>(options_.size));
  host_all_gather(stream, mine.data(), received.data(), mine.size() * sizeof(std::uint64_t));
  stream.synchronize();
  check();
  std::vector<std::uint64_t> all;
  for (auto rank = received.begin(); rank != received.end(); rank += mine.size()) {
    if (*rank != exchanges_) {
      abort(detail::concat("rank ", options_.rank, ": ", what,
                           " has not reached all ranks, and NCCL reported no error. Set "
                           "NCCL_DEBUG=WARN for more."));
      check();
    }
    all.insert(all.end(), rank + 1, rank + mine.size());
  }
  return all;
}

}  // namespace

TransportTraits nccl_traits() {
  TransportTraits traits;
  traits.name = "nccl";
  traits.gather_by = GatherBy::Size;
  traits.keeps_reduce_output = true;
  traits.flight_backend = "nccl";
  return traits;
}

std::pair<std::unique_ptr<Communicator>, std::unique_ptr<Communicator>> make_nccl_communicators(
    const Api& api, Device& device, const nccl::UniqueId& id, const NcclOptions& options) {
  const std::shared_ptr<void> guard = device.make_current();
  const LanePath gathers = path_of_lane(api, LaneUse::Gathers, options);
  const LanePath reductions = path_of_lane(api, LaneUse::Reductions, options);
  NcclJoined joined = join_nccl_ranks(api, id, options, gathers.settings, reductions.settings);
  const auto closing = std::make_shared<NcclClosing>(api, options);
  const auto make = [&](NcclCommGuard& comm, const LanePath& path, const char* name) {
    auto made =
        std::make_unique<NcclCommunicator>(api, device, comm.get(), options, path, name, closing);
    comm.release();
    return made;
  };
  std::unique_ptr<NcclCommunicator> gather = make(joined.gather, gathers, "gather");
  std::unique_ptr<NcclCommunicator> reduce = make(joined.reduce, reductions, "reduce");
  if (options.other_lane != nullptr) {
    options.other_lane->start([a = gather.get(), b = reduce.get()](const std::string& reason) {
      a->abort(reason);
      b->abort(reason);
    });
  }
  return {std::move(gather), std::move(reduce)};
}

}  // namespace fsdp
