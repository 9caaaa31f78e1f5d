// csrc/comm/nccl_buffers* over a library that only looks like NCCL.
#include "comm/nccl/nccl_buffers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "meet.h"
#include "nccl_ranks.h"

namespace fsdp {
namespace {

using test::fake;
using test::kNothingThrown;
using test::meet;
using test::NcclRanks;

using std::chrono::milliseconds;

// Windows that are not symmetric do nothing for a collective.
TEST_F(NcclRanks, RegisterBuffersAsTheVersionCan) {
  const std::pair<int, const char*> expected[] = {
      {22809, "register"}, {23006, "register"}, {23007, "window"}};
  for (const auto& [version, how] : expected) {
    use_version(version);
    fake().drain_calls();
    run_ranks(3, [](Rank rank) {
      for (Communicator* lane : {&rank.gather, &rank.reduce}) {
        EXPECT_NE(lane->allocate(rank.device, 4096, BufferUse::Output), nullptr);
      }
    });
    const auto calls = fake().drain_calls();
    for (const char* call : {"register", "window", "plain window"}) {
      EXPECT_EQ(std::count(calls.begin(), calls.end(), call), call == std::string(how) ? 6 : 0)
          << call << " in " << version;
    }
  }
}

// See Note [registration between nodes]. The fake counts gathers that could wait for ever.
TEST_F(NcclRanks, RegisterBuffersBetweenNodesOnlyWhereGathersCannotHang) {
  fake().nodes = 2;
  for (const int version : {22809, 23007, 23203, 23206}) {
    use_version(version);
    run_ranks(2, [version](Rank rank) {
      std::vector<std::shared_ptr<void>> buffers;
      for (Communicator* lane : {&rank.gather, &rank.reduce}) {
        for (const BufferUse use : {BufferUse::Input, BufferUse::Output}) {
          buffers.push_back(lane->allocate(rank.device, 4096, use));
        }
        const RegisteredMemory* const registered = lane->registered_memory();
        EXPECT_EQ(registered != nullptr ? registered->count() : 0, version < 23206 ? 0 : 2);
      }
      rank.gather.all_gather(rank.stream, buffers[0].get(), buffers[1].get(), 2048);
    });
  }
}

// See Note [order of windows].
TEST_F(NcclRanks, LetBuffersOutliveThem) {
  std::mutex mutex;
  std::vector<std::shared_ptr<void>> kept;
  run_ranks(2, [&](Rank rank) {
    const auto shard = rank.gather.allocate(rank.device, 4096, BufferUse::Shard);
    auto gradient = rank.gather.allocate(rank.device, 4096, BufferUse::Gradient);
    EXPECT_TRUE(rank.gather.registered_memory()->holds(static_cast<char*>(shard.get()) + 4095));
    EXPECT_TRUE(rank.gather.registered_memory()->holds(gradient.get()));
    EXPECT_FALSE(rank.reduce.registered_memory()->holds(gradient.get()));
    const void* const freed = gradient.get();
    std::thread([&gradient] { gradient.reset(); }).join();
    EXPECT_FALSE(rank.gather.registered_memory()->holds(freed));
    EXPECT_EQ(rank.gather.registered_memory()->count(), 2);  // until memory is planned again
    rank.gather.registered_memory()->free_unused();
    EXPECT_EQ(rank.gather.registered_memory()->count(), 1);
    const std::lock_guard<std::mutex> lock(mutex);
    kept.push_back(shard);
  });
  EXPECT_EQ(fake().registered_buffers, 0);
  EXPECT_EQ(fake().live_buffers, 2);
  EXPECT_EQ(fake().overlapping_windows, 0);
  kept.clear();
  EXPECT_EQ(fake().live_buffers, 0);
}

thread_local std::shared_ptr<void> freed_within_gather;

// See Note [unused buffers]. Another thread frees a buffer while this one is in NCCL, and the other
// rank waits in a collective. The fake counts buffers that are deregistered while a rank waits.
TEST_F(NcclRanks, FreeBuffersWhereAllOfThemMeet) {
  fake().before_gather = [] {
    std::thread([memory = std::move(freed_within_gather)]() mutable { memory.reset(); }).join();
  };
  for (const int version : {22809, 23206}) {
    use_version(version);
    for (int slow = 0; slow < 2; ++slow) {
      fake().slow_to_deregister = slow;
      run_ranks(2, [](Rank rank) {
        RegisteredMemory& registered = *rank.gather.registered_memory();
        freed_within_gather = rank.gather.allocate(rank.device, 64, BufferUse::Output);
        for (int i = 0; i < 2; ++i) {
          meet(rank.gather, rank.stream);
          EXPECT_EQ(registered.count(), 1);
        }
        registered.free_unused();
        EXPECT_EQ(registered.count(), 0);
        meet(rank.gather, rank.stream);
        // A rank that still uses its buffer keeps those of all.
        auto mine = rank.gather.allocate(rank.device, 64, BufferUse::Shard);
        if (rank.number == 0) {
          mine.reset();
        }
        registered.free_unused();
        EXPECT_EQ(registered.count(), 1);
        mine.reset();
        registered.free_unused();
        EXPECT_EQ(registered.count(), 0);
      });
    }
  }
  fake().before_gather = nullptr;
  EXPECT_EQ(fake().live_buffers, 0);
}

// See Note [order of windows]. The fake counts windows whose offsets differ between ranks.
TEST_F(NcclRanks, FreeBuffersInOneOrder) {
  use_version(23206);
  run_ranks(2, [](Rank rank) {
    std::vector<std::shared_ptr<void>> buffers;
    const auto allocate = [&] {
      buffers.push_back(rank.gather.allocate(rank.device, 64, BufferUse::Output));
    };
    for (int i = 0; i < 4; ++i) {
      allocate();
    }
    // Each rank has one that the other still uses, and frees the rest in its own order.
    const bool is_first = rank.number == 0;
    for (const std::size_t freed : {is_first ? 0 : 3, is_first ? 1 : 2, is_first ? 2 : 1}) {
      buffers[freed].reset();
    }
    allocate();
    EXPECT_EQ(rank.gather.registered_memory()->count(),
              3);  // those that a rank uses, and the new one
    allocate();
    buffers.erase(buffers.begin(), buffers.begin() + 4);
    allocate();
    EXPECT_EQ(rank.gather.registered_memory()->count(), 3);
  });
  EXPECT_EQ(fake().misplaced_windows, 0);
  EXPECT_EQ(fake().live_buffers, 0);
}

// Registering is collective, and in a step the ranks are not together.
TEST_F(NcclRanks, RegisterNothingWithinAStep) {
  run_ranks(2, [](Rank rank) {
    if (rank.number == 0) {
      EXPECT_NE(rank.gather.allocate_alone(rank.device, 4096, BufferUse::Output), nullptr);
      EXPECT_EQ(rank.gather.registered_memory()->count(), 0);
    }
  });
  const auto calls = fake().drain_calls();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "register"), 0);
}

