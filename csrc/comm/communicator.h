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
#include "comm/transport_traits.h"
#include "device/stream.h"

namespace fsdp {

// Advice that ends errors about ranks that issued different collectives.
inline constexpr const char* kRunTheSameUnits =
    "Run the same units, with the same sizes and settings, in the same order on every rank. A rank "
    "that leaves a unit out on purpose calls its join_empty(). If backward does not reach a unit "
    "on some ranks, call its set_reduce_scatter_unused_params(True) on every rank.";

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

// One all-gather of a group, with the arguments of Communicator::all_gather.
struct GatherPart {
  const void* input;
  void* output;
  std::size_t bytes;
};

// Memory that is registered with a transport. All ranks make these calls together, except `holds`
// and `count`. The communicator owns this object. Any thread may free the memory, at any time.
class RegisteredMemory {
 public:
  // If registering is not possible, this is memory of the device.
  virtual std::shared_ptr<void> allocate(std::size_t bytes, BufferUse use) = 0;
  // Whether `allocate` registers memory. It is false after a registration has failed on a rank.
  virtual bool can_register() const = 0;
  // Whether reductions are faster into registered memory.
  virtual bool registers_gradients() const = 0;
  // Whether `memory` lies in registered memory.
  virtual bool holds(const void* memory) const = 0;
  // The number of buffers that are registered now.
  virtual int count() const = 0;
  // Frees memory that is no longer used, where that was put off: Note [unused buffers] in
  // comm/nccl/nccl_buffers.h.
  virtual void free_unused() = 0;
  // The largest number that any rank passes, or `mine` if registering is not possible.
  virtual std::uint64_t most(std::uint64_t mine) = 0;

 protected:
  ~RegisteredMemory() = default;
};

// The interface of a transport: it implements the pure virtual methods, and overrides others that
// it supports.
class Communicator {
 public:
  Communicator(TransportTraits traits, int rank, int size)
      : traits_(std::move(traits)), rank_(rank), size_(size) {}
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const TransportTraits& traits() const { return traits_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Names the stream that all collectives of this communicator will run on, before the first one.
  // Without this call, transports of the host cannot find ranks that wait for each other.
  virtual void set_stream(Stream& /*stream*/) {}

  // Error messages call the following collectives `what`, which must outlive them. If the transport
  // can, it checks that all ranks have the same `tag`: Note [collective tags].
  void announce(const std::string& what, std::uint64_t tag) {
    what_ = &what;
    tag_ = tag;
  }
  void announce(std::string&& what, std::uint64_t tag) = delete;

  // Null if memory is not registered with this transport.
  virtual RegisteredMemory* registered_memory() { return nullptr; }

  // Memory that this transport reads and writes best, under the rules of Device::allocate and
  // RegisteredMemory. All ranks make the call together.
  std::shared_ptr<void> allocate(Device& device, std::size_t bytes, BufferUse use) {
    RegisteredMemory* const registered = registered_memory();
    return registered != nullptr ? registered->allocate(bytes, use)
                                 : allocate_alone(device, bytes, use);
  }

  // The same, but ranks need not call it together, as within a step. So it is not registered.
  virtual std::shared_ptr<void> allocate_alone(Device& device, std::size_t bytes,
                                               BufferUse /*use*/) {
    return device.allocate(bytes);
  }

  // output[r * bytes, (r + 1) * bytes) = rank r's input[0, bytes).
  virtual void all_gather(Stream& stream, const void* input, void* output, std::size_t bytes) = 0;

  // At least two all-gathers, in one launch unless gather_by is Packing. The distances between
  // their inputs are the same on all ranks, except in place (`input` is this rank's part of
  // `output`).
  virtual void all_gather_parts(Stream& stream, const std::vector<GatherPart>& parts) {
    for (const GatherPart& part : parts) {
      all_gather(stream, part.input, part.output, part.bytes);
    }
  }

  // output[0, numel) = sum over ranks of their input[rank() * numel, (rank() + 1) * numel).
  virtual void reduce_scatter(Stream& stream, const void* input, void* output, std::size_t numel,
                              DType dtype) = 0;

  // data[0, numel) = sum over ranks, in place.
  virtual void all_reduce(Stream& stream, void* data, std::size_t numel, DType dtype) = 0;

  // An all-gather of a few bytes of host memory, off the hot path. Ranks use it to compare their
  // next actions. `output` is complete for work behind this call on the stream.
  virtual void host_all_gather(Stream& stream, const void* input, void* output, std::size_t bytes) {
    all_gather(stream, input, output, bytes);
  }

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

 protected:
  // What was announced last.
  const std::string& what() const { return *what_; }
  std::uint64_t tag() const { return tag_; }

 private:
  const TransportTraits traits_;
  const int rank_;
  const int size_;
  const std::string unnamed_ = "a collective";
  const std::string* what_ = &unnamed_;
  std::uint64_t tag_ = 0;
  std::shared_ptr<FlightGroup> flight_group_;
};

}  // namespace fsdp
