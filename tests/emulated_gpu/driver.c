// libcuda.so.1: the driver's functions that torch's library for run-time compilation imports. torch
// asks for the state of the primary context. Whatever compiles or loads code fails with its name.
#include <stdint.h>
#include <stdio.h>

enum { kSuccess = 0, kNotSupported = 801 };

int cudaEmulatedHasContext(int device);  // of cudart/devices.cpp

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = cudaEmulatedHasContext(device);
  return kSuccess;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = (void*)(intptr_t)(device + 1);
  return kSuccess;
}

int cuCtxGetCurrent(void** context) {
  *context = (void*)1;
  return kSuccess;
}

int cuCtxSetCurrent(void* context) {
  (void)context;
  return kSuccess;
}

int cuDeviceGet(int* device, int number) {
  *device = number;
  return kSuccess;
}

int cuGetErrorString(int error, const char** text) {
  (void)error;
  *text = "an error of the emulated driver";
  return kSuccess;
}

#define MISSING(name)                                              \
  int name(void) {                                                 \
    fprintf(stderr, "[emulated GPU] " #name " is not emulated\n"); \
    return kNotSupported;                                          \
  }

MISSING(cuDeviceGetAttribute)
MISSING(cuFuncGetAttribute)
MISSING(cuFuncSetAttribute)
MISSING(cuFuncSetCacheConfig)
MISSING(cuLaunchCooperativeKernel)
MISSING(cuLaunchKernel)
MISSING(cuLinkAddData_v2)
MISSING(cuLinkComplete)
MISSING(cuLinkCreate_v2)
MISSING(cuModuleGetFunction)
MISSING(cuModuleLoad)
MISSING(cuModuleLoadData)
MISSING(cuModuleLoadDataEx)
MISSING(cuModuleUnload)
MISSING(cuOccupancyMaxActiveBlocksPerMultiprocessor)
MISSING(cuPointerGetAttribute)
MISSING(cuTensorMapEncodeTiled)
