#include "peers.h"

#include <cuda_runtime_api.h>

#include <mutex>
#include <set>
#include <sstream>
#include <utility>

#include "errors.h"
#include "lasting.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"

namespace emulated_gpu {
namespace {

struct Peers {
  std::mutex mutex;
  // A device, and one whose memory it may use, or memory of whose pool.
  std::set<std::pair<int, int>> allowed;
  std::set<std::pair<int, int>> allowed_pools;
};
Peers& peers() { return lasting<Peers>(); }

thread_local bool is_exempt = false;

bool is_a_device(int device) { return device >= 0 && device < settings().devices; }

bool may_access(int device, const Region& region) {
  if (region.kind == MemoryKind::kMapped) {
    return has_access(region, device);
  }
  if (!is_a_device(region.device) || region.is_managed() || region.device == device) {
    return true;
  }
  const std::lock_guard<std::mutex> lock(peers().mutex);
  const auto& allowed = region.kind == MemoryKind::kPool ? peers().allowed_pools : peers().allowed;
  return allowed.count({device, region.device}) != 0;
}

}  // namespace

void let_access(int device, int peer) {
  const std::lock_guard<std::mutex> lock(peers().mutex);
  peers().allowed.insert({device, peer});
}

void set_access_to_pool(int device, int peer, bool allows) {
  const std::lock_guard<std::mutex> lock(peers().mutex);
  if (allows) {
    peers().allowed_pools.insert({device, peer});
  } else {
    peers().allowed_pools.erase({device, peer});
  }
}

void needs_no_access() { is_exempt = true; }

void check_access(const std::vector<Access>& accesses) {
  if (std::exchange(is_exempt, false) || settings().devices == 1) {
    return;
  }
  const int device = use_current_device();
  for (const Access& access : accesses) {
    const auto region = region_of(reinterpret_cast<const void*>(access.begin));
    if (!region.has_value() || may_access(device, *region)) {
      continue;
    }
    std::ostringstream text;
    text << "an illegal address 0x" << std::hex << access.begin << ": device " << device
         << " may not use memory of device " << region->device
         << (region->kind == MemoryKind::kPool     ? "'s pool before cudaMemPoolSetAccess"
             : region->kind == MemoryKind::kMapped ? " before cuMemSetAccess"
                                                   : " before cudaDeviceEnablePeerAccess");
    fail(text.str(), cudaErrorIllegalAddress);
  }
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

extern "C" {

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (!is_a_device(device) || !is_a_device(peer)) {
    return failed(cudaErrorInvalidDevice, "there is no such device");
  }
  *can = device != peer ? 1 : 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  if (!is_a_device(peer) || peer == use_current_device()) {
    return failed(cudaErrorInvalidDevice, "there is no such other device");
  }
  if (flags != 0) {
    return failed(cudaErrorInvalidValue, "the flags have to be 0");
  }
  const std::lock_guard<std::mutex> lock(peers().mutex);
  if (!peers().allowed.insert({use_current_device(), peer}).second) {
    return failed(cudaErrorPeerAccessAlreadyEnabled, "access to the device is enabled already");
  }
  return outcome();
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  if (!is_a_device(peer)) {
    return failed(cudaErrorInvalidDevice, "there is no such device");
  }
  const std::lock_guard<std::mutex> lock(peers().mutex);
  if (peers().allowed.erase({use_current_device(), peer}) == 0) {
    return failed(cudaErrorPeerAccessNotEnabled, "access to the device is not enabled");
  }
  return outcome();
}
}
