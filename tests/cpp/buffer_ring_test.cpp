#include "core/memory/buffer_ring.h"

#include <gtest/gtest.h>

#include "base/check.h"

namespace fsdp {
namespace {

class BufferRingTest : public ::testing::Test {
 protected:
  std::unique_ptr<Device> device_ = make_host_device(std::chrono::seconds(5));
  BufferRing ring_{*device_, [this](std::size_t bytes) { return device_->allocate(bytes); }, 2,
                   256};

  void release(Slot* slot, bool keeps_contents = true) {
    ring_.release(*slot, device_->compute_stream(), keeps_contents);
  }
};

TEST_F(BufferRingTest, GivesOutNoSlotThatHasAnOwner) {
  Slot* first = ring_.try_acquire(0);
  Slot* second = ring_.try_acquire(1);
  EXPECT_NE(first, second);
  EXPECT_EQ(ring_.try_acquire(2), nullptr);
  release(first);
  EXPECT_EQ(ring_.try_acquire(2), first);
}

TEST_F(BufferRingTest, GivesOutTheSlotThatWasReleasedFirst) {
  Slot* first = ring_.try_acquire(0);
  Slot* second = ring_.try_acquire(1);
  release(second);
  release(first);
  EXPECT_EQ(ring_.try_acquire(2), second);
}

TEST_F(BufferRingTest, RemembersContentsUntilAnotherBucketAcquiresTheSlot) {
  release(ring_.try_acquire(0));
  release(ring_.try_acquire(1));
  Slot* kept = ring_.find_contents(1);
  ASSERT_NE(kept, nullptr);
  ring_.reacquire(*kept, 1);
  EXPECT_EQ(ring_.find_contents(1), nullptr);  // it has an owner now
  ring_.try_acquire(2);
  EXPECT_EQ(ring_.find_contents(0), nullptr);  // overwritten
}

TEST_F(BufferRingTest, ForgetsContentsOfReleasedSlots) {
  release(ring_.try_acquire(0));
  release(ring_.try_acquire(1), /*keeps_contents=*/false);
  EXPECT_EQ(ring_.find_contents(1), nullptr);
  ring_.forget_contents();
  EXPECT_EQ(ring_.find_contents(0), nullptr);
}

TEST_F(BufferRingTest, ReleasingOrReacquiringAWrongSlotThrows) {
  Slot* slot = ring_.try_acquire(0);
  EXPECT_THROW(ring_.reacquire(*slot, 0), Error);
  release(slot);
  EXPECT_THROW(release(slot), Error);
  EXPECT_THROW(ring_.reacquire(*slot, 1), Error);
}

TEST_F(BufferRingTest, OverflowSlotsAreFreedAtRelease) {
  EXPECT_EQ(ring_.allocated_bytes(), 512U);
  Slot* extra = ring_.acquire_overflow(7, 1024);
  EXPECT_EQ(ring_.allocated_bytes(), 1536U);
  release(extra);
  EXPECT_EQ(ring_.allocated_bytes(), 512U);
}

}  // namespace
}  // namespace fsdp
