// Ranges and names in NVIDIA's profilers. Without NVTX's headers, these functions do nothing.
#pragma once

#include <cuda_runtime_api.h>

#if __has_include(<nvtx3/nvToolsExt.h>) && !defined(FSDP_WITHOUT_NVTX)
#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtCudaRt.h>

namespace fsdp::nvtx {

inline void initialize() { nvtxInitialize(nullptr); }
inline void name_stream(cudaStream_t stream, const char* name) {
  nvtxNameCudaStreamA(stream, name);
}
inline void push(const char* name) { nvtxRangePushA(name); }
inline void pop() { nvtxRangePop(); }

}  // namespace fsdp::nvtx
#else

namespace fsdp::nvtx {

inline void initialize() {}
inline void name_stream(cudaStream_t /*stream*/, const char* /*name*/) {}
inline void push(const char* /*name*/) {}
inline void pop() {}

}  // namespace fsdp::nvtx
#endif
