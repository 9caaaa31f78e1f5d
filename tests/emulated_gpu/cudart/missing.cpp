// The functions that torch's libraries import from CUDA's runtime and that are not emulated. Each
// fails with its name. tests/emulated_gpu/test_emulated_gpu.py compares the list with torch.
//
// CUDA's header is not included: these are definitions without the real ones' parameters.
#include <string>

namespace emulated_gpu {

constexpr int kNotSupported = 801;  // cudaErrorNotSupported

void report_missing(const std::string& name);

}  // namespace emulated_gpu

#define EMULATED_GPU_MISSING(name)       \
  extern "C" int name() {                \
    emulated_gpu::report_missing(#name); \
    return emulated_gpu::kNotSupported;  \
  }

EMULATED_GPU_MISSING(cudaGetSymbolAddress)
EMULATED_GPU_MISSING(cudaMemcpyToSymbol)
