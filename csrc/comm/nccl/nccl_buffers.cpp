#include "comm/nccl/nccl_buffers.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/check.h"
#include "comm/nccl/nccl_calls.h"

namespace fsdp {
namespace {

const std::string kAgreement = "the agreement on buffers";
const std::string kAllocation = "the allocation of a buffer";
const std::string kRegistration = "the registration of a buffer";
const std::string kHowToAvoidIt = " (FSDP_EXT_NCCL_REGISTER=0 on all ranks avoids it)";
const std::string kDeregistration = "the deregistration of a buffer";
const std::string kUnused = "the exchange of unused buffers";

}  // namespace

NcclBuffers::NcclBuffers(const nccl::Api& api, Device& device, nccl::Comm comm,
                         NcclWatchdog& watchdog, const LanePath& path, Exchange exchange, Meet meet,
                         Report report)
    : api_(api),
      device_(device),
      comm_(comm),
      watchdog_(watchdog),
      path_(path),
      exchange_(std::move(exchange)),
      meet_(std::move(meet)),
      report_(std::move(report)) {}

std::shared_ptr<void> NcclBuffers::allocate(std::size_t bytes, BufferUse use) {
  if (!can_register()) {
    return device_.allocate(bytes);
  }
  FSDP_CHECK(
      !device_.is_capturing(), "A CUDA graph capture would allocate ", bytes,
      " bytes, but all buffers must exist before it. Run a few whole steps before capturing one.");
  const std::shared_ptr<void> guard = device_.make_current();
  free_unused();
  Buffer buffer = allocate_on_all_ranks(bytes, use);
  std::shared_ptr<void> memory = hand_out(buffer);
  if (register_buffer(buffer)) {
    return memory;
  }
  memory.reset();
  free_together({buffer.number});
  return device_.allocate(bytes);
}

// Registering makes ranks wait for each other, so all of them do it, or none.
NcclBuffers::Buffer NcclBuffers::allocate_on_all_ranks(std::size_t bytes, BufferUse use) {
  Buffer buffer = try_to_allocate(bytes, use);
  const bool is_allocated = buffer.memory != nullptr;
  const auto free_buffer = [this](const Buffer* made) { free(*made); };
  std::unique_ptr<const Buffer, decltype(free_buffer)> freed(is_allocated ? &buffer : nullptr,
                                                             free_buffer);
  buffer.number = allocated_++;
  if (all_agree(is_allocated, kAllocation)) {
    freed.release();
    return buffer;
  }
  throw OutOfMemory(detail::concat(
      is_allocated ? "Another rank" : "NCCL", " could not allocate ", bytes,
      " more bytes of GPU memory for buffers of collectives",
      is_allocated ? "" : ": " + api_.describe(comm_, nccl::kUnhandledCudaError),
      ". Call fully_shard on smaller modules, use more ranks or a smaller batch, or set "
      "FSDP_EXT_NCCL_REGISTER=0 to allocate them with PyTorch's allocator."));
}

std::shared_ptr<void> NcclBuffers::hand_out(const Buffer& buffer) {
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->held.emplace(static_cast<const char*>(buffer.memory), buffer);
  }
  // Once the buffer is unused, the collecting thread must not own private memory any more.
  const auto put_back = [shared = shared_, free_apart = free_apart()](void* memory) {
    std::unique_lock<std::mutex> lock(shared->mutex);
    Buffer freed = std::move(shared->held.extract(static_cast<const char*>(memory)).mapped());
    if (shared->closed) {  // NcclBuffers may have ended
      lock.unlock();
      free_apart(std::move(freed));
      return;
    }
    shared->unused.emplace(freed.number, std::move(freed));
  };
  return {buffer.memory, put_back};
}

// Returns a function that frees a buffer on a thread of its own, because the caller's thread may
// never have used this device. The function may outlive this object.
std::function<void(NcclBuffers::Buffer)> NcclBuffers::free_apart() const {
  return [select = nccl::selector_of(device_), synchronize = device_.synchronizer(),
          memory_free = api_.MemFree](Buffer buffer) {
    const auto free_memory = [&] {
      try {
        synchronize();
      } catch (const std::exception&) {
        // The device has failed, or the process ends.
      }
      if (buffer.owner != nullptr) {
        buffer.owner.reset();
        return nccl::kSuccess;
      }
      return memory_free(buffer.memory);
    };
    nccl::call_apart(select, free_memory).wait();
  };
}

