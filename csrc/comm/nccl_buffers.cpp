#include "comm/nccl_buffers.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <utility>

#include "base/check.h"
#include "comm/nccl_calls.h"

namespace fsdp {
namespace {

const std::string kAllocation = "the allocation of a buffer";
const std::string kRegistration = "the registration of a buffer";
const std::string kDeregistration = "the deregistration of a buffer";
const std::string kUnused = "the exchange of unused buffers";

// Ranks begin a registration together, so one that does not come has failed in it.
constexpr auto kLongestRegistration = std::chrono::milliseconds(60000);
const std::string kAdvice =
    "If NCCL cannot register buffers on a rank, set FSDP_EXT_NCCL_REGISTER=0 on all ranks.";

}  // namespace

NcclBuffers::NcclBuffers(const nccl::Api& api, Device& device, nccl::Comm comm,
                         NcclWatchdog& watchdog, Exchange exchange, Report report)
    : api_(api),
      device_(device),
      comm_(comm),
      watchdog_(watchdog),
      exchange_(std::move(exchange)),
      report_(std::move(report)) {}

std::shared_ptr<void> NcclBuffers::allocate(std::size_t bytes) {
  const std::shared_ptr<void> guard = device_.make_current();
  free_unused();
  Buffer buffer{try_to_allocate(bytes), bytes, allocated_++};
  // Registering makes ranks wait for each other, so all of them do it, or none.
  const bool is_allocated = buffer.memory != nullptr;
  if (!all_agree(is_allocated, kAllocation)) {
    if (is_allocated) {
      free(buffer);
    }
    throw_no_memory(is_allocated, bytes);
  }
  std::shared_ptr<void> memory = hand_out(buffer);
  register_buffer(buffer);
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  shared_->held.at(static_cast<const char*>(buffer.memory)) = buffer;
  return memory;
}

void NcclBuffers::throw_no_memory(bool is_allocated, std::size_t bytes) const {
  throw Error(detail::concat(
      is_allocated ? "Another rank" : "NCCL", " could not allocate ", bytes,
      " more bytes of GPU memory for buffers of the largest unit",
      is_allocated ? "" : ": " + api_.describe(comm_, nccl::kUnhandledCudaError),
      ". Call fully_shard on smaller modules, use more ranks or a smaller batch, or set "
      "FSDP_EXT_NCCL_REGISTER=0 to allocate them with PyTorch's allocator."));
}

// See Note [order of windows].
std::shared_ptr<void> NcclBuffers::hand_out(const Buffer& buffer) {
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->held.emplace(static_cast<const char*>(buffer.memory), buffer);
  }
  const auto put_back = [shared = shared_, synchronize = device_.synchronizer(),
                         memory_free = api_.MemFree](void* memory) {
    {
      const std::lock_guard<std::mutex> lock(shared->mutex);
      if (!shared->closed) {
        const auto held = shared->held.extract(static_cast<const char*>(memory));
        shared->unused.emplace(held.mapped().number, held.mapped());
        return;
      }
    }
    try {
      synchronize();
    } catch (const std::exception&) {
      // The device has failed, or the process ends.
    }
    memory_free(memory);
  };
  return {buffer.memory, put_back};
}

// NCCL does not know of the memory that the framework keeps for later. Null if there is too little.
void* NcclBuffers::try_to_allocate(std::size_t bytes) {
  void* memory = nullptr;
  if (api_.MemAlloc(&memory, bytes) == nccl::kSuccess && memory != nullptr) {
    return memory;
  }
  device_.free_cached_memory();
  return api_.MemAlloc(&memory, bytes) == nccl::kSuccess ? memory : nullptr;
}

bool NcclBuffers::all_agree(bool mine, const std::string& what) {
  const std::vector<std::uint64_t> all = exchange_({mine ? 1U : 0U}, what);
  return std::find(all.begin(), all.end(), 0U) == all.end();
}

bool NcclBuffers::holds(const void* memory) const {
  const auto* address = static_cast<const char*>(memory);
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  const auto after = shared_->held.upper_bound(address);
  if (after == shared_->held.begin()) {
    return false;
  }
  const auto& [start, buffer] = *std::prev(after);
  return buffer.is_registered() && address < start + buffer.bytes;
}

void NcclBuffers::free_unused() {
  std::vector<Buffer> freed;
  const std::vector<std::uint64_t> numbers = unused_on_all_ranks();
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    for (const std::uint64_t number : numbers) {
      freed.push_back(shared_->unused.at(number));
      shared_->unused.erase(number);
    }
  }
  if (!freed.empty()) {
    synchronize();
  }
  for (const Buffer& buffer : freed) {
    deregister(buffer);
    free(buffer);
  }
}

