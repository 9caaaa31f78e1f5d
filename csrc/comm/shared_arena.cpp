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
// Where a huge page can begin. Large buffers begin there.
constexpr std::size_t kHugePage = std::size_t{2} << 20;
// A hundred and more of these fit the address space of one process.
constexpr std::size_t kLargestArena = std::size_t{256} << 30;

std::string reason(int error) { return std::strerror(error); }

// Empty where it cannot be read.
std::string read_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return {};
  }
  std::string text(kPage, '\0');  // longer than any file that is read here
  const ssize_t length = ::read(fd, text.data(), text.size());
  ::close(fd);
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
  return text;
}

struct ProcessStat {
  char state = '\0';     // '\0': there is no such process
  bool unknown = false;  // it cannot be looked at now, for want of a file descriptor, say
  std::uint64_t started = 0;
};

// Fields 3 and 22 of /proc/<pid>/stat (proc_pid_stat(5)). The second may have any character.
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
  static auto& arena = *new std::shared_ptr<Arena>;  // as long as the process: Note [arena]
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
             "shared memory expects /proc to be mounted but it is not");
  std::copy_n(boot.begin(), std::min(boot.size(), sizeof(address_.host) - 1), address_.host);
  address_.pid = ::getpid();
  address_.started = self.started;
  address_.pid_namespace = pid_namespace();
  address_.token = random_token();
  const auto pages = static_cast<std::size_t>(std::max(1L, ::sysconf(_SC_PHYS_PAGES)));
  const auto page = static_cast<std::size_t>(std::max(1L, ::sysconf(_SC_PAGESIZE)));
  reserved_ = std::min(align_up(pages * page, kHugePage), kLargestArena);
  address_.fd = ::memfd_create("fsdp_ext", MFD_CLOEXEC);
  FSDP_CHECK(address_.fd >= 0,
             "shared memory expects memfd_create to work but it says: ", reason(errno));
  void* mapped = MAP_FAILED;
  if (::ftruncate(address_.fd, static_cast<off_t>(reserved_)) == 0) {
    mapped = ::mmap(nullptr, reserved_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                    address_.fd, 0);
  }
  if (mapped == MAP_FAILED) {
    const int error = errno;
    ::close(address_.fd);
    throw Error(detail::concat("shared memory expects to reserve ", reserved_ >> 20,
                               " MiB of addresses but the system says: ", reason(error),
                               "; see ulimit -v and ulimit -f"));
  }
  base_ = static_cast<char*>(mapped);
  ::madvise(base_, reserved_, MADV_HUGEPAGE);  // a hint
  ::madvise(base_, reserved_, MADV_DONTDUMP);
  address_.base = reinterpret_cast<std::uintptr_t>(base_);
  address_.bytes = reserved_;
  free_[0] = reserved_;
  std::memcpy(base_ + take(sizeof(address_.token)), &address_.token, sizeof(address_.token));
}

Arena::~Arena() {
  ::munmap(base_, reserved_);
  ::close(address_.fd);
}

std::shared_ptr<void> Arena::allocate(const std::shared_ptr<Arena>& arena, std::size_t bytes) {
  const std::size_t size = align_up(std::max<std::size_t>(bytes, 1), kPage);
  const std::size_t offset = arena->take(size);
  return {arena->base_ + offset, [arena, offset, size](void*) {
            if (::getpid() == arena->address_.pid) {  // Note [arena]
              arena->give_back(offset, size);
            }
          }};
}

// The first place that is large enough, with its pages.
std::size_t Arena::take(std::size_t bytes) {
  const std::size_t size = align_up(bytes, kPage);
  const std::size_t alignment = size >= kHugePage / 2 ? kHugePage : kPage;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    const auto [begin, length] = *range;
    const std::size_t offset = align_up(begin, alignment);
    if (offset + size > begin + length) {
      continue;
    }
    // Else the memory's lack would show as a SIGBUS, at whoever touches it. Kernels before 5.14 do
    // not know it, and it is that again.
    if (::madvise(base_ + offset, size, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
      const int error = errno;
      free_pages(offset, size);  // of which there may be some
      throw Error(
          detail::concat("expects ", bytes, " more bytes of shared memory but the system says: ",
                         reason(error == EFAULT ? ENOMEM : error),  // what a SIGBUS would be
                         "; use more ranks, or smaller units"));
    }
    free_.erase(range);
    if (offset > begin) {
      free_[begin] = offset - begin;
    }
    if (offset + size < begin + length) {
      free_[offset + size] = begin + length - offset - size;
    }
    return offset;
  }
  throw Error(detail::concat("expects ", bytes, " more bytes of shared memory but the ",
                             reserved_ >> 30,
                             " GiB that a rank can have are in use; use more "
                             "ranks, or smaller units"));
}

// A hole, and not an end: a peer that comes late, after this rank has given up, reads zeros and
// then sees that it failed.
void Arena::free_pages(std::size_t offset, std::size_t bytes) const noexcept {
  ::fallocate(address_.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(bytes));
}

void Arena::give_back(std::size_t offset, std::size_t bytes) noexcept {
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
             "shared memory expects all ranks on one host but process ", address.pid,
             " is on another");
  FSDP_CHECK(here.pid_namespace == address.pid_namespace,
             "shared memory expects all ranks in one PID namespace but process ", address.pid,
             " is in another; start the ranks of a host in one container");
  const std::string path =
      "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
  // Without O_NONBLOCK what is no file might make this wait.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  FSDP_CHECK(fd >= 0, "shared memory expects to open ", path,
             " but the system says: ", reason(errno), "; run all ranks as one user");
  struct stat status{};
  const bool is_arena = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
                        static_cast<std::uint64_t>(status.st_size) == address.bytes;
  void* mapped = is_arena
                     ? ::mmap(nullptr, address.bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0)
                     : nullptr;
  const int error = errno;
  ::close(fd);
  FSDP_CHECK(mapped != MAP_FAILED, "shared memory expects to map ", address.bytes >> 20,
             " MiB of process ", address.pid, " but the system says: ", reason(error),
             "; see ulimit -v");
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
    throw Error(detail::concat("shared memory expects ", path,
                               " to be a rank's memory but it is something else; that process "
                               "has ended"));
  }
}

ArenaView::~ArenaView() { unmap(); }

void ArenaView::unmap() noexcept {
  if (mapped_ > 0) {
    ::munmap(const_cast<char*>(base_), mapped_);
  }
}

}  // namespace fsdp
