#include "torch/transports.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "base/check.h"
#include "core/record/flight_recorder.h"
#include "device/forks.h"
#include "torch/backend_messages.h"
#include "torch/dtype.h"
#include "torch/with_python.h"

namespace fsdp {
namespace {

// Over gloo, ranks that wait for each other notice it after two or three of these intervals.
constexpr std::chrono::milliseconds kDeadlockInterval{500};

// Waits until all ranks have made this call. A call of the store does not return while the network
// to it is down, so a thread of its own polls, and may outlive this call. Other threads may use the
// store between two polls.
void meet_at(const c10::intrusive_ptr<c10d::Store>& store, const std::string& key, int ranks,
             const std::function<bool()>& given_up) {
  constexpr auto kLongestPause = std::chrono::milliseconds(50);
  const NoGilIfHeld no_gil;  // a store may be written in Python
  const auto is_left = std::make_shared<std::atomic<bool>>(false);
  std::packaged_task<void()> poll([=] {
    auto pause = std::chrono::milliseconds(1);
    for (auto come = store->add(key, 1); come < ranks && !*is_left; come = store->add(key, 0)) {
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
  });
  std::future<void> met = poll.get_future();
  try {
    std::thread(std::move(poll)).detach();
    while (met.wait_for(kLongestPause) != std::future_status::ready) {
      if (given_up()) {
        *is_left = true;
        return;
      }
    }
    met.get();
  } catch (const std::exception& error) {
    throw Error("The ranks cannot meet in the process group's store: " + plain_text(error));
  }
}

// Deleting lanes waits for their threads. A thread may be in a collective of a process group that
// is written in Python, and need the GIL. A forked child has no such threads: Note [forks].
class LanesDeleter {
 public:
  void operator()(Lanes* lanes) const {
    if (!forks_.is_forked()) {
      const NoGilIfHeld no_gil;
      delete lanes;
    }
  }

 private:
  ForkGuard forks_;
};

using Communicators = std::pair<std::unique_ptr<Communicator>, std::unique_ptr<Communicator>>;

std::shared_ptr<Lanes> lanes_over(Communicators of, std::unique_ptr<Device> device,
                                  std::unique_ptr<Packer> packer = make_host_packer()) {
  return {
      new Lanes(std::move(device), std::move(packer), std::move(of.first), std::move(of.second)),
      LanesDeleter()};
}

// A uint8 tensor that owns `memory`.
at::Tensor tensor_over(std::shared_ptr<void> memory, std::int64_t bytes, at::Device device) {
  void* data = memory.get();
  return at::for_blob(data, {bytes})
      .deleter([kept = std::move(memory)](void*) {})
      .options(at::TensorOptions().dtype(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

template <typename Collective>
void run_between(Lanes& lanes, Lane& lane, const std::string& what, const Collective& collective) {
  Stream& compute = lanes.device->compute_stream();
  const std::unique_ptr<Event> before = lanes.device->new_event();
  const std::unique_ptr<Event> after = lanes.device->new_event();
  compute.record(*before);
  lane.stream().wait(*before, what);
  lane.communicator().announce(what, 0);
  collective(lane.communicator(), lane.stream());
  lane.stream().record(*after);
  compute.wait(*after, what);
}

void check_sizes(const char* what, const at::Tensor& whole, const at::Tensor& part, int ranks) {
  FSDP_CHECK(whole.is_contiguous() && part.is_contiguous() &&
                 whole.scalar_type() == part.scalar_type() && whole.numel() == part.numel() * ranks,
             what, " over ", ranks, " ranks got ", whole.numel(), " elements of ",
             whole.scalar_type(), " and ", part.numel(), " of ", part.scalar_type(),
             ". Pass contiguous tensors of one dtype, one of them ", ranks, " times as long.");
}

}  // namespace

TransportTraits usual_traits(const std::string& name, bool on_gpu) {
  for (TransportTraits traits : {nccl_traits(), shared_memory_traits(), simulated_traits(on_gpu),
                                 process_group_traits(/*has_messages=*/true)}) {
    if (name == traits.name) {
      return traits;
    }
  }
  throw Error(detail::concat("There is no transport '", name, "'."));
}

void run_all_gather(Lanes& lanes, const at::Tensor& input, at::Tensor& output) {
  check_sizes("An all-gather", output, input, lanes.gather.communicator().size());
  static const std::string what = "an all-gather called directly";
  run_between(lanes, lanes.gather, what, [&](Communicator& communicator, Stream& stream) {
    communicator.all_gather(stream, input.const_data_ptr(), output.mutable_data_ptr(),
                            input.nbytes());
  });
}

void run_reduce_scatter(Lanes& lanes, const at::Tensor& input, at::Tensor& output) {
  check_sizes("A reduce-scatter", input, output, lanes.reduce.communicator().size());
  static const std::string what = "a reduce-scatter called directly";
  run_between(lanes, lanes.reduce, what, [&](Communicator& communicator, Stream& stream) {
    communicator.reduce_scatter(stream, input.const_data_ptr(), output.mutable_data_ptr(),
                                static_cast<std::size_t>(output.numel()),
                                to_dtype(output.scalar_type()));
  });
}

void run_all_reduce(Lanes& lanes, at::Tensor& data) {
  FSDP_CHECK(data.is_contiguous(),
             "An all-reduce got a tensor that is not contiguous. Pass tensor.contiguous().");
  static const std::string what = "an all-reduce called directly";
  run_between(lanes, lanes.reduce, what, [&](Communicator& communicator, Stream& stream) {
    communicator.all_reduce(stream, data.mutable_data_ptr(), static_cast<std::size_t>(data.numel()),
                            to_dtype(data.scalar_type()));
  });
}

std::string exchange_messages(Lanes& lanes, const std::string& mine) {
  static const std::string what = "the comparison of settings";
  struct Buffers {
    std::string mine;
    std::string all;
    std::unique_ptr<Event> done;
  };
  Lane& lane = lanes.gather;
  const auto ranks = static_cast<std::size_t>(lane.communicator().size());
  // The buffers are freed only after a wait that succeeds. A wait that timed out leaves them in
  // use.
  auto* buffers =
      new Buffers{mine, std::string(ranks * mine.size(), '\0'), lanes.device->new_event()};
  try {
    lane.host_all_gather(what, what, buffers->mine.data(), buffers->all.data(), mine.size());
    lane.stream().record(*buffers->done);
    buffers->done->synchronize(lanes.device->timeout(), what);
    const std::unique_ptr<Buffers> owned(buffers);
    lane.communicator().check();
    return std::move(buffers->all);
  } catch (const Error& error) {
    throw_with_flight_record(error, lanes, nullptr);
  }
}

std::shared_ptr<Lanes> make_process_group_lanes(c10::intrusive_ptr<c10d::ProcessGroup> gather,
                                                c10::intrusive_ptr<c10d::ProcessGroup> reduce,
                                                const GroupMembers& members,
                                                c10::intrusive_ptr<c10d::Store> store,
                                                std::chrono::milliseconds timeout,
                                                bool groups_one_by_one, HostLanes on_host) {
  LaneGroup group{members, std::make_shared<FailureBoard>(make_store_board(store)),
                  std::make_shared<PublishedLanes>(), nullptr};
  if (gather->getSize() > 1 && store != nullptr) {
    group.deadlocks =
        std::make_shared<DeadlockThread>(make_store_board(std::move(store)), group.published,
                                         members.global_rank, kDeadlockInterval);
  }
  const auto make = [&](c10::intrusive_ptr<c10d::ProcessGroup> of_lane, MessageStaging::Use use,
                        std::unique_ptr<HostRanks> host) {
    return make_process_group_communicator(std::move(of_lane), group, use, groups_one_by_one,
                                           std::move(host));
  };
  auto gathers = make(std::move(gather), MessageStaging::Use::Gathers, std::move(on_host.gather));
  auto reductions =
      make(std::move(reduce), MessageStaging::Use::Reductions, std::move(on_host.reduce));
  if (group.deadlocks != nullptr) {
    group.deadlocks->start([a = gathers.get(), b = reductions.get()](const std::string& account) {
      a->abort(account);
      b->abort(account);
    });
  }
  return lanes_over({std::move(gathers), std::move(reductions)}, make_host_device(timeout));
}

std::shared_ptr<Lanes> make_inline_lanes(const pybind11::object& collectives,
                                         const InlineRank& place,
                                         std::chrono::milliseconds timeout) {
  return lanes_over(
      {make_inline_communicator(collectives, place), make_inline_communicator(collectives, place)},
      make_host_device(timeout, HostStreams::Inline));
}

std::shared_ptr<Lanes> make_shared_memory_lanes(const SharedMemoryEndpoint& endpoint,
                                                const std::vector<std::string>& addresses, int rank,
                                                std::chrono::milliseconds timeout,
                                                std::chrono::milliseconds host_timeout) {
  return lanes_over(endpoint.connect(addresses, rank, timeout), make_host_device(host_timeout));
}

std::shared_ptr<Lanes> make_simulated_lanes(int device_index, const SimulatedOptions& options,
                                            int pack_multiprocessors,
                                            std::chrono::milliseconds timeout) {
  const bool on_host = device_index < 0;
  std::unique_ptr<Device> device = on_host
                                       ? make_host_device(timeout)
                                       : make_cuda_device(device_index, timeout, cuda_framework());
  std::unique_ptr<Packer> packer =
      on_host ? make_host_packer() : make_cuda_packer(*device, pack_multiprocessors);
  Communicators communicators{make_simulated_communicator(*device, options),
                              make_simulated_communicator(*device, options)};
  return lanes_over(std::move(communicators), std::move(device), std::move(packer));
}

at::Tensor lane_buffer(Lanes& lanes, std::int64_t bytes, const std::string& lane, BufferUse use) {
  const auto device =
      lanes.device->is_host()
          ? at::Device(at::kCPU)
          : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(lanes.device->index()));
  return tensor_over(lane_named(lanes, lane).allocate(static_cast<std::size_t>(bytes), use), bytes,
                     device);
}

at::Tensor shared_zeros(std::int64_t bytes) {
  return tensor_over(Arena::allocate(Arena::of_this_process(), static_cast<std::size_t>(bytes)),
                     bytes, at::kCPU);
}

std::shared_ptr<Lanes> make_nccl_lanes(const nccl::Api& api, int device_index,
                                       const nccl::UniqueId& id, NcclOptions options,
                                       c10::intrusive_ptr<c10d::Store> store,
                                       const GroupMembers& members, int pack_multiprocessors,
                                       std::chrono::milliseconds timeout) {
  std::unique_ptr<Device> device = make_cuda_device(device_index, timeout, cuda_framework());
  FSDP_CHECK(!device->is_capturing(),
             "A CUDA graph cannot capture the set-up in the first iteration. Run a few whole "
             "steps before capturing one.");
  std::unique_ptr<Packer> packer = make_cuda_packer(*device, pack_multiprocessors);
  options.driver = cuda_driver_version();
  if (options.size > 1 && store != nullptr) {
    options.other_lane = std::make_shared<DeadlockThread>(/*board=*/nullptr, /*lanes=*/nullptr,
                                                          members.global_rank, kDeadlockInterval);
    options.meet = [store, ranks = options.size](const std::string& name, const auto& given_up) {
      meet_at(store, "fsdp_ext/meetings/" + name, ranks, given_up);
    };
    options.ask_others = [board = FailureBoard(make_store_board(std::move(store))), members](
                             const std::string& what) { return board.exchange(what, members); };
  }
  Communicators communicators = make_nccl_communicators(api, *device, id, options);
  return lanes_over(std::move(communicators), std::move(device), std::move(packer));
}

}  // namespace fsdp
