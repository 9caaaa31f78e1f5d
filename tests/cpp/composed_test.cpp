// Collectives composed of messages, with threads as ranks. A message travels as a backend's do:
// when both its sender and its receiver are there, between equal tags and in their order.
#include "comm/messages/composed.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "comm/shared_memory/rank_order_sum.h"
#include "comm/shared_memory/shared_memory.h"
#include "message_of.h"

namespace fsdp::test {
namespace {

// Of a wait that a test expects to end. A busy machine may stop a thread for seconds.
constexpr std::chrono::seconds kTimeout{120};

// What has been sent or asked for and has not met the other side.
class Wire {
 public:
  struct Half {
    Half(void* a_memory, std::size_t a_size)
        : memory(static_cast<char*>(a_memory)), bytes(a_size) {}

    char* memory;
    std::size_t bytes;
    bool is_done = false;
    bool is_given_up = false;
  };
  using Key = std::tuple<int, int, std::int32_t>;  // sender, receiver, tag

  std::shared_ptr<Half> send(const Key& key, const void* data, std::size_t bytes) {
    return post(key, const_cast<void*>(data), bytes, sends_, receives_);
  }
  std::shared_ptr<Half> receive(const Key& key, void* data, std::size_t bytes) {
    return post(key, data, bytes, receives_, sends_);
  }

  void wait(const Half& half) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, kTimeout, [&] { return half.is_done; })) {
      throw TimeoutError("Timed out");
    }
    FSDP_CHECK(!half.is_given_up, "it was given up");
  }

  void give_up(const std::shared_ptr<Half>& half) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto* side : {&sends_, &receives_}) {
      for (auto& [key, halves] : *side) {
        halves.erase(std::remove(halves.begin(), halves.end(), half), halves.end());
      }
    }
  }

  void fail(Half& half) {
    const std::lock_guard<std::mutex> lock(mutex_);
    half.is_done = half.is_given_up = true;
    changed_.notify_all();
  }

  // A receive with too little room ends the process of a real backend.
  bool was_overrun() const { return was_overrun_; }
  // What has travelled from one rank to another.
  std::size_t bytes_from(int sender, int receiver) const {
    const auto found = travelled_.find({sender, receiver});
    return found == travelled_.end() ? 0 : found->second;
  }

 private:
  using Side = std::map<Key, std::deque<std::shared_ptr<Half>>>;

  std::shared_ptr<Half> post(const Key& key, void* data, std::size_t bytes, Side& mine,
                             Side& theirs) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto half = std::make_shared<Half>(data, bytes);
    std::deque<std::shared_ptr<Half>>& others = theirs[key];
    if (others.empty()) {
      mine[key].push_back(half);
      return half;
    }
    const std::shared_ptr<Half> other = others.front();
    others.pop_front();
    const Half& from = &mine == &sends_ ? *half : *other;
    const Half& to = &mine == &sends_ ? *other : *half;
    if (from.bytes > to.bytes) {
      was_overrun_ = true;
    } else {
      std::memcpy(to.memory, from.memory, from.bytes);
    }
    travelled_[{std::get<0>(key), std::get<1>(key)}] += from.bytes;
    half->is_done = other->is_done = true;
    changed_.notify_all();
    return half;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  Side sends_;
  Side receives_;
  std::map<std::pair<int, int>, std::size_t> travelled_;
  std::atomic<bool> was_overrun_{false};
};

class WireMessage final : public Message {
 public:
  WireMessage(Wire& wire, std::shared_ptr<Wire::Half> half) : wire_(wire), half_(std::move(half)) {}
  ~WireMessage() override { wire_.give_up(half_); }
  void wait() override { wire_.wait(*half_); }
  void give_up() override { wire_.fail(*half_); }

 private:
  Wire& wire_;
  std::shared_ptr<Wire::Half> half_;
};

