// The state that all schedules over one group of ranks share: the device and two lanes, one for
// gathers and one for reductions.
//
// Note [lanes]
// Ranks match collectives by their order on a communicator. A lane is one such order: all schedules
// that issue through its stream stay in step. Gathers and reductions have a lane each, because
// backward issues both and neither should wait for the other. A lane is expensive (a thread or a
// CUDA stream, connections to all peers), so lanes are made once for a set of ranks, not once for a
// model.
//
// Note [pieces]
// A bucket that is too large for one message (`max_message_bytes`) is sent in pieces. The copies
// before a message then run on the stream `before`, those after it on `after`. Pieces use the two
// halves of the staging buffer, and of the reduce input and output, in turns. A bucket that is one
// piece needs no other stream than the lane's, unless it is packed ahead: Note [packing ahead] in
// core/reduce/reducer.h. docs/design/buckets.md says more.
//
// Note [shards and gradients in windows]
// When memory is planned, where all ranks are together, shards that gathers read move into memory
// of the lane's communicator. So do gradients that reductions write, but only if that makes the
// lane's reductions faster. Buckets move one block after the other. A block is freed with its last
// tensor. If one rank's tensor gets other memory (Note [held gradients]), all ranks move theirs.
// Until then that rank reduces into the reduce output, which is registered, too: whether a buffer
// is registered has to be the same on all ranks. docs/design/cuda.md says why.
//
// Note [several meshes]
// Units that fewer ranks share than the root, such as experts, divide the ranks of the root's mesh
// into meshes. Their collectives run on the streams of the root's lanes, over communicators of
// their own, and all ranks of the root issue the collectives of all units in one order.
//
// - A bucket has units of one mesh.
// - With replicas, one lane sums the gradients of all meshes, because ranks with the same shard of
//   the root's unit have the same shards of all units.
// - Sizes are compared only among the ranks of one mesh, as meshes may differ.
// - Buffers that all buckets share are registered with the root's communicators alone, with the
//   largest number and sizes that any rank needs (Lane::most). Shards and gradients of other meshes
//   have no windows.
//
// docs/design/schedule.md says more.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "core/record/collective_history.h"
#include "core/record/flight_tape.h"
#include "device/stream.h"
#include "pack/pack.h"

namespace fsdp {

class FlightRecorder;

class Lane {
 public:
  Lane(Device& device, const std::string& name, std::unique_ptr<Communicator> communicator)
      : device_(device),
        communicator_(std::move(communicator)),
        registered_(communicator_->registered_memory()),
        timeout_(device.timeout()),
        stream_(device.new_stream(name)) {
    communicator_->set_stream(*stream_);
  }

  Communicator& communicator() { return *communicator_; }
  Stream& stream() { return *stream_; }
  CollectiveHistory& history() { return history_; }
  // Null if nothing is recorded.
  FlightTape* flights() const { return flights_.get(); }
  void record_in(std::shared_ptr<FlightTape> flights) { flights_ = std::move(flights); }

  // Sends a few bytes of host memory to all ranks. Errors call it `what`, which must outlive it,
  // and flight records `label`.
  void host_all_gather(const std::string& what, const std::string& label, const void* input,
                       void* output, std::size_t bytes);

  // Makes `before` and `after`: Note [pieces].
  void make_copy_streams() {
    if (before_ == nullptr) {
      before_ = device_.new_stream(stream_->name() + " in");
      after_ = device_.new_stream(stream_->name() + " out");
    }
  }
  Stream& before() { return *before_; }
  Stream& after() { return *after_; }

  // Blocks the calling thread until all issued work is done. Throws if any of it failed.
  void synchronize() {
    for (Stream* stream : {before_.get(), stream_.get(), after_.get()}) {
      if (stream != nullptr) {
        stream->synchronize();
      }
    }
  }

  // Allocates memory for collectives of this lane. All ranks call it together with the same size.
  std::shared_ptr<void> allocate(std::size_t bytes, BufferUse use) {
    return communicator_->allocate(device_, bytes, use);
  }

  // Whether a CUDA graph has captured collectives of this lane. Its replays then come between those
  // of any model on the lane: Note [graph capture] in device/cuda_stream.cpp.
  bool has_been_captured() const { return has_been_captured_; }
  void note_capture() { has_been_captured_ = true; }

  // The largest number that a rank passes, for buffers that all ranks have to make alike: Note
  // [several meshes]. `may_differ` is the same on all ranks, which make this call together.
  std::size_t most(std::size_t mine, bool may_differ) {
    return may_differ && registered_ != nullptr ? static_cast<std::size_t>(registered_->most(mine))
                                                : mine;
  }