// Torch may keep memory that it does not use.
TEST_F(NcclRanks, AllocateOnceMoreAfterOneFailure) {
  fake().allocations_to_fail = 1;
  const auto messages = run_ranks(2, [](Rank rank) {
    const auto memory = rank.gather.allocate(rank.device, 4096, BufferUse::Output);
    EXPECT_EQ(rank.gather.registered_memory()->count(), 1);
  });
  EXPECT_EQ(messages, (std::vector<std::string>(2, kNothingThrown)));
}

// The others would wait in the registration for ever.
TEST_F(NcclRanks, AllFailIfOneCannotAllocate) {
  fake().most_bytes = 4095;
  const auto messages = run_ranks(2, [](Rank rank) {
    rank.gather.allocate(rank.device, rank.number == 0 ? 4096 : 4095, BufferUse::Output);
  });
  fake().most_bytes = ~std::size_t{0};
  EXPECT_SAYS(messages[0], "NCCL could not allocate 4096 more bytes of GPU memory");
  EXPECT_SAYS(messages[1], "Another rank could not allocate 4095 more bytes of GPU memory");
}

TEST_F(NcclRanks, NoneUsesARegistrationThatFailsOnOne) {
  fake().register_fails_on_rank = 1;
  const auto messages = run_ranks(2, [](Rank rank) {
    const auto memory = rank.gather.allocate(rank.device, 4096, BufferUse::Output);
    EXPECT_NE(memory, nullptr);
    EXPECT_EQ(rank.gather.registered_memory()->count(), 0);
    meet(rank.gather, rank.stream);
    EXPECT_EQ(fake().registered_buffers, 0);
    EXPECT_EQ(fake().live_buffers, 0);  // the memory is the device's
  });
  EXPECT_EQ(messages, (std::vector<std::string>(2, kNothingThrown)));
}

// Rank 0 fails in NCCL, and rank 1 waits there. Then both errors say what to set.
TEST_F(NcclRanks, SayHowToGoOnIfRegistrationFailsOnOneRankAlone) {
  use_version(23206);
  fake().register_fails_on_rank = 0;
  fake().others_wait_for_failed = true;
  left_behind_ = 2;
  const auto messages = run_ranks(
      2, [](Rank rank) { rank.gather.allocate(rank.device, 4096, BufferUse::Output); },
      milliseconds(300));
  const std::string what = "of 2 waited 300 ms for the registration of a buffer";
  const std::string advice = " (FSDP_EXT_NCCL_REGISTER=0 on all ranks avoids it). ";
  EXPECT_SAYS(messages[0],
              what + ", in which NCCL failed with: internal error: what NCCL says" + advice);
  EXPECT_SAYS(messages[1], what + advice);
}

