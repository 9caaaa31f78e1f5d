// The text of the error that an action throws.
#pragma once

#include <functional>
#include <string>

#include "base/check.h"

namespace fsdp::test {

// What message_of returns if nothing is thrown.
inline const std::string kNothingThrown = "nothing was thrown";

template <typename ErrorType = Error>
std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const ErrorType& error) {
    return error.what();
  }
  return kNothingThrown;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace fsdp::test
