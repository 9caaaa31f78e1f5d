// State that the gatherer and the reducer share to send a bucket in pieces (Note [pieces] in
// core/lanes.h): the order between the streams of a lane, and a buffer whose halves the pieces use
// in turns.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "core/lanes.h"
#include "device/stream.h"

namespace fsdp {

class LaneStreams {
 public:
  // The lane outlives this, and may be shared with others.
  LaneStreams(Device& device, Lane& lane);

  // `value`: whether some bucket is sent in pieces. The first call with true makes the streams of
  // its copies.
  void set_any_in_pieces(bool value);
  bool is_any_in_pieces() const { return any_in_pieces_; }

  // The streams of a bucket's copies before its messages, its messages, and its copies after them.
  Stream& before(bool in_pieces) { return in_pieces ? lane_.before() : lane_.stream(); }
  Stream& messages() { return lane_.stream(); }
  Stream& after(bool in_pieces) { return in_pieces ? lane_.after() : lane_.stream(); }

  // Work issued to `later` from now on starts after the work issued to `earlier` so far. `what`
  // names that work in error messages.
  void order_after(Stream& later, Stream& earlier, const std::string& what);
  // Messages issued from now on start after the compute stream's work so far.
  void follow_compute();
  // Work issued to `stream` from now on starts after the compute stream's work at the last
  // follow_compute.
  void order_after_compute(Stream& stream);

 private:
  Device& device_;
  Lane& lane_;
  std::unique_ptr<Event> compute_reached_;
  std::unique_ptr<Event> reached_;  // recorded and waited for within order_after
  bool any_in_pieces_ = false;
};

// A buffer whose halves serve messages in turns. Where no bucket is sent in pieces, it may be used
// as a whole.
class HalvedBuffer {
 public:
  explicit HalvedBuffer(Device& device) : released_{device.new_event(), device.new_event()} {}

  void reset(std::shared_ptr<void> memory, std::size_t bytes) {
    memory_ = std::move(memory);
    bytes_ = bytes;
  }
  std::size_t bytes() const { return bytes_; }
  char* data() const { return static_cast<char*>(memory_.get()); }
  char* half_of(std::size_t piece) const { return data() + piece % 2 * (bytes_ / 2); }

  // The half is free when `stream` has done the work issued to it so far.
  void release_half(Stream& stream, std::size_t piece) { stream.record(*released_[piece % 2]); }
  void release_both(Stream& stream);
  // Work issued to `stream` from now on starts when the half is free.
  void wait_for_half(Stream& stream, std::size_t piece, const std::string& what) {
    stream.wait(*released_[piece % 2], what);
  }
  void wait_for_both(Stream& stream, const std::string& what);

 private:
  std::shared_ptr<void> memory_;
  std::size_t bytes_ = 0;
  std::array<std::unique_ptr<Event>, 2> released_;
};

}  // namespace fsdp
