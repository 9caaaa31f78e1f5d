// The part of NCCL that fsdp_ext uses, found at run time. The declarations are those of NCCL's
// public interface (nccl.h, 2.28.9 and newer), so a build needs neither its header nor its library.
#pragma once

#include <climits>
#include <cstddef>
#include <string>
#include <vector>

namespace fsdp::nccl {

// 2.28.9 as ncclGetVersion encodes it: the version of the oldest torch that fsdp_ext supports.
constexpr int kOldestVersion = 22809;

using Comm = struct NcclComm*;      // ncclComm_t
using Window = struct NcclWindow*;  // ncclWindow_t

struct UniqueId {  // ncclUniqueId
  char internal[128];
};

enum Result : int {  // ncclResult_t
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kInProgress = 7,
};

enum DataType : int {  // ncclDataType_t
  kInt8 = 0,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

constexpr int kSum = 0;                   // ncclRedOp_t
constexpr int kUndefined = INT_MIN;       // NCCL_CONFIG_UNDEF_INT
constexpr int kWindowCollSymmetric = 1;   // NCCL_WIN_COLL_SYMMETRIC
constexpr unsigned kMagic = 0xcafebeefU;  // marks an ncclConfig_t
constexpr int kMostCtas = 64;             // NCCL lowers it to what a version has

constexpr int kEfficiencyPolicy = 1;  // NCCL_CTA_POLICY_EFFICIENCY: few thread blocks
constexpr int kZeroCtas = 2;          // NCCL_CTA_POLICY_ZERO: copy engines gather
constexpr int kAutoPolicy = -1;  // not NCCL's: see Note [paths of lanes] in comm/nccl/nccl_paths.h

// ncclConfig_t as of 2.28. NCCL reads `size` bytes, takes `version` as the caller's version, and
// uses defaults for fields that the version lacks.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = kMagic;
  unsigned version = kOldestVersion;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;
  const char* comm_name = nullptr;
  int collnet_enable = kUndefined;
  int cta_policy = kUndefined;
  int shrink_share = kUndefined;
  int nvls_ctas = kUndefined;
  int channels_per_net_peer = kUndefined;
  int nvlink_centric_sched = kUndefined;
};
static_assert(sizeof(Config) == 80 && offsetof(Config, traffic_class) == 44 &&
                  offsetof(Config, cta_policy) == 60,
              "ncclConfig_t has these offsets.");

// User settings for the collectives of one lane: fields of ncclConfig_t. NCCL chooses the undefined
// fields.
struct LaneSettings {
  int min_ctas = kUndefined;  // thread blocks, which occupy a multiprocessor each
  int max_ctas = kUndefined;
  int cluster_size = kUndefined;  // thread blocks in a cluster
  int cta_policy = kUndefined;    // NCCL_CTA_POLICY_*, or kAutoPolicy
};

// The functions: FUNCTION(result, name without "nccl", arguments).
#define FSDP_NCCL_FUNCTIONS(FUNCTION)                                                          \
  FUNCTION(Result, GetVersion, (int*))                                                         \
  FUNCTION(Result, GetUniqueId, (UniqueId*))                                                   \
  FUNCTION(Result, CommInitRankConfig, (Comm*, int size, UniqueId, int rank, Config*))         \
  FUNCTION(Result, CommSplit, (Comm, int color, int key, Comm*, Config*))                      \
  FUNCTION(Result, CommFinalize, (Comm))                                                       \
  FUNCTION(Result, CommDestroy, (Comm))                                                        \
  FUNCTION(Result, CommAbort, (Comm))                                                          \
  FUNCTION(Result, CommRevoke, (Comm, int flags))                                              \
  FUNCTION(Result, CommGetAsyncError, (Comm, Result*))                                         \
  FUNCTION(const char*, GetErrorString, (Result))                                              \
  FUNCTION(const char*, GetLastError, (Comm))                                                  \
  FUNCTION(Result, AllGather, (const void*, void*, std::size_t, DataType, Comm, void* stream)) \
  FUNCTION(Result, ReduceScatter,                                                              \
           (const void*, void*, std::size_t, DataType, int op, Comm, void* stream))            \
  FUNCTION(Result, AllReduce,                                                                  \
           (const void*, void*, std::size_t, DataType, int op, Comm, void* stream))            \
  FUNCTION(Result, GroupStart, ())                                                             \
  FUNCTION(Result, GroupEnd, ())                                                               \
  FUNCTION(Result, MemAlloc, (void**, std::size_t))                                            \
  FUNCTION(Result, MemFree, (void*))                                                           \
  FUNCTION(Result, CommRegister, (Comm, void*, std::size_t, void** handle))                    \
  FUNCTION(Result, CommDeregister, (Comm, void* handle))                                       \
  FUNCTION(Result, CommWindowRegister, (Comm, void*, std::size_t, Window*, int flags))         \
  FUNCTION(Result, CommWindowDeregister, (Comm, Window))

struct Api {
  std::string path;  // of the library, from the dynamic linker
  int version = 0;

#define FSDP_DECLARE(result, name, arguments) result(*name) arguments = nullptr;
  FSDP_NCCL_FUNCTIONS(FSDP_DECLARE)
#undef FSDP_DECLARE

  std::string version_text() const;  // "2.28.9"
  // How buffers are registered unless settings say otherwise: "register", or "window" (symmetric,
  // from 2.30.7 on).
  const char* registration() const;
  // See Note [registration between nodes] in comm/nccl/nccl_paths.h.
  bool registers_between_nodes() const;
  // See Note [symmetric kernels] in comm/nccl/nccl_paths.h.
  bool has_safe_symmetric_kernels() const;
  // NCCL's text for an error, with the details of the last one.
  std::string describe(Comm comm, Result error) const;
};

// Loads the first of these libraries that exists: the one that $FSDP_EXT_NCCL_SO names, torch's
// (NCCL may be linked into torch), the one that the process has loaded, the `candidates` in order,
// and the one that the dynamic linker finds.
//
// Throws Error if there is none, if it is too old or lacks a function, or if torch uses another
// one.
Api find_library(const std::vector<std::string>& candidates);
// The same, but only the first call loads it.
const Api& load(const std::vector<std::string>& candidates);

// The paths of all NCCL libraries that the process has loaded.
std::vector<std::string> loaded_libraries();

}  // namespace fsdp::nccl
