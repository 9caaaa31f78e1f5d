// Errors as CUDA has them: one for each thread that the next query clears, and one of a kernel that
// failed, which stays.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace emulated_gpu {

// Sets the error of the calling thread and returns it.
cudaError_t failed(cudaError_t error, const std::string& what);

// What a call that did its own part returns: the error of a kernel that failed, or success.
cudaError_t outcome();

// Makes the next outcome of the calling thread an error, for functions that return none.
void refuse(cudaError_t error);

// Work that is not done yet is an error of the calling thread, too, but needs no words.
cudaError_t not_ready();

// As `fail` of emulated_gpu.h, with another error than cudaErrorLaunchFailure.
void fail(const std::string& what, cudaError_t error);

}  // namespace emulated_gpu
