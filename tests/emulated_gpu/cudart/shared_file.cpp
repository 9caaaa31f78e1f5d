#include "shared_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

namespace emulated_gpu {
namespace {

constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 46;

}  // namespace

bool SharedRange::is_of_this_process() const { return process == getpid(); }

SharedFile::SharedFile(const char* name) : file_(memfd_create(name, MFD_CLOEXEC)) {
  (void)!ftruncate(file_, static_cast<off_t>(kMostBytes));
}

SharedRange SharedFile::take(std::uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const SharedRange range{getpid(), file_, end_, bytes};
  end_ += bytes;
  return range;
}

bool map_shared(const SharedRange& range, void* address) {
  const auto offset = static_cast<off_t>(range.offset);
  int file = range.file;
  if (!range.is_of_this_process()) {
    const std::string path =
        "/proc/" + std::to_string(range.process) + "/fd/" + std::to_string(range.file);
    file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0 || lseek(file, offset, SEEK_DATA) != offset) {
      close(file);
      return false;
    }
  }
  const bool is_mapped = mmap(address, range.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                              file, offset) != MAP_FAILED;
  if (!range.is_of_this_process()) {
    close(file);
  }
  return is_mapped;
}

void give_back(const SharedRange& range) {
  fallocate(range.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
            static_cast<off_t>(range.offset), static_cast<off_t>(range.bytes));
}

}  // namespace emulated_gpu