// In order.
std::vector<std::uint64_t> NcclBuffers::unused_on_all_ranks() {
  std::vector<std::uint64_t> mine;
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    for (const auto& [number, buffer] : shared_->unused) {
      mine.push_back(number);
    }
  }
  const std::vector<std::uint64_t> counts = exchange_({mine.size()}, kUnused);
  const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
  if (*least == 0) {
    return {};
  }
  constexpr std::uint64_t kNone = ~std::uint64_t{0};
  mine.resize(*most, kNone);
  std::map<std::uint64_t, std::size_t> ranks;  // that do not use the buffer
  for (const std::uint64_t number : exchange_(mine, kUnused)) {
    ranks[number] += 1;
  }
  const auto is_in_use = [&](std::uint64_t number) {
    return number == kNone || ranks.at(number) < counts.size();
  };
  mine.erase(std::remove_if(mine.begin(), mine.end(), is_in_use), mine.end());
  return mine;
}

// A buffer that is freed meanwhile joins the unused ones, and its memory is freed at the end.
void NcclBuffers::close() {
  synchronize();
  std::map<std::uint64_t, Buffer> all;
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    all = shared_->unused;
    for (const auto& [address, buffer] : shared_->held) {
      all.emplace(buffer.number, buffer);
    }
  }
  for (const auto& [number, buffer] : all) {
    deregister(buffer);
  }
  std::map<std::uint64_t, Buffer> unused;
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->closed = true;
    shared_->held.clear();
    unused.swap(shared_->unused);
  }
  for (const auto& [number, buffer] : unused) {
    free(buffer);
  }
}

// Where registration fails on all ranks, or NCCL tells all, they use the buffer without it. If it
// fails on one rank alone, the others wait in NCCL until the watchdog ends that. Then this rank
// waits for their agreement, and they hear why.
void NcclBuffers::register_buffer(Buffer& buffer) {
  const NcclWatchdog::ShortLimit limit(watchdog_, kLongestRegistration, kAdvice);
  const nccl::Result result = register_with_nccl(buffer);
  const std::string what = result == nccl::kSuccess
                               ? kRegistration
                               : detail::concat(kRegistration, ", in which NCCL failed (",
                                                api_.describe(comm_, result), ")");
  registered_ += buffer.is_registered() ? 1 : 0;
  if (!all_agree(buffer.is_registered(), what)) {
    deregister(buffer);
    buffer.window = nullptr;
    buffer.handle = nullptr;
  }
}

nccl::Result NcclBuffers::register_with_nccl(Buffer& buffer) {
  const NcclWatchdog::BlockingCall blocking(watchdog_, kRegistration);
  if (api_.registration() != std::string("window")) {
    const nccl::Result result =
        api_.CommRegister(comm_, buffer.memory, buffer.bytes, &buffer.handle);
    buffer.handle = result == nccl::kSuccess ? buffer.handle : nullptr;
    return result;
  }
  auto window = std::make_unique<nccl::Window>(nullptr);
  const nccl::Result begun = api_.CommWindowRegister(comm_, buffer.memory, buffer.bytes,
                                                     window.get(), api_.window_flags());
  const nccl::Result result = nccl::finish(api_, comm_, begun, watchdog_.failed());
  if (result == nccl::kInProgress) {
    window.release();  // NCCL may still write to it
  } else if (result == nccl::kSuccess) {
    buffer.window = *window;  // null if NCCL has no windows between these ranks
  }
  return result;
}

void NcclBuffers::deregister(const Buffer& buffer) {
  registered_ -= buffer.is_registered() ? 1 : 0;
  if (watchdog_.has_failed()) {
    return;
  }
  const NcclWatchdog::BlockingCall blocking(watchdog_, kDeregistration);
  if (buffer.window != nullptr) {
    report_(api_.CommWindowDeregister(comm_, buffer.window), "deregister a buffer of");
  } else if (buffer.handle != nullptr) {
    report_(api_.CommDeregister(comm_, buffer.handle), "deregister a buffer of");
  }
}

void NcclBuffers::free(const Buffer& buffer) {
  report_(api_.MemFree(buffer.memory), "free a buffer of");
}

// NCCL unmaps memory even if the device still reads it.
void NcclBuffers::synchronize() {
  try {
    device_.synchronize();
  } catch (const std::exception&) {
    // Work has failed. Its waiters get the error.
  }
}

}  // namespace fsdp
