#include "communicator.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace emulated_gpu {
namespace {

constexpr std::size_t kHostBytes = 64;
constexpr int kSpins = 200;

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

}  // namespace

bool Collective::operator==(const Collective& other) const {
  return std::strncmp(name, other.name, sizeof(name)) == 0 && count == other.count &&
         type == other.type && op == other.op && root == other.root;
}

std::string Collective::text() const {
  return std::string(name) + " of " + std::to_string(count) + " elements, dtype " +
         std::to_string(type) + ", operation " + std::to_string(op) + ", root " +
         std::to_string(root);
}

struct Communicator::Barrier {
  std::atomic<int> arrived;
  std::atomic<int> round;
};

// Fresh shared memory is zero, and so are all of these.
struct Communicator::Shared {
  struct Rank {
    char host[kHostBytes];
    int device;
    int color;
    int key;
    Collective collective;
  };
  std::atomic<int> joined;
  Barrier of_hosts;
  Barrier of_streams;
  Rank ranks[kMostRanks];
  char slots[1];  // kSlotBytes for each rank
};

Communicator::Communicator(std::string name, int of_size, int of_rank)
    : size(of_size), rank(of_rank), device(device_of_this_thread()), name_(std::move(name)) {}

Communicator::~Communicator() {
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

void Communicator::join() {
  if (size > kMostRanks || !open_shared_memory()) {
    state_ = ncclSystemError;
    return;
  }
  Shared::Rank& mine = shared_->ranks[rank];
  std::snprintf(mine.host, sizeof(mine.host), "%s", host_id().c_str());
  mine.device = device;
  shared_->joined.fetch_add(1);
  while (shared_->joined < size) {
    if (is_aborted_) {
      state_ = ncclInternalError;
      return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  wait(shared_->of_hosts);
  if (rank == 0) {
    shm_unlink(name_.c_str());
  }
  state_ = has_same_gpu_twice() ? ncclInvalidUsage : ncclSuccess;
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

bool Communicator::wait(Barrier& barrier) {
  const int round = barrier.round;
  if (barrier.arrived.fetch_add(1) + 1 == size) {
    barrier.arrived = 0;
    barrier.round.fetch_add(1);
    return true;
  }
  for (int spins = 0; barrier.round == round; ++spins) {
    if (is_aborted_) {
      return false;
    }
    if (spins < kSpins) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  return true;
}

Communicator::Part Communicator::split(int color, int key) {
  shared_->ranks[rank].color = color;
  shared_->ranks[rank].key = key;
  wait(shared_->of_hosts);
  Part part{name_ + "-" + std::to_string(splits_++) + "-" + std::to_string(color), 0, 0};
  for (int other = 0; other < size; ++other) {
    const Shared::Rank& one = shared_->ranks[other];
    if (one.color == color) {
      ++part.size;
      part.rank += std::make_pair(one.key, other) < std::make_pair(key, rank);
    }
  }
  wait(shared_->of_hosts);
  return part;
}

void Communicator::enqueue_in_order(cudaStream_t stream, const std::string& what, Work work) {
  const unsigned long long capture = capture_of(stream);
  Newest& newest = capture != 0 ? newest_captured_ : newest_;
  if (newest.event != nullptr && newest.capture == capture) {
    wait_for(stream, newest.event);
  }
  if (newest.event == nullptr) {
    cudaEventCreateWithFlags(&newest.event, cudaEventDisableTiming);
  }
  enqueue(stream, what, std::move(work));
  cudaEventRecord(newest.event, stream);
  newest.capture = capture;
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
  for (std::size_t offset = 0; offset < bytes; offset += kSlotBytes) {
    const std::size_t part = std::min(kSlotBytes, bytes - offset);
    if (const char* from = mine(offset)) {
      std::memcpy(const_cast<char*>(slot(rank)), from, part);
    }
    if (!wait(shared_->of_streams)) {
      return;
    }
    for (int other = 0; other < size; ++other) {
      const Collective& theirs = shared_->ranks[other].collective;
      if (!(theirs == collective)) {
        fail("NCCL: rank " + std::to_string(rank) + " runs " + collective.text() + ", but rank " +
             std::to_string(other) + " runs " + theirs.text());
        return;
      }
    }
    take(offset, part);
    if (!wait(shared_->of_streams)) {
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
