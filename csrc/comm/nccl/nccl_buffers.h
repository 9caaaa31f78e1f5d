// Memory that is registered with one communicator: from ncclMemAlloc, or private memory (Note
// [private memory] in comm/nccl/nccl_paths.h).
//
// Note [order of windows]
// Symmetric windows need the same offset in NCCL's address space on all ranks, or a reduction in
// the switch adds up other memory. NCCL assigns offsets as windows come and go (2.30,
// dev_runtime.cc), so all ranks have to register and deregister in one order. But each rank frees a
// buffer when its own garbage collector does, and users hold shards and gradients as long as they
// like. So when ranks are together next, to allocate, they deregister and free the buffers that no
// rank uses, in the order in which they were made.
//
// Note [unused buffers]
// Any thread may free a buffer, but NCCL has no lock around what a communicator has registered, and
// deregistering waits for the other ranks ("Any thread may free a model" in docs/design/cuda.md).
// So freeing a buffer only puts it on a list. When ranks are together next, each waits for its
// device, and all meet on the host. Each then deregisters and frees, and all meet again before any
// launches the next collective. Closing the communicator deregisters what is left.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/nccl/nccl_api.h"
#include "comm/nccl/nccl_paths.h"
#include "comm/nccl/nccl_watchdog.h"
#include "device/stream.h"

namespace fsdp {

class NcclBuffers final : public RegisteredMemory {
 public:
  // Returns the numbers of all ranks, one rank after the other. All ranks call it together and pass
  // equally many. Errors name the exchange `what`.
  using Exchange = std::function<std::vector<std::uint64_t>(std::vector<std::uint64_t> mine,
                                                            const std::string& what)>;
  // Waits on the host until all ranks have made this call, too. Errors name the meeting `what`.
  using Meet = std::function<void(const std::string& what)>;
  // For calls whose caller cannot handle an error; `what` names the action that failed.
  using Report = std::function<void(nccl::Result result, const char* what)>;

  // All of these outlive this object.
  NcclBuffers(const nccl::Api& api, Device& device, nccl::Comm comm, NcclWatchdog& watchdog,
              const LanePath& path, Exchange exchange, Meet meet, Report report);

  NcclBuffers(const NcclBuffers&) = delete;
  NcclBuffers& operator=(const NcclBuffers&) = delete;

  // Frees buffers that no rank holds any more, and allocates. If a rank cannot allocate, it throws
  // Error on all. The memory may outlive this object.
  std::shared_ptr<void> allocate(std::size_t bytes, BufferUse use) override;
  bool can_register() const override { return !cannot_register_; }
  const LanePath& path() const { return path_; }
  bool registers_gradients() const override { return path_.registers_gradients(); }
  bool holds(const void* memory) const override { return bytes_left(memory) > 0; }
  // The number of registered bytes from an address on, in one buffer.
  std::size_t bytes_left(const void* memory) const;
  int count() const override { return registered_; }
  void free_unused() override;
  std::uint64_t most(std::uint64_t mine) override;
  // Before the communicator is closed.
  void close();

 private:
  struct Buffer {
    void* memory = nullptr;
    std::shared_ptr<void> owner;  // of private memory; null for memory from ncclMemAlloc
    std::size_t bytes = 0;
    std::uint64_t number = 0;  // in the order of all ranks
    bool is_symmetric = false;
    nccl::Window window = nullptr;
    void* handle = nullptr;

    bool is_registered() const { return window != nullptr || handle != nullptr; }
  };

  // State that the deleters of buffers share with this object, which they may outlive.
  struct Shared {
    std::mutex mutex;
    bool closed = false;
    std::map<const char*, Buffer> held;      // by address, also after closing
    std::map<std::uint64_t, Buffer> unused;  // by number: Note [unused buffers]
  };

  // Whether all ranks pass true.
  bool all_agree(bool mine, const std::string& what);
  Buffer allocate_on_all_ranks(std::size_t bytes, BufferUse use);
  std::vector<std::uint64_t> unused_on_all_ranks();
  std::shared_ptr<void> hand_out(const Buffer& buffer);
  std::function<void(Buffer)> free_apart() const;
  Buffer try_to_allocate(std::size_t bytes, BufferUse use);
  Buffer try_once_to_allocate(std::size_t bytes, BufferUse use);
  std::shared_ptr<void> allocate_private(std::size_t bytes);
  bool register_buffer(Buffer& buffer);
  nccl::Result register_with_nccl(Buffer& buffer);
  nccl::Result register_window(Buffer& buffer);
  bool deregister(const Buffer& buffer);
  void free_together(const std::vector<std::uint64_t>& numbers);
  void free(const Buffer& buffer);
  void synchronize();

  const nccl::Api& api_;
  Device& device_;
  nccl::Comm comm_;
  NcclWatchdog& watchdog_;
  LanePath path_;
  Exchange exchange_;
  Meet meet_;
  Report report_;
  std::atomic<int> registered_{0};
  bool cannot_register_ = false;
  std::uint64_t allocated_ = 0;
  std::optional<Device::Allocator> private_allocator_;
  std::vector<Buffer> stuck_;  // NCCL could not deregister them; their memory stays
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

}  // namespace fsdp
