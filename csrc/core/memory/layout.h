// The place of every element of a unit's parameters: in the flat shard, in the gather input, in the
// unsharded buffer and in the reduce input. Pure arithmetic: no memory, no device.
//
// For world size N and a parameter of R rows with q elements a row, every rank's chunk has
// c = ceil(R / N) rows, as in torch.chunk and DTensor's Shard(0). Rank r has rows
// [r * c, min((r + 1) * c, R)). The rest of its chunk, if any, is zero padding.
//
// With Shard(d), d > 0, a rank's chunk is not contiguous in the parameter: Note [runs] in
// pack/pack.h. Sizes are multiples of N then. Such a chunk counts as one row, so R is N and c is 1.
// It is always packed, and never cut.
//
//   flat shard        chunk | chunk | ...               one rank's chunks, in the storage dtype
//   gather input      chunk | chunk | ...               the same in the dtype of the wire
//   staging           rank 0's gather input | rank 1's | ...          (rank-major)
//   unsharded buffer  N chunks of parameter 0 | N chunks of 1 | ...   (parameter-contiguous)
//   reduce input      rank 0's segment | rank 1's segment | ...       (rank-major)
//   flat gradient     chunk | chunk | ...               one segment; trainable parameters only
//
// Every buffer has the parameters in the order of the constructor's argument, which layout_order
// determines. If all are trainable and of one dtype, each element has the same place in the flat
// shard and in the flat gradient.
//
// A parameter that is not gathered (ParamSpec::gathered) takes part in reductions only: it has zero
// bytes in the first four buffers. Note [tensor extensions] in
// fsdp_ext/sharding/params/extensions.py says what it is for.
//
// A chunk may be padded to a multiple of some number of elements (ParamSpec::chunk_multiple). If
// all chunks are, each element has the same place in the flat shard and in the flat gradient
// whatever the dtypes are. FSDP1's flat parameters need this.
//
// Note [offloaded units]
// The flat shard and the flat gradient of an offloaded unit are in the host's memory, so that an
// optimizer steps there (CPUOffloadPolicy). Everything else is on the device. The copies are those
// that a cast makes, too: gathers send what a kernel has read from the shard, and a kernel writes
// the reduction's output to the gradient. Kernels read and write pinned memory of the host as their
// own, on few multiprocessors (CastPlan::crosses_pcie). Events do not order the host's own work, so
// the host has to wait. The end of a forward waits until kernels have read the shards. Between
// passes, reshard() and waits for unshard() do so, too. The end of a backward waits until kernels
// have written the gradients.
//
// The first R * q elements of a parameter's region in the unsharded buffer are the parameter. It is
// a contiguous view, also if N does not divide R. Every start is aligned to 16 bytes in every
// buffer, and to 256 where matrix products read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "comm/transport_traits.h"
#include "pack/pack.h"

namespace fsdp {

constexpr std::size_t kAlignment = 16;  // bytes; one vector load or store of a GPU
// Bytes, of a parameter's region. cuBLAS uses slower kernels for pointers that are aligned less.
constexpr std::size_t kRegionAlignment = 256;

// Note [gather plans]
// The *direct* plan gathers each parameter straight into its region: nothing is copied. The
// *packed* plan gathers the chunks of all parameters in one message, rank-major, into staging, and
// unpacks from there. A message of its own costs a few microseconds even in a group. A copy of a
// few megabytes costs as much. So the plan follows the transport (comm/transport_traits.h):
//
//   Size       The transport launches a group as one. Parameters of at least kDirectBytes, which
//              the layout has first, are gathered directly. The rest is packed, in the same launch.
//   Packing    Groups are not launched as one. All parameters are packed, except one that is alone.
//   Parameter  A message costs little besides its copy (shared memory). Nothing is packed, except
//              chunks of several runs, and the parameters behind them in the layout.
//
// kDirectBytes is an estimate from a GPU's copy bandwidth (2 * 4 MiB at 4 TB/s are 2 us). It was
// not measured yet.
constexpr std::size_t kDirectBytes = std::size_t{4} << 20;  // of the whole parameter, on the wire

struct GatherMessage {
  std::size_t source_offset = 0;       // bytes, in the gather input
  std::size_t destination_offset = 0;  // bytes, in the unsharded buffer
  std::size_t bytes = 0;               // of one rank
};

struct GatherPlan {
  std::vector<GatherMessage> direct;
  std::size_t packed_offset = 0;  // bytes, in the gather input
  std::size_t packed_bytes = 0;   // of one rank; 0 if nothing is packed
  UnpackPlan unpack;              // of the packed message

