// Memory from ncclMemAlloc that is registered with one communicator.
//
// Note [windows of tensors]
// Flat shards and flat gradients are tensors. Users hold them as long as they like, and any thread
// may free them. But calls of NCCL for one communicator come from one thread at a time, and windows
// may lie at the same offsets on all ranks only if all ranks register and deregister in one order.
// So freeing such a buffer only puts it on a list. When memory is planned again, the buffers on it
// are deregistered and freed that are older than any that a rank still holds, in their order.
// Closing the communicator deregisters all others, and they are mere memory from then on.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/communicator.h"
#include "comm/nccl_api.h"
#include "comm/nccl_watchdog.h"
#include "device/stream.h"

namespace fsdp {

class NcclBuffers {
 public:
  // The least number that a rank passes. All ranks call it together.
  using Least = std::function<std::uint64_t(std::uint64_t mine)>;
  // For calls whose caller cannot handle an error; `what` is what NCCL could not do.
  using Report = std::function<void(nccl::Result result, const char* what)>;

  // All of these outlive this object.
  NcclBuffers(const nccl::Api& api, Device& device, nccl::Comm comm, NcclWatchdog& watchdog,
              Least least, Report report);

  NcclBuffers(const NcclBuffers&) = delete;
  NcclBuffers& operator=(const NcclBuffers&) = delete;

  // All ranks call this together. If one of them cannot allocate, it throws Error on all.
  std::shared_ptr<void> allocate(std::size_t bytes, BufferUse use);

  // Whether `memory` lies in a registered buffer of a tensor.
  bool holds(const void* memory) const;
  int registered() const { return registered_; }

  // Frees the buffers of tensors that are no longer held on any rank. All ranks call it together.
  void free_unused();
  // Before the communicator is closed.
  void close();

 private:
  struct Buffer {
    void* memory = nullptr;
    std::size_t bytes = 0;
    nccl::Window window = nullptr;
    void* handle = nullptr;
    std::uint64_t number = 0;  // in the order of all ranks
    BufferUse use = BufferUse::Input;

    bool is_registered() const { return window != nullptr || handle != nullptr; }
  };

  // What the deleters of tensors share with this object, which they may outlive.
  struct Tensors {
    std::mutex mutex;
    bool closed = false;
    std::map<const char*, Buffer> held;
    std::vector<Buffer> unused;
  };

  Buffer allocate_buffer(std::size_t bytes, BufferUse use);
  static bool is_older(const Buffer& a, const Buffer& b) { return a.number < b.number; }
  bool all_agree(bool mine) { return least_(mine ? 1 : 0) != 0; }
  std::vector<Buffer> take_unused(BufferUse use);
  std::shared_ptr<void> as_tensor(const Buffer& buffer);
  void* try_to_allocate(std::size_t bytes);
  void register_buffer(Buffer& buffer);
  void deregister(const Buffer& buffer);
  void free(const Buffer& buffer);
  void synchronize();

  const nccl::Api& api_;
  Device& device_;
  nccl::Comm comm_;
  NcclWatchdog& watchdog_;
  Least least_;
  Report report_;
  std::atomic<int> registered_{0};
  std::uint64_t allocated_ = 0;
  std::shared_ptr<Tensors> tensors_ = std::make_shared<Tensors>();
};

}  // namespace fsdp
