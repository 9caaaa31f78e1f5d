#include "base/text.h"

#include <algorithm>
#include <cstring>

namespace fsdp {
namespace {

// The number of bytes of the UTF-8 character at the start of `text`, which is not empty; 0 if none
// is there.
std::size_t character_length(std::string_view text) {
  const auto byte = [text](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) {
    return 1;
  }
  const std::size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || length > text.size()) {
    return 0;
  }
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) {
      return 0;
    }
  }
  // Overlong forms, surrogates and values beyond the last code point.
  const bool is_valid = (first != 0xe0 || byte(1) >= 0xa0) && (first != 0xed || byte(1) < 0xa0) &&
                        (first != 0xf0 || byte(1) >= 0x90) && (first != 0xf4 || byte(1) < 0x90);
  return is_valid ? length : 0;
}

}  // namespace

std::string valid_utf8(std::string_view text) {
  std::string valid;
  while (!text.empty()) {
    const std::size_t length = character_length(text);
    valid += length == 0 ? "?" : text.substr(0, length);
    text.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return valid;
}

std::string text_in(const char* memory, std::size_t size) {
  std::string text = valid_utf8({memory, ::strnlen(memory, size)});
  std::replace_if(
      text.begin(), text.end(),
      [](char byte) { return static_cast<unsigned char>(byte) < 0x20 && byte != '\n'; }, '?');
  return text;
}

}  // namespace fsdp