  const char* name() const {
    return packed_bytes == 0 ? "direct" : direct.empty() ? "packed" : "direct and packed";
  }
};

// The part of a unit's parameters that one message carries: consecutive parameters, or some rows of
// each rank's chunk of one parameter.
struct LayoutPart {
  std::size_t first = 0;  // parameters [first, end)
  std::size_t end = 0;
  std::int64_t first_row = 0;  // of each chunk
  std::int64_t rows = kAllRows;

  static constexpr std::int64_t kAllRows = -1;
  bool is_of_rows() const { return rows != kAllRows; }
};

// The reduction of one part. The entries of both plans are its trainable parameters in order.
struct ReducePlan {
  PackPlan pack;
  CastPlan finish;                  // reduce output to flat gradient
  std::size_t first_trainable = 0;  // the index of the first one among the unit's
  std::int64_t first_gradient = 0;  // the offset of the part's segment in the unit's, in elements
};

struct RowRange {
  std::int64_t first;
  std::int64_t count;
};

enum class Wire : std::uint8_t { Gather, Reduce };

struct ParamSpec {
  std::string name;
  std::int64_t rows = 0;               // R
  std::int64_t row_numel = 0;          // q
  std::int64_t runs = 1;               // of a chunk
  DType shard_dtype = DType::Float32;  // of the sharded parameter and the optimizer
  DType param_dtype = DType::Float32;  // of the unsharded parameter and the all-gather
  bool trainable = true;
  bool gathered = true;
  std::optional<DType> grad_dtype;            // of the sharded gradient; none: the layout's
  std::optional<DType> unsharded_grad_dtype;  // of the one that autograd brings; none: param_dtype
  std::int64_t chunk_multiple = 1;            // elements, a power of two
};

// Every chunk starts at a multiple of this many elements, so it is aligned in every dtype.
constexpr std::int64_t uniform_multiple(int world_size) {
  return static_cast<std::int64_t>(world_size == 1 ? kRegionAlignment : kAlignment);
}

struct ParamPlacement {
  std::int64_t numel = 0;                // R * q
  std::int64_t chunk_rows = 0;           // c
  std::int64_t chunk_numel = 0;          // c * q
  std::size_t shard_offset = 0;          // bytes, in the flat shard
  std::size_t gather_offset = 0;         // bytes, in the gather input
  std::size_t unsharded_offset = 0;      // bytes, of the region in the unsharded buffer
  std::int64_t grad_offset = -1;         // elements, in a reduce segment; -1 if not trainable
  std::size_t flat_gradient_offset = 0;  // bytes
};

// The order of the parameters in the layout, as indices into `params`: parameters that the
// transport gathers directly by size come before the others, which can then travel in one message.
// Those whose chunks have several runs come last. Otherwise the order is kept.
std::vector<std::size_t> layout_order(const std::vector<ParamSpec>& params, int world_size,
                                      std::size_t direct_bytes = kDirectBytes);

class UnitLayout {
 public:
  // `grad_dtype` is the dtype of the sharded gradients, which is the trainable parameters' or the
  // one that they are computed with. If they have several, it is the smallest, and parameters name
  // the others. `reduce_dtype` is the one on the wire. Tests lower `direct_bytes`.
  UnitLayout(std::vector<ParamSpec> params, int world_size, DType grad_dtype, DType reduce_dtype,
             std::size_t direct_bytes = kDirectBytes, bool is_offloaded = false);

  // The layout of a bucket: the parameters of several units in their order. Each unit's flat shard,
  // gather input, unsharded buffer and segment lie in the joined ones unchanged, one after another.
  // Units with trainable parameters must have the same gradient and reduce dtypes.
  static UnitLayout joined(const std::vector<const UnitLayout*>& layouts);

  int world_size() const { return world_size_; }
  DType grad_dtype() const { return grad_dtype_; }
  DType reduce_dtype() const { return reduce_dtype_; }
  const std::vector<ParamSpec>& params() const { return params_; }
  const std::vector<ParamPlacement>& placements() const { return placements_; }

