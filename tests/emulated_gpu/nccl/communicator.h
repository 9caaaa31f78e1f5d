// A communicator between processes of one machine, over POSIX shared memory. Its collectives run on
// the threads of streams.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <climits>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "emulated_gpu.h"
#include "library.h"
#include "registrations.h"

namespace emulated_gpu {

constexpr int kNoRoot = INT_MIN;

// What all ranks have to agree on.
struct Collective {
  char name[16];
  std::size_t count;
  int type;
  int op;
  int root;
  // Where this rank has its buffers.
  Placement from;
  Placement to;

  bool operator==(const Collective& other) const;
  std::string text() const;
  // Describes windows of two ranks that should be the same and differ. Empty if none does.
  std::string misplacement(const Collective& other) const;
};

// A call that makes ranks meet on the host, and what they say of it. All but the last four have to
// be the same.
struct HostCall {
  char name[16];
  std::size_t bytes;
  int flags;
  ncclResult_t failure;  // of this rank before it met the others
  int color;
  int key;
  std::size_t offset;
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

  // The name, size and rank of this rank's part.
  struct Part {
    std::string name;
    int size;
    int rank;
  };

  Communicator(Part part, const Config& config);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Waits until all ranks have joined.
  ncclResult_t join();

  // What this rank and all others say of a call on the host that all make together. It is an error
  // if they differ or one of them has failed.
  ncclResult_t meet(const HostCall& mine, std::vector<HostCall>* all);
  ncclResult_t split(int color, int key, Part& part);
  // The part without some ranks. Only the other ranks call it.
  Part without(const std::vector<int>& excluded);

  // Runs the work on the stream once the thread blocks fit. As in NCCL, a communicator's work runs
  // in order, whatever its streams are.
  void enqueue_in_order(cudaStream_t stream, const std::string& what, int blocks, Work work);
  // How many thread blocks move so many bytes.
  int blocks_for(std::size_t bytes) const;

  // Each rank copies the bytes that mine(offset) points to into its slot, a slot's size at a time.
  // Then take(offset, bytes) reads the slots. `mine` may return null, for nothing.
  void exchange(const Collective& collective, std::size_t bytes,
                const std::function<const char*(std::size_t)>& mine,
                const std::function<void(std::size_t, std::size_t)>& take);
  const char* slot(int rank) const;
  std::vector<const void*> slots() const;

  // Sends and receives all of them.
  void run(std::vector<Message> messages);

  // Ends all waits of kernels and of the host, until resume().
  void stop() { is_stopped_ = true; }
  void resume() { is_stopped_ = false; }
  // Other ranks that wait for this one learn that it does not come.
  void leave();
  // Waits for the work outside of captures.
  void synchronize() const;

  // The state of calls that go on in the background.
  void begin_background();
  void end_background(ncclResult_t result);
  void wait_for_background();

  // What ncclCommGetAsyncError reports.
  ncclResult_t asynchronous_result();
  // Whether it can be used: ncclSuccess, or the error of a call that cannot.
  ncclResult_t readiness();

  // Whether all ranks can read each other's memory, so windows are shared.
  bool shares_windows() const { return shares_windows_; }

  const int size;
  const int rank;
  const int device;
  const Config config;
  Registrations registrations;
  std::vector<double> scales;  // of ncclRedOpCreatePreMulSum
  std::atomic<bool> is_revoked{false};
  std::atomic<bool> is_finalized{false};

 private:
  struct Shared;
  struct Channel;
  // What ranks meet at.
  enum Barrier { kOfHosts, kOfStreams, kBarriers };
  // The newest work, outside of captures or in one of them.
  struct Newest {
    cudaEvent_t event = nullptr;
    unsigned long long capture = 0;
  };

  struct Wait {
    bool is_kernel = false;
    int spins = 0;
    int seen_leaving = -1;
  };

  bool open_shared_memory();
  bool wait(Barrier barrier);
  // Pauses in a wait for other ranks. Returns false if it has to end.
  bool pause(Wait& wait, const std::vector<int>& awaited);
  bool has_left(int other);
  bool has_same_gpu_twice() const;
  bool is_one_host() const;
  static std::size_t bytes_of_channels(int size);
  Channel& channel(int from, int to) const;
  bool advance(Message& message);

  const std::string name_;
  Shared* shared_ = nullptr;
  void* channels_ = nullptr;  // in the shared memory, behind all slots
  std::size_t shared_bytes_ = 0;
  bool shares_windows_ = false;
  std::mutex peers_mutex_;
  std::vector<int> peers_;  // files that tell whether the processes of ranks live; -1: not open
  std::atomic<bool> is_stopped_{false};
  std::atomic<ncclResult_t> error_{ncclSuccess};
  int children_ = 0;
  Newest newest_;
  Newest newest_captured_;

  std::mutex background_mutex_;
  std::condition_variable background_changed_;
  int in_background_ = 0;
};

}  // namespace emulated_gpu