class WireMessages final : public Messages {
 public:
  WireMessages(Wire& wire, int rank, int size) : wire_(wire), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::unique_ptr<Message> send(const void* data, std::size_t bytes, int to,
                                std::int32_t tag) override {
    return std::make_unique<WireMessage>(wire_, wire_.send({rank_, to, tag}, data, bytes));
  }
  std::unique_ptr<Message> receive(void* data, std::size_t bytes, int from,
                                   std::int32_t tag) override {
    return std::make_unique<WireMessage>(wire_, wire_.receive({from, rank_, tag}, data, bytes));
  }

 private:
  Wire& wire_;
  int rank_;
  int size_;
};

// The number of each rank's host. Ranks of one host share memory, if any host has several.
using Hosts = std::vector<int>;

Hosts single_ranks(int ranks) { return HostMap::of_single_ranks(ranks).hosts(); }

std::unique_ptr<HostRanks> host_of(const Hosts& hosts, int rank, MessageStaging::Use use,
                                   const std::vector<SharedMemoryEndpoint>& endpoints) {
  if (hosts == single_ranks(static_cast<int>(hosts.size()))) {
    return nullptr;
  }
  std::vector<std::string> addresses;
  for (const SharedMemoryEndpoint& endpoint : endpoints) {
    addresses.push_back(endpoint.address());
  }
  HostLanes lanes = endpoints[static_cast<std::size_t>(rank)].connect_on_host(
      addresses, HostMap(hosts), rank, kTimeout);
  return std::move(use == MessageStaging::Use::Gathers ? lanes.gather : lanes.reduce);
}

// Runs `of_rank` on a thread for each rank; returns their errors.
template <typename OfRank>
std::vector<std::string> run(Wire& wire, const Hosts& hosts, MessageStaging::Use use,
                             const OfRank& of_rank) {
  const auto ranks = static_cast<int>(hosts.size());
  std::vector<int> global_ranks;
  std::vector<SharedMemoryEndpoint> endpoints;
  for (int rank = 0; rank < ranks; ++rank) {
    global_ranks.push_back(10 * rank);
    endpoints.emplace_back(10 * rank);
  }
  std::vector<std::unique_ptr<ComposedCollectives>> composed;
  std::vector<std::string> errors(hosts.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    composed.push_back(std::make_unique<ComposedCollectives>(
        std::make_unique<WireMessages>(wire, rank, ranks), global_ranks, use,
        host_of(hosts, rank, use, endpoints)));
  }
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto place = static_cast<std::size_t>(rank);
      errors[place] = message_of([&] { of_rank(*composed[place], rank); });
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_FALSE(wire.was_overrun());
  return errors;
}

template <typename OfRank>
std::vector<std::string> run(const Hosts& hosts, MessageStaging::Use use, const OfRank& of_rank) {
  Wire wire;
  return run(wire, hosts, use, of_rank);
}

// Few enough for a test, and on both sides of what a first message, a piece and the ring hold.
std::vector<std::size_t> sizes_of(int ranks) {
  const MessageStaging staging(ranks, MessageStaging::Use::Reductions);
  return {
      0, 4, 1000, staging.inline_bytes, staging.inline_bytes + 4, 10 * staging.piece_bytes + 12};
}

std::vector<float> values(std::size_t numel, int seed) {
  std::vector<float> found(numel);
  for (std::size_t i = 0; i < numel; ++i) {
    found[i] = 0.1f * static_cast<float>((i * 7 + static_cast<std::size_t>(seed) * 13) % 1000);
  }
  return found;
}

const std::string kWhat = "the collective of a test";

class Composed : public testing::TestWithParam<Hosts> {};

TEST_P(Composed, AllGathersPutEveryInputInItsPlace) {
  const auto ranks = static_cast<int>(GetParam().size());
  const auto errors =
      run(GetParam(), MessageStaging::Use::Gathers, [&](ComposedCollectives& composed, int rank) {
        for (const std::size_t bytes : sizes_of(ranks)) {
          const std::vector<float> input = values(bytes / 4, rank);
          std::vector<float> all(input.size() * static_cast<std::size_t>(ranks), -1.0f);
          composed.all_gather({kWhat, bytes}, input.data(), all.data(), bytes);
          for (int from = 0; from < ranks; ++from) {
            const auto place = static_cast<std::size_t>(from);
            const std::vector<float> one = values(input.size(), from);
            FSDP_CHECK(std::equal(one.begin(), one.end(), all.data() + place * one.size()), "rank ",
                       from, "'s input of ", bytes, " bytes arrived wrong");
          }
        }
      });
  EXPECT_EQ(errors, std::vector<std::string>(errors.size(), kNothingThrown));
}

