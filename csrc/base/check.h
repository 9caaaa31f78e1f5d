// One way to fail: FSDP_CHECK(condition, parts...) throws fsdp::Error with the message, the
// condition that did not hold and where. Messages say what was expected, what came, what to do.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace fsdp {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Waiting took longer than the timeout; the message names what was waited for.
class TimeoutError : public Error {
 public:
  using Error::Error;
};

// What everything that needs CUDA says in a build without it.
inline constexpr const char* kNeedsCudaBuild =
    "expects a CUDA build of fsdp_ext but this is a CPU build; use a mesh of device type 'cpu'";

namespace detail {

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

[[noreturn]] inline void fail(const char* condition, const char* file, int line,
                              const std::string& message) {
  throw Error(concat(message, " [", condition, " is false at ", file, ":", line, "]"));
}

}  // namespace detail
}  // namespace fsdp

#define FSDP_CHECK(condition, ...)                                                               \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      ::fsdp::detail::fail(#condition, __FILE__, __LINE__, ::fsdp::detail::concat(__VA_ARGS__)); \
    }                                                                                            \
  } while (false)
