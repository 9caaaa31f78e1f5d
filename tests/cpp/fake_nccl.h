// A library with NCCL's interface, so that csrc/comm/nccl* can be tested without a GPU. Its ranks
// are threads of one process, its memory is the host's, and its collectives run in the call.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "comm/nccl/nccl_api.h"

namespace fsdp::test {

// What a test can set and read.
struct FakeNccl {
  std::atomic<int> version{22809};
  std::atomic<int> polls_in_progress{2};  // how many polls of a non-blocking call are in progress
  std::atomic<int> init_result{0};        // what the polls after those return
  std::atomic<int> async_error{0};        // of every blocking communicator
  std::atomic<int> register_result{0};
  std::atomic<int> register_fails_on_rank{-1};
  std::atomic<bool> others_wait_for_failed{false};  // while they register, until they are aborted
  std::atomic<int> allocations_to_fail{0};
  std::atomic<std::size_t> most_bytes{~std::size_t{0}};  // of one allocation
  std::atomic<int> nodes{1};                             // of the ranks
  std::atomic<bool> has_windows{true};  // between these ranks; false: they are null
  std::atomic<int> rank_without_windows{-1};
  std::atomic<bool> gathers_nothing{false};  // as after an abort that NCCL does not report
  std::atomic<bool> can_revoke{true};
  std::atomic<bool> revoking_ends_calls{true};  // not those that make connections, in 2.28
  std::atomic<bool> revoking_hangs{false};      // and ends no call
  std::atomic<bool> collectives_hang{false};    // until the communicator is aborted
  std::atomic<int> live_communicators{0};
  std::atomic<int> live_buffers{0};
  std::atomic<int> registered_buffers{0};
  std::atomic<int> overlapping_windows{0};  // that one communicator or another has had already
  std::atomic<int> slow_to_deregister{-1};  // a rank
  std::atomic<int> deregistered_amid_collectives{0};  // while another rank was in one
  std::atomic<int> misplaced_windows{0};              // whose offsets differ between ranks
  // Of all-gathers and reduce-scatters on registered buffers alone, and of the others.
  std::atomic<int> registered_gathers{0};
  std::atomic<int> plain_gathers{0};
  std::atomic<int> registered_reductions{0};
  std::atomic<int> plain_reductions{0};
  // What NCCL would run, by the rules of docs/design/cuda.md: Note [paths of lanes].
  std::atomic<int> copied_gathers{0};     // by copy engines
  std::atomic<int> copies_that_hang{0};   // of those
  std::atomic<int> symmetric_kernels{0};  // that read and write windows
  std::atomic<int> switch_gathers{0};     // with the policy "efficiency", by the switch
  std::atomic<int> ring_gathers{0};       // with that policy, by a ring
  std::atomic<int> erasable_flags{0};     // of gathers: Note [registration between nodes]
  std::function<void()> before_gather;    // what an all-gather does first; may be empty
  // May be null. Threads that close communicators may outlive a test.
  std::atomic<void (*)()> before_finalize{nullptr};
  const char* last_error = "what NCCL says";
  // Runs a collective in order of its stream. If this or the stream is null, it runs in the call.
  void (*enqueue)(void* stream, std::function<void()> collective) = nullptr;

  void log(const std::string& call) {
    const std::lock_guard<std::mutex> lock(mutex);
    calls.push_back(call);
  }
  std::vector<std::string> drain_calls() {
    const std::lock_guard<std::mutex> lock(mutex);
    return std::move(calls);
  }

  std::mutex mutex;
  std::vector<std::string> calls;
  std::vector<nccl::Config> splits;  // of all ranks, in order of the calls
};

// Exported by the library as "fake_nccl".
using FakeNcclFunction = FakeNccl*();

}  // namespace fsdp::test
