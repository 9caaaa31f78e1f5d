// Random operators: the CPU's generator, seeded from the state of the GPU's.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/stack.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>

#include <cstddef>
#include <vector>

#include "signature.h"

namespace emulated_gpu {

class RandomState {
 public:
  // Takes the generators out of the arguments, and advances the GPU's.
  RandomState(const Signature& signature, c10::Device device, torch::jit::Stack& arguments);

  // Puts generators of the CPU in their places. A graph's replay changes the state, so this reads
  // it when the operator runs.
  void set_generators(torch::jit::Stack& arguments) const;

 private:
  std::vector<std::size_t> places_;
  at::PhiloxCudaState state_;
};

}  // namespace emulated_gpu
