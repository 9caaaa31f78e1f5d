// Transport over NCCL, with communicators of its own.
#pragma once

#include <chrono>
#include <memory>
#include <utility>

#include "comm/communicator.h"
#include "comm/nccl_api.h"

namespace fsdp {

struct NcclOptions {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{};  // of joining, and of each collective
  bool register_buffers = true;         // with NCCL, where NCCL can
};

// Returns the communicators of the gather lane and of the reduce lane. All ranks call it at the
// same time, with the unique id that one of them made.
//
// Throws TimeoutError if not all ranks join within the timeout, and Error with NCCL's text if NCCL
// fails.
std::pair<std::unique_ptr<Communicator>, std::unique_ptr<Communicator>> make_nccl_communicators(
    const nccl::Api& api, Device& device, const nccl::UniqueId& id, const NcclOptions& options);

}  // namespace fsdp
