// Seam 2 of 3: the copies around the wire. Descriptors are made once for each unit; per step only
// the addresses of gradients change. Everything is enqueued on a stream and returns at once; a
// plan must live until the stream has run the work, arrays of addresses and modes need not.
//
// Note [runs]
// One rank's chunk of a parameter is `runs` pieces of chunk / runs elements. In the parameter, the
// pieces of all ranks take turns: piece k of rank r starts (k * world_size + r) pieces in. With
// Shard(0) there is one piece, which is the chunk, and the last ranks may have less or nothing;
// with Shard(d) there are as many as the sizes before dimension d make, and all ranks have as much.
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
// A message may carry a part of each rank's chunk. The part counts as a chunk, which is `stride`
// away from the next rank's in the parameter; 0 stands for the chunk itself, and whole chunks. Only
// of chunks of one run. What a gradient's address is then counts from the first rank's part on.

// Where one parameter's gradient goes in the rank-major reduce input. Units: elements.
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

// Where one parameter's chunks go, from rank-major staging to its own region. Units: bytes.
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

// A run of elements to convert. Units: elements from the bases given with the call.
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
};

// What to do with one entry of a CastPlan.
enum class CastMode : std::uint8_t {
  Write,  // destination = source
  Add,    // destination += source
  Skip,
};

// Arithmetic of all three: an element is widened to fp32 (fp64 if either side is fp64), multiplied
// by `scale`, rounded once to the destination's dtype (nearest even); where it is accumulated,
// the rounded element is widened again and added to the widened destination, and that sum is
// rounded. fp64 goes to a half precision by way of fp32, as PyTorch casts. So a sum of
// half-precision gradients has the bits of PyTorch's own `+=`.
class Packer {
 public:
  virtual ~Packer() = default;

  // Makes what this packer needs of a plan (tables on the device, say), which is not to be changed
  // after that. Once, before the plan is first used; may allocate and wait.
  virtual void prepare(PackPlan& plan) = 0;
  virtual void prepare(UnpackPlan& plan) = 0;
  virtual void prepare(CastPlan& plan) = 0;

  // Gradients to the rank-major reduce input. gradients[i] belongs to plan.entries[i] and is
  // contiguous; nullptr stands for zeros. Without `accumulate` every element of the destination
  // is written, padding as zero; with it, only elements that have a gradient are touched.
  virtual void pack(Stream& stream, const PackPlan& plan, const void* const* gradients,
                    DType gradient_dtype, void* reduce_input, DType reduce_dtype, double scale,
                    bool accumulate) = 0;

  // Rank-major staging to parameter-contiguous regions.
  virtual void unpack(Stream& stream, const UnpackPlan& plan, const void* staging,
                      void* unsharded) = 0;

  // Runs of elements from one dtype to another. modes[i] belongs to plan.entries[i]; without
  // them everything is written.
  virtual void cast(Stream& stream, const CastPlan& plan, const CastMode* modes, const void* source,
                    void* destination, double scale) = 0;
};

// Whoever issues gets these errors, not whoever waits for the stream.
void check_pack(DType gradient_dtype, DType reduce_dtype);
void check_cast(const CastEntry& entry, CastMode mode, double scale);

struct HostPackerSettings {
  InstructionSet instruction_set = best_instruction_set();
  // Runs of at least `large_run` bytes, of outputs of at least `large_output` bytes, bypass the
  // caches. Shorter runs are mostly lines that they share with their neighbours.
  std::size_t large_output = kLargeOutput;
  std::size_t large_run = 4096;
};

std::unique_ptr<Packer> make_host_packer(const HostPackerSettings& settings = {});
// Descriptors go to memory of `device`. Throws in a build without CUDA (no_pack_cuda.cpp).
std::unique_ptr<Packer> make_cuda_packer(Device& device);

}  // namespace fsdp
