// Memory that other processes can map: ranges of files that have no name.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <mutex>

namespace emulated_gpu {

// Part of a file that a process has open. Its bytes are whole pages.
struct SharedRange {
  pid_t process = 0;
  int file = -1;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;

  bool is_of_this_process() const;
};

// A file of this process. It has holes where nothing is written.
class SharedFile {
 public:
  explicit SharedFile(const char* name);

  // Returns a new range, filled with zeros.
  SharedRange take(std::uint64_t bytes);

 private:
  const int file_;
  std::mutex mutex_;
  std::uint64_t end_ = 0;
};

// Maps the range, in the place of what is mapped at the address. Returns false if the process has
// ended or has given the range back.
bool map_shared(const SharedRange& range, void* address);

// Frees the memory of a range of this process, whoever has it mapped. It reads as zero then.
void give_back(const SharedRange& range);

}  // namespace emulated_gpu
