// What all schedules over one set of ranks share: the device and two lanes, one for gathers and one
// for reductions.
//
// Note [lanes]
// Ranks match collectives by their order on a communicator. A lane is one order: whoever issues
// through its stream is in step with every other schedule that does. Gathers and reductions have a
// lane each, since backward issues both and neither should wait for the other. A lane is costly (a
// thread or a CUDA stream, connections to all peers), and models may come and go, so they are made
// once for a set of ranks and not once for a model.
//
// Note [pieces]
// What is too large for one message (`max_message_bytes`) travels as several, its pieces. Then
// copies have streams of their own: what comes before a piece's message (cast, pack) runs on
// `before`, what comes after it (unpack, the hand-over of gradients) on `after`, each beside the
// messages of other pieces. Pieces take turns in two halves of staging and of the reduce input.
// What is one piece needs no other stream than the lane's.
#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "base/check.h"
#include "comm/communicator.h"
#include "device/stream.h"
#include "pack/pack.h"

namespace fsdp {

class Lane {
 public:
  Lane(Device& device, const std::string& name, std::unique_ptr<Communicator> communicator)
      : device_(device),
        communicator_(std::move(communicator)),
        drained_(device.new_event()),
        timeout_(device.timeout()),
        stream_(device.new_stream(name)) {}

  Communicator& communicator() { return *communicator_; }
  Stream& stream() { return *stream_; }

  // See Note [pieces]. They exist from make_copy_streams on.
  void make_copy_streams() {
    if (before_ == nullptr) {
      before_ = device_.new_stream(stream_->name() + " in");
      after_ = device_.new_stream(stream_->name() + " out");
    }
  }
  Stream& before() { return *before_; }
  Stream& after() { return *after_; }

  // Blocks the calling thread until all that was issued is done; throws if any of it failed.
  void synchronize() {
    for (Stream* stream : {before_.get(), stream_.get(), after_.get()}) {
      if (stream != nullptr) {
        stream->synchronize();
      }
    }
  }

  // Memory for collectives of this lane. All ranks ask for as much at the same time; the lane
  // outlives it.
  std::shared_ptr<void> allocate(std::size_t bytes, BufferUse use) {
    return communicator_->allocate(device_, bytes, use);
  }

  // Waits until nothing of what was issued runs any more, since what it uses is about to be freed.
  // That takes as long as it takes: giving up is the backend's business, which has a timeout of
  // its own. Errors have been told to whoever waited for the work.
  void drain() noexcept {
    for (Stream* stream : {before_.get(), stream_.get(), after_.get()}) {
      if (stream != nullptr) {
        drain(*stream);
      }
    }
  }

 private:
  void drain(Stream& stream) noexcept {
    try {
      stream.record(*drained_);
      while (!drained_->query()) {
        try {
          drained_->synchronize(timeout_, stream.name());
        } catch (const TimeoutError&) {
          // Of this wait; the work goes on.
        }
      }
    } catch (const std::exception&) {
      // Of the work, which has ended, or of a device on which nothing runs any more.
    }
  }

  Device& device_;
  std::unique_ptr<Communicator> communicator_;
  std::unique_ptr<Event> drained_;
  std::chrono::milliseconds timeout_;
  std::unique_ptr<Stream> stream_;  // last: its work, which uses the others, ends first
  std::unique_ptr<Stream> before_;
  std::unique_ptr<Stream> after_;
};

struct Lanes {
  Lanes(std::unique_ptr<Device> a_device, std::unique_ptr<Packer> a_packer,
        std::unique_ptr<Communicator> gather_communicator,
        std::unique_ptr<Communicator> reduce_communicator)
      : device(std::move(a_device)),
        packer(std::move(a_packer)),
        gather(*device, "gather", std::move(gather_communicator)),
        reduce(*device, "reduce", std::move(reduce_communicator)) {}

  std::unique_ptr<Device> device;
  std::unique_ptr<Packer> packer;
  Lane gather;
  Lane reduce;
};

inline Lane& lane_named(Lanes& lanes, const std::string& name) {
  FSDP_CHECK(name == "gather" || name == "reduce", "expects a lane 'gather' or 'reduce' but got '",
             name, "'");
  return name == "gather" ? lanes.gather : lanes.reduce;
}

}  // namespace fsdp
