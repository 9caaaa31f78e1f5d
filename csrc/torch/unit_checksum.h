// What a unit contributes to a checked step: Note [checked steps] in torch/step_checksum.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "torch/step_checksum.h"

namespace fsdp {

class TorchUnit;

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

}  // namespace fsdp
