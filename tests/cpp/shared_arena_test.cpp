// The arena of shared memory: allocation, other processes, and errors.
#include "comm/shared_memory/shared_arena.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "message_of.h"

namespace fsdp::test {
namespace {

TEST(Arena, GivesZeroedMemoryAndReusesWhatIsFreed) {
  const auto arena = Arena::of_this_process();
  const std::size_t before = arena->allocated_bytes();
  void* first = nullptr;
  for (int round = 0; round < 2; ++round) {
    const auto a = Arena::allocate(arena, 10000);
    const auto b = Arena::allocate(arena, std::size_t{3} << 20);
    const auto c = Arena::allocate(arena, 1);
    EXPECT_EQ(arena->allocated_bytes() - before, 12288 + (std::size_t{3} << 20) + 4096);
    EXPECT_EQ(arena->offset_of(b.get()) % (std::size_t{2} << 20), 0U);
    const auto* bytes = static_cast<const char*>(a.get());
    EXPECT_TRUE(std::all_of(bytes, bytes + 10000, [](char byte) { return byte == 0; }));
    std::memset(a.get(), 7, 10000);
    if (round == 0) {
      first = a.get();
    }
    EXPECT_EQ(a.get(), first) << "the first free range is used again";
  }
  EXPECT_EQ(arena->allocated_bytes(), before);
}

TEST(Arena, JoinsRangesThatAreFreedInAnyOrder) {
  const auto arena = Arena::of_this_process();
  const std::size_t before = arena->allocated_bytes();
  std::mt19937 random(0);
  std::vector<std::shared_ptr<void>> buffers;
  for (int i = 0; i < 300; ++i) {
    if (buffers.empty() || random() % 3 != 0) {
      const std::size_t bytes = 1 + random() % 100000;
      buffers.push_back(Arena::allocate(arena, bytes));
      const auto* begin = static_cast<const char*>(buffers.back().get());
      EXPECT_TRUE(std::all_of(begin, begin + bytes, [](char byte) { return byte == 0; }));
      std::memset(buffers.back().get(), 1, bytes);
    } else {
      std::swap(buffers[random() % buffers.size()], buffers.back());
      buffers.pop_back();
    }
  }
  buffers.clear();
  EXPECT_EQ(arena->allocated_bytes(), before);
}

TEST(Arena, ContainsItsOwnMemoryOnly) {
  const auto arena = Arena::of_this_process();
  const auto memory = Arena::allocate(arena, 4096);
  const std::vector<char> elsewhere(1);
  EXPECT_TRUE(arena->contains(memory.get(), 4096));
  EXPECT_FALSE(arena->contains(nullptr, 1));
  EXPECT_FALSE(arena->contains(elsewhere.data(), 1));
}

TEST(Arena, SaysHowMuchMemoryIsMissing) {
  const auto arena = Arena::of_this_process();
  const std::string message =
      message_of([&] { Arena::allocate(arena, arena->address().bytes + 1); });
  EXPECT_TRUE(contains(message, "more bytes of shared memory")) << message;
}

#if !defined(__SANITIZE_THREAD__)  // ThreadSanitizer does not support fork()
// Runs `body` in a forked child and returns what it returns.
int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    int result = 99;
    try {
      result = body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    ::_exit(result);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Arena, CanBeReadByOtherProcesses) {
  const auto arena = Arena::of_this_process();
  const auto memory = Arena::allocate(arena, 4096);
  std::strcpy(static_cast<char*>(memory.get()), "hello");
  const auto address = arena->address();
  const auto offset = arena->offset_of(memory.get());
  EXPECT_EQ(in_child([&] {
              const auto view = ArenaView::of(address);
              const char* text = view->base() + offset;
              return text != memory.get() && std::strcmp(text, "hello") == 0 ? 0 : 1;
            }),
            0);
}

TEST(Arena, KeepsItsMemoryWhenAForkedChildFreesIt) {
  const auto arena = Arena::of_this_process();
  auto memory = Arena::allocate(arena, 4096);
  auto* bytes = static_cast<char*>(memory.get());
  bytes[0] = 5;
  EXPECT_EQ(in_child([&] {
              memory.reset();
              const auto own = Arena::of_this_process();
              const auto mine = Arena::allocate(own, 4096);
              static_cast<char*>(mine.get())[0] = 9;
              return own->address().process.pid == ::getpid() && mine.get() != bytes ? 0 : 1;
            }),
            0);
  EXPECT_EQ(bytes[0], 5);
}

TEST(Arena, CannotBeReadByAnotherUser) {
  if (::getuid() != 0) {
    GTEST_SKIP() << "needs root, to become another user";
  }
  const auto address = Arena::of_this_process()->address();
  EXPECT_EQ(in_child([&] {
              if (::setgid(65534) != 0 || ::setuid(65534) != 0) {
                return 2;
              }
              const std::string message = message_of([&] { ArenaView::of(address); });
              return contains(message, "Run all ranks as one user") ? 0 : 1;
            }),
            0);
}

TEST(Arena, KnowsTheStateOfAProcess) {
  ProcessIdentity child;
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::pause();
    ::_exit(0);
  }
  int status = 0;
  child = identity_of_this_process();
  EXPECT_EQ(state_of(child), ProcessState::Runs);
  child.started += 1;
  EXPECT_EQ(state_of(child), ProcessState::Ended) << "another process with the same pid";
  ::kill(pid, SIGKILL);
  ::waitpid(pid, &status, 0);
  child.pid = pid;
  EXPECT_EQ(state_of(child), ProcessState::Ended);
}
#endif

TEST(Arena, AProcessThatCannotBeInspectedCountsAsRunning) {
  const ProcessIdentity here = identity_of_this_process();
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{0, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const ProcessState state = state_of(here);
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(state, ProcessState::Runs);
}

TEST(Arena, LooksUpProcessesOfItsOwnHostAlone) {
  const ProcessIdentity here = identity_of_this_process();
  EXPECT_TRUE(can_look_up(here));
  ProcessIdentity elsewhere = here;
  elsewhere.host_name[0] = '?';  // a machine that was cloned from this one
  EXPECT_FALSE(can_look_up(elsewhere));
  elsewhere = here;
  elsewhere.host[0] = '?';
  EXPECT_FALSE(can_look_up(elsewhere));
  elsewhere = here;
  elsewhere.pid_namespace += 1;
  EXPECT_FALSE(can_look_up(elsewhere));
}

TEST(ArenaView, SaysWhyAnArenaCannotBeRead) {
  const ArenaAddress here = Arena::of_this_process()->address();
  ArenaAddress elsewhere = here;
  elsewhere.token += 1;
  elsewhere.process.host[0] = '?';
  const auto message = [&] { return message_of([&] { ArenaView::of(elsewhere); }); };
  EXPECT_TRUE(contains(message(), "needs all ranks on one host"));
  elsewhere = here;
  elsewhere.token += 1;
  elsewhere.process.pid_namespace += 1;
  EXPECT_TRUE(contains(message(), "PID namespace"));
  elsewhere = here;
  elsewhere.token += 1;
  EXPECT_TRUE(contains(message(), "something else"));
  elsewhere.fd = 0;  // not an arena, and perhaps not a file
  EXPECT_TRUE(contains(message(), "Shared memory "));
}

// A file that looks like an arena, but for its size or seals. Reading behind the end of a file that
// shrinks would end this process with a SIGBUS.
class FakeArena {
 public:
  FakeArena(std::size_t bytes, unsigned seals) : fd_(::memfd_create("fake", MFD_ALLOW_SEALING)) {
    address_ = Arena::of_this_process()->address();
    address_.token = 4711;
    address_.bytes = bytes;
    address_.fd = fd_;
    EXPECT_EQ(::ftruncate(fd_, static_cast<off_t>(bytes)), 0);
    EXPECT_EQ(::pwrite(fd_, &address_.token, sizeof(address_.token), 0),
              static_cast<ssize_t>(sizeof(address_.token)));
    EXPECT_EQ(::fcntl(fd_, F_ADD_SEALS, seals), 0);
  }
  ~FakeArena() { ::close(fd_); }
  FakeArena(const FakeArena&) = delete;
  FakeArena& operator=(const FakeArena&) = delete;

  ArenaAddress address_;

 private:
  int fd_;
};

constexpr unsigned kAllSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

TEST(Arena, NobodyCanChangeTheSizeOfTheFile) {
  const ArenaAddress here = Arena::of_this_process()->address();
  const int fd = static_cast<int>(here.fd);
  EXPECT_EQ(static_cast<unsigned>(::fcntl(fd, F_GET_SEALS)), kAllSeals);
  EXPECT_NE(::ftruncate(fd, 4096), 0);
  EXPECT_NE(::ftruncate(fd, static_cast<off_t>(here.bytes * 2)), 0);
}

TEST(ArenaView, MapsASealedFileOfTheRightSizeOnly) {
  FakeArena good(1 << 16, kAllSeals);
  EXPECT_EQ(ArenaView::of(good.address_)->bytes(), std::size_t{1} << 16);
  const std::string refusal = "size is sealed";
  for (const unsigned missing : {F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL}) {
    FakeArena unsealed(1 << 16, kAllSeals & ~missing);
    EXPECT_TRUE(contains(message_of([&] { ArenaView::of(unsealed.address_); }), refusal));
  }
  FakeArena other_size(1 << 16, kAllSeals);
  other_size.address_.bytes *= 2;
  EXPECT_TRUE(contains(message_of([&] { ArenaView::of(other_size.address_); }), refusal));
  FakeArena empty(1, kAllSeals);
  EXPECT_TRUE(contains(message_of([&] { ArenaView::of(empty.address_); }), refusal));
}

}  // namespace
}  // namespace fsdp::test
