#include "races.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <utility>

#include "lasting.h"
#include "memory.h"
#include "peers.h"
#include "pinned_uses.h"
#include "settings.h"

namespace emulated_gpu {
namespace {

constexpr std::size_t kMostFrames = 24;
constexpr std::size_t kTurns = 8;
constexpr std::size_t kMostUnmerged = 1 << 12;

struct Order {
  std::mutex mutex;
  Clock of_host;
};
Order& order() { return lasting<Order>(); }

struct Uses {
  std::mutex mutex;
  Shadow shadow;
};
Uses& uses() { return lasting<Uses>(); }

thread_local std::vector<Access>* noted = nullptr;

void note(const void* address, std::size_t bytes, bool is_write) {
  if (noted == nullptr || bytes == 0) {
    return;
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  before_access({begin, begin + bytes, is_write});
  // A kernel's threads use bytes that touch each other, often in turns.
  const std::size_t oldest = noted->size() > kTurns ? noted->size() - kTurns : 0;
  for (std::size_t number = noted->size(); number-- > oldest;) {
    Access& before = (*noted)[number];
    if (before.is_write == is_write && (before.end == begin || before.begin == begin + bytes)) {
      before.begin = std::min(before.begin, begin);
      before.end = std::max(before.end, begin + bytes);
      return;
    }
  }
  if (noted->size() == noted->capacity() && noted->size() >= kMostUnmerged) {
    merge(*noted);
    noted->reserve(2 * noted->size());
  }
  noted->push_back({begin, begin + bytes, is_write});
}

// - Where work comes from

// Python's own functions, if the process runs Python. This library is linked to none.
struct Python {
  int (*is_finalizing)();
  void* (*state_of_thread)();
  int (*take_lock)();
  void (*leave_lock)(int);
  void* (*current_frame)();
  void* (*frame_before)(void*);
  void* (*code_of)(void*);
  int (*line_of)(void*);
  void* (*attribute)(void*, const char*);
  const char* (*text_of)(void*);
  void (*release)(void*);
  bool is_complete = true;

  Python() {
    find(is_finalizing, "_Py_IsFinalizing");
    find(state_of_thread, "PyGILState_GetThisThreadState");
    find(take_lock, "PyGILState_Ensure");
    find(leave_lock, "PyGILState_Release");
    find(current_frame, "PyEval_GetFrame");
    find(frame_before, "PyFrame_GetBack");
    find(code_of, "PyFrame_GetCode");
    find(line_of, "PyFrame_GetLineNumber");
    find(attribute, "PyObject_GetAttrString");
    find(text_of, "PyUnicode_AsUTF8");
    find(release, "Py_DecRef");
  }

  std::vector<std::string> frames() const {
    std::vector<std::string> found;
    if (!is_complete || is_finalizing() != 0 || state_of_thread() == nullptr) {
      return found;
    }
    const int before = take_lock();  // torch's operators run without it
    void* frame = current_frame();   // which is borrowed
    bool is_owned = false;
    while (frame != nullptr && found.size() < kMostFrames) {
      void* code = code_of(frame);
      found.push_back(text(code, "co_filename") + ":" + std::to_string(line_of(frame)) + " " +
                      text(code, "co_name"));
      release(code);
      void* before = frame_before(frame);
      if (is_owned) {
        release(frame);
      }
      frame = before;
      is_owned = true;
    }
    if (frame != nullptr && is_owned) {
      release(frame);
    }
    leave_lock(before);
    return found;
  }

 private:
  template <typename Function>
  void find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
    is_complete = is_complete && function != nullptr;
  }

  std::string text(void* code, const char* name) const {
    void* value = attribute(code, name);
    const char* found = value != nullptr ? text_of(value) : nullptr;
    std::string copy = found != nullptr ? found : "?";
    if (value != nullptr) {
      release(value);
    }
    return copy;
  }
};

std::string name_of(void* address) {
  Dl_info info;
  if (dladdr(address, &info) == 0) {
    return "?";
  }
  std::string library = info.dli_fname != nullptr ? info.dli_fname : "?";
  library = library.substr(library.rfind('/') + 1);
  if (info.dli_sname == nullptr) {
    std::ostringstream text;
    text << library << "+0x" << std::hex
         << reinterpret_cast<std::uintptr_t>(address) -
                reinterpret_cast<std::uintptr_t>(info.dli_fbase);
    return text.str();
  }
  int status = 0;
  char* demangled = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  std::string name = status == 0 ? demangled : info.dli_sname;
  std::free(demangled);
  return library + " " + name;
}

std::string describe(const Origin& origin) {
  return origin.what + " on stream " + std::to_string(origin.stream);
}

std::string stack_of(const Origin& origin) {
  std::string text;
  for (const std::string& frame : origin.python) {
    text += "    " + frame + "\n";
  }
  for (void* address : origin.native) {
    text += "    " + name_of(address) + "\n";
  }
  return text;
}

void report(const Conflict& conflict, const Origin& later) {
  const Origin& earlier = *conflict.earlier.origin;
  std::ostringstream text;
  text << "nothing orders " << describe(earlier) << ", which "
       << (conflict.earlier_writes ? "writes" : "reads") << ", and " << describe(later)
       << ", which " << (conflict.access.is_write ? "writes" : "reads") << " the same "
       << conflict.access.end - conflict.access.begin << " bytes at 0x" << std::hex
       << conflict.access.begin;
  std::fprintf(stderr,
               "[emulated GPU] %s\n  the first one was submitted by\n%s  the other one by\n%s",
               text.str().c_str(), stack_of(earlier).c_str(), stack_of(later).c_str());
  fail(text.str());
}

void keep_cudas(std::vector<Access>& accesses) {
  merge(accesses);
  const auto is_other = [](const Access& access) {
    return !region_of(reinterpret_cast<const void*>(access.begin)).has_value();
  };
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(), is_other), accesses.end());
}

}  // namespace

