// Seam 2 of 3: the copies before and after communication. A plan is made once for each unit, and
// only the addresses of gradients change from step to step. Every call enqueues its work on a
// stream and returns at once. A plan must live until the stream has run the work. Arrays of
// addresses and modes are read before the call returns.
//
// Note [runs]
// A run is a contiguous range of a parameter that belongs to one rank. One rank's chunk consists of
// `runs` runs of equal length, and the runs of all ranks alternate in the parameter: run k of rank
// r is number k * world_size + r. With Shard(0), a chunk is one run, and the last ranks may have
// fewer elements or none. With Shard(d), the number of runs is the product of the sizes before
// dimension d, and all ranks have equally many elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/copy.h"
#include "base/dtype.h"
#include "base/instruction_set.h"
#include "device/stream.h"

namespace fsdp {

// Note [parts of chunks]
// A message may carry a part of each rank's chunk, if chunks have one run. An entry then describes
// the part as if it were the chunk. `stride` is the distance between the parts of two ranks in the
// parameter, and the gradient's address is that of the first rank's part. A stride of 0 stands for
// whole chunks.

// The place of one parameter's gradient in the rank-major reduce input. All figures are elements.
struct PackEntry {
  std::int64_t numel = 0;        // elements of the gradient (R * q)
  std::int64_t chunk_numel = 0;  // elements of one rank's chunk (c * q)
  std::int64_t offset = 0;       // of the chunk within a rank's segment
  std::int64_t runs = 1;         // see Note [runs]
  std::int64_t stride = 0;       // see Note [parts of chunks]
};

struct PackPlan {
  std::vector<PackEntry> entries;  // offsets ascending, chunks do not overlap
  std::int64_t segment_numel = 0;  // elements of one rank's segment, padding included
  int world_size = 1;
  std::shared_ptr<const void> table;  // the packer's own, see prepare
};

// The places of one parameter's chunks in the rank-major staging buffer and in the parameter's own
// region. All sizes are bytes.
struct UnpackEntry {
  std::size_t chunk_bytes = 0;
  std::size_t source_offset = 0;       // of the chunk within a rank's segment of the staging
  std::size_t destination_offset = 0;  // of the region, world_size * chunk_bytes long
  std::int64_t runs = 1;               // see Note [runs]
  std::size_t stride = 0;              // see Note [parts of chunks]
};

struct UnpackPlan {
  std::vector<UnpackEntry> entries;
  std::size_t segment_bytes = 0;
  int world_size = 1;
  std::shared_ptr<const void> table;  // the packer's own, see prepare
};

// Contiguous elements to convert. Offsets count from the addresses that the call gets.
struct CastEntry {
  std::size_t source_offset = 0;       // bytes
  std::size_t destination_offset = 0;  // bytes
  std::int64_t numel = 0;
  DType source_dtype = DType::Float32;
  DType destination_dtype = DType::Float32;
};

struct CastPlan {
  std::vector<CastEntry> entries;
  std::shared_ptr<const void> table;  // the packer's own, see prepare
  bool crosses_pcie = false;          // the source or the destination is in the host's memory
};

// What to do with one entry of a CastPlan.
enum class CastMode : std::uint8_t {
  Write,  // destination = source
  Add,    // destination += source
  Skip,
};

// The place where pack marks the gradients that have NaN or Inf. Pack reads every element anyway,
// so this needs no pass of its own.
struct NonfiniteMarks {
  std::uint64_t* of_entries = nullptr;  // on the packer's device; nullptr: nothing is noted
  std::uint64_t mark = 0;  // written for each entry with NaN or Inf; others keep theirs
};

// All implementations compute the same: an element is widened to fp32 (fp64 if either side is
// fp64), multiplied by `scale`, and rounded to nearest even in the destination's dtype. To
// accumulate, the rounded element and the destination are widened, added, and the sum is rounded.
// fp64 becomes a half precision by way of fp32, as in PyTorch. So a sum of half-precision gradients
// has the bits of PyTorch's own `+=`.
class Packer {
 public:
  virtual ~Packer() = default;

  // Makes this packer's own data for a plan, such as tables on the device. Call it once, before the
  // plan is first used, and do not change the plan afterwards. It may allocate and wait.
  virtual void prepare(PackPlan& plan) = 0;
  virtual void prepare(UnpackPlan& plan) = 0;
  virtual void prepare(CastPlan& plan) = 0;

  // Copies gradients to the rank-major reduce input. gradients[i] belongs to plan.entries[i] and is
  // contiguous; nullptr stands for zeros. Without `accumulate`, every element of the destination is
  // written, and padding becomes zero. With it, only elements that have a gradient change.
  virtual void pack(Stream& stream, const PackPlan& plan, const void* const* gradients,
                    DType gradient_dtype, void* reduce_input, DType reduce_dtype, double scale,
                    bool accumulate, const NonfiniteMarks& marks) = 0;

  // Copies the rank-major staging buffer to one contiguous region for each parameter.
  virtual void unpack(Stream& stream, const UnpackPlan& plan, const void* staging,
                      void* unsharded) = 0;

  // Converts elements from one dtype to another. modes[i] belongs to plan.entries[i]; nullptr
  // stands for writing every entry.
  virtual void cast(Stream& stream, const CastPlan& plan, const CastMode* modes, const void* source,
                    void* destination, double scale) = 0;
};

// Every packer calls these before it enqueues, so the caller gets the error, not the stream.
void check_pack(DType gradient_dtype, DType reduce_dtype);
void check_cast(const CastEntry& entry, CastMode mode, double scale);

struct HostPackerSettings {
  InstructionSet instruction_set = best_instruction_set();
  // An output of at least `large_output` bytes bypasses the caches, except for runs of fewer than
  // `large_run` bytes, which share too many of their cache lines with neighbours.
  std::size_t large_output = kLargeOutput;
  std::size_t large_run = 4096;
};

std::unique_ptr<Packer> make_host_packer(const HostPackerSettings& settings = {});
// The packer keeps its tables in memory of `device`. Its kernels occupy at most `multiprocessors`
// multiprocessors; 0 stands for all. Throws in a build without CUDA (no_pack_cuda.cpp).
std::unique_ptr<Packer> make_cuda_packer(Device& device, int multiprocessors = 0);

}  // namespace fsdp
