// CUDA's runtime for launches of translated kernels. The launches are those of nvcc's own host
// code: it registers its kernels by name, and it passes their arguments in its own layout.
#pragma once

#include <cstddef>
#include <set>
#include <string>

#include "device/host_stream.h"
#include "ptx.h"

namespace fsdp::test {

// The stream of the launches while this lives. Null pointers stand for streams here, since the
// launches take a cudaStream_t.
class LaunchesOn {
 public:
  explicit LaunchesOn(Stream& stream);
  ~LaunchesOn();
  LaunchesOn(const LaunchesOn&) = delete;
  LaunchesOn& operator=(const LaunchesOn&) = delete;

 private:
  HostQueue* before_;
};

// How many launches of the calling thread there were so far.
std::size_t launches();
unsigned blocks_of_last_launch();
// The mangled names of all kernels that were launched so far.
const std::set<std::string>& launched_kernels();

// The clock of all kernels. Every thread of a launch starts at the time at which the launch does,
// and the launch ends with its last thread.
ptx::Clock& gpu_clock();

}  // namespace fsdp::test
