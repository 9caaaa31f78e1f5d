// What the functions that translate_ptx.py writes are made of: a thread's place in its grid, memory
// accesses that are checked, and arithmetic as PTX defines it. A kernel that does what a GPU would
// not survive gets an error: a misaligned access, a division of integers by zero, or a parameter
// that the launch does not have. AddressSanitizer sees accesses outside of buffers, since
// ptx.cpp's loads and stores are compiled with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

namespace fsdp::ptx {

// A clock that only the kernels' own sleeps move, so no test depends on time.
class Clock {
 public:
  std::uint64_t read() const { return now_; }
  void sleep(std::uint32_t nanoseconds) { now_ += nanoseconds; }
  void set(std::uint64_t now) { now_ = now; }

 private:
  std::uint64_t now_ = 0;
};

// The bytes of each parameter, exactly as large as the kernel declares it, so that no load passes
// its end unnoticed.
using Arguments = std::vector<std::vector<unsigned char>>;

struct Thread {
  std::uint32_t index;
  std::uint32_t threads;  // of the block
  std::uint32_t block;
  std::uint32_t blocks;
  Clock* clock;
  const Arguments* parameters;

  // The address of a parameter in the launch's arguments.
  std::uint64_t parameter(std::size_t number) const {
    return reinterpret_cast<std::uint64_t>((*parameters)[number].data());
  }
};

struct Parameter {
  std::size_t size;
  std::size_t alignment;
};

struct Kernel {
  const char* name;  // mangled
  void (*run)(const Thread& thread);
  std::vector<Parameter> parameters;
};

// The translated kernels.
const std::vector<Kernel>& kernels();

// Copies a launch's arguments.
Arguments copy_arguments(const Kernel& kernel, void** from);

// Runs all threads and blocks in reverse order, since none may rely on an earlier one. Every thread
// starts at the clock's time, and the clock ends at that of the last one.
void run_grid(const Kernel& kernel, std::uint32_t blocks, std::uint32_t threads,
              const Arguments& arguments, Clock& clock);

// Called before each access of a kernel to memory.
using Observer = void (*)(std::uint64_t address, std::size_t bytes, bool is_write);
void set_observer(Observer observer);

// Throws an error of the thread's place and `what`.
[[noreturn]] void trap(const Thread& thread, const std::string& what, std::uint64_t address);
[[noreturn]] void trap_division();

// - Memory

template <typename T, int kElements>
struct Vector {
  T part[kElements];
};

// One access of `bytes` bytes, which has to be aligned to as many.
void read_parameter(const Thread& thread, std::uint64_t address, void* to, std::size_t bytes);
void read(const Thread& thread, std::uint64_t address, void* to, std::size_t bytes);
void write(const Thread& thread, std::uint64_t address, const void* from, std::size_t bytes);

template <typename T, int kElements>
Vector<T, kElements> load_global(const Thread& thread, std::uint64_t address) {
  Vector<T, kElements> loaded;
  read(thread, address, &loaded, sizeof(loaded));
  return loaded;
}

template <typename T, int kElements>
Vector<T, kElements> load_param(const Thread& thread, std::uint64_t address) {
  Vector<T, kElements> loaded;
  read_parameter(thread, address, &loaded, sizeof(loaded));
  return loaded;
}

template <typename T, int kElements>
void store_global(const Thread& thread, std::uint64_t address, const Vector<T, kElements>& value) {
  write(thread, address, &value, sizeof(value));
}

// - Arithmetic

// A register that was not written yet. The value is unlike any that a kernel computes with.
template <typename T>
constexpr T kUnset = static_cast<T>(0xdeadbeefdeadbeefull);

template <typename To, typename From>
To from_bits(From bits) {
  static_assert(sizeof(To) == sizeof(From), "a register holds values of its own size");
  To to;
  std::memcpy(&to, &bits, sizeof(to));
  return to;
}

constexpr std::uint32_t kNan = 0x7fffffffu;

// Arithmetic in fp32 has one NaN. In fp64 it keeps those of its operands.
inline float arithmetic(float value) { return value != value ? from_bits<float>(kNan) : value; }
inline double arithmetic(double value) { return value; }

inline std::uint32_t to_bits(float value) { return from_bits<std::uint32_t>(value); }
inline std::uint64_t to_bits(double value) { return from_bits<std::uint64_t>(value); }

// The least integer divided by -1 has no result in C++. PTX's wraps around.
template <typename T>
bool overflows(T one, T other) {
  return std::is_signed_v<T> && other == static_cast<T>(-1) && one == std::numeric_limits<T>::min();
}

template <typename T>
T divide(T one, T other) {
  if (other == 0) {
    trap_division();
  }
  return overflows(one, other) ? one : static_cast<T>(one / other);
}

template <typename T>
T remainder(T one, T other) {
  if (other == 0) {
    trap_division();
  }
  return overflows(one, other) ? T{0} : static_cast<T>(one % other);
}

template <typename T>
T minimum(T one, T other) {
  return one < other ? one : other;
}

template <typename T>
T maximum(T one, T other) {
  return one > other ? one : other;
}

// Distances beyond the width are clamped to it.
template <typename T>
T shift_left(T value, std::uint32_t bits) {
  return bits >= sizeof(T) * 8 ? T{0} : static_cast<T>(value << bits);
}

template <typename T>
T shift_right(T value, std::uint32_t bits) {
  constexpr std::uint32_t kWidth = sizeof(T) * 8;
  if (bits >= kWidth) {
    return std::is_signed_v<T> && value < 0 ? static_cast<T>(-1) : T{0};
  }
  return static_cast<T>(value >> bits);
}

inline std::uint32_t funnel_right(std::uint32_t low, std::uint32_t high, std::uint32_t bits) {
  return static_cast<std::uint32_t>(((std::uint64_t{high} << 32) | low) >> (bits & 31));
}

// Conversions. A NaN becomes the one NaN of its new type: kNan, or 0x7fff in both half precisions.
float half_to_float(std::uint16_t bits);
std::uint16_t float_to_half(float value);
std::uint16_t float_to_bfloat16(float value);
// Values outside of the range become its nearest end, and NaNs 0.
std::uint64_t truncate_to_u64(double value);

}  // namespace fsdp::ptx
