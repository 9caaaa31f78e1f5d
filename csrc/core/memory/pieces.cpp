#include "core/memory/pieces.h"

namespace fsdp {
namespace {

const std::string kComputeStream = "the compute stream";

}  // namespace

LaneStreams::LaneStreams(Device& device, Lane& lane)
    : device_(device),
      lane_(lane),
      compute_reached_(device.new_event()),
      reached_(device.new_event()) {}

void LaneStreams::set_any_in_pieces(bool value) {
  any_in_pieces_ = value;
  if (value) {
    lane_.make_copy_streams();
  }
}

void LaneStreams::order_after(Stream& later, Stream& earlier, const std::string& what) {
  if (&later != &earlier) {
    earlier.record(*reached_);
    later.wait(*reached_, what);
  }
}

void LaneStreams::follow_compute() {
  device_.compute_stream().record(*compute_reached_);
  order_after_compute(messages());
}

void LaneStreams::order_after_compute(Stream& stream) {
  stream.wait(*compute_reached_, kComputeStream);
}

void HalvedBuffer::release_both(Stream& stream) {
  release_half(stream, 0);
  release_half(stream, 1);
}

void HalvedBuffer::wait_for_both(Stream& stream, const std::string& what) {
  wait_for_half(stream, 0, what);
  wait_for_half(stream, 1, what);
}

}  // namespace fsdp
