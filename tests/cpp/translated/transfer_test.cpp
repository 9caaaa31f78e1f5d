// The kernels of simulated collectives move what they are told to, and end when they are told to.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "device/cuda_transfer.h"
#include "launches.h"

namespace fsdp {
namespace {

constexpr std::uint64_t kStep = 200;  // nanoseconds that a waiting thread sleeps at a time
constexpr std::chrono::nanoseconds kDuration{20000};

class Transfer : public ::testing::Test {
 protected:
  // Returns the nanoseconds that the launches take.
  std::uint64_t run(const std::vector<Move>& moves, int multiprocessors = 2) {
    const std::uint64_t before = test::gpu_clock().read();
    launch_transfer(nullptr, kDuration, moves, multiprocessors);
    return test::gpu_clock().read() - before;
  }

  static std::vector<unsigned char> numbered(std::size_t bytes) {
    std::vector<unsigned char> made(bytes);
    for (std::size_t i = 0; i < bytes; ++i) {
      made[i] = static_cast<unsigned char>(i * 31 + (i >> 8));
    }
    return made;
  }

  InlineStream compute_{std::chrono::milliseconds(60000)};
  test::LaunchesOn here_{compute_};
};

TEST_F(Transfer, WithoutMovesIsADelay) {
  const std::uint64_t took = run({});
  EXPECT_GE(took, 20000u);
  EXPECT_LE(took, 20000u + kStep);
}

// Slices of 64 KiB, remainders of a slice and of a word, and addresses of any alignment.
TEST_F(Transfer, MovesEveryByteInTheTimeItIsGiven) {
  for (const std::size_t bytes : {1u, 15u, 16u, 4096u, 8208u, 65536u, 65552u, 200000u, 131071u}) {
    for (const std::size_t shift : {0u, 1u, 16u}) {
      SCOPED_TRACE(testing::Message() << bytes << " bytes, shifted by " << shift);
      const auto source = numbered(bytes + shift);
      std::vector<unsigned char> destination(bytes + 1, 0xff);
      const std::uint64_t took = run({{source.data() + shift, destination.data(), bytes}});
      EXPECT_TRUE(std::equal(source.begin() + shift, source.end(), destination.begin()));
      EXPECT_EQ(destination.back(), 0xff);
      EXPECT_GE(took, 20000u);
      EXPECT_LE(took, 20000u + kStep);
    }
  }
}

TEST_F(Transfer, MovesPiecesAndWritesOnlyTheOneThatIsAskedFor) {
  constexpr std::size_t kPiece = 70000;
  const auto source = numbered(3 * kPiece);
  std::vector<unsigned char> destination(3 * kPiece, 0xff);
  Move move{source.data(), destination.data(), kPiece, 3, kPiece, kPiece};
  move.written_piece = 1;
  run({move});
  EXPECT_TRUE(std::all_of(destination.begin(), destination.begin() + kPiece,
                          [](unsigned char byte) { return byte == 0xff; }));
  EXPECT_TRUE(std::equal(source.begin() + kPiece, source.begin() + 2 * kPiece,
                         destination.begin() + kPiece));
  EXPECT_TRUE(std::all_of(destination.begin() + 2 * kPiece, destination.end(),
                          [](unsigned char byte) { return byte == 0xff; }));
  move.written_piece = Move::kAllPieces;
  run({move});
  EXPECT_EQ(destination, source);
}

// More moves than one launch takes. Each launch gets its share of the time.
TEST_F(Transfer, MovesAsManyAsItGets) {
  constexpr std::size_t kMoves = 100;
  const auto source = numbered(kMoves * 48);
  std::vector<unsigned char> destination(source.size(), 0xff);
  std::vector<Move> moves;
  for (std::size_t i = 0; i < kMoves; ++i) {
    moves.push_back({source.data() + i * 48, destination.data() + i * 48, 48});
  }
  const std::size_t before = test::launches();
  const std::uint64_t took = run(moves);
  EXPECT_EQ(test::launches() - before, 3u);
  EXPECT_EQ(destination, source);
  EXPECT_GE(took + 3, 20000u);
  EXPECT_LE(took, 20000u + 3 * kStep);
}

TEST_F(Transfer, ByEnginesCopiesAndWaitsForTheRestOfItsTime) {
  const auto source = numbered(96);
  std::vector<unsigned char> destination(3 * 96, 0xff);
  std::uint64_t start = 0;
  test::gpu_clock().set(500);
  launch_transfer_by_engines(nullptr, kDuration,
                             {{source.data(), destination.data(), 96, 3, 0, 96}}, &start);
  EXPECT_EQ(start, 500u);
  EXPECT_GE(test::gpu_clock().read(), 20500u);
  EXPECT_LE(test::gpu_clock().read(), 20500u + kStep);
  for (int piece = 0; piece < 3; ++piece) {
    EXPECT_TRUE(std::equal(source.begin(), source.end(), destination.begin() + piece * 96));
  }
}

}  // namespace
}  // namespace fsdp
