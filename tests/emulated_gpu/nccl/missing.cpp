// The functions that torch imports from NCCL and that are not emulated. Each fails with its name.
// NCCL's header is not included: these are definitions without the real ones' parameters.
#include <cstdio>

#define EMULATED_GPU_MISSING(name)                                      \
  extern "C" int name() {                                               \
    std::fprintf(stderr, "[emulated GPU] " #name " is not emulated\n"); \
    return 5; /* ncclInvalidUsage */                                    \
  }

EMULATED_GPU_MISSING(ncclDevCommCreate)
EMULATED_GPU_MISSING(ncclDevCommDestroy)
EMULATED_GPU_MISSING(ncclGroupSimulateEnd)
