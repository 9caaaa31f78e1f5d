#include "fake_nccl.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "comm/nccl/nccl_api.h"
#include "window_space.h"

#define FAKE_NCCL_API extern "C" __attribute__((visibility("default")))

using fsdp::nccl::Config;
using fsdp::nccl::DataType;
using fsdp::nccl::Result;
using fsdp::nccl::UniqueId;
using fsdp::nccl::Window;

namespace {

constexpr auto kAborted = static_cast<Result>(3);  // ncclInternalError

// Never destroyed, as the other state of this file: threads that close communicators may outlive
// main.
fsdp::test::FakeNccl& state = *new fsdp::test::FakeNccl;

// A barrier between the ranks of one communicator, with the address of each rank's input.
class Barrier {
 public:
  explicit Barrier(int size) : addresses(static_cast<std::size_t>(size)) {}

  // Returns false if the communicator was aborted. Other ranks then do not meet this one.
  bool wait(const std::atomic<bool>& aborted) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int round = round_;
    if (++arrived_ == static_cast<int>(addresses.size())) {
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
      return true;
    }
    while (round_ == round) {
      if (aborted) {
        --arrived_;
        return false;
      }
      changed_.wait_for(lock, std::chrono::milliseconds(1));
    }
    return true;
  }

  bool any_waits() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return arrived_ > 0;
  }

  std::vector<const void*> addresses;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int arrived_ = 0;
  int round_ = 0;
};

std::mutex& mutex = *new std::mutex;  // guards the maps and lists of this file
auto& barriers = *new std::map<std::string, std::shared_ptr<Barrier>>;

std::shared_ptr<Barrier> barrier_of(const std::string& name, int size) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Barrier>& barrier = barriers[name];
  if (barrier == nullptr) {
    barrier = std::make_shared<Barrier>(size);
  }
  return barrier;
}

}  // namespace

namespace fsdp::nccl {

struct NcclComm {
  std::string name;
  int rank = 0;
  int size = 0;
  bool blocking = true;
  int policy = fsdp::nccl::kUndefined;
  std::shared_ptr<Barrier> barrier;
  std::atomic<bool> aborted{false};
  std::atomic<bool> revoked{false};
  std::atomic<int> polls{0};
  int splits = 0;
  int windows_made = 0;
  fsdp::test::WindowSpace space;  // of its windows
};

}  // namespace fsdp::nccl

using fsdp::nccl::Comm;
using fsdp::nccl::NcclComm;

namespace {

// What all communicators have registered, by its begin.
struct Registered {
  std::size_t bytes;
  NcclComm* comm;
  bool is_symmetric;   // a window with NCCL_WIN_COLL_SYMMETRIC
  std::size_t offset;  // of a window
};
std::map<const char*, Registered>& registered() {
  static auto* const all = new std::map<const char*, Registered>;
  return *all;
}

struct Place {
  std::size_t bytes_left = 0;  // registered with the communicator from the address on
  bool is_symmetric = false;
};

Place place_of(const void* memory, const NcclComm* comm) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = fsdp::test::window_around(registered(), memory);
  if (found == registered().end() || found->second.comm != comm) {
    return {};
  }
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(memory) - found->first);
  return {found->second.bytes - offset, found->second.is_symmetric};
}

void add_registered(const void* memory, const Registered& added) {
  const auto* address = static_cast<const char*>(memory);
  const auto after = registered().lower_bound(address + added.bytes);
  if (after != registered().begin() &&
      std::prev(after)->first + std::prev(after)->second.bytes > address) {
    ++state.overlapping_windows;
  }
  registered()[address] = added;
}

void add_buffer(const void* memory, std::size_t bytes, NcclComm* comm) {
  const std::lock_guard<std::mutex> lock(mutex);
  add_registered(memory, {bytes, comm, false, 0});
}

