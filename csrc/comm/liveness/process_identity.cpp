#include "comm/liveness/process_identity.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <sstream>

#include "base/check.h"
#include "base/text.h"

namespace fsdp {
namespace {

// Empty if the file cannot be read.
std::string read_file(const std::string& path) {
  constexpr std::size_t kLongest = 4096;  // longer than every file that is read here
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return {};
  }
  std::string text(kLongest, '\0');
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
ProcessStat stat_of(std::int64_t pid) {
  const std::string text = read_file("/proc/" + std::to_string(pid) + "/stat");
  const std::size_t end_of_name = text.rfind(')');
  if (end_of_name == std::string::npos) {
    ProcessStat none;
    none.unknown = ::kill(static_cast<pid_t>(pid), 0) == 0 || errno != ESRCH;
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

// Whether /proc shows the processes of this PID namespace.
bool has_own_proc() {
  char target[32] = {};
  const ssize_t length = ::readlink("/proc/self", target, sizeof(target) - 1);
  return length > 0 && std::to_string(::getpid()) == target;
}

std::uint64_t pid_namespace() {
  struct stat status{};
  return ::stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

}  // namespace

ProcessIdentity identity_of_this_process() {
  const std::string boot = read_file("/proc/sys/kernel/random/boot_id");
  const ProcessStat self = stat_of(::getpid());
  FSDP_CHECK(!boot.empty() && self.state != '\0' && !self.unknown,
             "Shared memory needs /proc, which is not mounted here. Mount it.");
  FSDP_CHECK(
      has_own_proc(),
      "Shared memory needs the /proc of this PID namespace, but another one is mounted here. "
      "Mount it again (unshare --mount-proc).");
  ProcessIdentity identity;
  std::copy_n(boot.begin(), std::min(boot.size(), sizeof(identity.host) - 1), identity.host);
  ::gethostname(identity.host_name, sizeof(identity.host_name) - 1);
  identity.pid = ::getpid();
  identity.started = self.started;
  identity.pid_namespace = pid_namespace();
  return identity;
}

ProcessIdentity parse_identity(const std::string& bytes) {
  ProcessIdentity identity;
  FSDP_CHECK(bytes.size() == sizeof(identity), "A rank described its process in ", bytes.size(),
             " bytes, but this rank needs ", sizeof(identity),
             ". Run one version of fsdp_ext on all ranks.");
  std::memcpy(&identity, bytes.data(), sizeof(identity));
  check(identity);
  return identity;
}

void check(const ProcessIdentity& identity) {
  const bool is_text = std::memchr(identity.host, '\0', sizeof(identity.host)) != nullptr &&
                       std::memchr(identity.host_name, '\0', sizeof(identity.host_name)) != nullptr;
  FSDP_CHECK(is_text && identity.pid > 0 && identity.pid <= std::numeric_limits<pid_t>::max(),
             "A rank described its process by something that is no process. The process group's "
             "store has other data in it, or is damaged. Restart all ranks.");
}

bool share_host(const ProcessIdentity& a, const ProcessIdentity& b) {
  return std::strncmp(a.host, b.host, sizeof(a.host)) == 0;
}

bool share_pid_namespace(const ProcessIdentity& a, const ProcessIdentity& b) {
  return share_host(a, b) && a.pid_namespace == b.pid_namespace;
}

bool can_look_up(const ProcessIdentity& process) {
  try {
    const ProcessIdentity here = identity_of_this_process();
    return share_pid_namespace(here, process) &&
           std::strncmp(here.host_name, process.host_name, sizeof(here.host_name)) == 0;
  } catch (const Error&) {  // /proc is missing
    return false;
  }
}

std::string name_of(const ProcessIdentity& process) {
  const std::string host = text_in(process.host_name, sizeof(process.host_name));
  return detail::concat("process ", process.pid, host.empty() ? "" : " on ", host);
}

ProcessState state_of(const ProcessIdentity& process) {
  const ProcessStat now = stat_of(process.pid);
  if (now.unknown) {
    return ProcessState::Runs;
  }
  if (now.state == '\0' || now.state == 'Z' || now.state == 'X' || now.started != process.started) {
    return ProcessState::Ended;
  }
  return now.state == 'T' || now.state == 't' ? ProcessState::Stopped : ProcessState::Runs;
}

}  // namespace fsdp
