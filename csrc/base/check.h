// FSDP_CHECK(condition, parts...) throws fsdp::Error with the concatenated parts as its message.
// Users read these messages: they say what was given, what is needed and what to do.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace fsdp {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A wait took longer than the timeout. The message names what was waited for.
class TimeoutError : public Error {
 public:
  using Error::Error;
};

// An allocation found too little memory. Python gets a torch.OutOfMemoryError.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

inline constexpr const char* kNeedsCudaBuild =
    "This is a CPU build of fsdp_ext. Install a CUDA build, or use a mesh of device type 'cpu'.";

namespace detail {

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

[[noreturn]] inline void fail(const std::string& message) { throw Error(message); }

}  // namespace detail
}  // namespace fsdp

#define FSDP_CHECK(condition, ...)                               \
  do {                                                           \
    if (!(condition)) {                                          \
      ::fsdp::detail::fail(::fsdp::detail::concat(__VA_ARGS__)); \
    }                                                            \
  } while (false)