TEST_P(Composed, SumsAreThoseInRankOrder) {
  const auto ranks = static_cast<int>(GetParam().size());
  const auto errors = run(
      GetParam(), MessageStaging::Use::Reductions, [&](ComposedCollectives& composed, int rank) {
        for (const std::size_t bytes : sizes_of(ranks)) {
          const std::size_t numel = bytes / 4;
          const std::size_t before = static_cast<std::size_t>(rank) * numel;
          const std::vector<float> input = values(numel * static_cast<std::size_t>(ranks), rank);
          std::vector<float> output(numel, -1.0f);
          composed.reduce_scatter({kWhat, bytes}, input.data(), output.data(), numel,
                                  DType::Float32);
          std::vector<std::vector<float>> inputs;
          std::vector<const void*> sources;
          for (int from = 0; from < ranks; ++from) {
            inputs.push_back(values(numel * static_cast<std::size_t>(ranks), from));
          }
          for (const std::vector<float>& of_rank : inputs) {
            sources.push_back(of_rank.data() + before);
          }
          std::vector<float> expected(numel);
          sum_in_rank_order(sources, expected.data(), numel, DType::Float32);
          FSDP_CHECK(output == expected, "the sum of ", bytes, " bytes is wrong");
        }
      });
  EXPECT_EQ(errors, std::vector<std::string>(errors.size(), kNothingThrown));
}

TEST_P(Composed, AllReducesLeaveTheSumInRankOrderOnEveryRank) {
  const auto ranks = static_cast<int>(GetParam().size());
  const auto errors = run(
      GetParam(), MessageStaging::Use::Reductions, [&](ComposedCollectives& composed, int rank) {
        for (const std::size_t bytes : sizes_of(ranks)) {
          const std::size_t numel = bytes / 4;
          std::vector<std::vector<float>> inputs;
          std::vector<const void*> sources;
          for (int from = 0; from < ranks; ++from) {
            inputs.push_back(values(numel, from));
          }
          for (const std::vector<float>& of_rank : inputs) {
            sources.push_back(of_rank.data());
          }
          std::vector<float> expected(numel);
          sum_in_rank_order(sources, expected.data(), numel, DType::Float32);
          std::vector<float> data = values(numel, rank);
          composed.all_reduce({kWhat, bytes}, data.data(), numel, DType::Float32);
          FSDP_CHECK(data == expected, "the sum of ", bytes, " bytes is wrong");
        }
      });
  EXPECT_EQ(errors, std::vector<std::string>(errors.size(), kNothingThrown));
}

INSTANTIATE_TEST_SUITE_P(Ranks, Composed,
                         testing::Values(single_ranks(1), single_ranks(2), single_ranks(3),
                                         single_ranks(5)));
INSTANTIATE_TEST_SUITE_P(Hosts, Composed,
                         testing::Values(Hosts{0, 0, 1, 1}, Hosts{0, 1, 0, 1}, Hosts{0, 0, 0, 1},
                                         Hosts{2, 0, 0, 1, 2}, Hosts{0, 0}));

