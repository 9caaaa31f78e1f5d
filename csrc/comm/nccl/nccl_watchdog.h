// A thread that watches one NCCL communicator.
//
// Note [watchdog]
// In a step, no host thread waits for a collective, so only the watchdog notices one that hangs. It
// polls NCCL's asynchronous error and the events behind the newest collectives. On an error or a
// timeout it revokes the communicator (or aborts it, where NCCL cannot revoke), which ends the
// kernels that wait for peers. Revoking sets NCCL's abort flag, waits for NCCL's own streams and
// threads, and resets the flag. So a call that makes connections may miss the flag. If such a call
// still blocks at a later poll, the watchdog aborts the revoked communicator. That frees it while
// the call uses it, but NCCL has no better way to end the call. Revoking and aborting run on
// threads of their own, since they may never return. Until they return, nothing more can be done.
//
// The watchdog prints the reason on stderr, and every later call throws. Results computed since
// then must not be used, so the optimizer's step checks, too.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "comm/nccl/nccl.h"
#include "comm/nccl/nccl_api.h"
#include "device/stream.h"

namespace fsdp {

class NcclWatchdog {
 public:
  // Messages call the communicator `name`. Starts the thread that watches.
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

  // Watches the collective that was just issued to `stream`. It must end on a rank only after all
  // ranks have begun it. Messages call it `what`.
  void watch_collective(Stream& stream, const std::string& what);

  // `write` is called before the watchdog ends a collective: Communicator::set_flight_writer.
  void set_flight_writer(std::function<std::string()> write);

  // Revokes or aborts the communicator, and prints nothing. Only the first call has an effect. It
  // waits for NCCL for a few seconds only.
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

  // The fault: an error in whole sentences, or an operation that exceeds the timeout.
  struct Finding {
    std::string error;
    std::string late;
  };

  // Writes a flight record. Returns `reason`, followed by a sentence with the record's path.
  std::string with_flight_record(const std::string& reason);
  bool fail(const std::string& reason);
  void run();
  void revoke();
  void abort_communicator();
  bool take_abort(bool a_call_blocks);
  Finding look();
  const Outstanding* update_oldest_pending();
  std::string timeout_message(const std::string& what) const;

  const nccl::Api& api_;
  Device& device_;
  nccl::Comm comm_;
  const NcclOptions options_;
  const std::string name_;
  std::atomic<bool> captured_{false};
  std::atomic<bool> failed_{false};

  std::mutex mutex_;                          // guards what follows
  std::shared_future<nccl::Result> revoked_;  // invalid before revoking and after aborting
  std::condition_variable stop_;
  bool stopping_ = false;
  std::string error_;
  std::function<std::string()> write_flights_;  // may be null
  bool in_call_ = false;
  std::string call_;
  std::chrono::steady_clock::time_point call_since_;
  // A ring of the newest collectives. The oldest pending collective is the one that hangs. If newer
  // ones have overwritten it, the oldest that is left is reported instead.
  std::array<Outstanding, 512> outstanding_;
  std::uint32_t issued_ = 0;
  std::thread thread_;  // last, because it uses the members above
};

}  // namespace fsdp