void add_window(const void* memory, std::size_t bytes, int flags, NcclComm* comm) {
  static auto* const offsets = new std::map<std::pair<std::string, int>, std::size_t>;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::size_t offset = comm->space.take(bytes);
  add_registered(memory, {bytes, comm, flags == fsdp::nccl::kWindowCollSymmetric, offset});
  const auto [first, is_first] = offsets->insert({{comm->name, comm->windows_made++}, offset});
  state.misplaced_windows += is_first || first->second == offset ? 0 : 1;
}

void remove_buffer(const void* memory) {
  const std::lock_guard<std::mutex> lock(mutex);
  registered().erase(static_cast<const char*>(memory));
}

void remove_window(const void* memory) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto window = registered().find(static_cast<const char*>(memory));
  window->second.comm->space.give_back(window->second.offset);
  registered().erase(window);
}

// Whether a collective on these buffers runs by copy engines or as a symmetric kernel, and as no
// other kernel of NCCL's. The rules are those of enqueue.cc and scheduler/symmetric_sched.cc.
bool takes_windows(const Place& input, const Place& output, bool is_gather, const NcclComm* comm) {
  const bool takes_plain_inputs = state.version >= 22900;
  const bool both = input.is_symmetric && output.is_symmetric;
  const bool is_first_unsafe = comm->size == 2 && state.version >= 22900 && state.version < 23102;
  if (is_gather && comm->policy == fsdp::nccl::kZeroCtas &&
      (both || (takes_plain_inputs && output.is_symmetric))) {
    ++state.copied_gathers;
    state.copies_that_hang += is_first_unsafe ? 1 : 0;
    return true;
  }
  // On compute capability 10.0, large gathers are copied whatever the policy.
  state.copies_that_hang += is_gather && both && is_first_unsafe ? 1 : 0;
  // From 2.29 on, a kernel for small messages may run if one of the two is in a window.
  if (both || (takes_plain_inputs && (input.is_symmetric || output.is_symmetric))) {
    ++state.symmetric_kernels;
    return true;
  }
  return false;
}

// NCCL counts groups by thread. This does not use thread_local, because ThreadSanitizer does not
// see how a library that was opened at run time allocates and frees such memory.
struct Gather {
  std::size_t bytes;  // of each rank
  std::size_t ranks;
  Place input;
  Place output;
};

struct Group {
  int depth = 0;
  std::vector<std::function<Result()>> calls;
  std::vector<Gather> gathers;  // with the policy "efficiency"
};

// Counts the all-gathers of a group by what NCCL would choose (ncclPrepareTasks and getAlgoInfo in
// enqueue.cc): it adds up those less than four times as large as the smallest, and looks for the
// sum at the smallest one's buffers. Among equally large ones the last to be issued is first.
void choose_algorithms(std::vector<Gather> gathers) {
  std::reverse(gathers.begin(), gathers.end());
  std::stable_sort(gathers.begin(), gathers.end(),
                   [](const Gather& a, const Gather& b) { return a.bytes < b.bytes; });
  for (auto first = gathers.begin(); first != gathers.end();) {
    std::size_t bytes = 0;
    auto end = first;
    for (; end != gathers.end() && (end == first || end->bytes < 4 * first->bytes); ++end) {
      bytes += end->bytes;
    }
    const bool by_switch =
        bytes <= first->input.bytes_left && bytes * first->ranks <= first->output.bytes_left;
    (by_switch ? state.switch_gathers : state.ring_gathers) += static_cast<int>(end - first);
    first = end;
  }
}

Group& my_group() {
  static auto* const groups = new std::map<std::thread::id, Group>;
  const std::lock_guard<std::mutex> lock(mutex);
  return (*groups)[std::this_thread::get_id()];
}

Comm make(const std::string& name, int rank, int size, const Config* config) {
  ++state.live_communicators;
  auto* const comm = new NcclComm;
  comm->name = name;
  comm->rank = rank;
  comm->size = size;
  comm->blocking = config->blocking != 0;
  comm->barrier = barrier_of(name, size);
  comm->policy = config->size == sizeof(Config) ? config->cta_policy : fsdp::nccl::kUndefined;
  return comm;
}

