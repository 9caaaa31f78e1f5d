// Seam 3 of 3: collectives over the ranks of one group. A collective is enqueued on a stream and
// the call returns at once. All ranks issue the same collectives in the same order on one
// communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/check.h"
#include "base/dtype.h"
#include "comm/gather_by.h"
#include "device/stream.h"

namespace fsdp {

// How collectives use a buffer of this rank. Peers read an Input; collectives write an Output. A
// Shard is an input that holds parameters, so it may outlive the communicator.
enum class BufferUse : std::uint8_t { Input, Output, Shard };

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual const char* transport() const = 0;  // "shared_memory", "process_group", "nccl", ...
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Names the stream that all collectives of this communicator will run on, before the first one. A
  // communicator that is not told says less about ranks that wait for each other.
  virtual void serve(Stream& /*stream*/) {}

  // Error messages call the following collectives `what`, which must outlive them. If the transport
  // can, it checks that all ranks have the same `tag`: Note [collective tags].
  virtual void announce(const std::string& /*what*/, std::uint64_t /*tag*/) {}

  // Memory that this transport reads and writes best, under the rules of Device::allocate. All
  // ranks make the call together, and the memory is freed before the communicator is destroyed.
  virtual std::shared_ptr<void> allocate(Device& device, std::size_t bytes, BufferUse /*use*/) {
    return device.allocate(bytes);
  }

  // The number of buffers from `allocate` that are registered with the transport now.
  virtual int registered_buffers() const { return 0; }

  // See Note [gather plans].
  virtual GatherBy gather_by() const { return GatherBy::Packing; }
  // The all-gathers between these two calls are one launch, unless gather_by is Packing. The
  // distances between their inputs are the same on all ranks.
  virtual void group_start() {}
  virtual void group_end() {}

  // output[r * bytes, (r + 1) * bytes) = rank r's input[0, bytes).
  virtual void all_gather(Stream& stream, const void* input, void* output, std::size_t bytes) = 0;

  // output[0, numel) = sum over ranks of their input[rank() * numel, (rank() + 1) * numel).
  virtual void reduce_scatter(Stream& stream, const void* input, void* output, std::size_t numel,
                              DType dtype) = 0;

  // data[0, numel) = sum over ranks, in place.
  virtual void all_reduce(Stream& stream, void* data, std::size_t numel, DType dtype) = 0;

  // data[0, bytes) = rank root's data[0, bytes).
  virtual void broadcast(Stream& stream, void* data, std::size_t bytes, int root) = 0;

  // Work behind the barrier starts after the streams of all ranks have reached it.
  virtual void barrier(Stream& stream) = 0;

  // An all-gather of a few bytes of host memory, off the hot path. Ranks compare with it what they
  // are about to do. `output` is complete for work behind this call on the stream.
  virtual void host_all_gather(Stream& stream, const void* input, void* output,
                               std::size_t bytes) = 0;

  // Throws if a collective has failed on this rank or, as far as is known, on another.
  void check() {
    const std::string error = async_error();
    if (!error.empty()) {
      throw Error(error);
    }
  }

  // Makes pending and future collectives fail instead of waiting for peers.
  virtual void abort(const std::string& reason) = 0;

  // Why communication has failed; empty if it has not.
  virtual std::string async_error() = 0;
};

}  // namespace fsdp