  // Like allocate, but within a step, where ranks do not call it together.
  std::shared_ptr<void> allocate_alone(std::size_t bytes, BufferUse use) {
    return communicator_->allocate_alone(device_, bytes, use);
  }

  // Whether `memory` lies in memory that is registered with the communicator.
  bool is_registered(const void* memory) const {
    return registered_ != nullptr && registered_->holds(memory);
  }

  // Whether reductions of this lane are faster into registered memory.
  bool registers_gradients() const {
    return registered_ != nullptr && registered_->registers_gradients();
  }

  int registered_buffers() const { return registered_ != nullptr ? registered_->count() : 0; }

  // Moves tensors into memory that is registered with the communicator, if it registers any: Note
  // [shards and gradients in windows]. Then frees registered memory that is no longer used. All
  // ranks call it together with the same sizes.
  struct Movable {
    const void* memory;
    std::size_t bytes;
    std::function<void(std::shared_ptr<void>)> move;
  };
  void place_in_windows(const std::vector<Movable>& tensors, BufferUse use);

  // Waits until no issued work runs any more, because the memory it uses is about to be freed. The
  // wait has no timeout of its own: the backend gives up after its timeout. Errors were thrown to
  // the code that waited for the work. Any thread may call it, such as one that frees a model.
  void drain() noexcept;

 private:
  using Movables = std::vector<Movable>::const_iterator;
  // Moves as many tensors as fit into one new block. Returns the first one that is left.
  Movables move_into_a_block(Movables first, Movables end, BufferUse use);

  void drain(Stream& stream) noexcept;

  Device& device_;
  std::unique_ptr<Communicator> communicator_;
  RegisteredMemory* const registered_;  // of the communicator; may be null
  std::chrono::milliseconds timeout_;
  CollectiveHistory history_;
  std::atomic<bool> has_been_captured_{false};
  std::shared_ptr<FlightTape> flights_;
  std::unique_ptr<Stream> stream_;  // destroyed before the members above, which its work uses
  std::unique_ptr<Stream> before_;
  std::unique_ptr<Stream> after_;
};

struct Lanes;

// The ranks of units that the root shares with more ranks: Note [several meshes].
struct Mesh {
  std::shared_ptr<Lanes> lanes;  // whose streams are idle
  std::vector<int> ranks;        // among those of the root
};

struct Lanes {
  Lanes(std::unique_ptr<Device> a_device, std::unique_ptr<Packer> a_packer,
        std::unique_ptr<Communicator> gather_communicator,
        std::unique_ptr<Communicator> reduce_communicator)
      : device(std::move(a_device)),
        packer(std::move(a_packer)),
        gather(*device, "gather", std::move(gather_communicator)),
        reduce(*device, "reduce", std::move(reduce_communicator)) {}

  // The lanes of this rank's smaller group of `ranks` ranks: Note [group shards]. All ranks add
  // them, once for each size.
  Lanes& group_of(int ranks) const;
  bool has_group_of(int ranks) const {
    return std::any_of(groups.begin(), groups.end(), [ranks](const auto& group) {
      return group->gather.communicator().size() == ranks;
    });
  }

  // The mesh of a unit (UnitConfig::mesh). Null for that of these lanes, the root's.
  const Mesh* mesh(int number) const {
    return number == 0 ? nullptr : &meshes.at(static_cast<std::size_t>(number) - 1);
  }
  // The lanes over the ranks of that mesh.
  Lanes& of_mesh(int number) { return number == 0 ? *this : *mesh(number)->lanes; }

  std::unique_ptr<Device> device;
  std::unique_ptr<Packer> packer;
  std::shared_ptr<FlightRecorder> flights;  // null: nothing is recorded
  // Both outlive the streams below, which use them.
  std::vector<std::shared_ptr<Lanes>> groups;
  std::deque<Mesh> meshes;
  Lane gather;
  Lane reduce;
};

// The memory that the transport keeps for messages in flight: for both lanes, and for the lanes of
// smaller groups and other meshes.
std::size_t message_staging_bytes(Lanes& lanes);

// Why communication has failed in one of the lanes that a root uses; empty if it has not failed.
// `replicas` may be null.
std::string failure_in(Lanes& lanes, Lanes* replicas);

// After such a failure, this rank issues nothing any more, in any of these lanes. So this ends all
// of them, because ranks of another group may wait for this rank in a lane that has not failed.
void abort_after_failure(Lanes& lanes, Lanes* replicas);

Lane& lane_named(Lanes& lanes, const std::string& name);

// Throws, because a CUDA graph has captured a step of this model, and its replays use buffers that
// would be freed or replaced.
[[noreturn]] void refuse_after_capture();

}  // namespace fsdp
