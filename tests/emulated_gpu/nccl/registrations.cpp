#include "registrations.h"

#include <algorithm>

namespace emulated_gpu {

std::size_t Registrations::take_offset(std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return space_.take(bytes);
}

ncclWindow_t Registrations::add_window(const void* address, std::size_t bytes, int flags,
                                       std::size_t offset) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto handle = reinterpret_cast<ncclWindow_t>(++last_handle_);
  windows_[static_cast<const char*>(address)] = {bytes, offset, flags, handle};
  return handle;
}

void* Registrations::add_buffer(const void* address, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  void* handle = reinterpret_cast<void*>(++last_handle_);
  buffers_[handle] = {static_cast<const char*>(address), bytes};
  return handle;
}

bool Registrations::remove_window(ncclWindow_t handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(windows_.begin(), windows_.end(),
                                  [&](const auto& one) { return one.second.handle == handle; });
  if (found == windows_.end()) {
    return false;
  }
  space_.give_back(found->second.offset);
  windows_.erase(found);
  return true;
}

bool Registrations::remove_buffer(void* handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return buffers_.erase(handle) > 0;
}

Placement Registrations::placement_of(const void* address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto window = fsdp::test::window_around(windows_, address);
  if (window == windows_.end() || (window->second.flags & NCCL_WIN_COLL_SYMMETRIC) == 0) {
    return {};
  }
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(address) - window->first);
  return {true, window->second.offset, offset};
}

std::string Registrations::uses_of(const void* address, std::size_t bytes) {
  const auto* begin = static_cast<const char*>(address);
  const auto overlaps = [&](const char* other, std::size_t other_bytes) {
    return other < begin + bytes && begin < other + other_bytes;
  };
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [other, window] : windows_) {
    if (overlaps(other, window.bytes)) {
      return "a window of " + std::to_string(window.bytes) + " bytes";
    }
  }
  for (const auto& [handle, buffer] : buffers_) {
    if (overlaps(buffer.address, buffer.bytes)) {
      return "a registered buffer of " + std::to_string(buffer.bytes) + " bytes";
    }
  }
  return "";
}

std::size_t Registrations::live_windows() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return windows_.size();
}

}  // namespace emulated_gpu
