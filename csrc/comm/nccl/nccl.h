// Transport over NCCL, with communicators of its own.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "comm/communicator.h"
#include "comm/liveness/deadlock_watch.h"
#include "comm/nccl/nccl_api.h"

namespace fsdp {

TransportTraits nccl_traits();

struct NcclOptions {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{};  // of joining, and of each collective
  bool register_buffers = true;         // with NCCL, where NCCL can
  nccl::LaneSettings gather = {};
  nccl::LaneSettings reduce = {};
  int nodes = 1;   // of the ranks, as NCCL tells nodes apart
  int driver = 0;  // the newest CUDA version of this rank's driver: 12050 is 12.5

  // Ends the other lane once one has failed. Null: the other lane times out.
  std::shared_ptr<DeadlockThread> other_lane = nullptr;

  // Waits on the host until all ranks have passed this name, or until `given_up` returns true. No
  // two meetings have the same name. Null: ranks do not wait for each other.
  std::function<void(const std::string& name, const std::function<bool()>& given_up)> meet =
      nullptr;

  // Tells the other ranks what this rank waits for, and returns what they wait for, in sentences.
  // It may take a moment. Null: they are not asked.
  std::function<std::string(const std::string& what)> ask_others = nullptr;
};

// Returns the communicators of the gather lane and of the reduce lane. All ranks call it at the
// same time, with the unique id that one of them made. It starts options.other_lane, if set.
//
// Throws TimeoutError if not all ranks join within the timeout, and Error with NCCL's text if NCCL
// fails, or if a setting is not safe in its version.
std::pair<std::unique_ptr<Communicator>, std::unique_ptr<Communicator>> make_nccl_communicators(
    const nccl::Api& api, Device& device, const nccl::UniqueId& id, const NcclOptions& options);

}  // namespace fsdp