  std::size_t shard_bytes() const { return shard_bytes_; }          // of the flat shard
  std::size_t gather_bytes() const { return gather_bytes_; }        // of one rank's gather input
  std::size_t unsharded_bytes() const { return unsharded_bytes_; }  // of the unsharded buffer
  std::int64_t grad_numel() const { return grad_numel_; }           // of one reduce segment
  std::size_t gradient_bytes() const { return gradient_bytes_; }    // of the flat gradient

  std::size_t trainable_count() const { return trainable_count_; }
  // The dtype in which a parameter's reduced gradient is stored.
  DType grad_dtype_of(const ParamSpec& param) const {
    return param.grad_dtype.value_or(grad_dtype_);
  }
  // The dtype of each trainable parameter's unsharded gradient.
  std::vector<DType> unsharded_grad_dtypes() const;

  // The rows of `param` that rank `rank` has.
  RowRange rows(std::size_t param, int rank) const;

  // The bytes of one row from each rank on the wire, in the gather or the reduction, whichever has
  // more. No message can be smaller.
  std::size_t row_bytes(std::size_t param) const;

  // See Note [offloaded units].
  bool is_offloaded() const { return is_offloaded_; }
  // Whether the gather input is not the flat shard: the wire has another dtype, or the shard is in
  // the host's memory.
  bool needs_cast() const { return needs_cast_; }
  // One rank and no cast: the flat shard has the unsharded layout already.
  bool is_identity() const { return world_size_ == 1 && !needs_cast_; }

  // Parts whose messages carry at most `most_bytes` of all ranks together: as many whole parameters
  // as fit, or as many rows of a larger one. 0: one part of everything. A row that is larger is a
  // part of a reduction by itself, and an error in a gather.
  std::vector<LayoutPart> parts(Wire wire, std::size_t most_bytes) const;

  // Descriptors for the packer. Offsets are those of the whole unit, except in the segments of a
  // ReducePlan, which are the part's.
  GatherPlan gather_plan(GatherBy by, const LayoutPart& part) const;
  CastPlan shard_to_gather_plan(const LayoutPart& part) const;
  ReducePlan reduce_plan(const LayoutPart& part) const;

  // The layout of the same unsharded buffer, shared by `ranks` ranks, a divisor of the world size:
  // Note [group shards] in core/gather/bucket_gather.h. The gather input is the part that one of
  // them keeps. Nothing is cast, and nothing is trainable.
  UnitLayout regrouped(int ranks) const;
  // For a regrouped layout: copies the part of the unsharded buffer that rank `rank` keeps to a
  // gather input.
  UnpackPlan keep_plan(int rank) const;

 private:
  std::int64_t first_gradient(const LayoutPart& part) const;
  std::size_t row_bytes(Wire wire, std::size_t param) const;
  std::size_t message_bytes(Wire wire, std::size_t param) const;
  std::int64_t rows_of_a_message(Wire wire, std::size_t param, std::size_t most_bytes) const;
  std::size_t end_of_gather(std::size_t end) const;
  std::int64_t end_of_gradients(std::size_t end) const;
  std::size_t first_of_several_runs(const LayoutPart& part) const;
  GatherPlan gather_plan_of_rows(const LayoutPart& part) const;
  void place_chunk(std::size_t param);
  std::size_t gathered_numel(std::size_t param) const;  // elements of a chunk on the wire
  std::size_t padded_numel(std::size_t param) const;    // the same with the padding of the chunk

  std::vector<ParamSpec> params_;
  std::vector<ParamPlacement> placements_;
  int world_size_;
  DType grad_dtype_;
  DType reduce_dtype_;
  std::size_t direct_bytes_;
  std::size_t shard_bytes_ = 0;
  std::size_t gather_bytes_ = 0;
  std::size_t large_count_ = 0;  // of the first parameters that are gathered directly by size
  std::size_t unsharded_bytes_ = 0;
  std::int64_t grad_numel_ = 0;
  std::size_t gradient_bytes_ = 0;
  std::size_t trainable_count_ = 0;
  bool is_offloaded_ = false;
  bool needs_cast_ = false;
};

inline LayoutPart whole(const UnitLayout& layout) { return {0, layout.params().size()}; }

}  // namespace fsdp
