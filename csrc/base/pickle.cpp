#include "base/pickle.h"

namespace fsdp {
namespace {

// The length of the UTF-8 sequence that begins at `i`; 0 if none begins there, or if the text ends
// before the sequence does.
std::size_t sequence_at(const std::string& text, std::size_t i) {
  const auto byte = [&text](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  const unsigned char first = byte(i);
  const std::size_t length = first < 0x80                    ? 1
                             : first >= 0xC2 && first < 0xE0 ? 2
                             : first >= 0xE0 && first < 0xF0 ? 3
                             : first >= 0xF0 && first < 0xF5 ? 4
                                                             : 0;
  if (length == 0 || i + length > text.size()) {
    return 0;
  }
  for (std::size_t k = 1; k < length; ++k) {
    if (byte(i + k) < 0x80 || byte(i + k) > 0xBF) {
      return 0;
    }
  }
  const bool is_too_long = (first == 0xE0 && byte(i + 1) < 0xA0) ||  // fewer bytes would do
                           (first == 0xF0 && byte(i + 1) < 0x90);
  const bool is_no_character = (first == 0xED && byte(i + 1) > 0x9F) ||  // a surrogate
                               (first == 0xF4 && byte(i + 1) > 0x8F);
  return is_too_long || is_no_character ? 0 : length;
}

std::string valid_utf8(const std::string& text) {
  std::string valid;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = sequence_at(text, i);
    valid += length > 0 ? text.substr(i, length) : "?";
    i += length > 0 ? length : 1;
  }
  return valid;
}

}  // namespace

void PickleWriter::add(const std::string& text) {
  const std::string valid = valid_utf8(text);
  bytes_ += 'X';
  const auto size = static_cast<std::uint32_t>(valid.size());
  for (int i = 0; i < 4; ++i) {
    bytes_ += static_cast<char>((size >> (8 * i)) & 0xFF);
  }
  bytes_ += valid;
}

}  // namespace fsdp
