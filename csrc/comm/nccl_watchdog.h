// A thread that watches one NCCL communicator.
//
// Note [watchdog]
// In a step, no host thread waits for a collective, so only the watchdog notices one that hangs. It
// polls NCCL's asynchronous error and the events behind the newest collectives. On an error or a
// timeout it revokes the communicator (or aborts it, where NCCL cannot revoke), which ends the
// kernels that wait for peers. It prints the reason on stderr, and every later call throws. Results
// computed since then must not be used, so the optimizer's step checks, too.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "comm/nccl.h"
#include "comm/nccl_api.h"
#include "device/stream.h"

namespace fsdp {

class NcclWatchdog {
 public:
  // `name` is the communicator's name in messages. Starts the thread.
  NcclWatchdog(const nccl::Api& api, Device& device, nccl::Comm comm, const NcclOptions& options,
               std::string name);
  ~NcclWatchdog();

  NcclWatchdog(const NcclWatchdog&) = delete;
  NcclWatchdog& operator=(const NcclWatchdog&) = delete;

  // While this object lives, the calling thread may block in NCCL; the watchdog limits the time.
  class BlockingCall {
   public:
    BlockingCall(NcclWatchdog& watchdog, const std::string& what);
    ~BlockingCall();
    BlockingCall(const BlockingCall&) = delete;
    BlockingCall& operator=(const BlockingCall&) = delete;

   private:
    NcclWatchdog& watchdog_;
  };

  // Watches the collective that was just issued to `stream`. Messages call it `what`.
  void watch_collective(Stream& stream, const std::string& what);

  // Revokes or aborts the communicator. Only the first call has an effect.
  void abort(const std::string& reason);
  bool has_failed() const { return failed_; }
  std::string error();  // the reason; empty if nothing has failed

  // Whether a CUDA graph has captured a collective. The graph then holds the communicator.
  bool has_captured() const { return captured_; }

  // Ends the thread.
  void stop();

 private:
  struct Outstanding {
    std::unique_ptr<Event> event;  // completes after the collective
    std::string what;
    std::chrono::steady_clock::time_point since;
    bool pending = false;
  };

  void run();
  std::string find_failure();
  const Outstanding* update_oldest_pending();
  std::string timeout_message(const std::string& what) const;

  const nccl::Api& api_;
  Device& device_;
  nccl::Comm comm_;
  const NcclOptions options_;
  const std::string name_;
  std::atomic<bool> captured_{false};
  std::atomic<bool> failed_{false};

  std::mutex mutex_;  // guards what follows
  std::condition_variable stop_;
  bool stopping_ = false;
  std::string error_;
  bool in_call_ = false;
  std::string call_;
  std::chrono::steady_clock::time_point call_since_;
  // A ring of the newest collectives. The oldest pending one is the one that hangs. If newer ones
  // have overwritten it, the oldest that is left is reported instead.
  std::array<Outstanding, 64> outstanding_;
  std::size_t next_ = 0;
  std::thread thread_;  // last, because it uses the members above
};

}  // namespace fsdp
