// Writes Python objects of the simplest kinds in Python's pickle format, protocol 2.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/text.h"

namespace fsdp {

// Values are written one after another. Between begin_dict and end_dict, keys and values take
// turns.
class PickleWriter {
 public:
  PickleWriter() : bytes_("\x80\x02") {}

  void begin_dict() { bytes_ += "}("; }
  void end_dict() { bytes_ += 'u'; }
  void begin_list() { bytes_ += "]("; }
  void end_list() { bytes_ += 'e'; }
  // Makes a tuple of the last two values.
  void pair_last_two() { bytes_ += '\x86'; }

  void add_none() { bytes_ += 'N'; }
  void add(bool value) { bytes_ += value ? '\x88' : '\x89'; }
  void add(std::int64_t value) {
    bytes_ += "\x8a\x08";
    add_bytes(static_cast<std::uint64_t>(value), /*big_endian=*/false);
  }
  void add(double value) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    bytes_ += 'G';
    add_bytes(bits, /*big_endian=*/true);
  }
  // UTF-8. Other bytes become question marks, since Python would refuse the whole file.
  void add(const std::string& text) {
    const std::string valid = valid_utf8(text);
    bytes_ += 'X';
    add_bytes(valid.size(), /*big_endian=*/false, sizeof(std::uint32_t));
    bytes_ += valid;
  }
  void add(const char* text) { add(std::string(text)); }

  // A key of a dict, and its value.
  template <typename Value>
  void add(const std::string& key, const Value& value) {
    add(key);
    add(value);
  }

  // Ends the file. Call it once, after a single value.
  const std::string& finish() {
    bytes_ += '.';
    return bytes_;
  }

 private:
  // The lowest `count` bytes.
  void add_bytes(std::uint64_t bits, bool big_endian, std::size_t count = sizeof(std::uint64_t)) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t shift = 8 * (big_endian ? count - 1 - i : i);
      bytes_ += static_cast<char>((bits >> shift) & 0xFF);
    }
  }

  std::string bytes_;
};

}  // namespace fsdp