// NCCL and the driver cannot use memory that the framework has cached. The result has no memory if
// there is too little.
NcclBuffers::Buffer NcclBuffers::try_to_allocate(std::size_t bytes, BufferUse use) {
  Buffer buffer = try_once_to_allocate(bytes, use);
  if (buffer.memory == nullptr) {
    device_.free_cached_memory();
    buffer = try_once_to_allocate(bytes, use);
  }
  return buffer;
}

NcclBuffers::Buffer NcclBuffers::try_once_to_allocate(std::size_t bytes, BufferUse use) {
  Buffer buffer;
  buffer.bytes = bytes;
  buffer.is_symmetric = path_.is_symmetric(use);
  buffer.owner = path_.is_private(use) ? allocate_private(bytes) : nullptr;
  buffer.memory = buffer.owner.get();
  if (buffer.memory == nullptr && api_.MemAlloc(&buffer.memory, bytes) != nccl::kSuccess) {
    buffer.memory = nullptr;
  }
  return buffer;
}

// Returns null if there is too little memory, or if the device has no private memory. The kind of
// memory that NCCL needs is the kind that it allocates: with NCCL_CUMEM_ENABLE=0, and on some
// systems, that is memory from cudaMalloc.
std::shared_ptr<void> NcclBuffers::allocate_private(std::size_t bytes) {
  if (device_.is_host()) {
    return nullptr;
  }
  if (!private_allocator_.has_value()) {
    void* sample = nullptr;
    if (api_.MemAlloc(&sample, 1) != nccl::kSuccess || sample == nullptr) {
      return nullptr;
    }
    private_allocator_ = device_.allocator_like(sample);
    report_(api_.MemFree(sample), "free a buffer of");
  }
  return *private_allocator_ != nullptr ? (*private_allocator_)(bytes) : nullptr;
}

bool NcclBuffers::all_agree(bool mine, const std::string& what) {
  const std::vector<std::uint64_t> all = exchange_({mine ? 1U : 0U}, what);
  return std::find(all.begin(), all.end(), 0U) == all.end();
}

std::uint64_t NcclBuffers::most(std::uint64_t mine) {
  if (!can_register()) {
    return mine;
  }
  const std::vector<std::uint64_t> all = exchange_({mine}, kAgreement);
  return *std::max_element(all.begin(), all.end());
}

std::size_t NcclBuffers::bytes_left(const void* memory) const {
  const auto* address = static_cast<const char*>(memory);
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  const auto after = shared_->held.upper_bound(address);
  if (after == shared_->held.begin()) {
    return 0;
  }
  const auto& [start, buffer] = *std::prev(after);
  const auto offset = static_cast<std::size_t>(address - start);
  return buffer.is_registered() && offset < buffer.bytes ? buffer.bytes - offset : 0;
}

void NcclBuffers::free_unused() {
  const std::vector<std::uint64_t> numbers = unused_on_all_ranks();
  if (!numbers.empty()) {
    free_together(numbers);
  }
}

// All ranks pass the same numbers, of unused buffers. See Note [unused buffers].
void NcclBuffers::free_together(const std::vector<std::uint64_t>& numbers) {
  synchronize();
  meet_(kUnused);
  for (const std::uint64_t number : numbers) {
    Buffer buffer;
    {
      const std::lock_guard<std::mutex> lock(shared_->mutex);
      buffer = std::move(shared_->unused.extract(number).mapped());
    }
    if (deregister(buffer)) {
      free(buffer);
    } else {
      stuck_.push_back(buffer);
    }
  }
  meet_(kUnused);
}

