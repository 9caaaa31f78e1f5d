#include "communicator.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "multiprocessors.h"

namespace emulated_gpu {
namespace {

constexpr std::size_t kHostBytes = 64;
constexpr int kSpins = 200;
// How NCCL cuts messages into thread blocks depends on the machine. This is near its choice for
// eight GPUs of a node.
constexpr std::size_t kBytesOfBlock = 64 << 10;
constexpr int kMostBlocks = 32;

// NCCL takes ranks with different ids for ranks on different machines.
std::string host_id() {
  if (const char* id = std::getenv("NCCL_HOSTID")) {
    return id;
  }
  char name[kHostBytes] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

int device_of_this_thread() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaStreamGetCaptureInfo(stream, &status, &id, nullptr, nullptr, nullptr, nullptr);
  return status == cudaStreamCaptureStatusNone ? 0 : id;
}

bool is_one_of(const char* name, std::initializer_list<const char*> names) {
  return std::any_of(names.begin(), names.end(),
                     [&](const char* one) { return std::strcmp(name, one) == 0; });
}

std::string text_of(const Placement& place) {
  return !place.is_symmetric ? "no symmetric window"
                             : "byte " + std::to_string(place.offset) + " of the window at " +
                                   std::to_string(place.window);
}

// How one buffer of two ranks differs. Inputs that ranks only read themselves may differ.
std::string difference(const char* which, const Placement& mine, const Placement& theirs,
                       bool others_use_it) {
  const bool same_place = mine.window == theirs.window && mine.offset == theirs.offset;
  if (mine.is_symmetric == theirs.is_symmetric &&
      (!mine.is_symmetric || same_place || !others_use_it)) {
    return "";
  }
  return std::string("has its ") + which + " in " + text_of(mine) + ", the other in " +
         text_of(theirs);
}

}  // namespace

bool Collective::operator==(const Collective& other) const {
  return std::strncmp(name, other.name, sizeof(name)) == 0 && count == other.count &&
         type == other.type && op == other.op && root == other.root;
}

std::string Collective::text() const {
  return std::string(name) + " of " + std::to_string(count) + " elements, dtype " +
         std::to_string(type) + ", operation " + std::to_string(op) +
         (root != kNoRoot ? ", root " + std::to_string(root) : "");
}

// As NCCL's check of its arguments with NCCL_CHECK_MODE=DEBUG_GLOBAL.
std::string Collective::misplacement(const Collective& other) const {
  const std::string input =
      difference("input", from, other.from, is_one_of(name, {"all-reduce", "reduce-scatter"}));
  return !input.empty()
             ? input
             : difference("output", to, other.to, is_one_of(name, {"all-gather", "all-reduce"}));
}

// Fresh shared memory is zero, and so are all of these.
struct Communicator::Shared {
  struct Rank {
    char host[kHostBytes];
    int device;
    std::atomic<int> process;
    std::atomic<bool> has_left;
    std::atomic<int> arrivals[kBarriers];
    HostCall call;
    Collective collective;
  };
  std::atomic<int> joined;
  Rank ranks[kMostRanks];
  char slots[1];  // kSlotBytes for each rank
};

Communicator::Communicator(Part part, const Config& with_config)
    : size(part.size),
      rank(part.rank),
      device(device_of_this_thread()),
      config(with_config),
      name_(std::move(part.name)),
      peers_(static_cast<std::size_t>(part.size), -1) {}

Communicator::~Communicator() {
  for (const int file : peers_) {
    if (file >= 0) {
      close(file);
    }
  }
  if (shared_ != nullptr) {
    munmap(shared_, shared_bytes_);
  }
}

bool Communicator::open_shared_memory() {
  const std::size_t before = sizeof(Shared) + static_cast<std::size_t>(size) * kSlotBytes;
  const std::size_t channels_begin =
      (before + alignof(std::max_align_t)) & -alignof(std::max_align_t);
  shared_bytes_ = channels_begin + bytes_of_channels(size);
  const int file = shm_open(name_.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, static_cast<off_t>(shared_bytes_)) != 0) {
    return false;
  }
  void* mapped = mmap(nullptr, shared_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) {
    return false;
  }
  shared_ = static_cast<Shared*>(mapped);
  channels_ = static_cast<char*>(mapped) + channels_begin;
  return true;
}

ncclResult_t Communicator::join() {
  if (size > kMostRanks || !open_shared_memory()) {
    return error_ = refuse(ncclSystemError, "The emulated NCCL has no shared memory for " +
                                                std::to_string(size) + " ranks");
  }
  Shared::Rank& mine = shared_->ranks[rank];
  std::snprintf(mine.host, sizeof(mine.host), "%s", host_id().c_str());
  mine.device = device;
  mine.process = getpid();
  shared_->joined.fetch_add(1);
  std::vector<int> others;
  for (int other = 0; other < size; ++other) {
    others.push_back(other);
  }
  Wait until_all_joined;
  while (shared_->joined < size) {
    if (!pause(until_all_joined, others)) {
      return error_ == ncclSuccess ? error_ = ncclInternalError : error_.load();
    }
  }
  wait(kOfHosts);
  if (rank == 0) {
    shm_unlink(name_.c_str());
  }
  shares_windows_ = is_one_host();
  const bool may_share_gpu =
      library_version() >= kFirstThatSharesGpus && is_set("NCCL_MULTI_RANK_GPU_ENABLE");
  if (has_same_gpu_twice() && !may_share_gpu) {
    return error_ = refuse(ncclInvalidUsage,
                           library_version() >= kFirstThatSharesGpus
                               ? "Multiple Ranks are using the same GPU/Partition"
                               : "Duplicate GPU detected : two ranks of one host use the same "
                                 "CUDA device");
  }
  return ncclSuccess;
}

