// The hashes that a checked step computes for one unit.
//
// Note [checked steps]
// With fully_shard(check_every=k), the schedule looks at every k-th step. A step begins with a
// forward that autograd records, and ends with the first backward after it. The bytes of each
// unit's unsharded parameters are hashed when the unit is resharded, in forward and again in
// backward. So the hash covers the gather and all the time that the slot was in use. The sharded
// parameters are hashed when the step begins and when it ends. At the end of the step all ranks
// exchange these numbers, and fsdp_ext/sharding/root/step_checks.py compares them.
//
// All of this runs on the compute stream, where the parameters are whole and nobody writes them. On
// a GPU the numbers stay there until the end of the step. Other steps do nothing but count, and
// test one pointer for each unit that is resharded.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

namespace fsdp {

// A tensor with one int64, a hash of the elements' bytes. A flipped bit always changes it. Ranks
// with the same kind of device have the same hash of the same bytes.
at::Tensor hash_of(const at::Tensor& tensor);
// The same, computed with operators that every device has, for GPUs.
at::Tensor hash_by_operators(const at::Tensor& tensor);
// The same for several tensors together. Not defined if they have no elements.
at::Tensor hash_of(const std::vector<at::Tensor>& tensors);

// An undefined tensor stands for a hash that the step did not compute.
struct StepChecksum {
  // The numbers that ranks exchange, as step_checks.py in fsdp_ext/sharding reads them: the hashes
  // of forward, backward and the shard (0 if there is none), then 1 if the shard has changed
  // although nothing wrote it.
  using Numbers = std::array<std::int64_t, 4>;

  at::Tensor forward;  // hashes of the unsharded parameters
  at::Tensor backward;
  at::Tensor shard;  // a hash, when the step began
  std::uint64_t shard_version = 0;
};

}  // namespace fsdp
