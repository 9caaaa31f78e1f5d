// How communicators begin and end.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "groups.h"
#include "reductions.h"

namespace emulated_gpu {
namespace {

// Tests read from NCCL's log that ranks talk over sockets.
void write_log() {
  if (const char* path = std::getenv("NCCL_DEBUG_FILE")) {
    if (std::FILE* log = std::fopen(path, "a")) {
      std::fprintf(log, "emulated, in place of a connection via NET/Socket\n");
      std::fclose(log);
    }
  }
}

ncclResult_t begin(ncclComm_t* handle, Communicator::Part part, const ncclConfig_t* given) {
  write_log();
  Config config;
  ncclResult_t result = handle == nullptr ? ncclInvalidArgument : read_config(given, config);
  if (result == ncclSuccess && (part.size < 1 || part.rank < 0 || part.rank >= part.size)) {
    result = refuse(ncclInvalidArgument, "Invalid rank requested : " + std::to_string(part.rank) +
                                             "/" + std::to_string(part.size));
  }
  if (handle != nullptr) {
    *handle = nullptr;
  }
  const CommunicatorPtr made =
      result == ncclSuccess ? std::make_shared<Communicator>(std::move(part), config) : nullptr;
  return in_group(made, [&] {
    *handle = add_communicator(made);
    add_job(made, [made] { return made->join(); });
    return ncclSuccess;
  });
}

// Makes a communicator of some of the parent's ranks. `find_part` runs at the end of the group; the
// part is empty for a rank that is in none.
ncclResult_t begin_child(const CommunicatorPtr& parent, ncclComm_t* handle,
                         const ncclConfig_t* given,
                         std::function<ncclResult_t(Communicator::Part&)> find_part) {
  return in_group(parent, [&] {
    ncclResult_t result = handle == nullptr ? ncclInvalidArgument : parent->readiness();
    Config config = parent->config;
    if (result == ncclSuccess && given != nullptr) {
      result = read_config(given, config);
    }
    if (result != ncclSuccess) {
      return result;
    }
    *handle = nullptr;  // until it exists
    add_job(parent, [=] {
      Communicator::Part part{};
      const ncclResult_t found = find_part(part);
      if (found != ncclSuccess || part.size == 0) {
        return found;
      }
      const auto made = std::make_shared<Communicator>(part, config);
      const ncclResult_t joined = made->join();
      if (joined == ncclSuccess) {
        *handle = add_communicator(made);
      }
      return joined;
    });
    return ncclSuccess;
  });
}

ncclResult_t end(ncclComm_t handle, const CommunicatorPtr& communicator) {
  communicator->synchronize();
  communicator->leave();
  remove_communicator(handle);
  return ncclSuccess;
}

}  // namespace
}  // namespace emulated_gpu

using namespace emulated_gpu;

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  std::memset(id, 0, sizeof(*id));
  std::snprintf(id->internal, sizeof(id->internal), "/emulated-nccl-%08x%08x-%d", random(),
                random(), getpid());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* handle, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return begin(handle, {id.internal, size, rank}, config);
}

ncclResult_t ncclCommInitRank(ncclComm_t* handle, int size, ncclUniqueId id, int rank) {
  return begin(handle, {id.internal, size, rank}, nullptr);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* handle, int size, int rank, int /*ids*/,
                                      ncclUniqueId* id, ncclConfig_t* config) {
  return begin(handle, {id->internal, size, rank}, config);
}

ncclResult_t ncclCommInitAll(ncclComm_t* handles, int size, const int* devices) {
  int before = 0;
  cudaGetDevice(&before);
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  ncclGroupStart();
  for (int rank = 0; rank < size; ++rank) {
    cudaSetDevice(devices != nullptr ? devices[rank] : rank);
    begin(handles + rank, {id.internal, size, rank}, nullptr);
  }
  const ncclResult_t result = ncclGroupEnd();
  cudaSetDevice(before);
  return result;
}

ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* part,
                           ncclConfig_t* config) {
  const CommunicatorPtr parent = communicator_of(handle);
  return begin_child(parent, part, config, [=](Communicator::Part& found) {
    const ncclResult_t result = parent->split(color, key, found);
    found.size = color != NCCL_SPLIT_NOCOLOR ? found.size : 0;
    return result;
  });
}

