// A peer that writes anything anywhere: every read ends in a value or an Error, never in a crash.
// AddressSanitizer sees a read outside the peer's memory, which is a heap block of its exact size.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "comm/shared_memory/mailbox.h"
#include "comm/shared_memory/peer_memory.h"
#include "comm/shared_memory/rank_barrier.h"
#include "message_of.h"

namespace fsdp::test {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr int kAttempts = 100000;
#else
constexpr int kAttempts = 3000;
#endif

using Random = std::mt19937_64;

// How many bytes of a mailbox are damaged: all fields, of the long `reason` at the end only a
// start.
constexpr std::size_t kFields = offsetof(Mailbox, reason) + 64;

// Numbers near those that matter, and others.
std::uint64_t number(Random& random, std::uint64_t size) {
  const std::uint64_t special[] = {0,
                                   1,
                                   7,
                                   64,
                                   size,
                                   size - 1,
                                   size / 2,
                                   ~std::uint64_t{0},
                                   std::uint64_t{1} << 63,
                                   std::uint64_t{1} << 32};
  switch (random() % 4) {
    case 0:
      return special[random() % std::size(special)];
    case 1:
      return special[random() % std::size(special)] - random() % 256;
    case 2:
      return size == 0 ? 0 : random() % size;
    default:
      return random();
  }
}

// Changes a few bytes, or words.
void damage(Random& random, void* data, std::size_t size, std::uint64_t length) {
  auto* bytes = static_cast<char*>(data);
  for (std::uint64_t i = random() % 4; i > 0; --i) {
    const std::size_t at = random() % size;
    bytes[at] = static_cast<char>(random());
    const std::uint64_t word = number(random, length);
    std::memcpy(bytes + std::min(at / 8 * 8, size - sizeof(word)), &word, sizeof(word));
  }
}

void fill(Random& random, void* data, std::size_t size) {
  auto* bytes = static_cast<char*>(data);
  std::generate(bytes, bytes + size, [&] { return static_cast<char>(random()); });
}

// A peer's memory, in a heap block of its own.
class Block {
 public:
  explicit Block(std::size_t bytes)
      : base_(static_cast<char*>(::operator new(bytes, std::align_val_t{4096}))), bytes_(bytes) {
    std::memset(base_, 0, bytes);
  }
  ~Block() { ::operator delete(base_, std::align_val_t{4096}); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  PeerMemory memory() const { return {nullptr, base_, bytes_, "rank 1 (process 4711)"}; }
  char* base() { return base_; }

 private:
  char* base_;
  std::size_t bytes_;
};

// Whether Python can make a str of it.
bool is_utf8(const std::string& text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i]);
    const std::size_t length = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    std::uint32_t point = length == 1 ? first : first & (0x7fu >> length);
    if ((length > 1 && (first & 0xc0) != 0xc0) || first > 0xf7 || i + length > text.size()) {
      return false;
    }
    for (std::size_t k = 1; k < length; ++k) {
      const auto next = static_cast<unsigned char>(text[i + k]);
      if ((next & 0xc0) != 0x80) {
        return false;
      }
      point = (point << 6) | (next & 0x3fu);
    }
    const std::uint32_t least[] = {0, 0x80, 0x800, 0x10000};
    if (point < least[length - 1] || point > 0x10ffff || (point >= 0xd800 && point < 0xe000)) {
      return false;
    }
    i += length;
  }
  return true;
}

PeerAddress good_address() {
  PeerAddress address;
  address.arena.process = identity_of_this_process();
  address.arena.token = 4711;
  address.arena.bytes = 1 << 16;
  address.arena.fd = 3;
  address.global_rank = 1;
  return address;
}

TEST(DamagedPeer, AnAddressIsReadOrRefused) {
  Random random(1);
  const std::string good = to_bytes(good_address());
  EXPECT_EQ(to_bytes(parse_address(good)), good);
  int read = 0;
  for (int i = 0; i < kAttempts; ++i) {
    std::string bytes = good;
    if (random() % 8 == 0) {
      bytes.resize(random() % (2 * good.size()));
      fill(random, bytes.data(), bytes.size());
    } else {
      damage(random, bytes.data(), bytes.size(), 1 << 16);
    }
    const std::string message = message_of([&] {
      const PeerAddress address = parse_address(bytes);
      EXPECT_GT(address.arena.process.pid, 0);
      EXPECT_GE(address.arena.fd, 0);
      EXPECT_LT(std::strlen(address.arena.process.host), sizeof(address.arena.process.host));
      EXPECT_LT(std::strlen(address.arena.process.host_name),
                sizeof(address.arena.process.host_name));
      read += 1;
    });
    EXPECT_TRUE(is_utf8(message)) << message;
  }
  EXPECT_GT(read, kAttempts / 10);
  EXPECT_LT(read, kAttempts * 9 / 10);
}

