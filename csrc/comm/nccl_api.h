// What is used of NCCL, found at run time. These are the declarations of NCCL's public interface
// (nccl.h, 2.18 and newer) that matter here, so that neither its header nor its library is needed
// to build; functions that came later are null where the library that was found lacks them.
#pragma once

#include <climits>
#include <cstddef>
#include <string>
#include <vector>

namespace fsdp::nccl {

constexpr int kOldest = 21800;  // 2.18.0, as ncclGetVersion has it: the first that splits

using Comm = struct NcclComm*;      // ncclComm_t
using Window = struct NcclWindow*;  // ncclWindow_t

struct UniqueId {  // ncclUniqueId
  char internal[128];
};

enum Result : int {  // ncclResult_t
  kSuccess = 0,
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
constexpr unsigned kMagic = 0xcafebeefU;  // of a ncclConfig_t

// ncclConfig_t as of 2.18. NCCL reads as much as `size` says, and takes defaults for the rest.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = kMagic;
  unsigned version = kOldest;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
};

struct Api {
  std::string path;  // of the library, as the dynamic linker has it
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
  Result (*Broadcast)(const void*, void*, std::size_t, DataType, int root, Comm,
                      void* stream) = nullptr;
  Result (*GroupStart)() = nullptr;
  Result (*GroupEnd)() = nullptr;

  // From 2.19 on.
  Result (*MemAlloc)(void**, std::size_t) = nullptr;
  Result (*MemFree)(void*) = nullptr;
  Result (*CommRegister)(Comm, void*, std::size_t, void** handle) = nullptr;
  Result (*CommDeregister)(Comm, void* handle) = nullptr;
  // From 2.28 on.
  Result (*CommRevoke)(Comm, int flags) = nullptr;
  // From 2.27 on.
  Result (*CommWindowRegister)(Comm, void*, std::size_t, Window*, int flags) = nullptr;
  Result (*CommWindowDeregister)(Comm, Window) = nullptr;

  std::string version_text() const;  // "2.28.9"
  // "register" (2.19), "window" (2.27) or "none": what this library offers for long-lived buffers.
  const char* registration() const;
};

// The library: $FSDP_EXT_NCCL_SO, else the one that the process has loaded (torch's), else the
// first of `candidates` that there is, else whatever the dynamic linker finds. Loaded once.
//
// Throws Error if there is none, if it is too old or lacks a function, or if the process has two.
const Api& load(const std::vector<std::string>& candidates);
Api find_library(const std::vector<std::string>& candidates);  // each time anew

// Every library of that name that the process has loaded, by path.
std::vector<std::string> loaded_libraries();

}  // namespace fsdp::nccl
