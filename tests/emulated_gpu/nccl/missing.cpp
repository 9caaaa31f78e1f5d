// The other functions of NCCL 2.28.9 and 2.30.7, which are not emulated. Each fails with its name.
// NCCL's header is not included: these are definitions without the real ones' parameters.
#include <cstdio>
#include <cstdlib>

#define EMULATED_GPU_MISSING(name)                                      \
  extern "C" int name() {                                               \
    std::fprintf(stderr, "[emulated GPU] " #name " is not emulated\n"); \
    return 5; /* ncclInvalidUsage */                                    \
  }
// The real ones return no ncclResult_t, so a caller would not see the failure: these abort.
#define EMULATED_GPU_ABORTS(name)                                       \
  extern "C" void name() {                                              \
    std::fprintf(stderr, "[emulated GPU] " #name " is not emulated\n"); \
    std::abort();                                                       \
  }

EMULATED_GPU_MISSING(ncclCommGetUniqueId)
EMULATED_GPU_MISSING(ncclCommGrow)
EMULATED_GPU_MISSING(ncclCommMemStats)
EMULATED_GPU_MISSING(ncclCommQueryProperties)
EMULATED_GPU_MISSING(ncclCommResume)
EMULATED_GPU_MISSING(ncclCommSuspend)
EMULATED_GPU_MISSING(ncclDevCommCreate)
EMULATED_GPU_MISSING(ncclDevCommDestroy)
EMULATED_GPU_MISSING(ncclGather)
EMULATED_GPU_MISSING(ncclGetLsaDevicePointer)
EMULATED_GPU_MISSING(ncclGetLsaMultimemDevicePointer)
EMULATED_GPU_MISSING(ncclGetMultimemDevicePointer)
EMULATED_GPU_MISSING(ncclGetPeerDevicePointer)
EMULATED_GPU_MISSING(ncclGinBarrierCreateRequirement)
EMULATED_GPU_MISSING(ncclGinInboxA2ACreateRequirement)
EMULATED_GPU_MISSING(ncclGinOutboxCreateRequirement)
EMULATED_GPU_MISSING(ncclGroupSimulateEnd)
EMULATED_GPU_MISSING(ncclLLA2ACreateRequirement)
EMULATED_GPU_MISSING(ncclLsaBarrierCreateRequirement)
EMULATED_GPU_MISSING(ncclParamBind)
EMULATED_GPU_MISSING(ncclParamGet)
EMULATED_GPU_MISSING(ncclParamGetAllParameterKeys)
EMULATED_GPU_MISSING(ncclParamGetI16)
EMULATED_GPU_MISSING(ncclParamGetI32)
EMULATED_GPU_MISSING(ncclParamGetI64)
EMULATED_GPU_MISSING(ncclParamGetI8)
EMULATED_GPU_MISSING(ncclParamGetParameter)
EMULATED_GPU_MISSING(ncclParamGetStr)
EMULATED_GPU_MISSING(ncclParamGetU16)
EMULATED_GPU_MISSING(ncclParamGetU32)
EMULATED_GPU_MISSING(ncclParamGetU64)
EMULATED_GPU_MISSING(ncclParamGetU8)
EMULATED_GPU_MISSING(ncclPutSignal)
EMULATED_GPU_MISSING(ncclScatter)
EMULATED_GPU_MISSING(ncclSignal)
EMULATED_GPU_MISSING(ncclWaitSignal)
EMULATED_GPU_MISSING(ncclWinGetUserPtr)

EMULATED_GPU_ABORTS(ncclLLA2ACalcSlots)
EMULATED_GPU_ABORTS(ncclParamDumpAll)
EMULATED_GPU_ABORTS(ncclResetDebugInit)
EMULATED_GPU_ABORTS(ncclResetDebugInitInternal)
EMULATED_GPU_ABORTS(ncclTeamLsa)
EMULATED_GPU_ABORTS(ncclTeamRail)
EMULATED_GPU_ABORTS(ncclTeamRankToLsa)
EMULATED_GPU_ABORTS(ncclTeamRankToWorld)
EMULATED_GPU_ABORTS(ncclTeamWorld)
