#include "device/forks.h"

#include <pthread.h>

namespace fsdp {

std::atomic<std::uint32_t> ForkGuard::forks_{0};

std::uint32_t ForkGuard::count_forks() {
  static const int error =
      ::pthread_atfork(nullptr, nullptr, [] { forks_.fetch_add(1, std::memory_order_relaxed); });
  FSDP_CHECK(error == 0, "The host has too little memory to watch for forks.");
  return forks_.load(std::memory_order_relaxed);
}

void ForkGuard::throw_forked() {
  throw Error(
      "This process was forked off one that runs a sharded model, and a fork cannot communicate. "
      "Use the model only in the process that sharded it, or start the other process with 'spawn' "
      "(in a DataLoader, multiprocessing_context='spawn').");
}

}  // namespace fsdp
