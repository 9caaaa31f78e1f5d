// Sums and the like over the inputs of all ranks.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <vector>

namespace emulated_gpu {

// How to combine elements. The scale is that of an operator of ncclRedOpCreatePreMulSum, else 1.
struct Reduction {
  ncclDataType_t type;
  ncclRedOp_t op;
  double scale;
};

std::size_t bytes_of(ncclDataType_t type);

// The scale that `scalar` points to.
double scalar_of(const void* scalar, ncclDataType_t type);

// Combines the ranks' inputs in their order, and rounds after each as the type does.
void reduce(void* to, const std::vector<const void*>& from, std::size_t count,
            const Reduction& reduction);

}  // namespace emulated_gpu