Result run(void* stream, std::function<Result()> collective) {
  if (state.enqueue != nullptr && stream != nullptr) {
    collective = [stream, collective = std::move(collective)] {
      state.enqueue(stream, [collective] { collective(); });
      return fsdp::nccl::kSuccess;
    };
  }
  Group& group = my_group();
  if (group.depth > 0) {
    group.calls.push_back(std::move(collective));
    return fsdp::nccl::kSuccess;
  }
  return collective();
}

template <typename Read>
Result exchange_inputs(Comm comm, const void* input, const Read& read) {
  while (state.collectives_hang && !comm->aborted) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  comm->barrier->addresses[static_cast<std::size_t>(comm->rank)] = input;
  if (comm->aborted || !comm->barrier->wait(comm->aborted)) {
    return kAborted;
  }
  read(comm->barrier->addresses);
  // All ranks read now, so this wait is short, and no rank may leave before the others have read.
  const std::atomic<bool> never(false);
  comm->barrier->wait(never);
  return fsdp::nccl::kSuccess;
}

std::size_t size_of(DataType type) { return type == fsdp::nccl::kInt8 ? 1 : 4; }

}  // namespace

FAKE_NCCL_API fsdp::test::FakeNccl* fake_nccl() { return &state; }

FAKE_NCCL_API Result ncclGetVersion(int* version) {
  *version = state.version;
  return fsdp::nccl::kSuccess;
}

FAKE_NCCL_API Result ncclGetUniqueId(UniqueId* id) {
  static std::atomic<int> made{0};
  std::memset(id, 0, sizeof(*id));
  const std::string name = "id" + std::to_string(++made);
  std::memcpy(id->internal, name.c_str(), name.size());
  return fsdp::nccl::kSuccess;
}

FAKE_NCCL_API Result ncclCommInitRankConfig(Comm* comm, int size, UniqueId id, int rank,
                                            Config* config) {
  *comm = make(id.internal, rank, size, config);
  state.log(config->blocking == 0 ? "non-blocking init" : "init");
  return config->blocking == 0 ? fsdp::nccl::kInProgress : fsdp::nccl::kSuccess;
}

FAKE_NCCL_API Result ncclCommSplit(Comm parent, int /*color*/, int key, Comm* child,
                                   Config* config) {
  const std::string name = parent->name + "/" + std::to_string(++parent->splits);
  *child = make(name, key, parent->size, config);
  state.log(config->blocking == 0 ? "non-blocking split" : "split");
  {
    const std::lock_guard<std::mutex> lock(state.mutex);
    state.splits.push_back(*config);
  }
  parent->polls = 0;
  return parent->blocking ? fsdp::nccl::kSuccess : fsdp::nccl::kInProgress;
}

FAKE_NCCL_API Result ncclCommFinalize(Comm comm) {
  state.log("finalize");
  if (auto* const call = state.before_finalize.load()) {
    call();
  }
  while (state.collectives_hang && comm->blocking && !comm->aborted) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  comm->polls = 0;
  return comm->blocking ? fsdp::nccl::kSuccess : fsdp::nccl::kInProgress;
}

FAKE_NCCL_API Result ncclCommDestroy(Comm comm) {
  state.log("destroy");
  delete comm;
  --state.live_communicators;
  return fsdp::nccl::kSuccess;
}

// As in NCCL, aborting and revoking may come while another thread is in a call. Revoked
// communicators live until the process ends, and freeing aborted ones would race with that thread.
// So both are retained here, where a leak checker finds them. A revoked communicator stays in
// live_communicators even if it is aborted later. The watchdog aborts it only if a call returns
// late, so the count would otherwise depend on the machine's load.
static void retain(Comm comm) {
  static auto* const retained = new std::vector<Comm>;  // never destroyed
  const std::lock_guard<std::mutex> lock(mutex);
  retained->push_back(comm);
}

FAKE_NCCL_API Result ncclCommAbort(Comm comm) {
  state.log("abort");
  retain(comm);
  state.live_communicators -= comm->revoked ? 0 : 1;
  comm->aborted = true;
  return fsdp::nccl::kSuccess;
}