ncclResult_t ncclCommShrink(ncclComm_t handle, int* excluded, int count, ncclComm_t* part,
                            ncclConfig_t* config, int flags) {
  const CommunicatorPtr parent = communicator_of(handle);
  if (parent == nullptr || excluded == nullptr || count <= 0) {
    return in_group(nullptr, nullptr);
  }
  std::vector<int> without(excluded, excluded + count);
  std::sort(without.begin(), without.end());
  if (std::binary_search(without.begin(), without.end(), parent->rank)) {
    refuse(ncclInvalidArgument, "ncclCommShrink: a rank that is excluded may not call it");
    return in_group(nullptr, nullptr);
  }
  if ((flags & NCCL_SHRINK_ABORT) != 0) {
    parent->stop();
    parent->synchronize();
    parent->resume();
  }
  return begin_child(parent, part, config, [=](Communicator::Part& found) {
    found = parent->without(without);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  if (handle == nullptr) {
    return ncclSuccess;
  }
  const CommunicatorPtr communicator = communicator_of(handle);
  return in_group(communicator, [&] {
    if (const ncclResult_t result = communicator->readiness()) {
      return result;
    }
    if (communicator->is_finalized.exchange(true)) {
      return refuse(ncclInvalidArgument, "ncclCommFinalize was called before");
    }
    add_job(communicator, [communicator] {
      communicator->synchronize();
      return ncclSuccess;
    });
    return ncclSuccess;
  });
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  if (handle == nullptr) {
    return ncclSuccess;
  }
  const CommunicatorPtr communicator = communicator_of(handle);
  if (communicator == nullptr) {
    return ncclInvalidArgument;
  }
  if (const ncclResult_t result = communicator->readiness()) {
    return result;
  }
  const std::size_t windows = communicator->registrations.live_windows();
  end(handle, communicator);
  return windows == 0 || communicator->is_revoked
             ? ncclSuccess
             : refuse(ncclInvalidUsage, "ncclCommDestroy: " + std::to_string(windows) +
                                            " windows were not deregistered");
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  if (handle == nullptr) {
    return ncclSuccess;
  }
  const CommunicatorPtr communicator = communicator_of(handle);
  if (communicator == nullptr) {
    return ncclInvalidArgument;
  }
  communicator->stop();
  communicator->wait_for_background();
  return end(handle, communicator);
}

ncclResult_t ncclCommRevoke(ncclComm_t handle, int flags) {
  if (handle == nullptr) {
    return ncclSuccess;
  }
  const CommunicatorPtr communicator = communicator_of(handle);
  if (communicator == nullptr || flags != NCCL_REVOKE_DEFAULT || communicator->is_finalized ||
      communicator->is_revoked.exchange(true)) {
    return ncclInvalidArgument;
  }
  communicator->stop();
  communicator->wait_for_background();
  communicator->is_finalized = true;
  return in_group(communicator, [&] {
    add_job(communicator, [communicator] {
      communicator->synchronize();
      communicator->resume();
      return ncclSuccess;
    });
    return ncclSuccess;
  });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  const CommunicatorPtr communicator = communicator_of(handle);
  if (communicator == nullptr || error == nullptr) {
    return ncclInvalidArgument;
  }
  *error = communicator->asynchronous_result();
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
  const CommunicatorPtr communicator = communicator_of(handle);
  if (communicator == nullptr || communicator->readiness() != ncclSuccess) {
    return ncclInvalidArgument;
  }
  *count = communicator->size;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
  const CommunicatorPtr communicator = communicator_of(handle);
  if (communicator == nullptr || communicator->readiness() != ncclSuccess) {
    return ncclInvalidArgument;
  }
  *rank = communicator->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t handle, int* device) {
  const CommunicatorPtr communicator = communicator_of(handle);
  if (communicator == nullptr || communicator->readiness() != ncclSuccess) {
    return ncclInvalidArgument;
  }
  *device = communicator->device;
  return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t /*where*/, ncclComm_t handle) {
  const CommunicatorPtr communicator = communicator_of(handle);
  if (communicator == nullptr) {
    return ncclInvalidArgument;
  }
  std::vector<double>& scales = communicator->scales;
  *op = static_cast<ncclRedOp_t>(ncclNumOps + static_cast<int>(scales.size()));
  scales.push_back(scalar_of(scalar, type));
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t /*op*/, ncclComm_t /*handle*/) { return ncclSuccess; }
}
