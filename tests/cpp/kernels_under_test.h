// The CUDA kernels that pack_test.cpp runs on the host: their source compiled by the host's
// compiler (kernel_packer.cpp), or nvcc's PTX, translated (translated/translated_packer.cpp).
#pragma once

#include <memory>

#include "pack/pack.h"

namespace fsdp::test {

std::unique_ptr<Packer> make_kernels_under_test();

// Whether conversions turn every NaN into the same one, as a GPU's do. Other kernels keep a NaN's
// sign and its high bits.
bool kernels_have_one_nan();

}  // namespace fsdp::test
