// Launches. nvcc's host code registers its kernels by name, and a launcher runs them by it.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "emulated_gpu.h"
#include "entry_points.h"
#include "errors.h"
#include "lasting.h"

namespace emulated_gpu {
namespace {

struct Kernels {
  std::mutex mutex;
  std::map<const void*, std::string> names;  // by the address of the host's stub
  std::set<const void*> loaded;              // by cudaFuncGetAttributes, before any launch
  std::vector<Launcher> launchers;
};
Kernels& kernels() { return lasting<Kernels>(); }

// The extension's kernels of a step: Note [loaded kernels] in csrc/pack/pack_cuda.cu.
bool is_of_a_step(const std::string& name) {
  return name.find("pack_kernel") != std::string::npos ||
         name.find("11cast_kernel") != std::string::npos;
}

// torch.cuda._sleep, whose argument is cycles of a clock of 1 GHz here.
bool launch_sleep(const Launch& launch) {
  if (launch.name.find("spin_kernel") == std::string::npos) {
    return false;
  }
  const std::chrono::nanoseconds time(*static_cast<std::int64_t*>(launch.arguments[0]));
  enqueue(launch.stream, "a sleep", [time] { std::this_thread::sleep_for(time); });
  return true;
}

}  // namespace

void add_launcher(Launcher launcher) {
  const std::lock_guard<std::mutex> lock(kernels().mutex);
  kernels().launchers.push_back(launcher);
}

// Called by missing.cpp.
void report_missing(const std::string& name) {
  std::fprintf(stderr, "[emulated GPU] %s is not emulated\n", name.c_str());
  failed(cudaErrorNotSupported, name + " is not emulated");
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

void fsdp::ptx::register_kernel(const void* host, const char* name) {
  const std::lock_guard<std::mutex> lock(kernels().mutex);
  kernels().names[host] = name;
}

cudaError_t fsdp::ptx::launch_kernel(const void* host, dim3 grid, dim3 block, void** arguments,
                                     cudaStream_t stream) {
  Launch request{"of an unknown name", grid, block, arguments, stream};
  std::vector<Launcher> launchers{&launch_sleep};
  {
    Kernels& known = kernels();
    const std::lock_guard<std::mutex> lock(known.mutex);
    if (const auto found = known.names.find(host); found != known.names.end()) {
      request.name = found->second;
    }
    if (is_of_a_step(request.name) && known.loaded.count(host) == 0) {
      return failed(cudaErrorInvalidDeviceFunction,
                    "the kernel " + request.name + " was not loaded before its first launch");
    }
    launchers.insert(launchers.end(), known.launchers.begin(), known.launchers.end());
  }
  for (const Launcher launcher : launchers) {
    if (launcher(request)) {
      return outcome();
    }
  }
  std::fprintf(stderr, "[emulated GPU] there is no kernel %s\n", request.name.c_str());
  return failed(cudaErrorInvalidDeviceFunction, "the kernel " + request.name + " is not emulated");
}

using fsdp::ptx::launch_kernel;

extern "C" {

char __cudaInitModule(void** /*handle*/) { return 0; }

void __cudaRegisterVar(void** /*handle*/, char* /*host*/, char* /*device*/, const char* /*name*/,
                       int /*external*/, std::size_t /*bytes*/, int /*constant*/, int /*global*/) {}

cudaError_t cudaLaunchCooperativeKernel(const void* host, dim3 grid, dim3 block, void** arguments,
                                        std::size_t /*shared*/, cudaStream_t stream) {
  return launch_kernel(host, grid, block, arguments, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host,
                                void** arguments) {
  return launch_kernel(host, config->gridDim, config->blockDim, arguments, config->stream);
}

cudaError_t cudaFuncSetAttribute(const void* /*host*/, cudaFuncAttribute /*attribute*/,
                                 int /*value*/) {
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* host) {
  {
    const std::lock_guard<std::mutex> lock(kernels().mutex);
    kernels().loaded.insert(host);
  }
  std::memset(attributes, 0, sizeof(*attributes));
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  attributes->numRegs = 32;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                   const void* /*host*/,
                                                                   int /*threads*/,
                                                                   std::size_t /*shared*/,
                                                                   unsigned /*flags*/) {
  *blocks = 1;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* /*host*/,
                                                          int /*threads*/, std::size_t /*shared*/) {
  *blocks = 1;
  return cudaSuccess;
}
}
