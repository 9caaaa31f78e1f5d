// Memory that a communicator knows: windows, and buffers that are registered locally.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <string>

#include "../../cpp/window_space.h"

namespace emulated_gpu {

// Where a buffer of a collective is, if it is in a symmetric window.
struct Placement {
  bool is_symmetric;
  std::size_t window;  // its offset in the space of windows
  std::size_t offset;  // in the window
};

// The registrations of one communicator.
class Registrations {
 public:
  // Offsets are as of fsdp::test::WindowSpace; for windows that ranks do not share they mean
  // nothing.
  std::size_t take_offset(std::size_t bytes);
  ncclWindow_t add_window(const void* address, std::size_t bytes, int flags, std::size_t offset);
  void* add_buffer(const void* address, std::size_t bytes);

  // Each returns whether the handle was known.
  bool remove_window(ncclWindow_t handle);
  bool remove_buffer(void* handle);

  Placement placement_of(const void* address);
  // What is registered of this memory, for messages; empty: nothing.
  std::string uses_of(const void* address, std::size_t bytes);
  std::size_t live_windows();

 private:
  struct Window {
    std::size_t bytes;
    std::size_t offset;
    int flags;
    ncclWindow_t handle;
  };
  struct Buffer {
    const char* address;
    std::size_t bytes;
  };

  std::mutex mutex_;
  fsdp::test::WindowSpace space_;
  std::map<const char*, Window> windows_;
  std::map<void*, Buffer> buffers_;
  std::size_t last_handle_ = 0;
};

}  // namespace emulated_gpu
