#include "launches.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "entry_points.h"

namespace fsdp::test {
namespace {

constexpr std::size_t kMostArgumentBytes = 4096;
constexpr int kMultiprocessors = 10;

thread_local HostQueue* stream_of_launches = nullptr;
thread_local std::size_t launched = 0;
thread_local unsigned blocks_launched = 0;
std::set<std::string> launched_names;

// By the address of the host's stub. nvcc's code fills it in before main() begins.
std::map<const void*, const ptx::Kernel*>& registered() {
  static std::map<const void*, const ptx::Kernel*> kernels;
  return kernels;
}

const ptx::Kernel& find(const std::string& name) {
  const auto& all = ptx::kernels();
  const auto found = std::find_if(all.begin(), all.end(),
                                  [&](const ptx::Kernel& kernel) { return kernel.name == name; });
  FSDP_CHECK(found != all.end(), "The host's code registers ", name,
             ", but the translated PTX has no such kernel.");
  return *found;
}

cudaError_t launch(const ptx::Kernel& kernel, dim3 grid, dim3 block, void** from) {
  FSDP_CHECK(stream_of_launches != nullptr, "A launch needs a stream. Construct a LaunchesOn.");
  FSDP_CHECK(grid.x >= 1 && grid.y * grid.z == 1 && block.x >= 1 && block.x <= 1024 &&
                 block.y * block.z == 1,
             "A launch of ", kernel.name, " has a grid that no kernel here expects.");
  std::size_t bytes = 0;
  for (const ptx::Parameter& parameter : kernel.parameters) {
    bytes = (bytes + parameter.alignment - 1) / parameter.alignment * parameter.alignment;
    bytes += parameter.size;
  }
  FSDP_CHECK(bytes <= kMostArgumentBytes, kernel.name, " has ", bytes,
             " bytes of arguments. A launch takes ", kMostArgumentBytes, ".");
  ++launched;
  blocks_launched = grid.x;
  launched_names.insert(kernel.name);
  stream_of_launches->enqueue(
      [&kernel, blocks = grid.x, threads = block.x, arguments = ptx::copy_arguments(kernel, from)] {
        ptx::run_grid(kernel, blocks, threads, arguments, gpu_clock());
      });
  return cudaSuccess;
}

}  // namespace

LaunchesOn::LaunchesOn(Stream& stream) : before_(stream_of_launches) {
  stream_of_launches = &static_cast<HostQueue&>(stream);
}
LaunchesOn::~LaunchesOn() { stream_of_launches = before_; }

std::size_t launches() { return launched; }

unsigned blocks_of_last_launch() { return blocks_launched; }

const std::set<std::string>& launched_kernels() { return launched_names; }

ptx::Clock& gpu_clock() {
  static thread_local ptx::Clock clock;
  return clock;
}

}  // namespace fsdp::test

using fsdp::test::registered;
using fsdp::test::stream_of_launches;

void fsdp::ptx::register_kernel(const void* host, const char* name) {
  registered()[host] = &fsdp::test::find(name);
}

cudaError_t fsdp::ptx::launch_kernel(const void* host, dim3 grid, dim3 block, void** arguments,
                                     cudaStream_t /*stream*/) {
  return fsdp::test::launch(*registered().at(host), grid, block, arguments);
}

extern "C" {

// - What csrc calls

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int /*device*/) { return cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* /*name*/, void** function,
                                             unsigned /*version*/, unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? fsdp::test::kMultiprocessors : 0;
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
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* /*host*/) {
  *attributes = {};
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* /*host*/, cudaFuncAttribute /*attribute*/,
                                 int /*value*/) {
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* destination, const void* source, std::size_t bytes,
                            cudaMemcpyKind /*kind*/, cudaStream_t /*stream*/) {
  stream_of_launches->enqueue([=] { std::memcpy(destination, source, bytes); });
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t /*error*/) { return "an error"; }
const char* cudaGetErrorName(cudaError_t /*error*/) { return "cudaErrorUnknown"; }
}
