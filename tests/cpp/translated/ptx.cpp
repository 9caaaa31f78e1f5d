#include "ptx.h"

#include <algorithm>
#include <sstream>

#include "base/check.h"

namespace fsdp::ptx {
namespace {

// Rounds to nearest even in a format of fewer bits. `bits` is a positive fp32 number, whose lowest
// `dropped` bits go.
std::uint32_t drop_bits(std::uint32_t bits, std::uint32_t dropped) {
  const std::uint32_t rest = bits & ((1u << dropped) - 1);
  const std::uint32_t half = 1u << (dropped - 1);
  const std::uint32_t kept = bits >> dropped;
  return kept + (rest > half || (rest == half && (kept & 1u) != 0) ? 1 : 0);
}

void check_alignment(const Thread& thread, std::uint64_t address, std::size_t bytes,
                     const char* what) {
  if (address % bytes != 0) {
    trap(thread, detail::concat("a misaligned ", what, " of ", bytes, " bytes"), address);
  }
}

Observer observer = nullptr;

}  // namespace

void set_observer(Observer set) { observer = set; }

Arguments copy_arguments(const Kernel& kernel, void** from) {
  Arguments arguments;
  for (const Parameter& parameter : kernel.parameters) {
    const auto* begin = static_cast<const unsigned char*>(from[arguments.size()]);
    arguments.emplace_back(begin, begin + parameter.size);
  }
  return arguments;
}

void run_grid(const Kernel& kernel, std::uint32_t blocks, std::uint32_t threads,
              const Arguments& arguments, Clock& clock) {
  const std::uint64_t start = clock.read();
  std::uint64_t end = start;
  for (std::uint32_t block = blocks; block-- > 0;) {
    for (std::uint32_t thread = threads; thread-- > 0;) {
      clock.set(start);
      kernel.run({thread, threads, block, blocks, &clock, &arguments});
      end = std::max(end, clock.read());
    }
  }
  clock.set(end);
}

void trap(const Thread& thread, const std::string& what, std::uint64_t address) {
  std::ostringstream text;
  text << "Thread " << thread.index << " of block " << thread.block << " has " << what << " at 0x"
       << std::hex << address << ".";
  throw Error(text.str());
}

void trap_division() { throw Error("A kernel divides by zero."); }

void read_parameter(const Thread& thread, std::uint64_t address, void* to, std::size_t bytes) {
  check_alignment(thread, address, bytes, "load");
  for (const auto& parameter : *thread.parameters) {
    const auto begin = reinterpret_cast<std::uint64_t>(parameter.data());
    if (address >= begin && address + bytes <= begin + parameter.size()) {
      std::memcpy(to, reinterpret_cast<const void*>(address), bytes);
      return;
    }
  }
  trap(thread, detail::concat("a load of ", bytes, " bytes outside of the launch's arguments"),
       address);
}

void read(const Thread& thread, std::uint64_t address, void* to, std::size_t bytes) {
  check_alignment(thread, address, bytes, "load");
  if (observer != nullptr) {
    observer(address, bytes, false);
  }
  std::memcpy(to, reinterpret_cast<const void*>(address), bytes);
}

void write(const Thread& thread, std::uint64_t address, const void* from, std::size_t bytes) {
  check_alignment(thread, address, bytes, "store");
  if (observer != nullptr) {
    observer(address, bytes, true);
  }
  std::memcpy(reinterpret_cast<void*>(address), from, bytes);
}

float half_to_float(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16;
  const std::uint32_t exponent = bits >> 10 & 0x1fu;
  const std::uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1f) {
    return from_bits<float>(mantissa != 0 ? kNan : sign | 0x7f800000u);
  }
  if (exponent != 0) {
    return from_bits<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  }
  if (mantissa == 0) {
    return from_bits<float>(sign);
  }
  std::uint32_t shift = 0;  // until the leading one stands where that of a normal number does
  while ((mantissa << shift & 0x400u) == 0) {
    ++shift;
  }
  return from_bits<float>(sign | (113 - shift) << 23 | (mantissa << shift & 0x3ffu) << 13);
}

std::uint16_t float_to_half(float value) {
  const std::uint32_t bits = to_bits(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
  if (magnitude > 0x7f800000u) {
    return 0x7fff;
  }
  if (magnitude >= 0x477ff000u) {  // halfway from the largest to the next power of two
    return sign | 0x7c00;
  }
  if (magnitude >= 0x38800000u) {
    return static_cast<std::uint16_t>(sign | drop_bits(magnitude - (112u << 23), 13));
  }
  const std::uint32_t exponent = magnitude >> 23;
  if (exponent < 102) {  // less than half of the smallest
    return sign;
  }
  const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  return static_cast<std::uint16_t>(sign | drop_bits(mantissa, 126 - exponent));
}

std::uint16_t float_to_bfloat16(float value) {
  const std::uint32_t bits = to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return 0x7fff;
  }
  return static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | drop_bits(bits & 0x7fffffffu, 16));
}

std::uint64_t truncate_to_u64(double value) {
  constexpr double kEnd = 18446744073709551616.0;  // 2^64
  if (!(value > 0)) {
    return 0;
  }
  return value >= kEnd ? std::numeric_limits<std::uint64_t>::max()
                       : static_cast<std::uint64_t>(value);
}

}  // namespace fsdp::ptx
