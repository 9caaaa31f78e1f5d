// Counts the steps of a root and says which of them are checked: Note [checked steps] in
// torch/step_checksum.h.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "torch/step_checksum.h"
#include "torch/with_python.h"

namespace fsdp {

// A TorchRoot that replaces another one of the model takes over its checks, so steps count on.
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
