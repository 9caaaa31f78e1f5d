// A forked child has no workers: streams of its parent throw there, instead of waiting for ever.
#include "device/forks.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "device/host_stream.h"
#include "message_of.h"

namespace fsdp::test {
namespace {

#if !defined(__SANITIZE_THREAD__)  // ThreadSanitizer does not support fork()
constexpr std::chrono::milliseconds kLong{60000};
const std::string kWork = "the work";
const std::string kForked = "was forked off one that runs a sharded model";

// Whether `holds` returns true in a forked child.
bool in_child(const std::function<bool()>& holds) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(holds() ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(Forks, AStreamOfTheParentThrowsInAChild) {
  HostStream stream("parent's", kLong);
  HostEvent event;
  EXPECT_TRUE(in_child([&] {
    return contains(message_of([&] { stream.enqueue([] {}); }), kForked) &&
           contains(message_of([&] { stream.record(event); }), kForked) &&
           contains(message_of([&] { stream.synchronize(); }), kForked) && event.query();
  }));
  stream.synchronize();
}

TEST(Forks, WorkThatTheParentHasIssuedIsNotAwaitedInAChild) {
  HostStream stream("parent's", kLong);
  HostEvent event;
  std::promise<void> go;
  stream.enqueue([&] { go.get_future().wait(); });
  stream.record(event);
  InlineStream compute(kLong);
  EXPECT_TRUE(
      in_child([&] { return contains(message_of([&] { compute.wait(event, kWork); }), kForked); }));
  go.set_value();
  compute.wait(event, kWork);
}

TEST(Forks, AStreamOfTheChildWorks) {
  HostStream of_parent("parent's", kLong);
  // AddressSanitizer's allocator has locks that a fork copies as they are, so the worker is idle.
  of_parent.synchronize();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_TRUE(in_child([] {
    bool has_run = false;
    HostStream stream("child's", kLong);
    stream.enqueue([&] { has_run = true; });
    stream.synchronize();
    return has_run;
  }));
}
#endif

}  // namespace
}  // namespace fsdp::test
