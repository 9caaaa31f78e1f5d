// The gradients that backwards without gradient sync have accumulated for the units of one bucket:
// its reduce input, one piece after another, and which trainable parameters have gradients there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/stream.h"

namespace fsdp {

class BucketReduction;
struct Unit;

class AccumulatedGradients {
 public:
  // A part of a unit's gradients. Each rank's elements lie `stride` elements behind those of the
  // rank before it.
  struct Part {
    void* first = nullptr;
    std::int64_t numel = 0;  // of one rank
    std::int64_t stride = 0;
  };

  explicit AccumulatedGradients(const BucketReduction& reduction);
  AccumulatedGradients(const AccumulatedGradients&) = delete;
  AccumulatedGradients& operator=(const AccumulatedGradients&) = delete;

  bool any() const { return has_any_; }
  // Whether trainable parameter i of the unit has accumulated gradients.
  bool has(const Unit& unit, std::size_t i) const { return since(unit, i) != 0; }
  // The first packing that the parameter's gradients include: Note [NaN and Inf] in
  // core/reduce/nonfinite_gradients.h. 0 if it has none.
  std::uint64_t since(const Unit& unit, std::size_t i) const;
  // Whether gradients include packings before this one.
  bool any_before(std::uint64_t packing) const;

  // Allocates memory if there is none, without values.
  void allocate(Device& device);
  // If there are no gradients, all become zeros.
  void begin(Device& device);
  // The parameter has gradients from now on, which the caller writes.
  void add(const Unit& unit, std::size_t i, std::uint64_t packing);
  // The gradients that arrived for the units were packed into the memory. Parameters without
  // gradients have zeros there.
  void add_arrived(const std::vector<Unit*>& units, std::uint64_t packing);
  // Forgets the gradients of these units. Other units keep theirs; `stream` writes zeros between
  // them.
  void reset(Device& device, Stream& stream, const std::vector<Unit*>& units);
  void reset();

  char* piece(std::size_t number) const;  // of the bucket's reductions
  // The parts of the unit's segments, in order.
  std::vector<Part> parts(const Unit& unit) const;
  std::size_t bytes() const;  // of its memory

 private:
  void fill_with_zeros(Device& device, Stream& stream, const Unit& unit) const;

  const BucketReduction& reduction_;
  std::shared_ptr<void> memory_;      // from the first use on
  std::vector<std::uint64_t> since_;  // by trainable parameter of the bucket
  bool has_any_ = false;
};

}  // namespace fsdp