bool Communicator::has_same_gpu_twice() const {
  for (int other = 0; other < size; ++other) {
    const Shared::Rank& one = shared_->ranks[other];
    if (other != rank && std::strcmp(one.host, shared_->ranks[rank].host) == 0 &&
        one.device == device) {
      return true;
    }
  }
  return false;
}

bool Communicator::is_one_host() const {
  return std::all_of(shared_->ranks, shared_->ranks + size, [this](const Shared::Rank& one) {
    return std::strcmp(one.host, shared_->ranks[0].host) == 0;
  });
}

bool Communicator::has_left(int other) {
  const Shared::Rank& one = shared_->ranks[other];
  if (other == rank || one.process == 0) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(peers_mutex_);
  int& file = peers_[static_cast<std::size_t>(other)];
  if (file < 0) {
    file = static_cast<int>(syscall(SYS_pidfd_open, one.process.load(), 0));
  }
  if (one.has_left || file < 0) {
    return one.has_left || errno == ESRCH;
  }
  pollfd ended{file, POLLIN, 0};
  return poll(&ended, 1, 0) > 0;
}

bool Communicator::pause(Wait& wait, const std::vector<int>& awaited) {
  if (is_stopped_ || has_device_failed()) {
    return false;
  }
  if (++wait.spins < kSpins) {
    std::this_thread::yield();
    return true;
  }
  std::this_thread::sleep_for(std::chrono::microseconds(50));
  // Kernels read memory of their own host, and notice nothing there.
  if (wait.spins % kSpins != 0 || (wait.is_kernel && shares_windows_) || error_ != ncclSuccess) {
    return true;
  }
  for (const int other : awaited) {
    if (!has_left(other)) {
      continue;
    }
    // A rank may arrive and leave after the caller looked for it, so the caller looks once more.
    if (wait.seen_leaving != other) {
      wait.seen_leaving = other;
      return true;
    }
    error_ = refuse(ncclRemoteError, "Connection closed by rank " + std::to_string(other) + " of " +
                                         std::to_string(size));
    return wait.is_kernel;  // it waits until the communicator is aborted
  }
  return true;
}

bool Communicator::wait(Barrier barrier) {
  if (is_stopped_) {
    return false;
  }
  const int mine = shared_->ranks[rank].arrivals[barrier].fetch_add(1) + 1;
  const auto missing = [&] {
    std::vector<int> ranks;
    for (int other = 0; other < size; ++other) {
      if (shared_->ranks[other].arrivals[barrier] < mine) {
        ranks.push_back(other);
      }
    }
    return ranks;
  };
  Wait until_all_arrived{barrier == kOfStreams};
  for (;;) {
    const std::vector<int> awaited = missing();
    if (awaited.empty()) {
      return true;
    }
    if (!pause(until_all_arrived, awaited)) {
      return false;
    }
  }
}

ncclResult_t Communicator::meet(const HostCall& mine, std::vector<HostCall>* all) {
  shared_->ranks[rank].call = mine;
  const auto ended = [this] {
    return error_ != ncclSuccess ? error_.load() : refuse(ncclInternalError, "It was aborted");
  };
  if (!wait(kOfHosts)) {
    return ended();
  }
  std::vector<HostCall> calls;
  for (int other = 0; other < size; ++other) {
    calls.push_back(shared_->ranks[other].call);
  }
  if (!wait(kOfHosts)) {
    return ended();
  }
  const auto text = [](const HostCall& call) {
    return std::string(call.name) + " with " + std::to_string(call.bytes) + " bytes and flags " +
           std::to_string(call.flags);
  };
  for (int other = 0; other < size; ++other) {
    const HostCall& theirs = calls[static_cast<std::size_t>(other)];
    if (text(theirs) != text(mine)) {
      return refuse(ncclInvalidUsage, "rank " + std::to_string(rank) + " calls " + text(mine) +
                                          ", but rank " + std::to_string(other) + " calls " +
                                          text(theirs));
    }
    if (theirs.failure != ncclSuccess && mine.failure == ncclSuccess) {
      return refuse(theirs.failure,
                    std::string(mine.name) + " has failed on rank " + std::to_string(other));
    }
  }
  if (all != nullptr) {
    *all = std::move(calls);
  }
  return mine.failure;
}

