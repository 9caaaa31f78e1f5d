#include "torch/root_owner.h"

#include <sys/syscall.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <string>
#include <thread>

#include "base/check.h"
#include "torch/with_python.h"

namespace py = pybind11;

namespace fsdp {
namespace {

// After a backward has failed, autograd's thread may leave the root a moment after the error was
// raised. The next pass waits for that, at most this long.
constexpr std::chrono::milliseconds kLongestWaitForAutograd{1000};

bool has_ended(std::uint32_t thread) {
  return syscall(SYS_tgkill, getpid(), static_cast<pid_t>(thread), 0) != 0 && errno == ESRCH;
}

// The thread's name in Python's threading module, or "" if that module did not start it.
std::string python_name_of(std::uint32_t thread) {
  const py::gil_scoped_acquire gil;
  const py::module_ threading = py::module_::import("threading");
  const py::object made_up = threading.attr("_DummyThread");  // for threads that others started
  for (const py::handle each : threading.attr("enumerate")()) {
    const py::object number = each.attr("native_id");
    if (!number.is_none() && number.cast<std::uint32_t>() == thread &&
        !py::isinstance(each, made_up)) {
      return each.attr("name").cast<std::string>();
    }
  }
  return "";
}

std::string described(std::uint32_t thread) {
  const std::string name = python_name_of(thread);
  return name.empty() ? detail::concat("thread ", thread) : "thread '" + name + "'";
}

const char* doing(RootOwner::Use use) {
  switch (use) {
    case RootOwner::Use::SetUp:
      return "is preparing it for a forward";
    case RootOwner::Use::Forward:
      return "is in a forward";
    case RootOwner::Use::Backward:
      return "is in a backward";
    default:
      return "is in a method of it, such as unshard() or state_dict()";
  }
}

}  // namespace

std::uint64_t RootOwner::this_backward() {
  return static_cast<std::uint64_t>(torch::autograd::get_current_graph_task_id() + 1) << 40;
}

std::uint32_t RootOwner::this_thread() {
  static thread_local const auto number = static_cast<std::uint32_t>(syscall(SYS_gettid));
  return number;
}

bool RootOwner::is_of_another_thread() const {
  const std::uint64_t seen = state_.load(std::memory_order_relaxed);
  return seen != 0 && thread_of(seen) != this_thread() && !may_enter(seen);
}

void RootOwner::change(Use use) {
  if (thread_of(state_.load(std::memory_order_relaxed)) == this_thread()) {
    state_.store(pack(this_thread(), use), std::memory_order_relaxed);
  }
}

void RootOwner::leave() {
  if (thread_of(state_.load(std::memory_order_relaxed)) == this_thread()) {
    state_.store(0, std::memory_order_release);
  }
}

void RootOwner::leave_backward() {
  std::uint64_t seen = state_.load(std::memory_order_relaxed);
  if (use_of(seen) == Use::Backward) {
    state_.compare_exchange_strong(seen, 0, std::memory_order_release);
  }
}

// Whether a thread that is not the owner may use the root nevertheless.
bool RootOwner::may_enter(std::uint64_t seen) const {
  const std::uint64_t backward = this_backward();
  if (backward != 0 && backward == backward_of(seen)) {
    return true;
  }
  return (backward != 0 && python_name_of(this_thread()).empty()) || has_ended(thread_of(seen));
}

bool RootOwner::enter_from_outside(std::uint64_t seen, Use use) {
  if (seen != 0 && has_left_after_failing(seen)) {
    seen = 0;
  }
  const bool is_free = seen == 0 || has_ended(thread_of(seen));
  if (is_free &&
      state_.compare_exchange_strong(seen, pack(this_thread(), use), std::memory_order_acquire)) {
    return true;
  }
  check_from_outside(seen);
  return false;
}

// Waits a moment if a thread of autograd is the owner.
bool RootOwner::has_left_after_failing(std::uint64_t seen) const {
  if (may_enter(seen) || !python_name_of(thread_of(seen)).empty()) {
    return false;
  }
  const NoGilIfHeld no_gil;
  const auto end = std::chrono::steady_clock::now() + kLongestWaitForAutograd;
  while (state_.load(std::memory_order_relaxed) == seen) {
    if (std::chrono::steady_clock::now() > end) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return state_.load(std::memory_order_relaxed) == 0;
}

void RootOwner::check_from_outside(std::uint64_t seen) const {
  FSDP_CHECK(may_enter(seen), "The ", described(this_thread()), " entered this model while ",
             described(thread_of(seen)), " ", doing(use_of(seen)),
             ". A sharded model serves one thread at a time. Hold a lock during each step and each "
             "evaluation, or give each thread a model of its own.");
}

}  // namespace fsdp