// Returns the numbers of the buffers that no rank uses, in ascending order.
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
  std::map<std::uint64_t, std::size_t> ranks;  // how many do not use a buffer
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
  std::map<std::uint64_t, Buffer> all;
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    all = shared_->unused;
    for (const auto& [address, buffer] : shared_->held) {
      all.emplace(buffer.number, buffer);
    }
  }
  if (!all.empty()) {
    synchronize();
  }
  for (const auto& [number, buffer] : all) {
    deregister(buffer);
  }
  std::map<std::uint64_t, Buffer> unused;
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->closed = true;
    unused.swap(shared_->unused);
  }
  for (const auto& [number, buffer] : unused) {
    free(buffer);
  }
}

// If registration fails on all ranks, or NCCL tells all, it returns false. If it fails on one rank
// alone, that rank waits in the agreement and the others wait in NCCL until the watchdog ends both.
// That rank's error says why NCCL failed.
bool NcclBuffers::register_buffer(Buffer& buffer) {
  const nccl::Result result = register_with_nccl(buffer);
  std::string what = kRegistration;
  if (result != nccl::kSuccess) {
    what += detail::concat(", in which NCCL failed with: ", api_.describe(comm_, result));
  }
  what += kHowToAvoidIt;
  registered_ += buffer.is_registered() ? 1 : 0;
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->held.at(static_cast<const char*>(buffer.memory)) = buffer;
  }
  const std::uint64_t mine = buffer.window != nullptr ? 2 : buffer.is_registered() ? 1 : 0;
  const std::vector<std::uint64_t> all = exchange_({mine}, what);
  const auto [least, most] = std::minmax_element(all.begin(), all.end());
  cannot_register_ = *least == 0;
  FSDP_CHECK(cannot_register_ || *least == *most,
             "NCCL made a window of a buffer on some ranks only (on this one: ",
             buffer.window != nullptr ? "yes" : "no",
             "). Run the same NCCL with the same settings on all ranks, or set "
             "FSDP_EXT_NCCL_REGISTER=0 on all of them.");
  return !cannot_register_;
}

// NCCL from 2.29 on makes no windows where it has no symmetric memory. All ranks learn it alike,
// and register this buffer and later ones as before 2.30.7.
nccl::Result NcclBuffers::register_with_nccl(Buffer& buffer) {
  const NcclWatchdog::BlockingCall blocking(watchdog_, kRegistration + kHowToAvoidIt);
  if (buffer.is_symmetric) {
    const nccl::Result result = register_window(buffer);
    if (result != nccl::kSuccess || buffer.window != nullptr) {
      return result;
    }
    path_.symmetric_inputs = path_.symmetric_outputs = false;
  }
  const nccl::Result result = api_.CommRegister(comm_, buffer.memory, buffer.bytes, &buffer.handle);
  buffer.handle = result == nccl::kSuccess ? buffer.handle : nullptr;
  return result;
}

nccl::Result NcclBuffers::register_window(Buffer& buffer) {
  const nccl::Result result = api_.CommWindowRegister(comm_, buffer.memory, buffer.bytes,
                                                      &buffer.window, nccl::kWindowCollSymmetric);
  if (result != nccl::kSuccess) {
    buffer.window = nullptr;
  }
  return result;
}

// Returns whether the memory may be freed. If NCCL still knows the buffer, NCCL would mistake
// another one at the same address for it. A communicator that has failed is not used again.
bool NcclBuffers::deregister(const Buffer& buffer) {
  registered_ -= buffer.is_registered() ? 1 : 0;
  if (watchdog_.has_failed() || !buffer.is_registered()) {
    return true;
  }
  const NcclWatchdog::BlockingCall blocking(watchdog_, kDeregistration);
  const nccl::Result result = buffer.window != nullptr
                                  ? api_.CommWindowDeregister(comm_, buffer.window)
                                  : api_.CommDeregister(comm_, buffer.handle);
  report_(result, "deregister a buffer of");
  return result == nccl::kSuccess;
}

// Private memory is freed when the last copy of its buffer is gone.
void NcclBuffers::free(const Buffer& buffer) {
  if (buffer.owner == nullptr) {
    report_(api_.MemFree(buffer.memory), "free a buffer of");
  }
}

// NCCL unmaps memory even if the device still reads it.
void NcclBuffers::synchronize() {
  try {
    device_.synchronizer()();
  } catch (const std::exception&) {
    // Work has failed. Its waiters get the error.
  }
}

}  // namespace fsdp
