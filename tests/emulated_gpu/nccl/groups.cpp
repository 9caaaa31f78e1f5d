#include "groups.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "lasting.h"

namespace emulated_gpu {
namespace {

struct Communicators {
  std::mutex mutex;
  std::map<ncclComm_t, CommunicatorPtr> by_handle;
};
Communicators& communicators() { return lasting<Communicators>(); }

struct Job {
  CommunicatorPtr communicator;
  std::function<ncclResult_t()> run;
};

struct Launch {
  CommunicatorPtr communicator;
  std::function<void()> start;
};

// The messages of the group, on a stream of a communicator.
struct Messages {
  CommunicatorPtr communicator;
  cudaStream_t stream;
  std::vector<Message> all;

  void start() const {
    std::size_t bytes = 0;
    for (const Message& message : all) {
      bytes += message.bytes;
    }
    communicator->enqueue_in_order(
        stream, "NCCL's messages", communicator->blocks_for(bytes),
        [communicator = communicator, all = all] { communicator->run(all); });
  }
};

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<Job> jobs;
  std::vector<Launch> launches;
  std::vector<Messages> messages;

  std::vector<CommunicatorPtr> communicators() const {
    std::vector<CommunicatorPtr> all;
    const auto add = [&](const auto& entries) {
      for (const auto& entry : entries) {
        if (std::find(all.begin(), all.end(), entry.communicator) == all.end()) {
          all.push_back(entry.communicator);
        }
      }
    };
    add(jobs);
    add(launches);
    add(messages);
    return all;
  }
};
thread_local Group group;

// Jobs of one communicator run in order. Communicators have threads of their own, since ranks of
// one process wait for each other.
ncclResult_t run_jobs(const std::vector<Job>& jobs, const std::vector<CommunicatorPtr>& of) {
  std::vector<ncclResult_t> results(of.size(), ncclSuccess);
  const auto run_those = [&](std::size_t which) {
    cudaSetDevice(of[which]->device);
    for (const Job& job : jobs) {
      if (job.communicator == of[which] && results[which] == ncclSuccess) {
        results[which] = job.run();
      }
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t which = 1; which < of.size(); ++which) {
    threads.emplace_back(run_those, which);
  }
  run_those(0);
  for (std::thread& thread : threads) {
    thread.join();
  }
  const auto failed = std::find_if(results.begin(), results.end(),
                                   [](ncclResult_t result) { return result != ncclSuccess; });
  return failed != results.end() ? *failed : ncclSuccess;
}

ncclResult_t run(const Group& ended) {
  int before = 0;
  cudaGetDevice(&before);
  if (!ended.jobs.empty()) {
    const ncclResult_t result = run_jobs(ended.jobs, ended.communicators());
    cudaSetDevice(before);
    if (result != ncclSuccess) {
      return result;
    }
  }
  for (const Launch& launch : ended.launches) {
    cudaSetDevice(launch.communicator->device);
    launch.start();
  }
  for (const Messages& messages : ended.messages) {
    cudaSetDevice(messages.communicator->device);
    messages.start();
  }
  cudaSetDevice(before);
  return ncclSuccess;
}

ncclResult_t run_in_background(const Group& ended, const std::vector<CommunicatorPtr>& of) {
  for (const CommunicatorPtr& communicator : of) {
    communicator->begin_background();
  }
  std::thread([ended, of] {
    cudaSetDevice(of.front()->device);
    const ncclResult_t result = run(ended);
    for (const CommunicatorPtr& communicator : of) {
      communicator->end_background(result);
    }
  }).detach();
  return ncclInProgress;
}

ncclResult_t end_group() {
  if (--group.depth > 0) {
    return ncclSuccess;
  }
  const Group ended = std::exchange(group, {});
  if (ended.error != ncclSuccess) {
    return ended.error;
  }
  const std::vector<CommunicatorPtr> all = ended.communicators();
  const auto blocking = std::count_if(
      all.begin(), all.end(), [](const CommunicatorPtr& one) { return one->config.is_blocking; });
  if (blocking != 0 && blocking != static_cast<std::ptrdiff_t>(all.size())) {
    return refuse(ncclInvalidArgument,
                  "Blocking and nonblocking communicators are not allowed in the same group.");
  }
  return blocking != 0 || all.empty() ? run(ended) : run_in_background(ended, all);
}

ncclResult_t check(Communicator& communicator) {
  return communicator.is_revoked ? refuse(ncclInvalidUsage, "communicator was revoked")
                                 : communicator.readiness();
}

ncclResult_t check(Communicator& communicator, const Collective& what) {
  const bool has_root = what.root != kNoRoot;
  if (has_root && (what.root < 0 || what.root >= communicator.size)) {
    return refuse(ncclInvalidArgument, std::string(what.name) + " : invalid root " +
                                           std::to_string(what.root) + " of " +
                                           std::to_string(communicator.size) + " ranks");
  }
  if (what.type < 0 || what.type >= ncclNumTypes) {
    return refuse(ncclInvalidArgument,
                  std::string(what.name) + " : invalid type " + std::to_string(what.type));
  }
  const int own_operators = static_cast<int>(communicator.scales.size());
  if (what.op < 0 || what.op >= ncclNumOps + own_operators) {
    return refuse(ncclInvalidArgument, std::string(what.name) + " : invalid reduction operation " +
                                           std::to_string(what.op));
  }
  return check(communicator);
}

bool runs_on_copy_engines(const Communicator& communicator, const Collective& what) {
  return communicator.config.cta_policy == NCCL_CTA_POLICY_ZERO &&
         what.name == std::string("all-gather") && what.to.is_symmetric &&
         (what.from.is_symmetric || library_version() >= kFirstThatCopiesPlainInputs);
}

// From 2.29 on, small collectives may be one if one of their buffers is in a symmetric window.
bool may_be_symmetric_kernel(const Collective& what) {
  const std::string name = what.name;
  const bool has_kernels = name == "all-gather" || name == "reduce-scatter" || name == "all-reduce";
  const bool takes_one = library_version() >= kFirstThatCopiesPlainInputs;
  return has_kernels && (takes_one ? what.from.is_symmetric || what.to.is_symmetric
                                   : what.from.is_symmetric && what.to.is_symmetric);
}

}  // namespace

CommunicatorPtr communicator_of(ncclComm_t handle) {
  const std::lock_guard<std::mutex> lock(communicators().mutex);
  const auto found = communicators().by_handle.find(handle);
  if (found != communicators().by_handle.end()) {
    return found->second;
  }
  refuse(ncclInvalidArgument, "The communicator is null, or was destroyed or aborted");
  return nullptr;
}

std::vector<CommunicatorPtr> all_communicators() {
  const std::lock_guard<std::mutex> lock(communicators().mutex);
  std::vector<CommunicatorPtr> all;
  for (const auto& [handle, communicator] : communicators().by_handle) {
    all.push_back(communicator);
  }
  return all;
}

ncclComm_t add_communicator(const CommunicatorPtr& communicator) {
  const auto handle = reinterpret_cast<ncclComm_t>(communicator.get());
  const std::lock_guard<std::mutex> lock(communicators().mutex);
  communicators().by_handle[handle] = communicator;
  return handle;
}

void remove_communicator(ncclComm_t handle) {
  const std::lock_guard<std::mutex> lock(communicators().mutex);
  communicators().by_handle.erase(handle);
}

ncclResult_t in_group(const CommunicatorPtr& communicator,
                      const std::function<ncclResult_t()>& call) {
  ++group.depth;
  const ncclResult_t result = communicator == nullptr ? ncclInvalidArgument : call();
  if (result != ncclSuccess && group.error == ncclSuccess) {
    group.error = result;
  }
  const ncclResult_t ended = end_group();
  return result != ncclSuccess ? result : ended;
}

void add_job(const CommunicatorPtr& communicator, std::function<ncclResult_t()> job) {
  group.jobs.push_back({communicator, std::move(job)});
}

ncclResult_t submit(Collective what, const void* from, const void* to, std::size_t bytes,
                    ncclComm_t handle, cudaStream_t stream,
                    std::function<void(Communicator&, const Collective&)> collective) {
  const CommunicatorPtr communicator = communicator_of(handle);
  return in_group(communicator, [&] {
    if (const ncclResult_t result = check(*communicator, what)) {
      return result;
    }
    what.from = communicator->registrations.placement_of(from);
    what.to = communicator->registrations.placement_of(to);
    const bool is_copied = runs_on_copy_engines(*communicator, what);
    if (!is_copied && may_be_symmetric_kernel(what) && library_version() < kFirstWithSafeKernels) {
      return refuse(ncclInvalidUsage,
                    what.text() +
                        " is in symmetric windows, whose kernels may start before the "
                        "stream's earlier work has ended in NCCL before 2.30.7");
    }
    const int blocks = is_copied ? 0 : communicator->blocks_for(bytes);
    group.launches.push_back({communicator, [=] {
                                communicator->enqueue_in_order(
                                    stream, "NCCL's " + what.text(), blocks,
                                    [=] { collective(*communicator, what); });
                              }});
    return ncclSuccess;
  });
}

ncclResult_t submit(const Message& message, ncclComm_t handle, cudaStream_t stream) {
  const CommunicatorPtr communicator = communicator_of(handle);
  return in_group(communicator, [&] {
    if (const ncclResult_t result = check(*communicator)) {
      return result;
    }
    if (message.peer < 0 || message.peer >= communicator->size) {
      return refuse(ncclInvalidArgument, "invalid peer " + std::to_string(message.peer) + " of " +
                                             std::to_string(communicator->size) + " ranks");
    }
    if (message.bytes == 0) {
      return ncclSuccess;
    }
    for (Messages& before : group.messages) {
      if (before.communicator == communicator && before.stream == stream) {
        before.all.push_back(message);
        return ncclSuccess;
      }
    }
    group.messages.push_back({communicator, stream, {message}});
    return ncclSuccess;
  });
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

extern "C" {

ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (group.depth == 0) {
    return refuse(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
  }
  return end_group();
}
}