void reads(const void* address, std::size_t bytes) { note(address, bytes, false); }
void writes(const void* address, std::size_t bytes) { note(address, bytes, true); }

// - Order

void Clock::join(const Clock& other) {
  numbers_.resize(std::max(numbers_.size(), other.numbers_.size()));
  for (std::size_t stream = 0; stream < other.numbers_.size(); ++stream) {
    numbers_[stream] = std::max(numbers_[stream], other.numbers_[stream]);
  }
}

std::uint64_t Clock::advance(std::uint64_t stream) {
  numbers_.resize(std::max<std::size_t>(numbers_.size(), stream + 1));
  return ++numbers_[stream];
}

bool Clock::covers(const User& user) const {
  return user.stream < numbers_.size() && user.number <= numbers_[user.stream];
}

TicketPtr StreamOrder::next(const std::shared_ptr<const Origin>& origin) {
  if (origin == nullptr) {
    return nullptr;
  }
  auto ticket = std::make_shared<Ticket>();
  ticket->user.stream = id_;
  ticket->user.origin = origin;
  const std::lock_guard<std::mutex> lock(order().mutex);
  clock_.join(order().of_host);
  ticket->before = clock_;
  ticket->user.number = clock_.advance(id_);
  return ticket;
}

void StreamOrder::wait_for(const Clock& clock) {
  const std::lock_guard<std::mutex> lock(order().mutex);
  clock_.join(clock);
}

Clock StreamOrder::now() const {
  const std::lock_guard<std::mutex> lock(order().mutex);
  return clock_;
}

void host_waited_for(const Clock& clock) {
  {
    const std::lock_guard<std::mutex> lock(order().mutex);
    order().of_host.join(clock);
  }
  end_pinned_uses();
}

bool has_host_waited_for(const User& user) {
  const std::lock_guard<std::mutex> lock(order().mutex);
  return order().of_host.covers(user);
}

bool has_host_waited_for(const void* begin, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::lock_guard<std::mutex> lock(uses().mutex);
  return uses().shadow.all_users(address, address + bytes,
                                 [](const User& user) { return has_host_waited_for(user); });
}

void report_host_write(const void* begin, std::size_t bytes, const Origin& work) {
  std::ostringstream text;
  text << "the host has written the " << bytes << " bytes at 0x" << std::hex
       << reinterpret_cast<std::uintptr_t>(begin) << " and had not waited for " << describe(work)
       << ", which uses them";
  std::fprintf(stderr, "[emulated GPU] %s\n  it was submitted by\n%s", text.str().c_str(),
               stack_of(work).c_str());
  fail(text.str());
}

// - Uses

std::shared_ptr<const Origin> origin_of(const std::string& what, std::uint64_t stream,
                                        ReadsPython reads_python) {
  if (!settings().finds_races) {
    return nullptr;
  }
  static const auto* python = new Python;
  auto origin = std::make_shared<Origin>();
  origin->what = what;
  origin->stream = stream;
  if (reads_python == ReadsPython::kYes) {
    origin->python = python->frames();
  }
  if (origin->python.empty()) {
    origin->native.resize(kMostFrames);
    const int count = backtrace(origin->native.data(), static_cast<int>(kMostFrames));
    origin->native.resize(static_cast<std::size_t>(count));
  }
  return origin;
}

std::vector<Access> run_noted(const Work& work) {
  std::vector<Access> own;
  std::vector<Access>* around = std::exchange(noted, &own);
  try {
    work();
  } catch (...) {
    noted = around;
    throw;
  }
  noted = around;
  keep_cudas(own);
  check_access(own);
  if (around != nullptr) {
    around->insert(around->end(), own.begin(), own.end());
    needs_no_access();  // it was checked
  }
  return own;
}

void run_checked(const TicketPtr& ticket, const Work& work) {
  if (ticket == nullptr) {
    work();
    return;
  }
  const std::vector<Access> accesses = run_noted(work);
  after_work(ticket, accesses);
  const std::lock_guard<std::mutex> lock(uses().mutex);
  for (const Access& access : accesses) {
    const auto conflict = uses().shadow.use(access, ticket->user, [&](const User& earlier) {
      return earlier.stream == ticket->user.stream || ticket->before.covers(earlier);
    });
    if (conflict.has_value()) {
      report(*conflict, *ticket->user.origin);
    }
  }
}

void check_graph(const std::vector<GraphNode>& nodes) {
  Shadow shadow;
  std::vector<std::vector<bool>> before(nodes.size(), std::vector<bool>(nodes.size()));
  for (std::size_t number = 0; number < nodes.size(); ++number) {
    std::vector<bool>& own = before[number];
    for (const std::size_t direct : nodes[number].after) {
      own[direct] = true;
      std::transform(own.begin(), own.end(), before[direct].begin(), own.begin(),
                     std::logical_or<>());
    }
    for (const Access& access : nodes[number].accesses) {
      const auto conflict = shadow.use(access, {number, 0, nodes[number].origin},
                                       [&](const User& earlier) { return own[earlier.stream]; });
      if (conflict.has_value()) {
        report(*conflict, *nodes[number].origin);
      }
    }
  }
}

void forget_uses(const void* begin, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::lock_guard<std::mutex> lock(uses().mutex);
  uses().shadow.forget(address, address + bytes);
}

}  // namespace emulated_gpu
