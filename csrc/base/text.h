// Text from memory that may hold anything, as valid UTF-8, which Python needs.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fsdp {

// The text with a question mark for each byte that belongs to no character. A text that was cut to
// fit may end within one.
std::string valid_utf8(std::string_view text);

// Returns the text in `memory`, which ends at the first zero or after `size` bytes. Bytes that are
// no UTF-8 become question marks, and so do control characters except line breaks.
std::string text_in(const char* memory, std::size_t size);

}  // namespace fsdp
