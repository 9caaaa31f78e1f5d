// The part of NCCL that fsdp_ext uses, found at run time. The declarations are those of NCCL's
// public interface (nccl.h, 2.18 and newer), so a build needs neither its header nor its library.
// Functions of newer versions are null if the library lacks them.
#pragma once

#include <climits>
#include <cstddef>
#include <string>
#include <vector>

namespace fsdp::nccl {

// 2.18.0 as ncclGetVersion encodes it, the first version with ncclCommSplit.
constexpr int kOldestVersion = 21800;

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

// The first version whose ncclConfig_t has all fields of Config.
constexpr int kWholeConfig = 22800;

// 2.27 has windows, too. But there a registration that fails aborts the communicator and tells
// nobody, and it needs address space that is never given back.
constexpr int kFirstWithWindows = 22800;

constexpr int kEfficiencyPolicy = 1;  // NCCL_CTA_POLICY_EFFICIENCY: few thread blocks
constexpr int kZeroCtas = 2;          // NCCL_CTA_POLICY_ZERO: copy engines gather
constexpr int kAutoPolicy = -1;  // not NCCL's: see Note [paths of lanes] in comm/nccl/nccl_paths.h

// ncclConfig_t as of 2.28. NCCL reads `size` bytes, takes `version` as the caller's version, and
// uses defaults for fields that the version lacks. So older versions get the fields of 2.18 alone.
struct Config {
  std::size_t size = 48;
  unsigned magic = kMagic;
  unsigned version = kOldestVersion;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;  // from here on, not in 2.18
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
  int cta_policy = kUndefined;    // NCCL_CTA_POLICY_*, from 2.28 on, or kAutoPolicy
};

struct Api {
  std::string path;  // of the library, from the dynamic linker
  int version = 0;

  Result (*GetVersion)(int*) = nullptr;
  Result (*GetUniqueId)(UniqueId*) = nullptr;
  Result (*CommInitRankConfig)(Comm*, int size, UniqueId, int rank, Config*) = nullptr;
  Result (*CommSplit)(Comm, int color, int key, Comm*, Config*) = nullptr;
  Result (*CommFinalize)(Comm) = nullptr;
  Result (*CommDestroy)(Comm) = nullptr;
  Result (*CommAbort)(Comm) = nullptr;
  Result (*CommGetAsyncError)(Comm, Result*) = nullptr;
  const char* (*GetErrorString)(Result) = nullptr;
  const char* (*GetLastError)(Comm) = nullptr;
  Result (*AllGather)(const void*, void*, std::size_t, DataType, Comm, void* stream) = nullptr;
  Result (*ReduceScatter)(const void*, void*, std::size_t, DataType, int op, Comm,
                          void* stream) = nullptr;
  Result (*AllReduce)(const void*, void*, std::size_t, DataType, int op, Comm,
                      void* stream) = nullptr;
  Result (*GroupStart)() = nullptr;
  Result (*GroupEnd)() = nullptr;

  // From 2.19 on.
  Result (*MemAlloc)(void**, std::size_t) = nullptr;
  Result (*MemFree)(void*) = nullptr;
  Result (*CommRegister)(Comm, void*, std::size_t, void** handle) = nullptr;
  Result (*CommDeregister)(Comm, void* handle) = nullptr;
  // From 2.28.7 on.
  Result (*CommRevoke)(Comm, int flags) = nullptr;
  // From 2.27 on.
  Result (*CommWindowRegister)(Comm, void*, std::size_t, Window*, int flags) = nullptr;
  Result (*CommWindowDeregister)(Comm, Window) = nullptr;

  std::string version_text() const;  // "2.28.9"
  // How buffers are registered unless settings say otherwise: "register" (from 2.19 on), "window"
  // (symmetric, from 2.30.7 on) or "none".
  const char* registration() const;
  // See Note [registration between nodes] in comm/nccl/nccl_paths.h.
  bool registers_between_nodes() const;
  bool has_windows() const;
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
