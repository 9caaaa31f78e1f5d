// A translated kernel that does what a GPU would not survive is an error: the tests of the kernels
// would notice it.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>

#include "message_of.h"
#include "ptx.h"

namespace fsdp {
namespace {

using Arguments = std::vector<std::vector<unsigned char>>;

template <typename T>
std::vector<unsigned char> bytes_of(T value) {
  std::vector<unsigned char> bytes(sizeof(value));
  std::memcpy(bytes.data(), &value, sizeof(value));
  return bytes;
}

void run(const std::string& name, const Arguments& arguments) {
  for (const ptx::Kernel& kernel : ptx::kernels()) {
    if (kernel.name == name) {
      ptx::Clock clock;
      return kernel.run({/*index=*/3, 32, /*block=*/1, 2, &clock, &arguments});
    }
  }
  FAIL() << "there is no kernel " << name;
}

TEST(Traps, AnAlignedReadOfABufferIsNoTrap) {
  const auto buffer = std::make_unique<std::uint32_t[]>(4);
  buffer[3] = 7;
  std::uint32_t result = 0;
  run("read_word", {bytes_of(&buffer[3]), bytes_of(&result)});
  EXPECT_EQ(result, 7u);
}

TEST(Traps, AMisalignedReadIsAnError) {
  const auto buffer = std::make_unique<std::uint32_t[]>(4);
  std::uint32_t result = 0;
  const std::string message = test::message_of([&] {
    run("read_word", {bytes_of(reinterpret_cast<char*>(buffer.get()) + 2), bytes_of(&result)});
  });
  EXPECT_EQ(message.rfind("Thread 3 of block 1 has a misaligned load of 4 bytes at 0x", 0), 0u)
      << message;
}

TEST(Traps, AMisalignedWriteIsAnError) {
  std::uint32_t source = 0;
  const auto buffer = std::make_unique<std::uint32_t[]>(4);
  const std::string message = test::message_of([&] {
    run("read_word", {bytes_of(&source), bytes_of(reinterpret_cast<char*>(buffer.get()) + 1)});
  });
  EXPECT_EQ(message.rfind("Thread 3 of block 1 has a misaligned store of 4 bytes at 0x", 0), 0u)
      << message;
}

TEST(TrapsDeathTest, AReadOrAWriteOutsideOfABufferEndsTheProcess) {
  const auto buffer = std::make_unique<std::uint32_t[]>(4);
  std::uint32_t other = 0;
  EXPECT_DEATH(run("read_word", {bytes_of(&buffer[4]), bytes_of(&other)}), "heap-buffer-overflow");
  EXPECT_DEATH(run("read_word", {bytes_of(&other), bytes_of(&buffer[4])}), "heap-buffer-overflow");
}

TEST(Traps, ADivisionByZeroIsAnError) {
  std::uint32_t result = 0;
  run("divide", {bytes_of(std::uint32_t{4}), bytes_of(&result)});
  EXPECT_EQ(result, 3u);
  EXPECT_EQ(
      test::message_of([&] { run("divide", {bytes_of(std::uint32_t{0}), bytes_of(&result)}); }),
      "A kernel divides by zero.");
}

TEST(Traps, AReadBeyondALaunchsArgumentsIsAnError) {
  std::uint64_t result = 0;
  std::vector<unsigned char> argument(16);
  argument[0] = argument[8] = 8;  // the offset to read at, and what is there
  run("read_argument", {argument, bytes_of(&result)});
  EXPECT_EQ(result, 8u);
  argument[0] = 16;
  const std::string message =
      test::message_of([&] { run("read_argument", {argument, bytes_of(&result)}); });
  EXPECT_NE(message.find("a load of 8 bytes outside of the launch's arguments"), std::string::npos)
      << message;
}

}  // namespace
}  // namespace fsdp
