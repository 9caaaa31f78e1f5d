// Sums several arrays element by element, in the order in which they are given: fp64 in fp64, all
// others in fp32, rounded once at the end. So every rank computes the same sum.
#pragma once

#include <cstddef>
#include <vector>

#include "base/dtype.h"
#include "base/instruction_set.h"

namespace fsdp {

// output[0, numel) = sources[0] + sources[1] + ... `output` may be one of the sources. Throws for
// bytes, which have no sum.
void sum_in_rank_order(const std::vector<const void*>& sources, void* output, std::size_t numel,
                       DType dtype, InstructionSet instruction_set = best_instruction_set());

}  // namespace fsdp
