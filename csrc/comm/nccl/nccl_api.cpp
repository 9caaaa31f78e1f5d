#include "comm/nccl/nccl_api.h"

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
  std::string source;  // where it was found, for error messages
};

// The library that has this function; empty if there is none.
std::string path_of(void* function) {
  Dl_info info{};
  const bool is_found = function != nullptr && dladdr(function, &info) != 0;
  return is_found && info.dli_fname != nullptr ? info.dli_fname : "";
}

// The library that torch uses; empty if the process has no torch for GPUs. A library in LD_PRELOAD
// takes the place of the one that torch is linked with.
std::string library_of_torch() {
  void* const torch = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  if (torch == nullptr) {
    return "";
  }
  constexpr const char* kFunction = "ncclGetVersion";
  const std::string linked = path_of(dlsym(torch, kFunction));
  const std::string first = path_of(dlsym(RTLD_DEFAULT, kFunction));
  dlclose(torch);
  return first.empty() || linked.empty() ? linked : first;
}

Library open_library(const std::vector<std::string>& candidates) {
  const char* named = std::getenv("FSDP_EXT_NCCL_SO");
  if (named != nullptr && named[0] != '\0') {
    void* handle = dlopen(named, RTLD_NOW | RTLD_LOCAL);
    FSDP_CHECK(handle != nullptr, "FSDP_EXT_NCCL_SO='", named,
               "' is not a library that can be loaded: ", dlerror(),
               ". Set it to an NCCL library, or unset it.");
    return {handle, detail::concat("FSDP_EXT_NCCL_SO='", named, "'")};
  }
  const std::string of_torch = library_of_torch();
  if (void* handle = of_torch.empty() ? nullptr : dlopen(of_torch.c_str(), RTLD_NOW)) {
    return {handle, "torch"};
  }
  if (void* handle = dlopen(kName, RTLD_NOW | RTLD_NOLOAD)) {
    return {handle, "the process"};
  }
  for (const std::string& candidate : candidates) {
    if (void* handle = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      return {handle, "the nvidia-nccl package"};
    }
  }
  void* handle = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  FSDP_CHECK(handle != nullptr, "fsdp_ext needs NCCL but found no ", kName, " (", dlerror(),
             "). Run pip install nvidia-nccl-cu13 (nvidia-nccl-cu12 if torch uses CUDA 12), or set "
             "FSDP_EXT_NCCL_SO to the library.");
  return {handle, "the dynamic linker's path"};
}

// Returns whether the library has all functions.
bool find_functions(void* handle, Api& api) {
  bool is_complete = true;
#define FSDP_FIND(result, name, arguments)                                      \
  api.name = reinterpret_cast<decltype(api.name)>(dlsym(handle, "nccl" #name)); \
  is_complete = is_complete && api.name != nullptr;
  FSDP_NCCL_FUNCTIONS(FSDP_FIND)
#undef FSDP_FIND
  return is_complete;
}

// Torch's library and another one in one process have separate threads and memory, and neither
// knows how the other uses the network and the GPU. Libraries that neither torch nor fsdp_ext uses
// do no harm.
void check_only_one(const std::string& found, const Library& library) {
  const std::string of_torch = library_of_torch();
  FSDP_CHECK(of_torch.empty() || found == of_torch, "torch uses the NCCL library '", of_torch,
             "', but fsdp_ext found '", found, "' in ", library.source,
             ". Unset FSDP_EXT_NCCL_SO, or set it to torch's.");
  const std::vector<std::string> loaded = loaded_libraries();
  if (!of_torch.empty() || loaded.size() <= 1) {
    return;
  }
  std::string listed;
  for (const std::string& path : loaded) {
    listed += (listed.empty() ? "'" : "', '") + path;
  }
  throw Error(
      detail::concat("The process has loaded ", loaded.size(), " NCCL libraries: ", listed,
                     "', and it cannot be told which one torch uses. fsdp_ext found its own "
                     "in ",
                     library.source,
                     ". Load only one. If FSDP_EXT_NCCL_SO is set, load the library that it "
                     "names."));
}

}  // namespace

std::string Api::version_text() const {
  return detail::concat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

const char* Api::registration() const {
  return has_safe_symmetric_kernels() ? "window" : "register";
}

bool Api::registers_between_nodes() const {
  constexpr int kFirstThatKeepsFlags = 23206;
  return version >= kFirstThatKeepsFlags;
}

bool Api::has_safe_symmetric_kernels() const {
  constexpr int kFirstThatWaits = 23007;
  return version >= kFirstThatWaits;
}

std::string Api::describe(Comm comm, Result error) const {
  const char* last = GetLastError(comm);
  const bool has_details = last != nullptr && last[0] != '\0';
  return detail::concat(GetErrorString(error), has_details ? ": " : "", has_details ? last : "");
}

Api find_library(const std::vector<std::string>& candidates) {
  const Library library = open_library(candidates);
  Api api;
  const bool is_complete = find_functions(library.handle, api);
  api.path = path_of(reinterpret_cast<void*>(api.GetVersion));
  check_only_one(api.path, library);
  FSDP_CHECK(api.GetVersion != nullptr && api.GetVersion(&api.version) == kSuccess,
             "The library from ", library.source,
             " is not NCCL: it has no ncclGetVersion that works. Set "
             "FSDP_EXT_NCCL_SO to an NCCL library, or unset it.");
  FSDP_CHECK(api.version >= kOldestVersion, "The library from ", library.source, " (", api.path,
             ") is NCCL ", api.version_text(), ", but fsdp_ext needs 2.28.9 or newer. Upgrade it.");
  FSDP_CHECK(is_complete, "The library from ", library.source, " (", api.path, ", NCCL ",
             api.version_text(), ") lacks functions that fsdp_ext needs. Upgrade it.");
  return api;
}

const Api& load(const std::vector<std::string>& candidates) {
  static std::mutex mutex;
  static const Api* api = nullptr;  // never freed, because watchdogs may outlive main()
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
