// Text from memory that may hold anything, as valid UTF-8, which Python needs.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fsdp {

// The text with a question mark for each byte that belongs to no character. A text that was cut to
// fit may end within one.
std::string valid_utf8(std::string_view text);

// The text up to the memory's end or a zero. Control characters other than line breaks also become
// question marks.
std::string text_in(const char* memory, std::size_t size);

}  // namespace fsdp
