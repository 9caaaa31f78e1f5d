#include "comm/shared_arena.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <random>
#include <sstream>

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

// Empty if the file cannot be read.
std::string read_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return {};
  }
  std::string text(kPage, '\0');  // longer than every file that is read here
  const ssize_t length = ::read(fd, text.data(), text.size());
  ::close(fd);
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
  return text;
}

struct ProcessStat {
  char state = '\0';     // '\0' if there is no such process
  bool unknown = false;  // could not be read, e.g. because no file descriptor was free
  std::uint64_t started = 0;
};

// Reads fields 3 and 22 of /proc/<pid>/stat (proc_pid_stat(5)). Field 2, the name in parentheses,
// may contain any character.
ProcessStat stat_of(pid_t pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const std::string text = read_file(path);
  const std::size_t end_of_name = text.rfind(')');
  if (end_of_name == std::string::npos) {
    ProcessStat none;
    none.unknown = ::kill(pid, 0) == 0 || errno != ESRCH;
    return none;
  }
  std::istringstream fields(text.substr(end_of_name + 1));
  ProcessStat stat;
  std::string skipped;
  fields >> stat.state;
  for (int field = 4; field < 22; ++field) {
    fields >> skipped;
  }
  fields >> stat.started;
  return stat;
}

std::uint64_t pid_namespace() {
  struct stat status{};
  return ::stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

std::uint64_t random_token() {
  std::random_device source;
  return (static_cast<std::uint64_t>(source()) << 32) | source();
}

}  // namespace

ProcessState state_of(const ArenaAddress& address) {
  const ProcessStat now = stat_of(address.pid);
  if (now.unknown) {
    return ProcessState::Runs;
  }
  if (now.state == '\0' || now.state == 'Z' || now.state == 'X' || now.started != address.started) {
    return ProcessState::Ended;
  }
  return now.state == 'T' || now.state == 't' ? ProcessState::Stopped : ProcessState::Runs;
}

// - Arena

std::shared_ptr<Arena> Arena::of_this_process() {
  static std::mutex mutex;
  static auto& arena = *new std::shared_ptr<Arena>;  // lives until the process ends
  const std::lock_guard<std::mutex> lock(mutex);
  if (arena == nullptr || arena->address_.pid != ::getpid()) {
    arena.reset();
    arena.reset(new Arena);
  }
  return arena;
}

Arena::Arena() {
  const std::string boot = read_file("/proc/sys/kernel/random/boot_id");
  const ProcessStat self = stat_of(::getpid());
  FSDP_CHECK(!boot.empty() && self.state != '\0' && !self.unknown,
             "Shared memory needs /proc, which is not mounted here. Mount it.");
  std::copy_n(boot.begin(), std::min(boot.size(), sizeof(address_.host) - 1), address_.host);
  address_.pid = ::getpid();
  address_.started = self.started;
  address_.pid_namespace = pid_namespace();
  address_.token = random_token();
  reserve_addresses();
  address_.base = reinterpret_cast<std::uintptr_t>(base_);
  address_.bytes = reserved_;
  free_[0] = reserved_;
  std::memcpy(base_ + allocate_range(sizeof(address_.token)), &address_.token,
              sizeof(address_.token));
}

void Arena::reserve_addresses() {
  const auto pages = static_cast<std::size_t>(std::max(1L, ::sysconf(_SC_PHYS_PAGES)));
  const auto page = static_cast<std::size_t>(std::max(1L, ::sysconf(_SC_PAGESIZE)));
  reserved_ = std::min(align_up(pages * page, kHugePage), kLargestArena);
  address_.fd = ::memfd_create("fsdp_ext", MFD_CLOEXEC);
  FSDP_CHECK(address_.fd >= 0,
             "Shared memory needs memfd_create, which failed: ", std::strerror(errno), ".");
  void* mapped = MAP_FAILED;
  if (::ftruncate(address_.fd, static_cast<off_t>(reserved_)) == 0) {
    mapped = ::mmap(nullptr, reserved_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                    address_.fd, 0);
  }
  if (mapped == MAP_FAILED) {
    const int error = errno;
    ::close(address_.fd);
    throw Error(detail::concat("Shared memory could not reserve ", reserved_ >> 20,
                               " MiB of addresses: ", std::strerror(error),
                               ". Raise the limits that ulimit -v and ulimit -f show."));
  }
  base_ = static_cast<char*>(mapped);
  ::madvise(base_, reserved_, MADV_HUGEPAGE);  // a hint, which may fail
  ::madvise(base_, reserved_, MADV_DONTDUMP);
}

