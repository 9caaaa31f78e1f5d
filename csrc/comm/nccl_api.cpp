#include "comm/nccl_api.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "base/check.h"

namespace fsdp::nccl {
namespace {

constexpr const char* kName = "libnccl.so.2";

struct Library {
  void* handle = nullptr;
  std::string from;  // how it was found, for error messages
};

Library open_library(const std::vector<std::string>& candidates) {
  const char* named = std::getenv("FSDP_EXT_NCCL_SO");
  if (named != nullptr && named[0] != '\0') {
    void* handle = dlopen(named, RTLD_NOW | RTLD_LOCAL);
    FSDP_CHECK(handle != nullptr, "FSDP_EXT_NCCL_SO expects a NCCL library but got '", named,
               "': ", dlerror(), "; correct or unset it");
    return {handle, detail::concat("FSDP_EXT_NCCL_SO='", named, "'")};
  }
  if (void* handle = dlopen(kName, RTLD_NOW | RTLD_NOLOAD)) {
    return {handle, "what the process had loaded"};
  }
  for (const std::string& candidate : candidates) {
    if (void* handle = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      return {handle, "the nvidia-nccl package"};
    }
  }
  void* handle = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  FSDP_CHECK(handle != nullptr, "expects NCCL but found no ", kName, " (", dlerror(),
             "); pip install nvidia-nccl-cu13 (or -cu12, as torch's CUDA is), or set "
             "FSDP_EXT_NCCL_SO to the library");
  return {handle, "the dynamic linker's path"};
}

template <typename Function>
void find(void* handle, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(handle, name));
}

void find_functions(void* handle, Api& api) {
  find(handle, "ncclGetVersion", api.GetVersion);
  find(handle, "ncclGetUniqueId", api.GetUniqueId);
  find(handle, "ncclCommInitRankConfig", api.CommInitRankConfig);
  find(handle, "ncclCommSplit", api.CommSplit);
  find(handle, "ncclCommFinalize", api.CommFinalize);
  find(handle, "ncclCommDestroy", api.CommDestroy);
  find(handle, "ncclCommAbort", api.CommAbort);
  find(handle, "ncclCommGetAsyncError", api.CommGetAsyncError);
  find(handle, "ncclCommRevoke", api.CommRevoke);
  find(handle, "ncclGetErrorString", api.GetErrorString);
  find(handle, "ncclGetLastError", api.GetLastError);
  find(handle, "ncclAllGather", api.AllGather);
  find(handle, "ncclReduceScatter", api.ReduceScatter);
  find(handle, "ncclAllReduce", api.AllReduce);
  find(handle, "ncclBroadcast", api.Broadcast);
  find(handle, "ncclGroupStart", api.GroupStart);
  find(handle, "ncclGroupEnd", api.GroupEnd);
  find(handle, "ncclMemAlloc", api.MemAlloc);
  find(handle, "ncclMemFree", api.MemFree);
  find(handle, "ncclCommRegister", api.CommRegister);
  find(handle, "ncclCommDeregister", api.CommDeregister);
  find(handle, "ncclCommWindowRegister", api.CommWindowRegister);
  find(handle, "ncclCommWindowDeregister", api.CommWindowDeregister);
}

// Two libraries in one process have two sets of threads and of memory, and neither knows of the
// other's use of the network and of the GPU.
void check_only_one(const Library& library) {
  const std::vector<std::string> loaded = loaded_libraries();
  std::string listed;
  for (const std::string& path : loaded) {
    listed += (listed.empty() ? "'" : "', '") + path;
  }
  FSDP_CHECK(loaded.size() <= 1, "expects one NCCL in the process but ", library.from, " made it ",
             loaded.size(), ": ", listed,
             "'; unset FSDP_EXT_NCCL_SO, or set it to the one that torch uses");
}

}  // namespace

std::string Api::version_text() const {
  return detail::concat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

const char* Api::registration() const {
  if (MemAlloc == nullptr || MemFree == nullptr) {
    return "none";
  }
  if (version >= 22700 && CommWindowRegister != nullptr && CommWindowDeregister != nullptr) {
    return "window";
  }
  return CommRegister != nullptr && CommDeregister != nullptr ? "register" : "none";
}

Api find_library(const std::vector<std::string>& candidates) {
  const Library library = open_library(candidates);
  Api api;
  find_functions(library.handle, api);
  Dl_info info{};
  if (api.GetVersion != nullptr && dladdr(reinterpret_cast<void*>(api.GetVersion), &info) != 0 &&
      info.dli_fname != nullptr) {
    api.path = info.dli_fname;
  }
  check_only_one(library);
  FSDP_CHECK(api.GetVersion != nullptr && api.GetVersion(&api.version) == kSuccess,
             "expects a NCCL library but ", library.from, " has no ncclGetVersion that works");
  FSDP_CHECK(api.version >= kOldest, "expects NCCL 2.18 or newer but ", library.from, " is ",
             api.version_text(), " (", api.path, "); upgrade it");
  const bool complete = api.GetUniqueId && api.CommInitRankConfig && api.CommSplit &&
                        api.CommFinalize && api.CommDestroy && api.CommAbort &&
                        api.CommGetAsyncError && api.GetErrorString && api.GetLastError &&
                        api.AllGather && api.ReduceScatter && api.AllReduce && api.Broadcast &&
                        api.GroupStart && api.GroupEnd;
  FSDP_CHECK(complete, "expects all of NCCL's collectives but ", library.from, " (", api.path, ", ",
             api.version_text(), ") lacks some; upgrade it");
  return api;
}

const Api& load(const std::vector<std::string>& candidates) {
  static std::mutex mutex;
  static const Api* api = nullptr;  // never freed: a watchdog may outlive the exit of main
  const std::lock_guard<std::mutex> lock(mutex);
  if (api == nullptr) {
    api = new Api(find_library(candidates));
  }
  return *api;
}

std::vector<std::string> loaded_libraries() {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t /*size*/, void* data) {
        const std::string path = info->dlpi_name != nullptr ? info->dlpi_name : "";
        const std::string base = path.substr(path.rfind('/') + 1);
        if (base.compare(0, 10, "libnccl.so") == 0) {
          static_cast<std::vector<std::string>*>(data)->push_back(path);
        }
        return 0;
      },
      &paths);
  return paths;
}

}  // namespace fsdp::nccl
