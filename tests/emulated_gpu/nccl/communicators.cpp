// How communicators begin and end, groups of calls, and memory.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "groups.h"
#include "lasting.h"
#include "reductions.h"

namespace emulated_gpu {
namespace {

constexpr int kVersion = 22809;

struct Communicators {
  std::mutex mutex;
  std::map<ncclComm_t, std::shared_ptr<Communicator>> by_handle;
};
Communicators& communicators() { return lasting<Communicators>(); }

thread_local int group_depth = 0;
thread_local std::vector<std::function<void()>> group;

// The messages of the group, on a stream of a communicator.
struct Messages {
  std::shared_ptr<Communicator> communicator;
  cudaStream_t stream;
  std::vector<Message> all;

  void start() const {
    communicator->enqueue_in_order(
        stream, "NCCL's messages",
        [communicator = communicator, all = all] { communicator->run(all); });
  }
};
thread_local std::vector<Messages> group_messages;

// Tests read from NCCL's log that ranks talk over sockets.
void write_log() {
  if (const char* path = std::getenv("NCCL_DEBUG_FILE")) {
    if (std::FILE* log = std::fopen(path, "a")) {
      std::fprintf(log, "emulated, in place of a connection via NET/Socket\n");
      std::fclose(log);
    }
  }
}

ncclResult_t begin(ncclComm_t* handle, const Communicator::Part& part, const ncclConfig_t* config) {
  write_log();
  auto made = std::make_shared<Communicator>(part.name, part.size, part.rank);
  *handle = reinterpret_cast<ncclComm_t>(made.get());
  {
    const std::lock_guard<std::mutex> lock(communicators().mutex);
    communicators().by_handle[*handle] = made;
  }
  if (config != nullptr && config->blocking == 0) {
    std::thread([made] { made->join(); }).detach();
    return ncclInProgress;
  }
  made->join();
  return made->state();
}

ncclResult_t end(ncclComm_t handle) {
  if (const auto communicator = communicator_of(handle)) {
    communicator->abort();
  }
  const std::lock_guard<std::mutex> lock(communicators().mutex);
  communicators().by_handle.erase(handle);
  return ncclSuccess;
}

}  // namespace

std::shared_ptr<Communicator> communicator_of(ncclComm_t handle) {
  const std::lock_guard<std::mutex> lock(communicators().mutex);
  const auto found = communicators().by_handle.find(handle);
  return found != communicators().by_handle.end() ? found->second : nullptr;
}

ncclResult_t submit(const Collective& what, ncclComm_t handle, cudaStream_t stream,
                    const std::function<void(Communicator&)>& collective) {
  const std::shared_ptr<Communicator> communicator = communicator_of(handle);
  if (communicator == nullptr || communicator->is_aborted()) {
    return ncclInvalidUsage;
  }
  auto start = [what, communicator, stream, collective] {
    communicator->enqueue_in_order(stream, "NCCL's " + what.text(),
                                   [communicator, collective] { collective(*communicator); });
  };
  if (group_depth > 0) {
    group.push_back(start);
  } else {
    start();
  }
  return ncclSuccess;
}

ncclResult_t submit(const Message& message, ncclComm_t handle, cudaStream_t stream) {
  const std::shared_ptr<Communicator> communicator = communicator_of(handle);
  if (communicator == nullptr || communicator->is_aborted() || message.peer < 0 ||
      message.peer >= communicator->size) {
    return ncclInvalidUsage;
  }
  if (message.bytes == 0) {
    return ncclSuccess;
  }
  if (group_depth == 0) {
    Messages{communicator, stream, {message}}.start();
    return ncclSuccess;
  }
  for (Messages& before : group_messages) {
    if (before.communicator == communicator && before.stream == stream) {
      before.all.push_back(message);
      return ncclSuccess;
    }
  }
  group_messages.push_back({communicator, stream, {message}});
  return ncclSuccess;
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = kVersion;
  return ncclSuccess;
}

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

ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* part,
                           ncclConfig_t* config) {
  const auto communicator = communicator_of(handle);
  if (communicator == nullptr) {
    return ncclInvalidArgument;
  }
  const Communicator::Part made = communicator->split(color, key);
  *part = nullptr;
  return color == NCCL_SPLIT_NOCOLOR ? ncclSuccess : begin(part, made, config);
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  if (const auto communicator = communicator_of(handle)) {
    communicator->synchronize();
  }
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  ncclCommFinalize(handle);
  return end(handle);
}

ncclResult_t ncclCommAbort(ncclComm_t handle) { return end(handle); }

ncclResult_t ncclCommRevoke(ncclComm_t handle, int /*flags*/) {
  if (const auto communicator = communicator_of(handle)) {
    communicator->abort();
  }
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  const auto communicator = communicator_of(handle);
  *error = communicator != nullptr ? communicator->state() : ncclInvalidArgument;
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
  *count = communicator_of(handle)->size;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
  *rank = communicator_of(handle)->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t handle, int* device) {
  *device = communicator_of(handle)->device;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclInProgress:
      return "NCCL operation in progress";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclSystemError:
      return "unhandled system error";
    default:
      return "an error of the emulated NCCL";
  }
}

const char* ncclGetLastError(ncclComm_t handle) {
  const auto communicator = communicator_of(handle);
  return communicator != nullptr && communicator->state() == ncclInvalidUsage
             ? "Duplicate GPU detected : two ranks of one host use the same CUDA device"
             : "";
}

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (--group_depth == 0) {
    for (const auto& start : std::exchange(group, {})) {
      start();
    }
    for (const Messages& messages : std::exchange(group_messages, {})) {
      messages.start();
    }
  }
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** address, std::size_t bytes) {
  return cudaMalloc(address, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void* address) {
  return cudaFree(address) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

// A handle of registered memory or a window is its address: nothing becomes faster by it.
ncclResult_t ncclCommRegister(const ncclComm_t /*handle*/, void* address, std::size_t /*bytes*/,
                              void** registered) {
  *registered = address;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t /*handle*/, void* /*registered*/) {
  return ncclSuccess;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t /*handle*/, void* address, std::size_t /*bytes*/,
                                    ncclWindow_t* window, int /*flags*/) {
  *window = static_cast<ncclWindow_t>(address);
  return ncclSuccess;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t /*handle*/, ncclWindow_t /*window*/) {
  return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t /*where*/, ncclComm_t handle) {
  std::vector<double>& scales = communicator_of(handle)->scales;
  *op = static_cast<ncclRedOp_t>(ncclNumOps + static_cast<int>(scales.size()));
  scales.push_back(scalar_of(scalar, type));
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t /*op*/, ncclComm_t /*handle*/) { return ncclSuccess; }
}