TEST_F(NcclRanks, UseTheDevicesMemoryWithoutRegistration) {
  run_ranks(
      2,
      [](Rank rank) {
        EXPECT_NE(rank.gather.allocate(rank.device, 4096, BufferUse::Output), nullptr);
      },
      milliseconds(20000), /*register_buffers=*/false);
  run_ranks(1, [](Rank rank) {
    EXPECT_NE(rank.gather.allocate(rank.device, 64, BufferUse::Output), nullptr);
  });
  const auto calls = fake().drain_calls();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "register"), 0);
}

// NCCL 2.29 and newer makes no windows where it has no symmetric memory.
TEST_F(NcclRanks, RegisterBuffersAsWithoutWindowsWhereThereAreNone) {
  use_version(23206);
  fake().has_windows = false;
  run_ranks(2, [](Rank rank) {
    EXPECT_TRUE(rank.reduce.registered_memory()->registers_gradients());
    const auto output = rank.reduce.allocate(rank.device, 4096, BufferUse::Output);
    EXPECT_EQ(rank.reduce.registered_memory()->count(), 1);
    EXPECT_FALSE(rank.reduce.registered_memory()->registers_gradients());
    const auto input = rank.reduce.allocate(rank.device, 4096, BufferUse::Input);
    EXPECT_EQ(rank.reduce.registered_memory()->count(), 2);
  });
  const auto calls = fake().drain_calls();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "window"), 2);
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "register"), 4);
}

TEST_F(NcclRanks, RefuseWindowsOnSomeRanksOnly) {
  use_version(23206);
  fake().rank_without_windows = 1;
  const auto messages =
      run_ranks(2, [](Rank rank) { rank.reduce.allocate(rank.device, 4096, BufferUse::Output); });
  EXPECT_SAYS(messages[0], "NCCL made a window of a buffer on some ranks only (on this one: yes)");
  EXPECT_SAYS(messages[1], "NCCL made a window of a buffer on some ranks only (on this one: no)");
}

// Such groups have to be cut: Note [groups in registered buffers].
TEST_F(NcclRanks, LetTheSwitchGatherGroupsWhereThereAreNoWindows) {
  use_version(23206);
  fake().has_windows = false;
  fake().ring_gathers = 0;
  nccl::LaneSettings few_blocks;
  few_blocks.cta_policy = nccl::kEfficiencyPolicy;
  run_ranks(
      2,
      [](Rank rank) {
        const auto input = rank.gather.allocate(rank.device, 128, BufferUse::Shard);
        const auto output = rank.gather.allocate(rank.device, 256, BufferUse::Output);
        const auto part = [&](std::size_t from) {
          return GatherPart{static_cast<char*>(input.get()) + from,
                            static_cast<char*>(output.get()) + 2 * from, 64};
        };
        rank.gather.all_gather_parts(rank.stream, {part(0), part(64)});
      },
      milliseconds(20000), true, few_blocks);
  EXPECT_EQ(fake().ring_gathers, 0);
}

// Each try would move shards and gradients to other memory.
TEST_F(NcclRanks, TryNoMoreAfterARegistrationHasFailed) {
  fake().register_result = 4;
  run_ranks(2, [](Rank rank) {
    EXPECT_TRUE(rank.gather.registered_memory()->can_register());
    const auto first = rank.gather.allocate(rank.device, 4096, BufferUse::Output);
    EXPECT_FALSE(rank.gather.registered_memory()->can_register());
    EXPECT_NE(rank.gather.allocate(rank.device, 4096, BufferUse::Output), nullptr);
  });
  const auto calls = fake().drain_calls();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "register"), 2);
}

// A collective that NCCL has aborted without a word leaves what was in its buffer.
TEST_F(NcclRanks, NoticeAnExchangeThatHasNotRun) {
  left_behind_ = 2;
  const auto messages = run_ranks(2, [](Rank rank) {
    fake().gathers_nothing = true;
    rank.gather.allocate(rank.device, 4096, BufferUse::Output);
  });
  for (const std::string& message : messages) {
    EXPECT_SAYS(message,
                "the exchange of unused buffers has not reached all ranks, and NCCL "
                "reported no error. Set NCCL_DEBUG=WARN for more.");
  }
}

TEST_F(NcclRanks, UseBuffersWhoseRegistrationFails) {
  fake().register_result = 4;
  const auto messages = run_ranks(2, [](Rank rank) {
    EXPECT_NE(rank.gather.allocate(rank.device, 4096, BufferUse::Output), nullptr);
  });
  EXPECT_EQ(messages, (std::vector<std::string>(2, kNothingThrown)));
}

}  // namespace
}  // namespace fsdp