// Every two ranks of different hosts also exchange one header.
TEST(ComposedOnHosts, GatheredInputsCrossBetweenTwoHostsOnce) {
  const Hosts hosts = {0, 0, 0, 1, 1, 2};
  for (const std::size_t bytes : {std::size_t{400}, std::size_t{400000}}) {
    Wire wire;
    run(wire, hosts, MessageStaging::Use::Gathers, [&](ComposedCollectives& composed, int) {
      std::vector<char> input(bytes);
      std::vector<char> output(hosts.size() * bytes);
      composed.all_gather({kWhat, 0}, input.data(), output.data(), bytes);
    });
    for (int owner = 0; owner < 6; ++owner) {
      std::map<int, std::size_t> inputs;  // by host
      for (int to = 0; to < 6; ++to) {
        const std::size_t sent = wire.bytes_from(owner, to);
        const bool crosses =
            hosts[static_cast<std::size_t>(owner)] != hosts[static_cast<std::size_t>(to)];
        ASSERT_GE(sent, crosses ? MessageStaging::kHeaderBytes : 0);
        inputs[hosts[static_cast<std::size_t>(to)]] +=
            sent - (crosses ? MessageStaging::kHeaderBytes : 0);
      }
      for (const auto& [host, arrived] : inputs) {
        EXPECT_EQ(arrived, host == hosts[static_cast<std::size_t>(owner)] ? 0 : bytes);
      }
    }
  }
}

TEST(ComposedOnHosts, SegmentsForRanksOfTheSameHostDoNotTravel) {
  const Hosts hosts = {0, 0, 1};
  Wire wire;
  run(wire, hosts, MessageStaging::Use::Reductions, [&](ComposedCollectives& composed, int) {
    std::vector<float> input(300000);
    std::vector<float> output(100000);
    composed.reduce_scatter({kWhat, 0}, input.data(), output.data(), output.size(), DType::Float32);
  });
  EXPECT_EQ(wire.bytes_from(0, 1), 0u);
  EXPECT_EQ(wire.bytes_from(1, 0), 0u);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(wire.bytes_from(rank, 2), 400000 + MessageStaging::kHeaderBytes);
    EXPECT_EQ(wire.bytes_from(2, rank), 400000 + MessageStaging::kHeaderBytes);
  }
}

TEST(ComposedOnHosts, RanksGatherInPlaceInMemoryOfTheHost) {
  constexpr std::size_t kBytes = std::size_t{1} << 20;
  const auto errors =
      run({0, 0, 1, 1}, MessageStaging::Use::Gathers, [&](ComposedCollectives& composed, int rank) {
        const std::shared_ptr<void> output = composed.host()->allocate(4 * kBytes);
        auto* const all = static_cast<char*>(output.get());
        char* const mine = all + static_cast<std::size_t>(rank) * kBytes;
        std::memset(mine, 1 + rank, kBytes);
        composed.all_gather({kWhat, 0}, mine, all, kBytes);
        for (int from = 0; from < 4; ++from) {
          const char* part = all + static_cast<std::size_t>(from) * kBytes;
          FSDP_CHECK(std::count(part, part + kBytes, 1 + from) == kBytes, "rank ", from,
                     "'s input arrived wrong");
        }
      });
  EXPECT_EQ(errors, std::vector<std::string>(errors.size(), kNothingThrown));
}

TEST(ComposedErrors, RanksInDifferentCollectivesNameBoth) {
  const std::string other = "the other collective";
  const auto errors = run(
      single_ranks(3), MessageStaging::Use::Gathers, [&](ComposedCollectives& composed, int rank) {
        const std::size_t bytes = rank == 1 ? 4000000 : 400000;
        std::vector<char> input(bytes);
        std::vector<char> output(3 * bytes);
        composed.all_gather({rank == 1 ? other : kWhat, 0}, input.data(), output.data(), bytes);
      });
  for (const int rank : {0, 2}) {
    EXPECT_NE(
        errors[static_cast<std::size_t>(rank)].find(
            "this rank is in the collective of a test (400000 bytes of each rank, number 1 of "
            "its lane), and rank 10 is in the other collective (4000000 bytes"),
        std::string::npos)
        << errors[static_cast<std::size_t>(rank)];
  }
  EXPECT_NE(errors[1].find("this rank is in the other collective"), std::string::npos) << errors[1];
}

TEST(ComposedErrors, EqualSizesOfDifferentUnitsDiffer) {
  const auto errors =
      run(single_ranks(2), MessageStaging::Use::Reductions,
          [&](ComposedCollectives& composed, int rank) {
            std::vector<float> input(20);
            std::vector<float> output(10);
            const auto tag = static_cast<std::uint64_t>(rank);
            composed.reduce_scatter({kWhat, tag}, input.data(), output.data(), 10, DType::Float32);
          });
  EXPECT_NE(errors[0].find("rank 10 is in the collective"), std::string::npos) << errors[0];
}

