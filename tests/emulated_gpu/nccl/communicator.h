// A communicator between processes of one machine, over POSIX shared memory. Its collectives run on
// the threads of streams.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "emulated_gpu.h"

namespace emulated_gpu {

// What all ranks have to agree on.
struct Collective {
  char name[16];
  std::size_t count;
  int type;
  int op;
  int root;

  bool operator==(const Collective& other) const;
  std::string text() const;
};

// What one rank sends to another, or receives from it.
struct Message {
  bool is_sent;
  int peer;
  char* data;
  std::size_t bytes;
  std::size_t done;  // bytes
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  static constexpr int kMostRanks = 16;
  static constexpr std::size_t kSlotBytes = 1 << 20;
  static constexpr std::size_t kChannelBytes = 1 << 16;

  Communicator(std::string name, int size, int rank);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Waits until all ranks have joined. state() tells how it ended.
  void join();
  ncclResult_t state() const { return state_; }

  // The name, size and rank of this rank's part, after all ranks have named a colour and a key.
  struct Part {
    std::string name;
    int size;
    int rank;
  };
  Part split(int color, int key);

  // Runs the work on the stream. As in NCCL, a communicator's work runs in order, whatever its
  // streams are.
  void enqueue_in_order(cudaStream_t stream, const std::string& what, Work work);

  // Each rank copies the bytes that mine(offset) points to into its slot, a slot's size at a time.
  // Then take(offset, bytes) reads the slots. `mine` may return null, for nothing.
  void exchange(const Collective& collective, std::size_t bytes,
                const std::function<const char*(std::size_t)>& mine,
                const std::function<void(std::size_t, std::size_t)>& take);
  const char* slot(int rank) const;
  std::vector<const void*> slots() const;

  // Sends and receives all of them.
  void run(std::vector<Message> messages);

  // Ends waits for other ranks, and all later ones.
  void abort() { is_aborted_ = true; }
  bool is_aborted() const { return is_aborted_; }

  // Waits for the work outside of captures.
  void synchronize() const;

  const int size;
  const int rank;
  const int device;
  std::vector<double> scales;  // of ncclRedOpCreatePreMulSum

 private:
  struct Barrier;
  struct Shared;
  struct Channel;
  // The newest work, outside of captures or in one of them.
  struct Newest {
    cudaEvent_t event = nullptr;
    unsigned long long capture = 0;
  };

  bool open_shared_memory();
  bool wait(Barrier& barrier);
  bool has_same_gpu_twice() const;
  static std::size_t bytes_of_channels(int size);
  Channel& channel(int from, int to) const;
  bool advance(Message& message);

  const std::string name_;
  Shared* shared_ = nullptr;
  void* channels_ = nullptr;  // in the shared memory, behind all slots
  std::size_t shared_bytes_ = 0;
  std::atomic<bool> is_aborted_{false};
  std::atomic<ncclResult_t> state_{ncclInProgress};
  int splits_ = 0;
  Newest newest_;
  Newest newest_captured_;
};

}  // namespace emulated_gpu
