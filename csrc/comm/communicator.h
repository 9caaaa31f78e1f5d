// Seam 3 of 3: collectives over the ranks of one group. A collective is enqueued on a stream and
// the call returns at once. All ranks issue the same collectives in the same order on one
// communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/dtype.h"
#include "comm/gather_by.h"
#include "device/stream.h"

namespace fsdp {

// How collectives use a buffer of this rank. Peers read an Input; collectives write an Output. A
// Shard is an input that holds parameters, and a Gradient an output that holds sharded gradients.
// Both are tensors of users.
enum class BufferUse : std::uint8_t { Input, Output, Shard, Gradient };

// The ranks of a communicator, as flight records describe them: Note [flight records].
struct FlightGroup {
  std::string name;  // the same on all its ranks, and no other communicator of a rank has it
  std::string description;
  std::string backend;     // as PyTorch's tools call the transport
  std::vector<int> ranks;  // by their numbers in the whole job, in order
  std::uint64_t issued = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual const char* transport() const = 0;  // "shared_memory", "process_group", "nccl", ...
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Names the stream that all collectives of this communicator will run on, before the first one. A
  // communicator that is not told says less about ranks that wait for each other.
  virtual void serve(Stream& /*stream*/) {}

  // Whether collectives have run when these calls return, on the thread that calls: Note [inline
  // groups]. Nothing overlaps them then.
  virtual bool is_inline() const { return false; }

  // Error messages call the following collectives `what`, which must outlive them. If the transport
  // can, it checks that all ranks have the same `tag`: Note [collective tags].
  virtual void announce(const std::string& /*what*/, std::uint64_t /*tag*/) {}

  // Memory that this transport reads and writes best, under the rules of Device::allocate. All
  // ranks make the call together. Inputs and outputs are freed before the communicator is
  // destroyed. Shards and gradients may be freed at any time, by any thread.
  virtual std::shared_ptr<void> allocate(Device& device, std::size_t bytes, BufferUse /*use*/) {
    return device.allocate(bytes);
  }

  // The same, for memory that is first needed within a step. The ranks need not call it together,
  // so it is not registered with the transport.
  virtual std::shared_ptr<void> allocate_in_step(Device& device, std::size_t bytes, BufferUse use) {
    return allocate(device, bytes, use);
  }

  // Whether `allocate` registers memory, so that shards and gradients should lie in such memory.
  virtual bool registers_buffers() const { return false; }
  // Whether `memory` lies in registered memory.
  virtual bool is_registered(const void* /*memory*/) const { return false; }
  // Frees buffers that no rank holds any more, if freeing them was put off: Note [order of windows]
  // in comm/nccl/nccl_buffers.h. All ranks call it together.
  virtual void free_unused() {}
  // Whether all ranks pass true. They call it together.
  virtual bool all_agree(bool mine) { return mine; }
  // If `allocate` registers memory, the largest number that any rank passes, and otherwise `mine`.
  // All ranks call it together.
  virtual std::uint64_t most(std::uint64_t mine) { return mine; }

  // The number of buffers from `allocate` that are registered with the transport now.
  virtual int registered_buffers() const { return 0; }

  // See Note [gather plans].
  virtual GatherBy gather_by() const { return GatherBy::Packing; }
  // The all-gathers between these two calls are one launch, unless gather_by is Packing. The
  // distances between their inputs are the same on all ranks.
  virtual void group_start() {}
  virtual void group_end() {}

  // Whether collectives are composed of messages: Note [composed collectives].
  virtual bool is_composed() const { return false; }
  // The number of each rank's host, by rank, if ranks of one host share memory and those of several
  // hosts send messages: Note [groups that span hosts]. Empty otherwise.
  virtual std::vector<int> hosts() const { return {}; }
  // The memory that the transport keeps for messages in flight.
  virtual std::size_t message_staging_bytes() const { return 0; }

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

  // Collectives are recorded once a group is set: Note [flight records] in
  // core/record/flight_tape.h.
  void set_flight_group(FlightGroup group) {
    flight_group_ = std::make_shared<FlightGroup>(std::move(group));
  }
  const std::shared_ptr<FlightGroup>& flight_group() const { return flight_group_; }
  // The number of the next recorded collective, from 1.
  std::uint64_t count_flight() const { return ++flight_group_->issued; }
  // `write` writes a flight record and returns a sentence that says where it is. A transport that
  // ends collectives by itself calls it before it ends them, on any thread. Others never call it.
  virtual void set_flight_writer(std::function<std::string()> /*write*/) {}

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

 private:
  std::shared_ptr<FlightGroup> flight_group_;
};

}  // namespace fsdp