// What a rank reads from its peer in a collective, with the result of each read.
std::uint64_t read_all(const PeerMemory& memory, std::uint64_t offset, std::uint32_t round) {
  const Mailbox& mailbox = mailbox_in(memory, offset);
  const std::string texts[] = {reason_in(mailbox), mailbox.activity.label(),
                               message_of([&] { state_in(mailbox, memory.who); }),
                               message_of([&] { has_reached(mailbox.posted, round, "rank 1"); })};
  for (const std::string& text : texts) {
    EXPECT_TRUE(is_utf8(text)) << text;
    EXPECT_LE(text.size(), sizeof(Mailbox::reason));
  }
  const Operation operation = operation_in(mailbox, round);
  EXPECT_TRUE(is_utf8(operation.describe()));
  const char* input = input_in(memory, operation);
  std::uint64_t sum = 0;
  for (const char* byte = input - operation.before; byte < input + operation.after; ++byte) {
    sum += static_cast<unsigned char>(*byte);
  }
  return sum;
}

TEST(DamagedPeer, AMailboxIsReadOrRefused) {
  Random random(2);
  int read = 0;
  for (int i = 0; i < kAttempts; ++i) {
    const std::size_t bytes = 8 + random() % (4 * sizeof(Mailbox));
    Block block(bytes);
    std::uint64_t offset = number(random, bytes);
    if (random() % 2 == 0 && bytes >= sizeof(Mailbox)) {
      offset = random() % (bytes - sizeof(Mailbox) + 1) / alignof(Mailbox) * alignof(Mailbox);
      auto* mailbox = new (block.base() + offset) Mailbox;
      for (Operation& operation : mailbox->operations) {
        operation.offset = number(random, bytes);
        operation.before = number(random, bytes) % 64;
        operation.after = number(random, bytes);
      }
    } else {
      fill(random, block.base(), bytes);
    }
    const std::size_t damaged = std::min(bytes, kFields);
    damage(random, block.base() + std::min<std::uint64_t>(offset, bytes - damaged), damaged, bytes);
    read += message_of([&] { read_all(block.memory(), offset, random() % 8); }) == kNothingThrown;
  }
  EXPECT_GT(read, kAttempts / 50) << "some are read";
  EXPECT_LT(read, kAttempts * 9 / 10) << "some are refused";
}

// The same by a rank in a collective, which reads the peer's input.
TEST(DamagedPeer, ACollectiveEndsInAnError) {
  constexpr std::size_t kBytes = 32768;
  constexpr std::uint64_t kInput = 2 * sizeof(Mailbox);
  static_assert(kInput + 64 <= kBytes);
  static const std::string kLabel = "the all-gather of unit 'layer'";
  Random random(3);
  Operation mine;
  mine.kind = Operation::Kind::AllGather;
  mine.bytes = mine.after = 64;
  int completed = 0;
  for (int i = 0; i < kAttempts; ++i) {
    Block block(kBytes);
    Mailbox own;
    PeerAddress address = good_address();
    Peer peer(address, block.memory(), 0);
    auto* theirs = new (block.base()) Mailbox;
    theirs->posted = theirs->finished = 1;
    theirs->operations[1] = mine;
    theirs->operations[1].tag = 0;
    theirs->operations[1].offset = kInput;
    damage(random, theirs, kFields, kBytes);
    if (random() % 4 == 0) {
      damage(random, &theirs->operations[1], sizeof(Operation), kBytes);
    }
    RankBarrier rank(own, {peer}, 0, std::chrono::milliseconds(0));
    rank.begin_collective(kLabel);
    const std::string message = message_of([&] {
      rank.post(mine);
      char copy[64];
      std::memcpy(copy, rank.wait_for_input(0, mine), sizeof(copy));
      rank.finish();
      completed += 1;
    });
    EXPECT_TRUE(is_utf8(message)) << message;
  }
  EXPECT_GT(completed, kAttempts / 10);
  EXPECT_LT(completed, kAttempts * 9 / 10);
}

TEST(DamagedPeer, TheMessageNamesTheRankAndWhatIsWrong) {
  Block block(16384);
  const PeerMemory memory = block.memory();
  const auto error_at = [&](std::uint64_t offset) {
    return message_of([&] { mailbox_in(memory, offset); });
  };
  EXPECT_TRUE(contains(error_at(20000), "rank 1 (process 4711) has its mailbox at offset 20000"));
  EXPECT_TRUE(contains(error_at(20000), "outside its 16384 bytes of shared memory"));
  EXPECT_TRUE(contains(error_at(~std::uint64_t{0}), "outside its 16384 bytes"));
  EXPECT_TRUE(contains(error_at(8), "no multiple of 64"));
  auto* mailbox = new (block.base()) Mailbox;
  mailbox->state = static_cast<Mailbox::State>(9);
  EXPECT_TRUE(contains(message_of([&] { state_in(*mailbox, memory.who); }), "unknown state 9"));
  Operation operation;
  operation.dtype = DType::Float32;
  operation.offset = 6;
  EXPECT_TRUE(contains(message_of([&] { input_in(memory, operation); }), "no multiple of 4"));
  EXPECT_TRUE(contains(message_of([&] { has_reached(9, 7, memory.who); }), "is in round 9"));
  std::memset(mailbox->reason, 'x', sizeof(mailbox->reason));
  mailbox->reason[1] = '\xff';
  EXPECT_EQ(reason_in(*mailbox).size(), sizeof(mailbox->reason)) << "it has no end";
  EXPECT_EQ(reason_in(*mailbox).substr(0, 3), "x?x");
}

}  // namespace
}  // namespace fsdp::test
