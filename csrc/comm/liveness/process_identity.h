// Which process a rank is, in a form that other processes of its host can look up.
#pragma once

#include <cstdint>
#include <string>

namespace fsdp {

// Processes exchange it as bytes. A process id alone would not do, since ids are reused and each
// namespace has its own.
struct ProcessIdentity {
  char host[48] = {};               // the boot id, which differs between hosts
  char host_name[64] = {};          // for messages
  std::uint64_t pid_namespace = 0;  // a pid is valid within one namespace
  std::uint64_t started = 0;        // when the process started, in the kernel's ticks since boot
  std::int64_t pid = 0;
};

// Throws if /proc is not mounted, or is that of another PID namespace.
ProcessIdentity identity_of_this_process();

// Checks bytes that another process wrote. Throws if they do not describe a process.
ProcessIdentity parse_identity(const std::string& bytes);
void check(const ProcessIdentity& identity);

// Whether both processes have one host, or even one PID namespace.
bool share_host(const ProcessIdentity& a, const ProcessIdentity& b);
bool share_pid_namespace(const ProcessIdentity& a, const ProcessIdentity& b);

// Whether state_of() holds for the process. Virtual machines that were started from one snapshot
// have one boot id and equal namespaces, so the host's name has to be the same, too.
bool can_look_up(const ProcessIdentity& process);

// For messages, such as "process 20469 on node3".
std::string name_of(const ProcessIdentity& process);

// The state of a process of this PID namespace. A process that cannot be inspected counts as
// running.
enum class ProcessState : std::uint8_t { Runs, Stopped, Ended };
ProcessState state_of(const ProcessIdentity& process);

}  // namespace fsdp