ncclResult_t Communicator::split(int color, int key, Part& part) {
  HostCall mine{"ncclCommSplit", 0, 0, ncclSuccess, color, key, 0};
  std::vector<HostCall> all;
  if (const ncclResult_t result = meet(mine, &all)) {
    return result;
  }
  part = {name_ + "-" + std::to_string(children_++) + "-" + std::to_string(color), 0, 0};
  for (int other = 0; other < size; ++other) {
    const HostCall& one = all[static_cast<std::size_t>(other)];
    if (one.color == color) {
      ++part.size;
      part.rank += std::make_pair(one.key, other) < std::make_pair(key, rank);
    }
  }
  return ncclSuccess;
}

Communicator::Part Communicator::without(const std::vector<int>& excluded) {
  Part part{name_ + "-" + std::to_string(children_++), size - static_cast<int>(excluded.size()),
            rank};
  for (const int other : excluded) {
    part.name += "-not" + std::to_string(other);
    part.rank -= other < rank;
  }
  return part;
}

int Communicator::blocks_for(std::size_t bytes) const {
  const auto needed = static_cast<int>(
      std::min<std::size_t>(kMostBlocks, (bytes + kBytesOfBlock - 1) / kBytesOfBlock));
  return std::clamp(needed, std::min(config.min_ctas, config.max_ctas), config.max_ctas);
}

void Communicator::enqueue_in_order(cudaStream_t stream, const std::string& what, int blocks,
                                    Work work) {
  const unsigned long long capture = capture_of(stream);
  Newest& newest = capture != 0 ? newest_captured_ : newest_;
  if (newest.event != nullptr && newest.capture == capture) {
    wait_for(stream, newest.event);
  }
  if (newest.event == nullptr) {
    cudaEventCreateWithFlags(&newest.event, cudaEventDisableTiming);
  }
  Multiprocessors& multiprocessors = Multiprocessors::of(device);
  const std::uint64_t turn = capture == 0 ? multiprocessors.next_turn() : 0;
  enqueue(stream, what, [=, &multiprocessors, self = shared_from_this()] {
    multiprocessors.run(
        what, blocks, turn, [&] { return self->is_stopped_ || has_device_failed(); }, work);
  });
  cudaEventRecord(newest.event, stream);
  newest.capture = capture;
}

void Communicator::leave() {
  if (shared_ != nullptr) {
    shared_->ranks[rank].has_left = true;
  }
}

void Communicator::begin_background() {
  const std::lock_guard<std::mutex> lock(background_mutex_);
  ++in_background_;
}

void Communicator::end_background(ncclResult_t result) {
  const std::lock_guard<std::mutex> lock(background_mutex_);
  if (result != ncclSuccess && error_ == ncclSuccess) {
    error_ = result;
  }
  --in_background_;
  background_changed_.notify_all();
}

void Communicator::wait_for_background() {
  std::unique_lock<std::mutex> lock(background_mutex_);
  background_changed_.wait(lock, [this] { return in_background_ == 0; });
}

ncclResult_t Communicator::asynchronous_result() {
  const std::lock_guard<std::mutex> lock(background_mutex_);
  return error_ == ncclSuccess && in_background_ > 0 ? ncclInProgress : error_.load();
}

ncclResult_t Communicator::readiness() {
  const ncclResult_t result = is_stopped_ ? ncclSuccess : asynchronous_result();
  return result != ncclInProgress
             ? result
             : refuse(ncclInvalidArgument,
                      "Attempt to use communicator before the previous operation returned "
                      "ncclSuccess");
}

void Communicator::synchronize() const {
  if (newest_.event != nullptr) {
    cudaEventSynchronize(newest_.event);
  }
}

void Communicator::exchange(const Collective& collective, std::size_t bytes,
                            const std::function<const char*(std::size_t)>& mine,
                            const std::function<void(std::size_t, std::size_t)>& take) {
  shared_->ranks[rank].collective = collective;
  const std::string me = "rank " + std::to_string(rank);
  for (std::size_t offset = 0; offset < bytes; offset += kSlotBytes) {
    const std::size_t part = std::min(kSlotBytes, bytes - offset);
    if (const char* from = mine(offset)) {
      std::memcpy(const_cast<char*>(slot(rank)), from, part);
    }
    if (!wait(kOfStreams)) {
      return;
    }
    for (int other = 0; other < size; ++other) {
      const Collective& theirs = shared_->ranks[other].collective;
      const std::string who = "rank " + std::to_string(other);
      if (!(theirs == collective)) {
        fail_device(me + " runs " + collective.text() + ", but " + who + " runs " + theirs.text());
        return;
      }
      const std::string misplaced = collective.misplacement(theirs);
      if (!misplaced.empty()) {
        fail_device(me + " and " + who + " run " + collective.text() + ". The first " + misplaced);
        return;
      }
    }
    take(offset, part);
    if (!wait(kOfStreams)) {
      return;
    }
  }
}

const char* Communicator::slot(int of_rank) const {
  return shared_->slots + static_cast<std::size_t>(of_rank) * kSlotBytes;
}

std::vector<const void*> Communicator::slots() const {
  std::vector<const void*> all;
  for (int other = 0; other < size; ++other) {
    all.push_back(slot(other));
  }
  return all;
}

}  // namespace emulated_gpu
