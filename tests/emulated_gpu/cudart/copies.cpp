// Copies and memsets, which are asynchronous where CUDA's are ("API synchronization behavior" of
// its documentation):
//
//   from      to        cudaMemcpyAsync                 cudaMemcpy
//   pageable  device    has read when it returns        the same, after all work of the stream
//   pinned    device    is asynchronous                 has ended
//   device    pageable  has ended                       has ended
//   device    pinned    is asynchronous                 has ended
//   device    device    is asynchronous                 is asynchronous
//   host      host      has ended                       has ended
//
// cudaMemsetAsync is asynchronous. So is cudaMemset, but not with pinned or managed memory. Managed
// memory counts as a device's in copies.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <vector>

#include "captures.h"
#include "errors.h"
#include "memory.h"
#include "peers.h"
#include "pinned_uses.h"
#include "streams.h"

namespace emulated_gpu {
namespace {

bool is_of_a_device(const void* address) {
  const std::optional<Region> region = region_of(address);
  return region.has_value() && !region->is_pinned();
}

bool is_of(const void* address, int device) {
  const std::optional<Region> region = region_of(address);
  return region.has_value() && (region->device == device || region->is_managed());
}

cudaError_t check_kind(const void* to, const void* from, cudaMemcpyKind kind) {
  const bool needs_to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool needs_from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if ((needs_to && !is_of_a_device(to)) || (needs_from && !is_of_a_device(from))) {
    return failed(cudaErrorInvalidValue, "a copy's kind does not fit to its addresses");
  }
  return cudaSuccess;
}

void copy_staged(Stream& stream, void* to, const void* from, std::size_t bytes) {
  const char* begin = static_cast<const char*>(from);
  auto staged = std::make_shared<std::vector<char>>(begin, begin + bytes);
  stream.submit({"a copy from the host", cudaGraphNodeTypeMemcpy}, [=] {
    needs_no_access();
    writes(to, bytes);
    std::memcpy(to, staged->data(), bytes);
  });
}

cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                 cudaStream_t handle) {
  if (bytes == 0) {
    return outcome();
  }
  if (const cudaError_t error = check_kind(to, from, kind)) {
    return error;
  }
  const std::shared_ptr<Stream> stream = Stream::of(handle);
  const bool to_pageable = !region_of(to).has_value();
  const bool is_within_host = !is_of_a_device(to) && !is_of_a_device(from);
  const bool waits = to_pageable || (is_within_host && !is_captured(*stream));
  if (!region_of(from).has_value() && !to_pageable) {
    copy_staged(*stream, to, from, bytes);
    if (waits) {
      stream->synchronize();
    }
    return outcome();
  }
  if (to_pageable) {
    if (const cudaError_t error = refuse_when_captured(*stream)) {
      return error;
    }
  }
  const PinnedUses uses = is_captured(*stream) ? PinnedUses() : begin_copy(to, from, bytes);
  const TicketPtr ticket = stream->submit({"a copy", cudaGraphNodeTypeMemcpy}, [=] {
    needs_no_access();
    reads(from, bytes);
    writes(to, bytes);
    run_copy(uses, to, from, bytes);
  });
  set_ticket(uses, ticket);
  if (waits) {
    stream->synchronize();
  }
  return outcome();
}

}  // namespace
}  // namespace emulated_gpu

using namespace emulated_gpu;

extern "C" {

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return copy(to, from, bytes, kind, stream);
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  if (const cudaError_t error = refuse_during_captures("cudaMemcpy")) {
    return error;
  }
  const bool is_staged = is_of_a_device(to) && !region_of(from).has_value();
  if (is_staged) {
    if (const cudaError_t error = cudaStreamSynchronize(nullptr)) {
      return error;
    }
  }
  if (const cudaError_t error = copy(to, from, bytes, kind, nullptr)) {
    return error;
  }
  const bool is_within_devices = is_of_a_device(to) && is_of_a_device(from);
  return is_staged || is_within_devices ? outcome() : cudaStreamSynchronize(nullptr);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device,
                                std::size_t bytes, cudaStream_t stream) {
  if (!is_of(to, to_device) || !is_of(from, from_device)) {
    return failed(cudaErrorInvalidValue, "a copy's devices do not fit to its addresses");
  }
  return copy(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

// It waits for all work of the devices, and later work of theirs waits for it. The host does not.
cudaError_t cudaMemcpyPeer(void* to, int to_device, const void* from, int from_device,
                           std::size_t bytes) {
  if (const cudaError_t error = refuse_during_captures("cudaMemcpyPeer")) {
    return error;
  }
  const std::shared_ptr<Stream> stream = Stream::of(nullptr);
  std::vector<std::shared_ptr<Stream>> others;
  for (const int device : std::set<int>{stream->device, to_device, from_device}) {
    for (const std::shared_ptr<Stream>& other : streams_of(device)) {
      others.push_back(other);
    }
  }
  others.erase(std::find(others.begin(), others.end(), stream));
  for (const std::shared_ptr<Stream>& other : others) {
    stream->follow(*other);
  }
  const cudaError_t error = cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, nullptr);
  for (const std::shared_ptr<Stream>& other : others) {
    other->follow(*stream);
  }
  return error;
}

cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                              std::size_t from_pitch, std::size_t width, std::size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  for (std::size_t row = 0; row < height; ++row) {
    void* to_row = static_cast<char*>(to) + row * to_pitch;
    const void* from_row = static_cast<const char*>(from) + row * from_pitch;
    if (const cudaError_t error = copy(to_row, from_row, width, kind, stream)) {
      return error;
    }
  }
  return outcome();
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  if (bytes > 0 && !region_of(to).has_value()) {
    return failed(cudaErrorInvalidValue, "a memset of memory that is not CUDA's");
  }
  Stream::of(stream)->submit({"a memset", cudaGraphNodeTypeMemset}, [=] {
    writes(to, bytes);
    std::memset(to, value, bytes);
  });
  return outcome();
}

cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  const std::optional<Region> region = region_of(to);
  const bool waits = region.has_value() && (region->is_pinned() || region->is_managed());
  const cudaError_t error = cudaMemsetAsync(to, value, bytes, nullptr);
  return error == cudaSuccess && waits ? cudaStreamSynchronize(nullptr) : error;
}
}
