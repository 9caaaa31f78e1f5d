#include "errors.h"

#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <utility>

#include "emulated_gpu.h"
#include "lasting.h"
#include "settings.h"

namespace emulated_gpu {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
// The newest failure, which stays when a query clears the error.
thread_local cudaError_t described_error = cudaSuccess;
thread_local std::string detail;
thread_local cudaError_t refused = cudaSuccess;

struct Fault {
  std::mutex mutex;
  std::string what;
  cudaError_t error = cudaErrorLaunchFailure;
  std::atomic<bool> happened{false};
};
Fault& fault() { return lasting<Fault>(); }

const char* name_of(cudaError_t error) {
  static const std::map<cudaError_t, const char*> names = {
      {cudaSuccess, "cudaSuccess"},
      {cudaErrorCapturedEvent, "cudaErrorCapturedEvent"},
      {cudaErrorDeviceUninitialized, "cudaErrorDeviceUninitialized"},
      {cudaErrorGraphExecUpdateFailure, "cudaErrorGraphExecUpdateFailure"},
      {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered"},
      {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered"},
      {cudaErrorIllegalAddress, "cudaErrorIllegalAddress"},
      {cudaErrorIllegalState, "cudaErrorIllegalState"},
      {cudaErrorInvalidDevice, "cudaErrorInvalidDevice"},
      {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction"},
      {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle"},
      {cudaErrorInvalidValue, "cudaErrorInvalidValue"},
      {cudaErrorLaunchFailure, "cudaErrorLaunchFailure"},
      {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation"},
      {cudaErrorNotReady, "cudaErrorNotReady"},
      {cudaErrorNotSupported, "cudaErrorNotSupported"},
      {cudaErrorOperatingSystem, "cudaErrorOperatingSystem"},
      {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled"},
      {cudaErrorPeerAccessNotEnabled, "cudaErrorPeerAccessNotEnabled"},
      {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit"},
      {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated"},
      {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation"},
      {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined"},
      {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported"},
  };
  const auto found = names.find(error);
  return found != names.end() ? found->second : "cudaErrorUnknown";
}

}  // namespace

cudaError_t failed(cudaError_t error, const std::string& what) {
  last_error = described_error = error;
  detail = what;
  if (settings().traces) {
    std::fprintf(stderr, "[emulated GPU] %s: %s\n", name_of(error), what.c_str());
  }
  return error;
}

void refuse(cudaError_t error) { refused = error; }

cudaError_t outcome() {
  if (refused != cudaSuccess) {
    return std::exchange(refused, cudaSuccess);
  }
  if (!fault().happened) {
    return cudaSuccess;
  }
  const std::lock_guard<std::mutex> lock(fault().mutex);
  return failed(fault().error, fault().what);
}

cudaError_t not_ready() {
  last_error = cudaErrorNotReady;
  return cudaErrorNotReady;
}

void fail(const std::string& what) { fail(what, cudaErrorLaunchFailure); }

void fail(const std::string& what, cudaError_t error) {
  const std::lock_guard<std::mutex> lock(fault().mutex);
  if (fault().happened) {
    return;
  }
  std::fprintf(stderr, "[emulated GPU] a kernel failed: %s\n", what.c_str());
  fault().what = what;
  fault().error = error;
  fault().happened = true;
}

}  // namespace emulated_gpu

using emulated_gpu::last_error;

extern "C" {

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t error) { return emulated_gpu::name_of(error); }

const char* cudaGetErrorString(cudaError_t error) {
  static thread_local std::string text;
  text = error == cudaErrorMemoryAllocation ? "out of memory" : cudaGetErrorName(error);
  if (error == emulated_gpu::described_error && error != cudaSuccess) {
    text += ": " + emulated_gpu::detail;
  }
  return text.c_str();
}
}
