// How ranks join into NCCL communicators.
//
// Note [blocking communicators]
// Ranks join through a non-blocking communicator, so that a missing rank is a timeout and not a
// hang. But a non-blocking communicator launches each collective from a new thread (NCCL 2.28,
// src/group.cc, ncclGroupEndInternal), which takes longer than all the rest of a launch. So that
// communicator only joins the ranks. The two communicators of the lanes are split off it as
// blocking ones, and it is destroyed. NCCL_COMM_BLOCKING=0 is refused, because it would make the
// lanes' communicators non-blocking. A call on a blocking communicator may block, e.g. the first
// collective, which makes connections. The watchdog aborts a call that blocks too long
// (Note [watchdog]).
#pragma once

#include <utility>

#include "comm/nccl/nccl.h"
#include "comm/nccl/nccl_api.h"

namespace fsdp {

// Owns a communicator: aborts it unless it was released.
class NcclCommGuard {
 public:
  NcclCommGuard(const nccl::Api& api, nccl::Comm comm) : api_(&api), comm_(comm) {}
  ~NcclCommGuard() {
    if (comm_ != nullptr) {
      api_->CommAbort(comm_);
    }
  }
  NcclCommGuard(NcclCommGuard&& other) noexcept : api_(other.api_), comm_(other.release()) {}
  NcclCommGuard(const NcclCommGuard&) = delete;
  NcclCommGuard& operator=(const NcclCommGuard&) = delete;

  nccl::Comm get() const { return comm_; }
  nccl::Comm release() { return std::exchange(comm_, nullptr); }

 private:
  const nccl::Api* api_;
  nccl::Comm comm_;
};

struct NcclJoined {
  NcclCommGuard gather;
  NcclCommGuard reduce;
};

// Joins all ranks on the current device. Throws as make_nccl_communicators does. The settings
// replace those of `options`.
NcclJoined join_nccl_ranks(const nccl::Api& api, const nccl::UniqueId& id,
                           const NcclOptions& options, const nccl::LaneSettings& gather_settings,
                           const nccl::LaneSettings& reduce_settings);

}  // namespace fsdp
