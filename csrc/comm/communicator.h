// Seam 3 of 3: collectives over the ranks of one group. All are enqueued on a stream and return
// at once; ranks must issue the same collectives in the same order on one communicator.
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

// What a rank does with memory in collectives: gives what others read, or takes what they gave. A
// shard is input that may outlive the communicator, since it is the parameters.
enum class BufferUse : std::uint8_t { Input, Output, Shard };

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual const char* transport() const = 0;  // "shared_memory", "process_group", "nccl", ...
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Says what the collectives from now on are, for error messages. `what` outlives them.
  virtual void announce(const std::string& /*what*/) {}

  // Memory that this transport reads and writes best. As Device::allocate's, but that all ranks
  // call it together, and that it goes before the communicator does.
  virtual std::shared_ptr<void> allocate(Device& device, std::size_t bytes, BufferUse /*use*/) {
    return device.allocate(bytes);
  }

  // How many buffers that `allocate` gave are registered with the transport now.
  virtual int registered_buffers() const { return 0; }

  // How all-gathers that belong together travel best: Note [gather plans].
  virtual GatherBy gather_by() const { return GatherBy::Packing; }
  // Calls between the two travel as one launch, unless gather_by is Packing. Their inputs lie as
  // far from each other on all ranks.
  virtual void group_start() {}
  virtual void group_end() {}

  // output[r * bytes, (r + 1) * bytes) = rank r's input[0, bytes).
  virtual void all_gather(Stream& stream, const void* input, void* output, std::size_t bytes) = 0;

  // output[0, numel) = sum over ranks of their input[rank() * numel, (rank() + 1) * numel).
  virtual void reduce_scatter(Stream& stream, const void* input, void* output, std::size_t numel,
                              DType dtype) = 0;

  // data[0, numel) = sum over ranks, in place.
  virtual void all_reduce(Stream& stream, void* data, std::size_t numel, DType dtype) = 0;

  // data[0, bytes) = rank root's.
  virtual void broadcast(Stream& stream, void* data, std::size_t bytes, int root) = 0;

  // The stream gets past this point when all ranks' streams have come to it.
  virtual void barrier(Stream& stream) = 0;

  // all_gather of a few bytes of host memory, off the hot path: how ranks compare what they are
  // about to do. `output` is complete when the stream gets past this point.
  virtual void host_all_gather(Stream& stream, const void* input, void* output,
                               std::size_t bytes) = 0;

  // Throws if a collective failed, here or, as far as is known, on another rank.
  void check() {
    const std::string error = async_error();
    if (!error.empty()) {
      throw Error(error);
    }
  }

  // Makes pending and future collectives fail instead of waiting for peers.
  virtual void abort(const std::string& reason) = 0;

  // Empty while all is well; else the library's own text.
  virtual std::string async_error() = 0;
};

}  // namespace fsdp
