// Writes Python objects of the simplest kinds in Python's pickle format, protocol 2.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

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
  void add(const std::string& text);
  void add(const char* text) { add(std::string(text)); }

  // Ends the file. Call it once, after a single value.
  const std::string& finish() {
    bytes_ += '.';
    return bytes_;
  }

 private:
  void add_bytes(std::uint64_t bits, bool big_endian) {
    for (int i = 0; i < 8; ++i) {
      const int shift = 8 * (big_endian ? 7 - i : i);
      bytes_ += static_cast<char>((bits >> shift) & 0xFF);
    }
  }

  std::string bytes_;
};

}  // namespace fsdp
