// Devices: which there are, which is current, and their properties, which are an H100's.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "errors.h"
#include "settings.h"
#include "streams.h"

namespace emulated_gpu {
namespace {

thread_local int the_current_device = 0;
std::atomic<unsigned> contexts{0};  // a bit for each device

constexpr int kCudaVersion = 13000;
constexpr int kSharedBytes = 49152;
constexpr int kSharedBytesOptIn = 232448;
constexpr int kSharedBytesOfMultiprocessor = 233472;
constexpr int kRegisters = 65536;
constexpr int kWarp = 32;
constexpr int kThreadsOfBlock = 1024;
constexpr int kThreadsOfMultiprocessor = 2048;
constexpr int kHighestPriority = -5;

void set_limits(cudaDeviceProp& properties) {
  properties.sharedMemPerBlock = kSharedBytes;
  properties.sharedMemPerBlockOptin = kSharedBytesOptIn;
  properties.sharedMemPerMultiprocessor = kSharedBytesOfMultiprocessor;
  properties.reservedSharedMemPerBlock = 1024;
  properties.regsPerBlock = properties.regsPerMultiprocessor = kRegisters;
  properties.warpSize = kWarp;
  properties.memPitch = 2147483647;
  properties.maxThreadsPerBlock = kThreadsOfBlock;
  properties.maxThreadsDim[0] = properties.maxThreadsDim[1] = kThreadsOfBlock;
  properties.maxThreadsDim[2] = 64;
  properties.maxGridSize[0] = 2147483647;
  properties.maxGridSize[1] = properties.maxGridSize[2] = 65535;
  properties.totalConstMem = 65536;
  properties.textureAlignment = 512;
  properties.texturePitchAlignment = 32;
  properties.maxThreadsPerMultiProcessor = kThreadsOfMultiprocessor;
  properties.maxBlocksPerMultiProcessor = 32;
}

}  // namespace

// Functions that use the current device make its context. cudaGetDevice does not.
int use_current_device() {
  contexts |= 1U << the_current_device;
  return the_current_device;
}

void set_current_device(int device) { the_current_device = device; }

bool has_context(int device) { return (contexts >> device & 1U) != 0; }

}  // namespace emulated_gpu

using namespace emulated_gpu;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = settings().devices;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = the_current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= settings().devices) {
    return failed(cudaErrorInvalidDevice, "there is no device " + std::to_string(device));
  }
  set_current_device(device);
  use_current_device();  // which makes its context
  return cudaSuccess;
}

// For libcuda.so.1 (driver.c).
int cudaEmulatedHasContext(int device) { return has_context(device) ? 1 : 0; }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = kCudaVersion;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kCudaVersion;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  std::memset(properties, 0, sizeof(*properties));
  // tests/support/devices.py knows the emulated GPU by this name.
  std::snprintf(properties->name, sizeof(properties->name), "Emulated GPU");
  std::snprintf(properties->uuid.bytes, sizeof(properties->uuid.bytes), "emulated GPU %02d",
                device);
  properties->major = 9;
  properties->totalGlobalMem = settings().memory_bytes;
  properties->multiProcessorCount = settings().multiprocessors;
  properties->l2CacheSize = 50 << 20;
  properties->memoryBusWidth = 5120;
  properties->asyncEngineCount = 3;
  properties->pciBusID = 10 + device;
  properties->unifiedAddressing = properties->managedMemory = properties->concurrentKernels = 1;
  properties->canMapHostMemory = properties->streamPrioritiesSupported = 1;
  properties->cooperativeLaunch = properties->concurrentManagedAccess = 1;
  properties->memoryPoolsSupported = 1;
  set_limits(*properties);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = settings().multiprocessors;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = kSharedBytes;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = kSharedBytesOptIn;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = kSharedBytesOfMultiprocessor;
      break;
    case cudaDevAttrWarpSize:
      *value = kWarp;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = kThreadsOfBlock;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = kThreadsOfMultiprocessor;
      break;
    case cudaDevAttrClockRate:
      *value = 1000000;
      break;  // kHz, as launches.cpp counts cycles
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrMemoryPoolsSupported:
      *value = 1;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = kHighestPriority;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  std::snprintf(text, static_cast<std::size_t>(bytes), "0000:%02x:00.0", 10 + device);
  return cudaSuccess;
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }

cudaError_t cudaProfilerStop() { return cudaSuccess; }
}