Arena::~Arena() {
  ::munmap(base_, reserved_);
  ::close(address_.fd);
}

std::shared_ptr<void> Arena::allocate(const std::shared_ptr<Arena>& arena, std::size_t bytes) {
  const std::size_t size = align_up(std::max<std::size_t>(bytes, 1), kPage);
  const std::size_t offset = arena->allocate_range(size);
  return {arena->base_ + offset, [arena, offset, size](void*) {
            if (::getpid() == arena->address_.pid) {  // not in a forked child: Note [arena]
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
  throw Error(detail::concat("A rank needs ", bytes, " more bytes of shared memory, but the ",
                             reserved_ >> 30,
                             " GiB that it can have are in use. Use more ranks or smaller units."));
}

// Without this, a lack of memory would be a SIGBUS in whichever process first touches a page.
// Kernels before 5.14 do not know the advice and return EINVAL; there it remains a SIGBUS.
void Arena::populate_pages(std::size_t offset, std::size_t bytes) const {
  if (::madvise(base_ + offset, bytes, MADV_POPULATE_WRITE) == 0 || errno == EINVAL) {
    return;
  }
  const int error = errno == EFAULT ? ENOMEM : errno;  // EFAULT stands for the SIGBUS
  free_pages(offset, bytes);                           // some may have been populated
  throw Error(detail::concat("A rank needs ", bytes, " more bytes of shared memory: ",
                             std::strerror(error), ". Use more ranks or smaller units."));
}

// Frees the pages and keeps the file's size. A late peer may still map the file after this rank has
// given up: it reads zeros and then sees that the rank has failed.
void Arena::free_pages(std::size_t offset, std::size_t bytes) const noexcept {
  ::fallocate(address_.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
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
  static std::map<std::uint64_t, std::weak_ptr<const ArenaView>> views;  // by token
  const std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<const ArenaView>& known = views[address.token];
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
  if (here.token == address.token && here.pid == address.pid) {
    own_ = own;
    base_ = reinterpret_cast<const char*>(static_cast<std::uintptr_t>(address.base));
    return;
  }
  FSDP_CHECK(std::strncmp(here.host, address.host, sizeof(here.host)) == 0,
             "Shared memory needs all ranks on one host, but process ", address.pid,
             " is on another.");
  FSDP_CHECK(here.pid_namespace == address.pid_namespace,
             "Shared memory needs all ranks in one PID namespace, but process ", address.pid,
             " is in another. Start the ranks of a host in one container.");
  map_file(address);
}

void ArenaView::map_file(const ArenaAddress& address) {
  const std::string path =
      "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
  // By now the path may be another kind of file. O_NONBLOCK keeps open() from blocking on it.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  FSDP_CHECK(fd >= 0, "Shared memory could not open ", path, ": ", std::strerror(errno),
             ". Run all ranks as one user.");
  struct stat status{};
  const bool is_arena = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
                        static_cast<std::uint64_t>(status.st_size) == address.bytes;
  void* mapped = is_arena
                     ? ::mmap(nullptr, address.bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0)
                     : nullptr;
  const int error = errno;
  ::close(fd);
  FSDP_CHECK(mapped != MAP_FAILED, "Shared memory could not map ", address.bytes >> 20,
             " MiB of process ", address.pid, ": ", std::strerror(error),
             ". Raise the limit that ulimit -v shows.");
  std::uint64_t token = 0;
  if (mapped != nullptr) {
    ::madvise(mapped, address.bytes, MADV_HUGEPAGE);
    ::madvise(mapped, address.bytes, MADV_DONTDUMP);
    base_ = static_cast<const char*>(mapped);
    mapped_ = address.bytes;
    std::memcpy(&token, base_, sizeof(token));
  }
  if (token != address.token) {
    unmap();
    throw Error(detail::concat("Shared memory found something else in ", path,
                               " than a rank's memory. That process has ended."));
  }
}

ArenaView::~ArenaView() { unmap(); }

void ArenaView::unmap() noexcept {
  if (mapped_ > 0) {
    ::munmap(const_cast<char*>(base_), mapped_);
  }
}

}  // namespace fsdp
