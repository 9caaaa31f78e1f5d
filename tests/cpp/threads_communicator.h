// A communicator whose ranks are threads of one process, for tests of the schedule.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/align.h"
#include "base/check.h"
#include "comm/communicator.h"
#include "device/host_stream.h"

namespace fsdp::test {

// Where the ranks of one group meet. Every collective is one meeting: each rank publishes an
// address and reads what it needs from the others'. No rank leaves before all have read.
class MeetingPoint {
 public:
  MeetingPoint(int size, std::chrono::milliseconds timeout)
      : timeout_(timeout), addresses_(static_cast<std::size_t>(size)) {}

  template <typename Read>
  void meet(int rank, const void* address, const Read& read) {
    addresses_[static_cast<std::size_t>(rank)] = address;
    arrive();
    read(addresses_);
    arrive();
  }

  int size() const { return static_cast<int>(addresses_.size()); }

 private:
  void arrive() {
    std::unique_lock<std::mutex> lock(mutex_);
    const std::uint64_t meeting = meetings_;
    if (++arrived_ == addresses_.size()) {
      arrived_ = 0;
      ++meetings_;
      changed_.notify_all();
      return;
    }
    if (!changed_.wait_for(lock, timeout_, [&] { return meetings_ != meeting; })) {
      throw TimeoutError("a peer did not come to the meeting point");
    }
  }

  std::chrono::milliseconds timeout_;
  std::vector<const void*> addresses_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t arrived_ = 0;
  std::uint64_t meetings_ = 0;
};

class ThreadsCommunicator final : public Communicator {
 public:
  ThreadsCommunicator(const std::shared_ptr<MeetingPoint>& point, int rank,
                      GatherBy gather_by = GatherBy::Packing)
      : Communicator({"threads", gather_by}, rank, point->size()), point_(point), memory_(*this) {}

  // As NCCL does with buffers that it registers: ranks make them together.
  void make_buffers_alike() { memory_.makes_alike = true; }
  const std::vector<std::size_t>& allocated() const { return memory_.allocated; }
  RegisteredMemory* registered_memory() override { return &memory_; }

  void all_gather_parts(Stream& stream, const std::vector<GatherPart>& parts) override {
    groups_ += 1;
    Communicator::all_gather_parts(stream, parts);
  }
  int groups() const { return groups_; }

  void all_gather(Stream& stream, const void* input, void* output, std::size_t bytes) override {
    enqueue(stream, [=] {
      point_->meet(rank(), input, [&](const std::vector<const void*>& inputs) {
        for (std::size_t r = 0; r < inputs.size(); ++r) {
          std::memcpy(static_cast<char*>(output) + r * bytes, inputs[r], bytes);
        }
      });
    });
  }

  // fp32 only, summed in rank order.
  void reduce_scatter(Stream& stream, const void* input, void* output, std::size_t numel,
                      DType dtype) override {
    FSDP_CHECK(dtype == DType::Float32, "the tests reduce float32 only");
    enqueue(stream, [=] {
      std::vector<float> sums(numel, 0.0F);
      point_->meet(rank(), input, [&](const std::vector<const void*>& inputs) {
        for (const void* theirs : inputs) {
          const float* segment =
              static_cast<const float*>(theirs) + static_cast<std::size_t>(rank()) * numel;
          for (std::size_t i = 0; i < numel; ++i) {
            sums[i] += segment[i];
          }
        }
      });
      std::memcpy(output, sums.data(), numel * sizeof(float));
    });
  }

  void all_reduce(Stream&, void*, std::size_t, DType) override {
    throw Error("the schedule does not all-reduce");
  }

  void abort(const std::string& reason) override { failure_ = reason; }
  std::string async_error() override { return failure_; }

  // The next collective throws this.
  void fail_next(std::string message) { failure_ = std::move(message); }

 private:
  class Memory final : public RegisteredMemory {
   public:
    explicit Memory(ThreadsCommunicator& owner) : owner_(owner) {}
    std::shared_ptr<void> allocate(std::size_t bytes, BufferUse /*use*/) override {
      allocated.push_back(bytes);
      return {std::aligned_alloc(64, align_up(bytes, 64)), &std::free};
    }
    bool can_register() const override { return false; }
    bool registers_gradients() const override { return false; }
    bool holds(const void* /*memory*/) const override { return false; }
    int count() const override { return 0; }
    void free_unused() override {}
    std::uint64_t most(std::uint64_t mine) override {
      std::uint64_t most = mine;
      if (makes_alike) {
        owner_.point_->meet(owner_.rank(), &mine, [&](const std::vector<const void*>& all) {
          for (const void* theirs : all) {
            most = std::max(most, *static_cast<const std::uint64_t*>(theirs));
          }
        });
      }
      return most;
    }

    bool makes_alike = false;
    std::vector<std::size_t> allocated;

   private:
    ThreadsCommunicator& owner_;
  };

  template <typename Work>
  void enqueue(Stream& stream, Work work) {
    static_cast<HostQueue&>(stream).enqueue([this, work] {
      FSDP_CHECK(failure_.empty(), failure_);
      work();
    });
  }

  std::shared_ptr<MeetingPoint> point_;
  Memory memory_;
  int groups_ = 0;
  std::string failure_;
};

}  // namespace fsdp::test
