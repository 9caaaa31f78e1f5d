// Checked steps: their counter, and the hashes of one unit.
//
// Note [checked steps]
// With fully_shard(check_every=k), the schedule looks at every k-th step. A step begins with a
// forward that autograd records, and ends with the first backward after it. The bytes of each
// unit's unsharded parameters are hashed when the unit is resharded, in forward and again in
// backward. So the hash covers the gather and all the time that the slot was in use. The sharded
// parameters are hashed when the step begins and when it ends. At the end of the step all ranks
// exchange these numbers, and fsdp_ext/sharding/root/step_checks.py compares them.
//
// A gather that was issued before the step (Note [gathers ahead of forward]) may race with a write
// that makes no new version. So when such a unit is attached, this rank's rows of the gathered
// parameters are compared with its shard.
//
// All of this runs on the compute stream, where the parameters are whole and nobody writes them. On
// a GPU the numbers stay there until the end of the step. Other steps do nothing but count, and
// test one pointer for each unit that is resharded.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "torch/with_python.h"

namespace fsdp {

class TorchUnit;

// A tensor with one int64, a hash of the elements' bytes. A flipped bit always changes it. Ranks
// with the same kind of device have the same hash of the same bytes.
at::Tensor hash_of(const at::Tensor& tensor);
// The same, computed with operators that every device has, for GPUs.
at::Tensor hash_by_operators(const at::Tensor& tensor);
// The same for several tensors together. Not defined if they have no elements.
at::Tensor hash_of(const std::vector<at::Tensor>& tensors);
// A tensor with one bool: whether `gathered` differs from `shard` cast to its dtype. A NaN that was
// cast equals everything, because casts may change its bytes.
at::Tensor differs(const at::Tensor& gathered, const at::Tensor& shard);

// An undefined tensor stands for a hash that the step did not compute.
struct StepChecksum {
  // The numbers that ranks exchange, as step_checks.py in fsdp_ext/sharding reads them: the hashes
  // of forward, backward and the shard (0 if there is none), then 1 if the shard has changed
  // although nothing wrote it, and a GatherAhead.
  using Numbers = std::array<std::int64_t, 5>;
  enum class GatherAhead : std::uint8_t { No, Equal, Outdated };

  at::Tensor forward;  // hashes of the unsharded parameters
  at::Tensor backward;
  at::Tensor shard;  // a hash, when the step began
  std::uint64_t shard_version = 0;
  bool is_gathered_ahead = false;
  at::Tensor is_outdated;  // a bool, if it is gathered ahead: whether its own rows differ
};

// What a unit contributes to a checked step.
class UnitChecksum {
 public:
  // This is a member of `unit`.
  explicit UnitChecksum(TorchUnit& unit) : unit_(unit) {}

  // Call these at the beginning and at the end of a checked step.
  void begin();
  StepChecksum::Numbers end();
  // The step has ended in an exception.
  void discard() { sum_.reset(); }

  // Compares this rank's rows of the unsharded parameters, which have just been attached, with the
  // shard, if a checked step has found the unit gathered ahead. A shard with a new version has been
  // written since then, for example by an attached optimizer.
  void compare_with_shard();
  // Hashes the unsharded parameters in a checked step, the first time in each pass, because ranks
  // may differ in how often they gather a unit.
  void hash_parameters();

 private:
  template <typename Visit>
  void for_each_shard(const Visit& visit) const;
  at::Tensor hash_of_shard() const;
  std::uint64_t shard_version() const;  // with updates in backward

  TorchUnit& unit_;
  std::unique_ptr<StepChecksum> sum_;  // in a checked step only
};

// Counts the steps of a root and says which of them are checked.
// When a model gets a new TorchRoot, that takes over the checks of the old one, so the count
// continues.
class StepChecks {
 public:
  // `compare` is a weak reference to a method that takes the number of a step and the numbers of
  // each unit. It compares them with those of other ranks.
  StepChecks(std::int64_t every, pybind11::object compare)
      : every_(every), compare_(std::move(compare)) {}

  StepChecks(const StepChecks&) = delete;
  StepChecks& operator=(const StepChecks&) = delete;

  // Returns whether the step that begins now is checked. The first step has the number 1.
  bool begin_step() { return ++step_ % every_ == 0; }
  std::int64_t step() const { return step_; }

  void compare(const std::vector<StepChecksum::Numbers>& units) const;

 private:
  std::int64_t every_;
  std::int64_t step_ = 0;
  HeldObject compare_;
};

}  // namespace fsdp
