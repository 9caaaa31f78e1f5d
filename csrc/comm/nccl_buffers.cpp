#include "comm/nccl_buffers.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/check.h"

namespace fsdp {
namespace {

const std::string kRegistration = "the registration of a buffer";
const std::string kDeregistration = "the deregistration of a buffer";

}  // namespace

NcclBuffers::NcclBuffers(const nccl::Api& api, Device& device, nccl::Comm comm,
                         NcclWatchdog& watchdog, Least least, Report report)
    : api_(api),
      device_(device),
      comm_(comm),
      watchdog_(watchdog),
      least_(std::move(least)),
      report_(std::move(report)) {}

std::shared_ptr<void> NcclBuffers::allocate(std::size_t bytes, BufferUse use) {
  const std::shared_ptr<void> guard = device_.make_current();
  if (use == BufferUse::Shard || use == BufferUse::Gradient) {
    free_unused();
    return as_tensor(allocate_buffer(bytes, use));
  }
  const Buffer buffer = allocate_buffer(bytes, use);
  return {buffer.memory, [this, buffer](void*) {
            synchronize();
            deregister(buffer);
            free(buffer);
          }};
}

NcclBuffers::Buffer NcclBuffers::allocate_buffer(std::size_t bytes, BufferUse use) {
  Buffer buffer{try_to_allocate(bytes), bytes, nullptr, nullptr, allocated_++, use};
  const bool is_allocated = buffer.memory != nullptr;
  // Registering makes ranks wait for each other, so all of them do it, or none.
  if (!all_agree(is_allocated)) {
    if (is_allocated) {
      free(buffer);
    }
    throw Error(detail::concat(
        is_allocated ? "Another rank" : "NCCL", " could not allocate ", bytes,
        " more bytes of GPU memory for buffers of the largest unit",
        is_allocated ? "" : ": " + api_.describe(comm_, nccl::kUnhandledCudaError),
        ". Call fully_shard on smaller modules, use more ranks or a smaller batch, or set "
        "FSDP_EXT_NCCL_REGISTER=0 to allocate them with PyTorch's allocator."));
  }
  register_buffer(buffer);
  registered_ += buffer.is_registered() ? 1 : 0;
  if (!all_agree(buffer.is_registered())) {
    deregister(buffer);
    buffer.window = nullptr;
    buffer.handle = nullptr;
  }
  return buffer;
}

// See Note [windows of tensors].
std::shared_ptr<void> NcclBuffers::as_tensor(const Buffer& buffer) {
  {
    const std::lock_guard<std::mutex> lock(tensors_->mutex);
    tensors_->held.emplace(static_cast<const char*>(buffer.memory), buffer);
  }
  const auto free_memory = [tensors = tensors_, buffer, synchronize = device_.synchronizer(),
                            memory_free = api_.MemFree](void*) {
    {
      const std::lock_guard<std::mutex> lock(tensors->mutex);
      tensors->held.erase(static_cast<const char*>(buffer.memory));
      if (!tensors->closed) {
        tensors->unused.push_back(buffer);
        return;
      }
    }
    try {
      synchronize();
    } catch (const std::exception&) {
      // The device has failed, or the process ends.
    }
    memory_free(buffer.memory);
  };
  return {buffer.memory, free_memory};
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

bool NcclBuffers::holds(const void* memory) const {
  const auto* address = static_cast<const char*>(memory);
  const std::lock_guard<std::mutex> lock(tensors_->mutex);
  auto after = tensors_->held.upper_bound(address);
  if (after == tensors_->held.begin()) {
    return false;
  }
  const Buffer& before = std::prev(after)->second;
  return before.is_registered() && address < std::prev(after)->first + before.bytes;
}

void NcclBuffers::free_unused() {
  for (const BufferUse use : {BufferUse::Shard, BufferUse::Gradient}) {
    const std::vector<Buffer> unused = take_unused(use);
    if (!unused.empty()) {
      synchronize();
    }
    for (const Buffer& buffer : unused) {
      deregister(buffer);
      free(buffer);
    }
  }
}

// Returns those that are older than any that a rank holds, in their order.
std::vector<NcclBuffers::Buffer> NcclBuffers::take_unused(BufferUse use) {
  std::uint64_t oldest = allocated_;
  {
    const std::lock_guard<std::mutex> lock(tensors_->mutex);
    for (const auto& [address, buffer] : tensors_->held) {
      oldest = buffer.use == use ? std::min(oldest, buffer.number) : oldest;
    }
  }
  oldest = least_(oldest);
  std::vector<Buffer> taken;
  const std::lock_guard<std::mutex> lock(tensors_->mutex);
  std::vector<Buffer>& unused = tensors_->unused;
  const auto stays = [&](const Buffer& buffer) {
    return buffer.use != use || buffer.number >= oldest;
  };
  const auto first = std::stable_partition(unused.begin(), unused.end(), stays);
  taken.assign(first, unused.end());
  unused.erase(first, unused.end());
  std::sort(taken.begin(), taken.end(), is_older);
  return taken;
}

// A tensor that is freed meanwhile joins the unused ones, and its memory is freed at the end.
void NcclBuffers::close() {
  synchronize();
  std::vector<Buffer> left;
  {
    const std::lock_guard<std::mutex> lock(tensors_->mutex);
    left = tensors_->unused;
    for (const auto& [address, buffer] : tensors_->held) {
      left.push_back(buffer);
    }
  }
  std::sort(left.begin(), left.end(), is_older);
  for (const Buffer& buffer : left) {
    deregister(buffer);
  }
  std::vector<Buffer> unused;
  {
    const std::lock_guard<std::mutex> lock(tensors_->mutex);
    tensors_->closed = true;
    tensors_->held.clear();
    unused.swap(tensors_->unused);
  }
  for (const Buffer& buffer : unused) {
    free(buffer);
  }
}

// Where registration fails on all ranks, or NCCL tells all, they use the buffer without it. If it
// fails within NCCL on one rank, the others wait in NCCL until the watchdog ends that.
void NcclBuffers::register_buffer(Buffer& buffer) {
  const NcclWatchdog::BlockingCall blocking(watchdog_, kRegistration);
  const nccl::Result result =
      api_.registration() == std::string("window")
          ? api_.CommWindowRegister(comm_, buffer.memory, buffer.bytes, &buffer.window,
                                    api_.window_flags())  // Note [symmetric kernels]
          : api_.CommRegister(comm_, buffer.memory, buffer.bytes, &buffer.handle);
  if (result != nccl::kSuccess) {
    buffer.window = nullptr;
    buffer.handle = nullptr;
  }
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
