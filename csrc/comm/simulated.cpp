#include "comm/simulated.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"

namespace fsdp {
namespace {

class SimulatedCommunicator final : public Communicator {
 public:
  SimulatedCommunicator(Device& device, const SimulatedOptions& options)
      : device_(device), options_(options), random_(options.seed) {
    FSDP_CHECK(options.size >= 1 && options.rank >= 0 && options.rank < options.size,
               "a simulated rank expects to be one of ", options.size, " ranks but got ",
               options.rank);
    for (const LinkCost& cost : {options.gather, options.reduce}) {
      FSDP_CHECK(
          cost.alpha >= 0 && cost.beta > 0,
          "a simulated link expects a latency of 0 or more and a positive bandwidth but got ",
          cost.alpha, " s and ", cost.beta, " bytes/s");
    }
  }

  const char* transport() const override { return "simulated"; }
  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  GatherBy gather_by() const override { return options_.gather_by; }

  // Zeros, so that what is never written is a number.
  std::shared_ptr<void> allocate(Device& device, std::size_t bytes, BufferUse /*use*/) override {
    std::shared_ptr<void> memory = device.allocate(bytes);
    device.fill(device.compute_stream(), memory.get(), 0, bytes);
    return memory;
  }

  void group_start() override { in_group_ = true; }

  void group_end() override {
    in_group_ = false;
    if (!group_.empty()) {
      run(*grouped_on_, options_.gather, group_bytes_, group_);
      group_.clear();
      group_bytes_ = 0;
    }
  }

  void all_gather(Stream& stream, const void* input, void* output, std::size_t bytes) override {
    Move move;
    move.source = input;
    move.bytes = bytes;
    if (options_.whole_traffic) {
      move.destination = output;
      move.count = options_.size;
      move.destination_step = bytes;
    } else {
      move.destination = static_cast<char*>(output) + ranks_before() * bytes;
    }
    const std::size_t all = bytes * ranks();
    if (in_group_) {
      group_.push_back(move);
      group_bytes_ += all;
      grouped_on_ = &stream;
      return;
    }
    run(stream, options_.gather, all, {move});
  }

  void reduce_scatter(Stream& stream, const void* input, void* output, std::size_t numel,
                      DType dtype) override {
    const std::size_t segment = numel * itemsize(dtype);
    Move move;
    move.source = input;
    move.destination = output;
    move.bytes = segment;
    if (options_.whole_traffic) {
      move.count = options_.size;
      move.source_step = segment;
      move.kept = options_.rank;
    } else {
      move.source = static_cast<const char*>(input) + ranks_before() * segment;
    }
    run(stream, options_.reduce, segment * ranks(), {move});
  }

  void all_reduce(Stream& stream, void* /*data*/, std::size_t numel, DType dtype) override {
    run(stream, options_.reduce, 2 * numel * itemsize(dtype), {});
  }

  void broadcast(Stream& stream, void* /*data*/, std::size_t bytes, int /*root*/) override {
    run(stream, options_.gather, bytes, {});
  }

  void barrier(Stream& stream) override { run(stream, options_.gather, 0, {}); }

  // All ranks say what this one says. No stream works on such memory.
  void host_all_gather(Stream& /*stream*/, const void* input, void* output,
                       std::size_t bytes) override {
    for (std::size_t r = 0; r < ranks(); ++r) {
      std::memcpy(static_cast<char*>(output) + r * bytes, input, bytes);
    }
  }

  void abort(const std::string& reason) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    error_ = reason;
  }
  std::string async_error() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }

 private:
  std::size_t ranks() const { return static_cast<std::size_t>(options_.size); }
  std::size_t ranks_before() const { return static_cast<std::size_t>(options_.rank); }

  void run(Stream& stream, const LinkCost& cost, std::size_t bytes, std::vector<Move> moves) {
    check();
    double seconds = cost.alpha + static_cast<double>(bytes) / cost.beta;
    if (options_.jitter > 0) {
      seconds *= 1 + options_.jitter * late_(random_);
    }
    const auto nothing = [](const Move& move) {
      return move.bytes == 0 ||
             (move.count == 1 && move.source == static_cast<const void*>(move.destination));
    };
    moves.erase(std::remove_if(moves.begin(), moves.end(), nothing), moves.end());
    device_.transfer(stream, std::chrono::nanoseconds(std::llround(seconds * 1e9)), moves,
                     options_.multiprocessors);
  }

  Device& device_;
  SimulatedOptions options_;
  std::mt19937_64 random_;
  std::exponential_distribution<double> late_{1.0};
  std::mutex mutex_;  // of error_
  std::string error_;

  // - Between group_start and group_end.
  bool in_group_ = false;
  std::vector<Move> group_;
  std::size_t group_bytes_ = 0;
  Stream* grouped_on_ = nullptr;
};

}  // namespace

std::unique_ptr<Communicator> make_simulated_communicator(Device& device,
                                                          const SimulatedOptions& options) {
  return std::make_unique<SimulatedCommunicator>(device, options);
}

}  // namespace fsdp
