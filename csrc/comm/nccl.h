// Transport over NCCL, with communicators of its own.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/nccl_api.h"

namespace fsdp {

struct NcclOptions {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{};  // of joining, and of each collective
  bool register_buffers = true;         // with NCCL, where it can
};

// The communicators of the two lanes. Every rank calls it at the same time, with the unique id that
// one of them made.
//
// Throws TimeoutError if not all ranks join within the timeout, Error with NCCL's text if it fails.
std::pair<std::unique_ptr<Communicator>, std::unique_ptr<Communicator>> make_nccl_communicators(
    const nccl::Api& api, Device& device, const nccl::UniqueId& id, const NcclOptions& options);

}  // namespace fsdp
