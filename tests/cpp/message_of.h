// What an action throws, as text.
#pragma once

#include <functional>
#include <string>

#include "base/check.h"

namespace fsdp::test {

inline std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

}  // namespace fsdp::test
