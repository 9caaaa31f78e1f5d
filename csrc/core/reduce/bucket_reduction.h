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
#include "core/reduce/accumulated_gradients.h"
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