FAKE_NCCL_API Result ncclCommRevoke(Comm comm, int /*flags*/) {
  state.log("revoke");
  if (!state.can_revoke) {
    return kAborted;
  }
  retain(comm);
  comm->revoked = true;
  while (state.revoking_hangs) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (state.revoking_ends_calls) {
    comm->aborted = true;
  }
  return fsdp::nccl::kSuccess;
}

// A non-blocking communicator is ready after some polls.
FAKE_NCCL_API Result ncclCommGetAsyncError(Comm comm, Result* result) {
  if (comm->blocking) {
    *result = static_cast<Result>(state.async_error.load());
    return fsdp::nccl::kSuccess;
  }
  if (++comm->polls <= state.polls_in_progress) {
    *result = fsdp::nccl::kInProgress;
  } else {
    *result = static_cast<Result>(state.init_result.load());
  }
  return fsdp::nccl::kSuccess;
}

FAKE_NCCL_API const char* ncclGetErrorString(Result result) {
  return result == kAborted ? "internal error" : "some error";
}

FAKE_NCCL_API const char* ncclGetLastError(Comm /*comm*/) { return state.last_error; }

FAKE_NCCL_API Result ncclAllGather(const void* input, void* output, std::size_t count,
                                   DataType type, Comm comm, void* stream) {
  const std::size_t bytes = count * size_of(type);
  if (state.before_gather) {
    state.before_gather();
  }
  if (state.gathers_nothing) {
    return fsdp::nccl::kSuccess;
  }
  const Place from = place_of(input, comm);
  const Place to = place_of(output, comm);
  const bool is_registered = from.bytes_left > 0 && to.bytes_left > 0;
  ++(is_registered ? state.registered_gathers : state.plain_gathers);
  state.erasable_flags += is_registered && state.nodes > 1 && state.version < 23206 ? 1 : 0;
  if (!takes_windows(from, to, /*is_gather=*/true, comm) && is_registered &&
      comm->policy == fsdp::nccl::kEfficiencyPolicy) {
    const Gather gather{bytes, static_cast<std::size_t>(comm->size), from, to};
    if (Group& group = my_group(); group.depth > 0) {
      group.gathers.push_back(gather);
    } else {
      choose_algorithms({gather});
    }
  }
  return run(stream, [=] {
    return exchange_inputs(comm, input, [&](const std::vector<const void*>& inputs) {
      for (std::size_t r = 0; r < inputs.size(); ++r) {
        char* place = static_cast<char*>(output) + r * bytes;
        if (inputs[r] != place) {  // else it is in place, and other ranks may be reading it
          std::memcpy(place, inputs[r], bytes);
        }
      }
    });
  });
}

// fp32 only.
FAKE_NCCL_API Result ncclReduceScatter(const void* input, void* output, std::size_t count,
                                       DataType /*type*/, int /*op*/, Comm comm, void* stream) {
  const Place from = place_of(input, comm);
  const Place to = place_of(output, comm);
  ++(from.bytes_left > 0 && to.bytes_left > 0 ? state.registered_reductions
                                              : state.plain_reductions);
  takes_windows(from, to, /*is_gather=*/false, comm);
  return run(stream, [=] {
    std::vector<float> sums(count, 0.0f);
    const Result result = exchange_inputs(comm, input, [&](const std::vector<const void*>& inputs) {
      for (const void* theirs : inputs) {
        const float* segment =
            static_cast<const float*>(theirs) + static_cast<std::size_t>(comm->rank) * count;
        for (std::size_t i = 0; i < count; ++i) {
          sums[i] += segment[i];
        }
      }
    });
    std::memcpy(output, sums.data(), count * sizeof(float));
    return result;
  });
}

