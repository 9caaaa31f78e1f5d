#include "comm/simulated.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

namespace fsdp {
namespace {

class SimulatedCommunicator final : public Communicator {
 public:
  SimulatedCommunicator(Device& device, const SimulatedOptions& options)
      : Communicator(simulated_traits(options.on_gpu), options.rank, options.size),
        device_(device),
        options_(options) {}

  // Zeroed, because collectives leave parts of their outputs unwritten.
  std::shared_ptr<void> allocate_alone(Device& device, std::size_t bytes,
                                       BufferUse /*use*/) override {
    std::shared_ptr<void> memory = device.allocate(bytes);
    device.fill(device.compute_stream(), memory.get(), 0, bytes);
    return memory;
  }

  void all_gather(Stream& stream, const void* input, void* output, std::size_t bytes) override {
    enqueue_transfer(stream, options_.gather, bytes * ranks(), {move_of({input, output, bytes})});
  }

  void all_gather_parts(Stream& stream, const std::vector<GatherPart>& parts) override {
    std::vector<Move> moves;
    std::size_t bytes = 0;
    for (const GatherPart& part : parts) {
      moves.push_back(move_of(part));
      bytes += part.bytes * ranks();
    }
    enqueue_transfer(stream, options_.gather, bytes, std::move(moves));
  }

  void reduce_scatter(Stream& stream, const void* input, void* output, std::size_t numel,
                      DType dtype) override {
    const std::size_t segment = numel * itemsize(dtype);
    Move move;
    move.source = input;
    move.destination = output;
    move.bytes = segment;
    if (options_.on_gpu) {
      move.count = options_.size;
      move.source_step = segment;
      move.written_piece = options_.rank;
    } else {
      move.source = static_cast<const char*>(input) + ranks_before_this() * segment;
    }
    enqueue_transfer(stream, options_.reduce, segment * ranks(), {move});
  }

  void all_reduce(Stream& stream, void* /*data*/, std::size_t numel, DType dtype) override {
    enqueue_transfer(stream, options_.reduce, 2 * numel * itemsize(dtype), {});
  }

  // Returns this rank's bytes for every rank. It copies at once, since no stream uses this memory.
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
  std::size_t ranks_before_this() const { return static_cast<std::size_t>(options_.rank); }

  Move move_of(const GatherPart& part) const {
    Move move;
    move.source = part.input;
    move.bytes = part.bytes;
    if (options_.on_gpu) {
      move.destination = part.output;
      move.count = options_.size;
      move.destination_step = part.bytes;
    } else {
      move.destination = static_cast<char*>(part.output) + ranks_before_this() * part.bytes;
    }
    return move;
  }

  void enqueue_transfer(Stream& stream, const LinkCost& cost, std::size_t bytes,
                        std::vector<Move> moves) {
    check();
    const double seconds = cost.alpha + static_cast<double>(bytes) / cost.beta;
    const auto is_empty = [this](const Move& move) {
      return !options_.moves_memory || move.bytes == 0 ||
             (move.count == 1 && move.source == static_cast<const void*>(move.destination));
    };
    moves.erase(std::remove_if(moves.begin(), moves.end(), is_empty), moves.end());
    const std::chrono::nanoseconds duration(std::llround(seconds * 1e9));
    if (!options_.moves_memory && duration.count() == 0) {
      return;
    }
    device_.transfer(stream, duration, moves, options_.multiprocessors);
  }

  Device& device_;
  SimulatedOptions options_;
  std::mutex mutex_;  // guards error_
  std::string error_;
};

}  // namespace

TransportTraits simulated_traits(bool on_gpu) {
  TransportTraits traits;
  traits.name = "simulated";
  traits.gather_by = on_gpu ? GatherBy::Size : GatherBy::Parameter;
  traits.is_simulated = true;
  return traits;
}

std::unique_ptr<Communicator> make_simulated_communicator(Device& device,
                                                          const SimulatedOptions& options) {
  return std::make_unique<SimulatedCommunicator>(device, options);
}

}  // namespace fsdp
