// Which NCCL this stands for, what a communicator is told, and errors of calls.
#pragma once

#include <nccl.h>

#include <string>

namespace emulated_gpu {

constexpr int kFirstThatSharesGpus = NCCL_VERSION(2, 30, 3);  // NCCL_MULTI_RANK_GPU_ENABLE
// From here on a window between ranks that cannot read each other's memory is null.
constexpr int kFirstWithNullWindows = NCCL_VERSION(2, 29, 0);
// From here on copy engines gather from memory that is in no symmetric window.
constexpr int kFirstThatCopiesPlainInputs = NCCL_VERSION(2, 29, 0);
// From here on symmetric kernels wait for the work before them.
constexpr int kFirstWithSafeKernels = NCCL_VERSION(2, 30, 7);

// EMULATED_GPU_NCCL, as ncclGetVersion encodes it.
int library_version();

struct Config {
  bool is_blocking = true;
  int min_ctas = 1;
  int max_ctas = 64;
  int cta_policy = NCCL_CTA_POLICY_DEFAULT;
};

// Reads what a caller of any version gives, as the emulated version does; null: the defaults.
// Variables of the environment replace it.
ncclResult_t read_config(const ncclConfig_t* from, Config& config);

// Whether the variable is a number other than 0.
bool is_set(const char* variable);

// Returns the error, which ncclGetLastError describes. With NCCL_DEBUG it prints it, too.
ncclResult_t refuse(ncclResult_t error, const std::string& why);

// Makes all later calls of CUDA fail with `why`, and ends the kernels that wait for other ranks.
void fail_device(const std::string& why);
bool has_device_failed();

}  // namespace emulated_gpu
