// Remembers the shapes that the meta device has found. Its kernels that are written in Python take
// longer than a small operator does.
#pragma once

#include <ATen/core/stack.h>

#include <optional>
#include <string>

#include "signature.h"

namespace emulated_gpu {

// What shapes depend on: the operator, and its arguments without the tensors' contents. Nothing if
// an argument is of a kind that is not known here.
std::optional<std::string> shape_key(const Signature& signature,
                                     const torch::jit::Stack& arguments);

// The results on the meta device that were stored with a key.
std::optional<torch::jit::Stack> cached_shapes(const std::string& key);
void cache_shapes(const std::string& key, const torch::jit::Stack& shapes);

}  // namespace emulated_gpu