// `run` fails if a rank receives more than it has room for.
TEST(ComposedErrors, AllReducesOfOtherSizesDiffer) {
  for (const std::size_t larger : {std::size_t{20}, std::size_t{200000}}) {
    const auto errors =
        run(single_ranks(2), MessageStaging::Use::Reductions,
            [&](ComposedCollectives& composed, int rank) {
              std::vector<float> data(rank == 0 ? 10 : larger);
              composed.all_reduce({kWhat, 0}, data.data(), data.size(), DType::Float32);
            });
    EXPECT_NE(errors[0].find("(40 bytes of each rank, number 1 of its lane), and rank 10 is in"),
              std::string::npos)
        << errors[0];
    EXPECT_NE(errors[1].find("and rank 0 is in"), std::string::npos) << errors[1];
  }
}

TEST(ComposedErrors, GivingUpEndsTheWaitThatRunsAndAllLaterOnes) {
  const std::string reason = "ranks wait for each other";
  Wire wire;
  ComposedCollectives composed(std::make_unique<WireMessages>(wire, 0, 2), {0, 1},
                               MessageStaging::Use::Gathers);
  std::vector<char> output(2);
  const auto gather = [&] { composed.all_gather({kWhat, 0}, kWhat.data(), output.data(), 1); };
  std::string error;
  std::thread waits([&] { error = message_of(gather); });
  composed.give_up(reason);
  waits.join();
  EXPECT_EQ(error, reason);
  EXPECT_EQ(message_of(gather), reason);
}

TEST(ComposedErrors, ARankInAnotherCollectiveIsNamedOnItsHostAndOnOthers) {
  const std::string other = "the other collective";
  const auto errors =
      run({0, 0, 1}, MessageStaging::Use::Gathers, [&](ComposedCollectives& composed, int rank) {
        std::vector<char> input(40);
        std::vector<char> output(120);
        const auto tag = static_cast<std::uint64_t>(rank == 1);
        composed.all_gather({rank == 1 ? other : kWhat, tag}, input.data(), output.data(), 40);
      });
  EXPECT_NE(errors[0].find("this rank issued the collective of a test, an all-gather of 40 bytes "
                           "(bytes), and rank 10 issued the other collective"),
            std::string::npos)
      << errors[0];
  EXPECT_NE(errors[2].find("rank 10 is in the other collective"), std::string::npos) << errors[2];
}

TEST(ComposedErrors, AFailureReachesTheRanksOfItsHost) {
  const std::string reason = "the network is down";
  const auto errors =
      run({0, 0, 1}, MessageStaging::Use::Reductions, [&](ComposedCollectives& composed, int rank) {
        if (rank == 1) {
          composed.give_up(reason);
        }
        if (rank != 0) {
          return;
        }
        std::vector<float> input(30);
        std::vector<float> output(10);
        composed.reduce_scatter({kWhat, 0}, input.data(), output.data(), 10, DType::Float32);
      });
  EXPECT_EQ(errors[0], reason);
}

TEST(MessageStaging, DependsOnRanksAlone) {
  using Use = MessageStaging::Use;
  EXPECT_EQ(MessageStaging(1, Use::Gathers).bytes, 0u);
  EXPECT_EQ(MessageStaging(1, Use::Reductions).bytes, 0u);
  const MessageStaging two(2, Use::Reductions);
  EXPECT_EQ(two.piece_bytes, std::size_t{1} << 20);
  EXPECT_EQ(two.inline_bytes, std::size_t{32} << 10);
  for (const int ranks : {2, 3, 8, 17}) {
    const MessageStaging staging(ranks, Use::Reductions);
    EXPECT_EQ(staging.piece_bytes % 64, 0u);
    EXPECT_LT(staging.bytes, std::size_t{8} << 20);
  }
}

}  // namespace
}  // namespace fsdp::test
