#include "comm/shared_memory/shared_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <random>

#include "base/align.h"
#include "base/check.h"

namespace fsdp {
namespace {

#ifndef MADV_POPULATE_WRITE  // since Linux 5.14
#define MADV_POPULATE_WRITE 23
#endif

constexpr std::size_t kPage = 4096;
// Large buffers are aligned to this, so that huge pages can hold them.
constexpr std::size_t kHugePage = std::size_t{2} << 20;
// More than a hundred arenas of this size fit into the address space of one process.
constexpr std::size_t kLargestArena = std::size_t{256} << 30;
// Fixes the size of the file: Note [arena].
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::uint64_t random_token() {
  std::random_device source;
  return (static_cast<std::uint64_t>(source()) << 32) | source();
}

// The size of an open file that nobody can change any more; 0 if the file is not one of our arenas.
std::size_t sealed_size(int fd) {
  struct stat status{};
  const int seals = ::fcntl(fd, F_GET_SEALS);  // fails if it is another kind of file
  const bool is_sealed = seals >= 0 && (seals & kSeals) == kSeals;
  if (!is_sealed || ::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
    return 0;
  }
  const auto size = static_cast<std::size_t>(std::max<off_t>(status.st_size, 0));
  return size >= kPage ? size : 0;
}

std::string no_addresses(std::size_t bytes, int error) {
  return detail::concat("Shared memory could not reserve ", bytes >> 20,
                        " MiB of addresses: ", std::strerror(error),
                        ". Raise the limits that ulimit -v and ulimit -f show.");
}

}  // namespace

// - Arena

std::shared_ptr<Arena> Arena::of_this_process() {
  static std::mutex mutex;
  static auto& arena = *new std::shared_ptr<Arena>;  // lives until the process ends
  const std::lock_guard<std::mutex> lock(mutex);
  if (arena == nullptr || arena->address_.process.pid != ::getpid()) {
    arena.reset();
    arena.reset(new Arena);
  }
  return arena;
}

Arena::Arena() {
  address_.process = identity_of_this_process();
  address_.token = random_token();
  reserve_addresses();
  address_.bytes = reserved_;
  free_[0] = reserved_;
  std::memcpy(base_ + allocate_range(sizeof(address_.token)), &address_.token,
              sizeof(address_.token));
}

void Arena::reserve_addresses() {
  const auto pages = static_cast<std::size_t>(std::max(1L, ::sysconf(_SC_PHYS_PAGES)));
  const auto page = static_cast<std::size_t>(std::max(1L, ::sysconf(_SC_PAGESIZE)));
  reserved_ = std::min(align_up(pages * page, kHugePage), kLargestArena);
  make_file();
  void* mapped =
      ::mmap(nullptr, reserved_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    ::close(file_);
    throw Error(no_addresses(reserved_, error));
  }
  base_ = static_cast<char*>(mapped);
  ::madvise(base_, reserved_, MADV_HUGEPAGE);  // a hint, which may fail
  ::madvise(base_, reserved_, MADV_DONTDUMP);
}

void Arena::make_file() {
  file_ = ::memfd_create("fsdp_ext", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  FSDP_CHECK(file_ >= 0, "Shared memory needs memfd_create, which failed: ", std::strerror(errno),
             ".");
  address_.fd = file_;
  const bool has_size = ::ftruncate(file_, static_cast<off_t>(reserved_)) == 0;
  if (has_size && ::fcntl(file_, F_ADD_SEALS, kSeals) == 0) {
    return;
  }
  const int error = errno;
  ::close(file_);
  FSDP_CHECK(has_size, no_addresses(reserved_, error));
  throw Error(
      detail::concat("Shared memory needs files whose size can be sealed (fcntl(2), "
                     "F_ADD_SEALS), and sealing one failed: ",
                     std::strerror(error), "."));
}

Arena::~Arena() {
  ::munmap(base_, reserved_);
  ::close(file_);
}

std::shared_ptr<void> Arena::allocate(const std::shared_ptr<Arena>& arena, std::size_t bytes) {
  const std::size_t size = align_up(std::max<std::size_t>(bytes, 1), kPage);
  const std::size_t offset = arena->allocate_range(size);
  return {arena->base_ + offset, [arena, offset, size](void*) {
            if (::getpid() == arena->address_.process.pid) {  // not in a forked child: Note [arena]
              arena->free_range(offset, size);
            }
          }};
}

// First fit.
std::size_t Arena::allocate_range(std::size_t bytes) {
  const std::size_t size = align_up(bytes, kPage);
  const std::size_t alignment = size >= kHugePage / 2 ? kHugePage : kPage;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    const auto [begin, length] = *range;
    const std::size_t offset = align_up(begin, alignment);
    if (offset + size > begin + length) {
      continue;
    }
    populate_pages(offset, size);
    free_.erase(range);
    if (offset > begin) {
      free_[begin] = offset - begin;
    }
    if (offset + size < begin + length) {
      free_[offset + size] = begin + length - offset - size;
    }
    return offset;
  }
  throw OutOfMemory(detail::concat(
      "A rank needs ", bytes, " more bytes of shared memory, but the ", reserved_ >> 30,
      " GiB that it can have are in use. Use more ranks or smaller units."));
}

// Without this, a lack of memory would be a SIGBUS in whichever process first touches a page.
// Kernels before 5.14 do not know the advice and return EINVAL, so a SIGBUS remains possible there.
void Arena::populate_pages(std::size_t offset, std::size_t bytes) const {
  if (::madvise(base_ + offset, bytes, MADV_POPULATE_WRITE) == 0 || errno == EINVAL) {
    return;
  }
  const int error = errno == EFAULT ? ENOMEM : errno;  // EFAULT stands for the SIGBUS
  free_pages(offset, bytes);                           // some may have been populated
  throw OutOfMemory(detail::concat("A rank needs ", bytes, " more bytes of shared memory: ",
                                   std::strerror(error), ". Use more ranks or smaller units."));
}

// Frees the pages and keeps the file's size. A late peer may still map the file after this rank has
// given up: it reads zeros and then sees that the rank has failed.
void Arena::free_pages(std::size_t offset, std::size_t bytes) const noexcept {
  ::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(bytes));
}

