// How a bucket's gradients are reduced, and the state of its last reduction, which only the reducer
// changes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/lanes.h"
#include "core/memory/layout.h"
#include "core/units/unit.h"
#include "device/stream.h"
#include "pack/pack.h"

namespace fsdp {

// One message of a reduction, with its packing before and its finish after: Note [pieces].
struct ReducePiece : ReducePlan {
  LayoutPart part;
  std::int64_t gradient_offset = 0;    // elements of the gradient before the piece's rows
  std::vector<DType> gradient_dtypes;  // of its gradients, each once
};

class BucketReduction;

// The gradients that backwards without gradient sync have accumulated for the units of one bucket:
// its reduce input, one piece after another, and which trainable parameters have gradients there.
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
  // Counts the parameter's gradients as accumulated. The caller writes their values.
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

class BucketReduction {
 public:
  // `layout` is that of the bucket of `units`, and outlives this.
  BucketReduction(const UnitLayout& layout, const std::vector<Unit*>& units, Lanes& lanes);

  BucketReduction(const BucketReduction&) = delete;
  BucketReduction& operator=(const BucketReduction&) = delete;

  const UnitLayout& layout() const { return layout_; }
  Communicator& communicator() const { return communicator_; }        // of the ranks of the mesh
  const std::vector<ReducePiece>& pieces() const { return pieces_; }  // at least one
  bool is_in_pieces() const { return pieces_.size() > 1; }
  std::size_t input_bytes() const;  // of all ranks' segments
  std::size_t input_bytes(const ReducePiece& piece) const;
  const AccumulatedGradients& accumulated() const { return accumulated_; }
  Event& packed() const { return *packed_; }    // complete when the gradients are packed
  Event& reduced() const { return *reduced_; }  // complete when they are reduced

  // In error messages.
  const std::string label;
  const std::string all_reduce_label;  // Note [replicas] in core/reduce/reducer.h

 private:
  friend class PackedGradients;
  friend class Reducer;

  const UnitLayout& layout_;
  Communicator& communicator_;
  const std::vector<ReducePiece> pieces_;
  const std::vector<DType> gradient_dtypes_;  // of each trainable parameter, unsharded
  AccumulatedGradients accumulated_;
  // The native handles of the streams on which gradients arrived that are not packed yet.
  std::vector<void*> arrived_on_;
  // With one element for each trainable parameter.
  std::vector<const void*> gradients_;           // addresses, for the packer
  std::vector<const void*> gradients_of_dtype_;  // scratch, for pieces of several gradient dtypes
  std::vector<CastMode> finish_modes_;
  const std::unique_ptr<Event> packed_;
  const std::unique_ptr<Event> reduced_;
  bool is_pending_ = false;    // the compute stream has not waited for `reduced_` yet
  bool into_window_ = false;   // on all ranks: Note [shards and gradients in windows]
  void* waited_on_ = nullptr;  // the native handle of the compute stream that has waited last
};

}  // namespace fsdp
