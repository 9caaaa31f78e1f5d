// What the calling thread publishes about its lanes: comm/liveness/lane_state.h.
#pragma once

#include <string>

#include "comm/shared_memory/mailbox.h"
#include "device/host_stream.h"

namespace fsdp::test {

inline constexpr int kGather = 0;
inline constexpr int kReduce = 1;
inline const std::string kLabels[] = {"the all-gather of unit 'layers.1'",
                                      "the reduce-scatter of the root"};

// The thread issues a collective, and the lane begins it.
inline void publish_begin(Mailbox& mailbox, int lane) {
  mailbox.issuer.issue();
  mailbox.activity.begin(kLabels[lane]);
  mailbox.posted += 1;
}

// The thread is blocked until the lane is done.
inline void publish_block(Mailbox& mailbox) { mailbox.issuer.blocked = this_thread(); }

}  // namespace fsdp::test