void Arena::free_range(std::size_t offset, std::size_t bytes) noexcept {
  free_pages(offset, bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  auto range = free_.emplace(offset, bytes).first;
  const auto after = std::next(range);
  if (after != free_.end() && range->first + range->second == after->first) {
    range->second += after->second;
    free_.erase(after);
  }
  if (range != free_.begin()) {
    const auto before = std::prev(range);
    if (before->first + before->second == range->first) {
      before->second += range->second;
      free_.erase(range);
    }
  }
}

bool Arena::contains(const void* memory, std::size_t bytes) const {
  const auto* begin = static_cast<const char*>(memory);
  return bytes > 0 && begin >= base_ && begin + bytes <= base_ + reserved_;
}

std::size_t Arena::allocated_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::size_t free = 0;
  for (const auto& range : free_) {
    free += range.second;
  }
  return reserved_ - free;
}

// - ArenaView

std::shared_ptr<const ArenaView> ArenaView::of(const ArenaAddress& address) {
  static std::mutex mutex;
  using Key = std::pair<std::int64_t, std::uint64_t>;
  static std::map<Key, std::weak_ptr<const ArenaView>> views;
  const std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<const ArenaView>& known = views[{address.process.pid, address.token}];
  std::shared_ptr<const ArenaView> view = known.lock();
  if (view == nullptr) {
    view.reset(new ArenaView(address));
    known = view;
  }
  return view;
}

ArenaView::ArenaView(const ArenaAddress& address) {
  const std::shared_ptr<Arena> own = Arena::of_this_process();
  const ArenaAddress& here = own->address();
  if (here.token == address.token && here.process.pid == address.process.pid) {
    own_ = own;
    base_ = own->base();
    bytes_ = here.bytes;
    return;
  }
  FSDP_CHECK(share_host(here.process, address.process),
             "Shared memory needs all ranks on one host, but ", name_of(address.process),
             " is on another.");
  FSDP_CHECK(
      share_pid_namespace(here.process, address.process),
      "Shared memory needs all ranks in one PID namespace, but ", name_of(address.process),
      " is in another one of this machine. Start the ranks of a machine in one container, or "
      "in containers that share their PID namespace (docker run --pid).");
  map_file(address);
}

void ArenaView::map_file(const ArenaAddress& address) {
  const std::string path =
      "/proc/" + std::to_string(address.process.pid) + "/fd/" + std::to_string(address.fd);
  // By now the path may be another kind of file. O_NONBLOCK keeps open() from blocking on it, and
  // O_NOCTTY keeps a terminal from becoming this process's own.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  FSDP_CHECK(fd >= 0, "Shared memory could not open ", path, ": ", std::strerror(errno),
             ". Run all ranks as one user.");
  const std::size_t bytes = sealed_size(fd);
  void* mapped = MAP_FAILED;
  if (bytes > 0 && bytes == address.bytes) {
    mapped = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
  }
  const int error = errno;
  ::close(fd);
  FSDP_CHECK(bytes > 0 && bytes == address.bytes, "Shared memory found something else in ", path,
             " than a rank's memory of ", address.bytes,
             " bytes whose size is sealed. That process has ended, or runs another build of "
             "fsdp_ext.");
  FSDP_CHECK(mapped != MAP_FAILED, "Shared memory could not map ", bytes >> 20, " MiB of process ",
             address.process.pid, ": ", std::strerror(error),
             ". Raise the limit that ulimit -v shows.");
  ::madvise(mapped, bytes, MADV_HUGEPAGE);
  ::madvise(mapped, bytes, MADV_DONTDUMP);
  base_ = static_cast<const char*>(mapped);
  bytes_ = bytes;
  std::uint64_t token = 0;
  std::memcpy(&token, base_, sizeof(token));
  if (token != address.token) {
    unmap();
    throw Error(detail::concat("Shared memory found something else in ", path,
                               " than the memory of a rank of this job. That process has ended."));
  }
}

ArenaView::~ArenaView() { unmap(); }

void ArenaView::unmap() noexcept {
  if (own_ == nullptr && base_ != nullptr) {
    ::munmap(const_cast<char*>(base_), bytes_);
  }
}

}  // namespace fsdp
