#include "core/memory/buffer_ring.h"

#include <gtest/gtest.h>

#include <string>

#include "base/check.h"

namespace fsdp {
namespace {

const std::string kGather = "a gather";

class BufferRingTest : public ::testing::Test {
 protected:
  std::unique_ptr<Device> device_ = make_host_device(std::chrono::seconds(5));
  BufferRing ring_{*device_, [this](std::size_t bytes) { return device_->allocate(bytes); },
                   equal_slots(2, 256)};

  Slot* acquire(int bucket) {
    return ring_.try_acquire(bucket, 256, device_->compute_stream(), kGather);
  }
  void release(Slot* slot, bool keeps_contents = true) {
    ring_.release(*slot, device_->compute_stream(), keeps_contents);
  }
};

TEST_F(BufferRingTest, GivesOutNoSlotThatHasAnOwner) {
  Slot* first = acquire(0);
  Slot* second = acquire(1);
  EXPECT_NE(first, second);
  EXPECT_EQ(acquire(2), nullptr);
  char* const place = static_cast<char*>(first->data());
  release(first);
  EXPECT_EQ(acquire(2)->data(), place);
}

TEST_F(BufferRingTest, GivesOutTheSlotThatWasReleasedFirst) {
  Slot* first = acquire(0);
  Slot* second = acquire(1);
  void* const place = second->data();
  release(second);
  release(first);
  EXPECT_EQ(acquire(2)->data(), place);
}

TEST_F(BufferRingTest, RemembersContentsUntilAnotherBucketAcquiresTheSlot) {
  release(acquire(0));
  release(acquire(1));
  EXPECT_NE(ring_.reacquire(1), nullptr);
  EXPECT_EQ(ring_.reacquire(1), nullptr);  // it has an owner now
  acquire(2);
  EXPECT_EQ(ring_.reacquire(0), nullptr);  // overwritten
}

TEST_F(BufferRingTest, ForgetsContentsThatAReleaseDoesNotKeep) {
  release(acquire(1), /*keeps_contents=*/false);
  EXPECT_EQ(ring_.reacquire(1), nullptr);
}

TEST_F(BufferRingTest, KeepsOnlyTheLastContentsOfABucket) {
  release(acquire(0));
  Slot* newest = acquire(0);  // the other slot
  EXPECT_EQ(ring_.reacquire(0), nullptr);
  release(newest);
  EXPECT_EQ(ring_.reacquire(0), newest);
}

TEST_F(BufferRingTest, ReleasingASlotTwiceThrows) {
  Slot* slot = acquire(0);
  release(slot);
  EXPECT_THROW(release(slot), Error);
}

TEST_F(BufferRingTest, OverflowSlotsAreFreedAtRelease) {
  EXPECT_EQ(ring_.allocated_bytes(), 512U);
  Slot* extra = ring_.acquire_overflow(7, 1024);
  EXPECT_EQ(ring_.allocated_bytes(), 1536U);
  release(extra);
  EXPECT_EQ(ring_.allocated_bytes(), 512U);
}

// Two large buckets and two small ones. A large one and a small one fit beside each other.
class RingOfPlacesTest : public ::testing::Test {
 protected:
  static RingPlan plan() {
    RingPlan plan = equal_slots(2, 768);
    plan.bytes = 1024;
    plan.offsets = {0, 768, 0, 256};  // of 768, 256, 256 and 768 bytes
    return plan;
  }

  std::unique_ptr<Device> device_ = make_host_device(std::chrono::seconds(5));
  BufferRing ring_{*device_, [this](std::size_t bytes) { return device_->allocate(bytes); },
                   plan()};

  Slot* acquire(int bucket, std::size_t bytes) {
    return ring_.try_acquire(bucket, bytes, device_->compute_stream(), kGather);
  }
  void release(Slot* slot) { ring_.release(*slot, device_->compute_stream(), true); }
};

TEST_F(RingOfPlacesTest, PutsEachBucketWhereItIsPlanned) {
  Slot* const embedding = acquire(0, 768);
  Slot* const layer = acquire(1, 256);
  EXPECT_EQ(embedding->offset, 0U);
  EXPECT_EQ(layer->offset, 768U);
  EXPECT_EQ(static_cast<char*>(layer->data()) - static_cast<char*>(embedding->data()), 768);
  EXPECT_EQ(acquire(2, 256), nullptr);  // no room
  release(embedding);
  Slot* const next = acquire(2, 256);
  EXPECT_EQ(next->offset, 0U);
  EXPECT_EQ(acquire(3, 768), nullptr);
  release(layer);
  EXPECT_EQ(acquire(3, 768)->offset, 256U);
  EXPECT_EQ(ring_.allocated_bytes(), 1024U);
}

TEST_F(RingOfPlacesTest, ASlotOverwritesAllThatItOverlaps) {
  const auto has = [this](int bucket) {
    Slot* const slot = ring_.reacquire(bucket);
    if (slot != nullptr) {
      release(slot);
    }
    return slot != nullptr;
  };
  release(acquire(2, 256));  // at 0
  release(acquire(1, 256));  // at 768
  EXPECT_TRUE(has(1));
  EXPECT_TRUE(has(2));
  release(acquire(0, 768));
  EXPECT_FALSE(has(2));
  EXPECT_TRUE(has(1));
  release(acquire(3, 768));
  EXPECT_FALSE(has(0));
  EXPECT_FALSE(has(1));
}

TEST_F(RingOfPlacesTest, FindsAnotherPlaceIfThePlannedOneHasAnOwner) {
  acquire(0, 768);
  EXPECT_EQ(acquire(2, 256)->offset, 768U);
}

TEST_F(RingOfPlacesTest, ANewSlotFollowsTheReadersOfAllThatItOverlaps) {
  const std::unique_ptr<Stream> reader = device_->new_stream("reader");
  const std::unique_ptr<Stream> writer = device_->new_stream("writer");
  Slot* const first = acquire(2, 256);
  Slot* const second = acquire(1, 256);
  device_->delay(*reader, std::chrono::milliseconds(50));
  const std::unique_ptr<Event> read = device_->new_event();
  reader->record(*read);
  ring_.release(*first, *reader, /*keeps_contents=*/true);
  ring_.release(*second, device_->compute_stream(), /*keeps_contents=*/true);
  const std::unique_ptr<Event> written = device_->new_event();
  ring_.try_acquire(0, 768, *writer, kGather);
  writer->record(*written);
  written->synchronize(std::chrono::seconds(5), kGather);
  EXPECT_TRUE(read->query());
}

}  // namespace
}  // namespace fsdp