FAKE_NCCL_API Result ncclAllReduce(const void* input, void* output, std::size_t count,
                                   DataType /*type*/, int /*op*/, Comm comm, void* stream) {
  return run(stream, [=] {
    std::vector<float> sums(count, 0.0f);
    const Result result = exchange_inputs(comm, input, [&](const std::vector<const void*>& inputs) {
      for (const void* theirs : inputs) {
        for (std::size_t i = 0; i < count; ++i) {
          sums[i] += static_cast<const float*>(theirs)[i];
        }
      }
    });
    std::memcpy(output, sums.data(), count * sizeof(float));
    return result;
  });
}

FAKE_NCCL_API Result ncclGroupStart() {
  ++my_group().depth;
  return fsdp::nccl::kSuccess;
}

FAKE_NCCL_API Result ncclGroupEnd() {
  Group& group = my_group();
  --group.depth;
  state.log("group of " + std::to_string(group.calls.size()));
  choose_algorithms(std::exchange(group.gathers, {}));
  for (const auto& collective : std::exchange(group.calls, {})) {
    const Result result = collective();
    if (result != fsdp::nccl::kSuccess) {
      return result;
    }
  }
  return fsdp::nccl::kSuccess;
}

FAKE_NCCL_API Result ncclMemAlloc(void** memory, std::size_t bytes) {
  if (state.allocations_to_fail > 0) {
    --state.allocations_to_fail;
    return fsdp::nccl::kUnhandledCudaError;
  }
  if (bytes > state.most_bytes) {
    return fsdp::nccl::kUnhandledCudaError;
  }
  *memory = std::malloc(bytes);
  ++state.live_buffers;
  return fsdp::nccl::kSuccess;
}

FAKE_NCCL_API Result ncclMemFree(void* memory) {
  std::free(memory);
  --state.live_buffers;
  return fsdp::nccl::kSuccess;
}

static Result register_for(Comm comm) {
  return comm->rank == state.register_fails_on_rank
             ? kAborted
             : static_cast<Result>(state.register_result.load());
}

FAKE_NCCL_API Result ncclCommRegister(Comm comm, void* memory, std::size_t bytes, void** handle) {
  state.log("register");
  const Result result = register_for(comm);
  if (result == fsdp::nccl::kSuccess) {
    *handle = memory;
    add_buffer(memory, bytes, comm);
    ++state.registered_buffers;
  }
  return result;
}

// Other ranks unmap the buffer, which may wait for what their GPUs run.
static void unmap_elsewhere(Comm comm) {
  bool amid_collectives = comm->barrier->any_waits();
  if (comm->rank == state.slow_to_deregister) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    amid_collectives = amid_collectives || comm->barrier->any_waits();
  }
  state.deregistered_amid_collectives += amid_collectives ? 1 : 0;
}

FAKE_NCCL_API Result ncclCommDeregister(Comm comm, void* handle) {
  unmap_elsewhere(comm);
  --state.registered_buffers;
  remove_buffer(handle);
  return fsdp::nccl::kSuccess;
}

// All ranks wait for each other in it.
FAKE_NCCL_API Result ncclCommWindowRegister(Comm comm, void* memory, std::size_t bytes,
                                            Window* window, int flags) {
  state.log(flags == fsdp::nccl::kWindowCollSymmetric ? "window" : "plain window");
  const bool fails_here = comm->rank == state.register_fails_on_rank;
  const auto together = barrier_of(comm->name + " registers", comm->size);
  if (state.others_wait_for_failed && (fails_here || !together->wait(comm->aborted))) {
    return kAborted;
  }
  const Result result = register_for(comm);
  *window = nullptr;
  if (result != fsdp::nccl::kSuccess) {
    return result;
  }
  if (!state.has_windows || comm->rank == state.rank_without_windows) {
    return fsdp::nccl::kSuccess;
  }
  ++state.registered_buffers;
  add_window(memory, bytes, flags, comm);
  *window = reinterpret_cast<Window>(memory);
  return fsdp::nccl::kSuccess;
}

FAKE_NCCL_API Result ncclCommWindowDeregister(Comm comm, Window window) {
  unmap_elsewhere(comm);
  --state.registered_buffers;
  remove_window(window);
  return fsdp::nccl::kSuccess;
}
