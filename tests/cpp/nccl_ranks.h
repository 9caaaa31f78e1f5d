// Ranks over a library that only looks like NCCL (fake_nccl.h). Each is a thread.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/nccl/nccl.h"
#include "device/host_stream.h"
#include "fake_nccl.h"
#include "message_of.h"

#define EXPECT_SAYS(text, part) EXPECT_TRUE(::fsdp::test::contains(text, part)) << (text)

namespace fsdp::test {

using std::chrono::milliseconds;

constexpr const char* kLibrary = FAKE_NCCL_LIBRARY;

inline FakeNccl& fake() {
  static void* const handle = dlopen(kLibrary, RTLD_NOW);
  return *reinterpret_cast<FakeNcclFunction*>(dlsym(handle, "fake_nccl"))();
}

// A stream that runs nothing until it is opened.
struct BlockedStream {
  BlockedStream() {
    stream.enqueue([future = opened.get_future().share()] { future.wait(); });
  }
  void open() { opened.set_value(); }

  std::promise<void> opened;
  HostStream stream{"gather", milliseconds(20000)};
};

inline void wait_for_error(Communicator& communicator) {
  while (communicator.async_error().empty()) {
    std::this_thread::sleep_for(milliseconds(1));
  }
}

// As in the product, it outlives the threads of communicators that are left behind.
inline nccl::Api& find_fake_library() {
  static auto* const found = new std::deque<nccl::Api>;
  setenv("FSDP_EXT_NCCL_SO", kLibrary, 1);
  found->push_back(nccl::find_library({}));
  unsetenv("FSDP_EXT_NCCL_SO");
  return found->back();
}

// How many ranks have come to each meeting, by its name.
class Meetings {
 public:
  std::atomic<int>& at(const std::string& name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return come_[name];
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::atomic<int>> come_;
};

class NcclRanks : public ::testing::Test {
 protected:
  void SetUp() override {
    fake().drain_calls();
    live_before_ = fake().live_communicators;
    fake().deregistered_amid_collectives = 0;
    fake().erasable_flags = 0;
    fake().copies_that_hang = 0;
  }

  void TearDown() override {
    fake().async_error = 0;
    fake().init_result = 0;
    fake().register_result = 0;
    fake().register_fails_on_rank = -1;
    fake().others_wait_for_failed = false;
    fake().revoking_ends_calls = true;
    fake().revoking_hangs = false;
    fake().has_windows = true;
    fake().rank_without_windows = -1;
    fake().gathers_nothing = false;
    fake().collectives_hang = false;
    fake().slow_to_deregister = -1;
    fake().polls_in_progress = 2;
    fake().nodes = 1;
    fake().can_revoke = true;
    use_version(22809);
    // The count includes revoked communicators, aborted or not. Communicators whose peers have
    // gone are closed later, in other threads.
    const int expected = live_before_ + left_behind_;
    for (int i = 0; i < 5000 && fake().live_communicators != expected; ++i) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_EQ(fake().live_communicators, expected);
    EXPECT_EQ(fake().live_buffers, 0);
    EXPECT_EQ(fake().registered_buffers, 0);
    EXPECT_EQ(fake().misplaced_windows, 0);
    EXPECT_EQ(fake().deregistered_amid_collectives, 0);
    EXPECT_EQ(fake().erasable_flags, 0);
    EXPECT_EQ(fake().copies_that_hang, 0);
  }

  struct Rank {
    int number;
    Device& device;
    Communicator& gather;
    Communicator& reduce;
    Stream& stream;  // the calling thread
  };

  void use_version(int version) {
    fake().version = version;
    api_.version = version;
  }

  std::function<std::string(const std::string&)> ask_others_;  // NcclOptions::ask_others
  bool ends_both_lanes_ = false;                               // by NcclOptions::other_lane
  int driver_ = 13000;

  // Runs `body` on a thread per rank and returns the message of each.
  std::vector<std::string> run_ranks(int size, const std::function<void(Rank)>& body,
                                     milliseconds timeout = milliseconds(20000),
                                     bool register_buffers = true,
                                     const nccl::LaneSettings& gathers = {},
                                     const nccl::LaneSettings& reductions = {}) {
    nccl::UniqueId id;
    api_.GetUniqueId(&id);
    const auto meetings = std::make_shared<Meetings>();
    std::vector<std::future<std::string>> ranks;
    for (int r = 0; r < size; ++r) {
      ranks.push_back(std::async(std::launch::async, [=] {
        return message_of([&] {
          const auto device = make_host_device(milliseconds(20000));
          NcclOptions options{r, size, timeout, register_buffers, gathers, reductions};
          options.ask_others = ask_others_;
          if (ends_both_lanes_) {
            options.other_lane =
                std::make_shared<DeadlockThread>(nullptr, nullptr, r, milliseconds(1));
          }
          options.nodes = fake().nodes;
          options.driver = driver_;
          options.meet = [meetings, size](const std::string& name, const auto& given_up) {
            std::atomic<int>& come = meetings->at(name);
            for (++come; come < size && !given_up();) {
              std::this_thread::sleep_for(milliseconds(1));
            }
          };
          const auto [gather, reduce] = make_nccl_communicators(api_, *device, id, options);
          body({r, *device, *gather, *reduce, device->compute_stream()});
        });
      }));
    }
    std::vector<std::string> messages;
    for (auto& rank : ranks) {
      messages.push_back(rank.get());
    }
    return messages;
  }

  nccl::Api& api_ = find_fake_library();
  int live_before_ = 0;
  int left_behind_ = 0;
};

}  // namespace fsdp::test
