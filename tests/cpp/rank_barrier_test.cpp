// The barrier under the collectives of shared memory: round numbers, missing and failed ranks.
#include "comm/shared_memory/rank_barrier.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "comm/shared_memory/shared_arena.h"
#include "message_of.h"

namespace fsdp::test {
namespace {

using std::chrono::milliseconds;

const std::string kLayer = "the all-gather of unit 'layer'";

class TwoRanks : public ::testing::Test {
 protected:
  void connect_after_round(std::uint32_t last_round) {
    const auto arena = Arena::of_this_process();
    const PeerMemory memory{nullptr, arena->base(), arena->address().bytes, "a rank"};
    std::vector<Peer> peers;
    for (int r = 0; r < 2; ++r) {
      memory_.push_back(Arena::allocate(arena, sizeof(Mailbox)));
      mailboxes_[r] = new (memory_.back().get()) Mailbox;
      mailboxes_[r]->posted = mailboxes_[r]->finished = last_round;
      const std::uint64_t offset = arena->offset_of(mailboxes_[r]);
      peers.emplace_back(PeerAddress{arena->address(), {offset, offset}, r}, memory, 0);
    }
    for (int r = 0; r < 2; ++r) {
      ranks_[r] =
          std::make_unique<RankBarrier>(*mailboxes_[r], peers, r, milliseconds(300), last_round);
      ranks_[r]->begin_collective(kLayer);
    }
  }

  std::vector<std::shared_ptr<void>> memory_;
  Mailbox* mailboxes_[2];
  std::unique_ptr<RankBarrier> ranks_[2];
};

TEST_F(TwoRanks, SynchroniseWhenRoundNumbersWrapAround) {
  connect_after_round(0xfffffffdu);
  for (int i = 0; i < 6; ++i) {
    for (auto& rank : ranks_) {
      rank->post({});
    }
    auto other = std::async(std::launch::async, [&] {
      ranks_[1]->wait_for_input(0, {});
      ranks_[1]->finish();
    });
    ranks_[0]->wait_for_input(1, {});
    ranks_[0]->finish();
    other.get();
  }
  EXPECT_EQ(mailboxes_[0]->posted, 3U);
  // A missing rank is noticed there, too.
  connect_after_round(0xffffffffu);
  ranks_[0]->post({});
  EXPECT_TRUE(
      contains(message_of([&] { ranks_[0]->wait_for_input(1, {}); }), "waited 300 ms for rank 1"));
}

// The data of a failed rank may be wrong, so rank 1 fails although it has finished reading.
TEST_F(TwoRanks, AReaderOfARankThatThenFailsFails) {
  connect_after_round(0);
  for (auto& rank : ranks_) {
    rank->post({});
  }
  ranks_[0]->wait_for_input(1, {});
  const std::string reason = message_of([&] { ranks_[0]->finish(); });
  EXPECT_TRUE(contains(reason, "waited 300 ms for rank 1")) << reason;
  ranks_[0]->abort(reason);
  ranks_[1]->wait_for_input(0, {});
  EXPECT_EQ(mailboxes_[0]->finished, 1U);
  EXPECT_TRUE(contains(message_of([&] { ranks_[1]->finish(); }), reason));
}

TEST_F(TwoRanks, ALongReasonArrivesWhole) {
  connect_after_round(0);
  const std::string reason(Mailbox::kReasonBytes - 1, 'u');
  ranks_[0]->abort(reason);
  EXPECT_EQ(ranks_[1]->async_error(), reason);
}

}  // namespace
}  // namespace fsdp::test
