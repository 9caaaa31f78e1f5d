// The host packer and the CUDA kernels, which run on the host here (kernels_under_test.h), give
// what a reference gives. The reference moves one element at a time, and it rounds with exact
// arithmetic in fp64 where they compute with bits.
#include "pack/pack.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "base/check.h"
#include "base/copy.h"
#include "base/instruction_set.h"
#include "device/host_stream.h"
#include "kernels_under_test.h"
#include "message_of.h"

namespace fsdp {
namespace {

using test::message_of;

using Buffer = std::vector<unsigned char>;

constexpr DType kFloats[] = {DType::Float32, DType::BFloat16, DType::Float16, DType::Float64};
constexpr unsigned char kPoison = 0xff;  // all bits set is a NaN in every floating dtype
constexpr std::size_t kGuard = 64;       // poisoned bytes behind every output

// - The reference

struct HalfFormat {
  int mantissa_bits;
  int min_exponent;  // of normal numbers
  int max_exponent;
};

HalfFormat half_format(DType dtype) {
  return dtype == DType::BFloat16 ? HalfFormat{7, -126, 127} : HalfFormat{10, -14, 15};
}

double half_value(DType dtype, std::uint16_t bits) {
  const HalfFormat format = half_format(dtype);
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int exponent = (bits & 0x7fff) >> format.mantissa_bits;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == format.max_exponent - format.min_exponent + 2) {
    return mantissa != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  }
  const int leading = exponent == 0 ? 0 : 1 << format.mantissa_bits;
  const int scale = std::max(exponent, 1) - 1 + format.min_exponent - format.mantissa_bits;
  return sign * std::ldexp(leading + mantissa, scale);
}

// `value` is an fp32 number, so everything here is exact except for the one nearbyint.
std::uint16_t half_bits(DType dtype, float value) {
  const HalfFormat format = half_format(dtype);
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const auto infinity = static_cast<std::uint16_t>((format.max_exponent - format.min_exponent + 2)
                                                   << format.mantissa_bits);
  if (std::isnan(value)) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return dtype == DType::BFloat16
               ? 0x7fc0
               : static_cast<std::uint16_t>(sign | 0x7e00 | ((bits >> 13) & 0x1ff));
  }
  if (std::isinf(value)) {
    return sign | infinity;
  }
  const double magnitude = std::fabs(static_cast<double>(value));
  const int exponent =
      value == 0 ? format.min_exponent : std::max(std::ilogb(magnitude), format.min_exponent);
  // In units of the last place. A carry out of the mantissa increments the exponent, and a carry
  // out of the largest exponent gives infinity.
  const auto units =
      static_cast<int>(std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent)));
  const int bits = units + ((exponent - format.min_exponent) << format.mantissa_bits);
  return static_cast<std::uint16_t>(sign | std::min<int>(bits, infinity));
}

template <typename T>
T load(const void* data, std::int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void store(void* data, std::int64_t index, T value) {
  std::memcpy(static_cast<char*>(data) + index * sizeof(T), &value, sizeof(T));
}

double get(DType dtype, const void* data, std::int64_t index) {
  switch (dtype) {
    case DType::Float32:
      return load<float>(data, index);
    case DType::Float64:
      return load<double>(data, index);
    default:
      return half_value(dtype, load<std::uint16_t>(data, index));
  }
}

void put(DType dtype, void* data, std::int64_t index, double value) {
  switch (dtype) {
    case DType::Float32:
      return store(data, index, static_cast<float>(value));
    case DType::Float64:
      return store(data, index, value);
    default:
      return store(data, index, half_bits(dtype, static_cast<float>(value)));
  }
}

// The arithmetic that pack.h promises: widen, scale, round; widen both, add, round.
void reference_element(DType from, const void* source, std::int64_t source_index, DType to,
                       void* destination, std::int64_t index, double scale, bool accumulate) {
  const bool wide = from == DType::Float64 || to == DType::Float64;
  const double value = get(from, source, source_index);
  const double before = get(to, destination, index);
  put(to, destination, index,
      wide ? value * scale : static_cast<float>(value) * static_cast<float>(scale));
  if (accumulate) {
    const double rounded = get(to, destination, index);
    put(to, destination, index,
        to == DType::Float64 ? before + rounded
                             : static_cast<float>(before) + static_cast<float>(rounded));
  }
}

bool is_packed(const PackEntry& place, int world_size, std::int64_t i) {
  return place.stride == 0 ||
         (i / place.stride < world_size && i % place.stride < place.chunk_numel);
}

// Whether any element of entry `entry` that is packed is NaN or Inf.
bool reference_look(const PackPlan& plan, const std::vector<const void*>& gradients, DType from,
                    std::size_t entry) {
  const PackEntry& place = plan.entries[entry];
  for (std::int64_t i = 0; gradients[entry] != nullptr && i < place.numel; ++i) {
    if (is_packed(place, plan.world_size, i) && !std::isfinite(get(from, gradients[entry], i))) {
      return true;
    }
  }
  return false;
}

void reference_pack(const PackPlan& plan, const std::vector<const void*>& gradients, DType from,
                    void* reduce_input, DType to, double scale, bool accumulate) {
  if (!accumulate) {
    std::memset(reduce_input, 0, plan.segment_numel * plan.world_size * itemsize(to));
  }
  for (std::size_t entry = 0; entry < plan.entries.size(); ++entry) {
    const PackEntry& place = plan.entries[entry];
    const std::int64_t run = std::max<std::int64_t>(place.chunk_numel / place.runs, 1);
    for (std::int64_t i = 0; gradients[entry] != nullptr && i < place.numel; ++i) {
      if (place.stride != 0) {
        if (is_packed(place, plan.world_size, i)) {
          reference_element(from, gradients[entry], i, to, reduce_input,
                            i / place.stride * plan.segment_numel + place.offset + i % place.stride,
                            scale, accumulate);
        }
        continue;
      }
      const std::int64_t rank = i / run % plan.world_size;
      const std::int64_t piece = i / run / plan.world_size;
      reference_element(from, gradients[entry], i, to, reduce_input,
                        rank * plan.segment_numel + place.offset + piece * run + i % run, scale,
                        accumulate);
    }
  }
}

// - Values

template <typename T>
T pick(std::mt19937_64& random, T low, T high) {
  return std::uniform_int_distribution<T>(low, high)(random);
}

// Mixes ordinary values, random bit patterns, and values halfway between two half-precision ones.
void fill_random(DType dtype, void* data, std::int64_t numel, std::mt19937_64& random) {
  for (std::int64_t i = 0; i < numel; ++i) {
    const std::uint64_t bits = random();
    const int kind = pick(random, 0, 7);
    if (kind == 0) {
      std::memcpy(static_cast<char*>(data) + i * itemsize(dtype), &bits, itemsize(dtype));
    } else if (kind == 1) {
      const DType half = pick(random, 0, 1) == 0 ? DType::BFloat16 : DType::Float16;
      const auto pattern = static_cast<std::uint16_t>(bits & 0x7bfe);
      put(dtype, data, i, (half_value(half, pattern) + half_value(half, pattern + 1)) / 2);
    } else {
      put(dtype, data, i,
          std::ldexp(std::uniform_real_distribution<double>(-1, 1)(random), pick(random, -20, 12)));
    }
  }
}

// Compares bit for bit, except that all NaNs are equal: the processor chooses the NaN of a product
// or a sum.
std::string first_difference(DType dtype, const Buffer& actual, const Buffer& expected) {
  if (actual.size() != expected.size()) {
    return "sizes differ";
  }
  const std::size_t size = itemsize(dtype);
  for (std::size_t i = 0; i < actual.size() / size; ++i) {
    if (std::memcmp(&actual[i * size], &expected[i * size], size) == 0) {
      continue;
    }
    const double got = get(dtype, actual.data(), i);
    const double want = get(dtype, expected.data(), i);
    if (!(std::isnan(got) && std::isnan(want))) {
      return detail::concat("element ", i, " of ", actual.size() / size, " is ", got,
                            " where the reference has ", want);
    }
  }
  return "";
}

bool guard_is_untouched(const Buffer& buffer) {
  return std::all_of(buffer.end() - kGuard, buffer.end(),
                     [](unsigned char byte) { return byte == kPoison; });
}

// Which packer is tested: the kernels' bodies, or the host packer with loops for one instruction
// set and with or without non-temporal stores.
struct Kind {
  const char* name;
  InstructionSet instruction_set = InstructionSet::Baseline;
  bool is_past_caches = false;
  bool is_kernels = false;
};

const Kind kKinds[] = {
    {"HostBaseline"},
    {"HostAvx2", InstructionSet::Avx2},
    {"HostAvx512", InstructionSet::Avx512},
    {"HostBaselinePastCaches", InstructionSet::Baseline, true},
    {"HostAvx2PastCaches", InstructionSet::Avx2, true},
    {"HostAvx512PastCaches", InstructionSet::Avx512, true},
    {"Kernels", InstructionSet::Baseline, false, true},
};

void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

std::unique_ptr<Packer> make_packer(const Kind& kind) {
  if (kind.is_kernels) {
    return test::make_kernels_under_test();
  }
  HostPackerSettings settings;
  settings.instruction_set = kind.instruction_set;
  settings.large_output = settings.large_run =
      kind.is_past_caches ? 0 : std::numeric_limits<std::size_t>::max();
  return make_host_packer(settings);
}

class PackerTest : public ::testing::Test {
 protected:
  void use(const Kind& kind) {
    if (!is_supported(kind.instruction_set)) {
      GTEST_SKIP() << "this processor has no " << name(kind.instruction_set);
    }
    packer_ = make_packer(kind);
  }

  // These run on the calling thread.
  void run_pack(PackPlan plan, const void* const* gradients, DType from, void* reduce_input,
                DType to, double scale, bool accumulate, const NonfiniteMarks& marks = {}) {
    packer_->prepare(plan);
    packer_->pack(compute_, plan, gradients, from, reduce_input, to, scale, accumulate, marks);
  }

  void run_unpack(UnpackPlan plan, const void* staging, void* unsharded) {
    packer_->prepare(plan);
    packer_->unpack(compute_, plan, staging, unsharded);
  }

  void run_cast(CastPlan plan, CastMode mode, const void* source, void* destination, double scale) {
    packer_->prepare(plan);
    const std::vector<CastMode> modes(plan.entries.size(), mode);
    packer_->cast(compute_, plan, modes.data(), source, destination, scale);
  }

  // Casts `numel` elements and returns them, without the guard.
  Buffer cast(DType from, const void* source, DType to, std::int64_t numel, double scale = 1.0) {
    Buffer destination(numel * itemsize(to) + kGuard, kPoison);
    run_cast({{{0, 0, numel, from, to}}, nullptr}, CastMode::Write, source, destination.data(),
             scale);
    EXPECT_TRUE(guard_is_untouched(destination));
    destination.resize(numel * itemsize(to));
    return destination;
  }

  InlineStream compute_{std::chrono::milliseconds(60000)};
  std::unique_ptr<Packer> packer_;
};

class AnyPacker : public PackerTest, public ::testing::WithParamInterface<Kind> {
 protected:
  void SetUp() override { use(GetParam()); }

  // The NaN in half precision that becomes of a NaN in fp32. A GPU has one for all. Elsewhere bf16
  // has one, and fp16 keeps the sign and the high bits. pack.h promises no more than a NaN.
  std::uint16_t narrow_nan(DType half, std::uint32_t bits) const {
    if (has_one_nan()) {
      return 0x7fff;
    }
    return half == DType::BFloat16 ? 0x7fc0
                                   : static_cast<std::uint16_t>(((bits >> 16) & 0x8000) | 0x7e00 |
                                                                ((bits >> 13) & 0x1ff));
  }

  bool has_one_nan() const { return GetParam().is_kernels && test::kernels_have_one_nan(); }
};

INSTANTIATE_TEST_SUITE_P(Packers, AnyPacker, ::testing::ValuesIn(kKinds),
                         [](const auto& info) { return info.param.name; });

std::string describe(DType from, DType to, double scale, bool accumulate) {
  return detail::concat(name(from), " to ", name(to), ", scale ", scale,
                        accumulate ? ", accumulated" : "");
}

// - pack and unpack

struct RandomPack {
  PackPlan plan;
  std::vector<Buffer> storage;    // of each gradient
  std::vector<Buffer> unaligned;  // the same, at any alignment
  std::vector<const void*> gradients;
};

// Chunks as torch.chunk makes them and others, chunks of Shard(dim > 0), and some of several tiles.
// There are gaps before, between and after them, and gradients begin at any alignment.
RandomPack random_pack(int world_size, DType dtype, bool may_be_absent, std::mt19937_64& random,
                       bool may_be_in_parts = true) {
  RandomPack made;
  made.plan.world_size = world_size;
  std::int64_t offset = pick(random, 0, 1) * pick(random, 0, 5);
  const int entries = pick(random, 0, 6);
  for (int i = 0; i < entries; ++i) {
    const std::int64_t rows = pick(random, 0, 2 * world_size + 3);
    const std::int64_t row_numel = pick(random, 0, 4) != 0   ? pick(random, 0, 9)
                                   : pick(random, 0, 5) == 0 ? pick(random, 0, 9000 / world_size)
                                                             : pick(random, 0, 90);
    const std::int64_t chunk_rows = (rows + world_size - 1) / world_size;
    PackEntry entry{rows * row_numel, chunk_rows * row_numel, offset, 1, 0};
    if (pick(random, 0, 3) == 0) {
      entry.runs = pick(random, 1, 4);
      entry.chunk_numel = row_numel * entry.runs;
      entry.numel = entry.chunk_numel * world_size;
    } else if (pick(random, 0, 3) == 0) {
      entry.chunk_numel += pick(random, 0, 3);
    } else if (may_be_in_parts && entry.chunk_numel > 1 && pick(random, 0, 2) == 0) {
      entry.stride = entry.chunk_numel;  // Note [parts of chunks]
      entry.chunk_numel = pick(random, std::int64_t{1}, entry.stride - 1);
    }
    made.plan.entries.push_back(entry);
    offset += entry.chunk_numel + pick(random, 0, 1) * pick(random, 0, 7);
    // The gradient ends where its memory ends, so AddressSanitizer sees reads beyond it.
    const std::int64_t before = pick(random, 0, 2) == 0 ? pick(random, 0, 15) : 0;
    made.storage.emplace_back(entry.numel * itemsize(dtype));
    fill_random(dtype, made.storage.back().data(), entry.numel, random);
    made.unaligned.emplace_back((before + entry.numel) * itemsize(dtype));
    unsigned char* gradient = made.unaligned.back().data() + before * itemsize(dtype);
    std::copy(made.storage.back().begin(), made.storage.back().end(), gradient);
    const bool absent = may_be_absent && pick(random, 0, 3) == 0;
    made.gradients.push_back(absent ? nullptr : gradient);
  }
  made.plan.segment_numel = offset;
  return made;
}

class PackOnRanks : public PackerTest, public ::testing::WithParamInterface<std::tuple<Kind, int>> {
 protected:
  void SetUp() override { use(std::get<0>(GetParam())); }
  int world_size() const { return std::get<1>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(Packers, PackOnRanks,
                         ::testing::Combine(::testing::Values(kKinds[0], kKinds[2], kKinds[4],
                                                              kKinds[6]),
                                            ::testing::Values(1, 2, 3, 4, 5, 6, 7, 8, 9, 64)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) + "On" +
                                  std::to_string(std::get<1>(info.param));
                         });

TEST_P(PackOnRanks, PutsEveryElementWhereTheReferenceDoes) {
  const int world_size = this->world_size();
  const double scales[] = {1.0, 1.0 / world_size, 1.0 / 3.0};
  for (int seed = 0; seed < 150; ++seed) {
    std::mt19937_64 random(seed * 1000 + world_size);
    const DType from = kFloats[pick(random, 0, 3)];
    const DType to = kFloats[pick(random, 0, 3)];
    const double scale = scales[pick(random, 0, 2)];
    const bool accumulate = pick(random, 0, 1) == 1;
    SCOPED_TRACE(detail::concat("seed ", seed, ", ", describe(from, to, scale, accumulate)));
    const RandomPack made = random_pack(world_size, from, /*may_be_absent=*/true, random);
    const std::size_t bytes = made.plan.segment_numel * world_size * itemsize(to);
    Buffer actual(bytes + kGuard, kPoison);
    if (accumulate && pick(random, 0, 3) != 0) {
      fill_random(to, actual.data(), made.plan.segment_numel * world_size, random);
    }
    Buffer expected = actual;
    reference_pack(made.plan, made.gradients, from, expected.data(), to, scale, accumulate);

    run_pack(made.plan, made.gradients.data(), from, actual.data(), to, scale, accumulate);
    EXPECT_TRUE(guard_is_untouched(actual));
    ASSERT_EQ(first_difference(to, actual, expected), "");
  }
}

TEST_P(PackOnRanks, MarksTheGradientsThatHaveNaNOrInf) {
  const int world_size = this->world_size();
  const double specials[] = {std::nan(""), HUGE_VAL, -HUGE_VAL};
  for (int seed = 0; seed < 150; ++seed) {
    std::mt19937_64 random(seed * 1000 + world_size);
    const DType from = kFloats[pick(random, 0, 3)];
    const DType to = kFloats[pick(random, 0, 3)];
    const double scale = pick(random, 0, 1) == 1 ? 1.0 : 1.0 / world_size;
    const bool accumulate = pick(random, 0, 1) == 1;
    SCOPED_TRACE(detail::concat("seed ", seed, ", ", describe(from, to, scale, accumulate)));
    const RandomPack made = random_pack(world_size, from, /*may_be_absent=*/true, random);
    // Many gradients have special values at random. These get one in a single place.
    for (std::size_t i = 0; i < made.gradients.size(); ++i) {
      const std::int64_t numel = made.plan.entries[i].numel;
      if (made.gradients[i] != nullptr && numel > 0 && pick(random, 0, 2) == 0) {
        auto* gradient = const_cast<void*>(made.gradients[i]);
        std::memset(gradient, 0, static_cast<std::size_t>(numel) * itemsize(from));
        put(from, gradient, pick(random, std::int64_t{0}, numel - 1), specials[pick(random, 0, 2)]);
      }
    }
    std::vector<std::uint64_t> marks(made.gradients.size() + 1, 7);
    std::vector<std::uint64_t> expected = marks;
    for (std::size_t i = 0; i < made.gradients.size(); ++i) {
      expected[i] = reference_look(made.plan, made.gradients, from, i) ? 9 : 7;
    }
    Buffer packed(made.plan.segment_numel * world_size * itemsize(to), 0);
    run_pack(made.plan, made.gradients.data(), from, packed.data(), to, scale, accumulate,
             {marks.data(), 9});
    ASSERT_EQ(marks, expected);
  }
}

// The largest finite values of each dtype, and the bits of NaN and Inf next to them.
TEST_P(AnyPacker, TellsTheLargestFiniteValuesFromNaNAndInf) {
  const auto is_marked = [this](DType dtype, const std::vector<unsigned char>& bytes) {
    PackPlan plan{{{static_cast<std::int64_t>(bytes.size() / itemsize(dtype)),
                    static_cast<std::int64_t>(bytes.size() / itemsize(dtype)), 0}},
                  static_cast<std::int64_t>(bytes.size() / itemsize(dtype)),
                  1,
                  nullptr};
    const void* const gradients[] = {bytes.data()};
    std::vector<double> packed(bytes.size());
    std::uint64_t mark = 0;
    run_pack(plan, gradients, dtype, packed.data(), DType::Float64, 1.0, false, {&mark, 1});
    return mark == 1;
  };
  for (const DType dtype : kFloats) {
    const std::size_t size = itemsize(dtype);
    Buffer infinity(size);
    put(dtype, infinity.data(), 0, HUGE_VAL);
    std::uint64_t bits = 0;
    std::memcpy(&bits, infinity.data(), size);  // little-endian
    const std::uint64_t sign = std::uint64_t{1} << (8 * size - 1);
    for (std::int64_t place = 0; place < 200; ++place) {
      Buffer values(200 * size, 0);
      for (const auto& [pattern, marked] :
           {std::pair(bits, true), std::pair(bits + 1, true), std::pair(bits | sign, true),
            std::pair(bits - 1, false), std::pair((bits - 1) | sign, false),
            std::pair(std::uint64_t{1}, false)}) {
        std::memcpy(values.data() + static_cast<std::size_t>(place) * size, &pattern, size);
        ASSERT_EQ(is_marked(dtype, values), marked)
            << name(dtype) << ", bits " << pattern << " at " << place;
      }
    }
  }
}

TEST_P(PackOnRanks, ThenUnpackGivesTheGradientsBackBitForBit) {
  const int world_size = this->world_size();
  for (int seed = 0; seed < 60; ++seed) {
    std::mt19937_64 random(seed * 1000 + world_size);
    const DType dtype = kFloats[pick(random, 0, 3)];
    SCOPED_TRACE(detail::concat("seed ", seed, ", ", name(dtype)));
    const RandomPack made = random_pack(world_size, dtype, /*may_be_absent=*/false, random,
                                        /*may_be_in_parts=*/false);
    const std::size_t size = itemsize(dtype);
    Buffer staging(made.plan.segment_numel * world_size * size, kPoison);
    run_pack(made.plan, made.gradients.data(), dtype, staging.data(), dtype, 1.0, false);

    UnpackPlan plan;
    plan.segment_bytes = made.plan.segment_numel * size;
    plan.world_size = world_size;
    Buffer expected;
    for (std::size_t i = 0; i < made.plan.entries.size(); ++i) {
      const PackEntry& entry = made.plan.entries[i];
      expected.insert(expected.end(), pick(random, 0, 16), kPoison);  // a gap: not to be touched
      plan.entries.push_back(
          {entry.chunk_numel * size, entry.offset * size, expected.size(), entry.runs});
      const std::size_t region = entry.chunk_numel * size * world_size;
      Buffer parameter = made.storage[i];
      parameter.resize(region, 0);
      expected.insert(expected.end(), parameter.begin(), parameter.end());
    }
    expected.insert(expected.end(), kGuard, kPoison);
    Buffer actual(expected.size(), kPoison);
    run_unpack(plan, staging.data(), actual.data());
    ASSERT_EQ(actual, expected);
  }
}

// Two messages carry one chunk of each rank, see Note [parts of chunks].
TEST_P(PackOnRanks, TwoPartsOfEachChunkAreTheWhole) {
  const int world_size = this->world_size();
  for (const std::int64_t chunk : {3, 50, 9001}) {
    const std::int64_t first = chunk / 3 + 1;
    const std::int64_t numel = chunk * world_size - 2;
    std::vector<float> gradient(static_cast<std::size_t>(numel));
    std::iota(gradient.begin(), gradient.end(), 1.0F);
    std::vector<float> whole(static_cast<std::size_t>(chunk * world_size), NAN);
    for (const std::int64_t begin : {std::int64_t{0}, first}) {
      const std::int64_t length = begin == 0 ? first : chunk - first;
      PackPlan pack_plan{{{numel - begin, length, 0, 1, chunk}}, length, world_size, nullptr};
      std::vector<float> staging(static_cast<std::size_t>(length * world_size), NAN);
      const void* addresses[] = {gradient.data() + begin};
      run_pack(pack_plan, addresses, DType::Float32, staging.data(), DType::Float32, 1.0, false);
      const auto bytes = static_cast<std::size_t>(length) * sizeof(float);
      UnpackPlan unpack_plan;
      unpack_plan.entries.push_back({bytes, 0, static_cast<std::size_t>(begin) * sizeof(float), 1,
                                     static_cast<std::size_t>(chunk) * sizeof(float)});
      unpack_plan.segment_bytes = bytes;
      unpack_plan.world_size = world_size;
      run_unpack(unpack_plan, staging.data(), whole.data());
    }
    gradient.resize(whole.size(), 0.0F);
    EXPECT_EQ(whole, gradient);
  }
}

TEST_P(AnyPacker, PacksFewerRowsThanRanksWithZerosForTheRest) {
  const std::vector<float> gradient = {1, 2, 3, 4};  // 2 rows of 2 over 3 ranks
  const PackPlan plan{{{4, 2, 1}}, 4, 3, nullptr};
  std::vector<float> actual(12, NAN);
  const void* gradients[] = {gradient.data()};
  run_pack(plan, gradients, DType::Float32, actual.data(), DType::Float32, 0.5, false);
  EXPECT_EQ(actual, (std::vector<float>{0, 0.5, 1, 0, 0, 1.5, 2, 0, 0, 0, 0, 0}));
}

TEST_P(AnyPacker, AnAbsentGradientIsZerosAndLeavesWhatIsAccumulated) {
  const PackPlan plan{{{3, 2, 0}}, 3, 2, nullptr};
  const void* gradients[] = {nullptr};
  std::vector<float> actual = {1, 2, 3, 4, 5, 6};
  const std::vector<float> before = actual;
  run_pack(plan, gradients, DType::BFloat16, actual.data(), DType::Float32, 0.5, true);
  EXPECT_EQ(actual, before);
  run_pack(plan, gradients, DType::BFloat16, actual.data(), DType::Float32, 0.5, false);
  EXPECT_EQ(actual, std::vector<float>(6, 0.0f));
}

// More entries than a launch of a kernel takes.
TEST_P(AnyPacker, PacksAndCastsAnyNumberOfEntries) {
  for (const int entries : {481, 4065, 5000}) {
    SCOPED_TRACE(entries);
    std::vector<float> source(static_cast<std::size_t>(entries) * 2);
    std::iota(source.begin(), source.end(), 1.0F);
    PackPlan pack_plan{{}, entries, 2, nullptr};
    CastPlan cast_plan;
    std::vector<const void*> gradients;
    std::vector<CastMode> modes;
    std::vector<float> packed(source.size(), NAN);
    std::vector<float> expected_packed(source.size());
    std::vector<float> expected_cast(source.size(), -1.0F);
    for (std::int64_t i = 0; i < entries; ++i) {
      pack_plan.entries.push_back({2, 1, i});
      gradients.push_back(i % 7 == 3 ? nullptr : &source[i * 2]);
      const auto at = static_cast<std::size_t>(i) * sizeof(float);
      cast_plan.entries.push_back({at, at * 2, 1, DType::Float32, DType::Float32});
      modes.push_back(i % 5 == 2 ? CastMode::Skip : CastMode::Write);
      for (std::int64_t rank = 0; rank < 2; ++rank) {
        expected_packed[rank * entries + i] = i % 7 == 3 ? 0.0F : source[i * 2 + rank];
      }
      if (i % 5 != 2) {
        expected_cast[i * 2] = source[i];
      }
    }
    run_pack(pack_plan, gradients.data(), DType::Float32, packed.data(), DType::Float32, 1, false);
    EXPECT_EQ(packed, expected_packed);

    std::vector<float> cast(source.size(), -1.0F);
    packer_->prepare(cast_plan);
    packer_->cast(compute_, cast_plan, modes.data(), source.data(), cast.data(), 1.0);
    EXPECT_EQ(cast, expected_cast);
  }
}

// - cast

TEST_P(AnyPacker, CastsEveryPairOfDtypesAsTheReferenceDoes) {
  std::mt19937_64 random(7);
  for (const DType from : kFloats) {
    for (const DType to : kFloats) {
      for (const double scale : {1.0, 0.125, 1.0 / 3.0}) {
        for (const bool accumulate : {false, true}) {
          SCOPED_TRACE(describe(from, to, scale, accumulate));
          // Three unaligned entries with gaps. Their lengths leave every remainder of a vector.
          for (std::int64_t numel = 0; numel < 70; ++numel) {
            const std::int64_t starts[] = {numel % 5, 80 + numel % 3, 160};
            CastPlan plan;
            Buffer source((160 + numel) * itemsize(from));
            fill_random(from, source.data(), 160 + numel, random);
            Buffer actual(300 * itemsize(to), kPoison);
            if (accumulate) {
              fill_random(to, actual.data(), 300, random);
            }
            Buffer expected = actual;
            for (const std::int64_t start : starts) {
              const std::int64_t at = start + 1;
              plan.entries.push_back({start * itemsize(from), at * itemsize(to), numel, from, to});
              for (std::int64_t i = 0; i < numel; ++i) {
                reference_element(from, source.data(), start + i, to, expected.data(), at + i,
                                  scale, accumulate);
              }
            }
            run_cast(plan, accumulate ? CastMode::Add : CastMode::Write, source.data(),
                     actual.data(), scale);
            ASSERT_EQ(first_difference(to, actual, expected), "") << numel << " elements";
          }
        }
      }
    }
  }
}

// The loops for every instruction set give the bits of the baseline, NaNs included, at any
// alignment to a cache line and with any remainder of a vector or a block.
class HostLoops : public PackerTest, public ::testing::WithParamInterface<Kind> {
 protected:
  void SetUp() override { use(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(Packers, HostLoops,
                         ::testing::ValuesIn(std::begin(kKinds) + 1, std::end(kKinds) - 1),
                         [](const auto& info) { return info.param.name; });

TEST_P(HostLoops, GiveTheBitsOfTheBaseline) {
  constexpr std::int64_t kMost = 700;
  std::mt19937_64 random(11);
  const std::unique_ptr<Packer> baseline = make_packer(kKinds[0]);
  for (const DType from : kFloats) {
    for (const DType to : kFloats) {
      Buffer source((kMost + 64) * itemsize(from));
      fill_random(from, source.data(), kMost + 64, random);
      Buffer before((kMost + 64) * itemsize(to));
      fill_random(to, before.data(), kMost + 64, random);
      for (int round = 0; round < 150; ++round) {
        const std::int64_t numel = round < 70 ? round : pick(random, std::int64_t{70}, kMost);
        const CastMode mode = pick(random, 0, 1) == 0 ? CastMode::Write : CastMode::Add;
        const double scale = pick(random, 0, 1) == 0 ? 0.125 : 1.0 / 3.0;
        SCOPED_TRACE(describe(from, to, scale, mode == CastMode::Add));
        const CastPlan plan{{{pick(random, 0, 63) * itemsize(from),
                              pick(random, 0, 63) * itemsize(to), numel, from, to}},
                            nullptr};
        Buffer expected = before;
        Buffer actual = before;
        baseline->cast(compute_, plan, &mode, source.data(), expected.data(), scale);
        packer_->cast(compute_, plan, &mode, source.data(), actual.data(), scale);
        if (mode == CastMode::Write) {
          ASSERT_EQ(actual, expected) << numel << " elements";
        } else {  // the sum of two NaNs is either of them, which the compiler chooses
          ASSERT_EQ(first_difference(to, actual, expected), "") << numel << " elements";
        }
      }
    }
  }
}

TEST(HostPacker, BypassesCachesForLargeRunsOfLargeOutputs) {
  InlineStream compute(std::chrono::milliseconds(60000));
  const auto packer = make_host_packer();
  const auto numel = static_cast<std::int64_t>(kLargeOutput / 2 + 77);
  std::vector<float> source(static_cast<std::size_t>(numel));
  std::iota(source.begin(), source.end(), 1.0F);
  std::vector<std::uint16_t> actual(source.size());
  std::vector<std::uint16_t> expected(source.size());
  const CastPlan whole{{{0, 0, numel, DType::Float32, DType::BFloat16}}, nullptr};
  packer->cast(compute, whole, nullptr, source.data(), actual.data(), 0.5);
  make_packer(kKinds[0])->cast(compute, whole, nullptr, source.data(), expected.data(), 0.5);
  EXPECT_EQ(actual, expected);
}

std::vector<std::uint16_t> every_pattern() {
  std::vector<std::uint16_t> patterns(65536);
  for (std::size_t i = 0; i < patterns.size(); ++i) {
    patterns[i] = static_cast<std::uint16_t>(i);
  }
  return patterns;
}

TEST_P(AnyPacker, WidensEveryHalfPrecisionPattern) {
  const std::vector<std::uint16_t> patterns = every_pattern();
  for (const DType from : {DType::BFloat16, DType::Float16}) {
    for (const DType to : {DType::Float32, DType::Float64}) {
      const Buffer actual = cast(from, patterns.data(), to, 65536);
      for (std::int64_t i = 0; i < 65536; ++i) {
        const double want = half_value(from, patterns[i]);
        const double got = get(to, actual.data(), i);
        ASSERT_TRUE(std::isnan(want) ? std::isnan(got) : got == want)
            << describe(from, to, 1, false) << ", pattern " << i;
        if (!(std::isnan(want) && has_one_nan())) {
          ASSERT_EQ(std::signbit(got), i >= 0x8000) << "pattern " << i;
        }
      }
    }
  }
}

TEST_P(AnyPacker, EveryHalfPrecisionPatternSurvivesBeingWidened) {
  const std::vector<std::uint16_t> patterns = every_pattern();
  for (const DType half : {DType::BFloat16, DType::Float16}) {
    for (const DType wide : {DType::Float32, DType::Float64}) {
      const Buffer there = cast(half, patterns.data(), wide, 65536);
      const Buffer back = cast(wide, there.data(), half, 65536);
      for (std::int64_t i = 0; i < 65536; ++i) {
        std::uint16_t want = patterns[i];
        if (std::isnan(half_value(half, want))) {
          const std::uint32_t sign = (want & 0x8000u) << 16;
          want = narrow_nan(half, sign | 0x7f800000u | (want & 0x3ffu) << 13);
        }
        ASSERT_EQ(load<std::uint16_t>(back.data(), i), want) << name(half) << " by " << name(wide);
      }
    }
  }
}

TEST_P(AnyPacker, ConvertsEveryPatternOfOneHalfPrecisionToTheOther) {
  const std::vector<std::uint16_t> patterns = every_pattern();
  const DType halves[] = {DType::BFloat16, DType::Float16};
  for (int i = 0; i < 2; ++i) {
    const DType from = halves[i];
    const DType to = halves[1 - i];
    const Buffer actual = cast(from, patterns.data(), to, 65536);
    Buffer expected(actual.size());
    for (std::int64_t k = 0; k < 65536; ++k) {
      put(to, expected.data(), k, half_value(from, patterns[k]));
    }
    ASSERT_EQ(first_difference(to, actual, expected), "") << name(from) << " to " << name(to);
  }
}

// Neighbours share a word, see Note [pairs], so every pattern stands beside one that is unlike it.
// All bits are compared, since each packer has but one NaN in bf16.
TEST_P(AnyPacker, ScalesAndAddsEveryPatternOfBFloat16BesideAnyOther) {
  constexpr std::int64_t kNumel = 65536;
  std::vector<std::uint16_t> source(kNumel + 1);
  std::vector<std::uint16_t> before(kNumel + 1);
  for (std::int64_t i = 0; i <= kNumel; ++i) {
    source[i] = static_cast<std::uint16_t>(i * 40503);
    before[i] = static_cast<std::uint16_t>(i * 25713 + 12345);
  }
  for (const double scale : {0.125, 1.0 / 3.0, -0x1p90}) {
    for (const CastMode mode : {CastMode::Write, CastMode::Add}) {
      SCOPED_TRACE(describe(DType::BFloat16, DType::BFloat16, scale, mode == CastMode::Add));
      std::vector<std::uint16_t> actual = before;
      std::vector<std::uint16_t> expected = before;
      for (std::int64_t i = 1; i <= kNumel; ++i) {
        reference_element(DType::BFloat16, source.data(), i, DType::BFloat16, expected.data(),
                          i - 1, scale, mode == CastMode::Add);
        if (std::isnan(half_value(DType::BFloat16, expected[i - 1]))) {
          expected[i - 1] = narrow_nan(DType::BFloat16, 0);
        }
      }
      run_cast({{{2, 0, kNumel, DType::BFloat16, DType::BFloat16}}, nullptr}, mode, source.data(),
               actual.data(), scale);
      ASSERT_EQ(actual, expected);
    }
  }
}

// Each half-precision number, the middle between it and the next, and the neighbours of both in
// fp32. They include every tie, the step from subnormal to normal, and the step to infinity.
TEST_P(AnyPacker, RoundsEveryTieAndItsNeighbours) {
  for (const DType half : {DType::BFloat16, DType::Float16}) {
    const int infinity = half == DType::BFloat16 ? 0x7f80 : 0x7c00;
    std::vector<float> values;
    for (int bits = 0; bits < infinity; ++bits) {
      const double value = half_value(half, bits);
      const double next = bits + 1 < infinity ? half_value(half, bits + 1)
                                              : std::ldexp(1.0, half_format(half).max_exponent + 1);
      for (const double exact : {value, (value + next) / 2}) {
        const auto point = static_cast<float>(exact);
        for (const float x :
             {std::nextafter(point, -INFINITY), point, std::nextafter(point, INFINITY)}) {
          values.push_back(x);
          values.push_back(-x);
        }
      }
    }
    const auto numel = static_cast<std::int64_t>(values.size());
    const Buffer actual = cast(DType::Float32, values.data(), half, numel);
    for (std::int64_t i = 0; i < numel; ++i) {
      ASSERT_EQ(load<std::uint16_t>(actual.data(), i), half_bits(half, values[i]))
          << name(half) << " of " << values[i];
    }
  }
}

TEST_P(AnyPacker, KnownValuesRoundToKnownBits) {
  struct Known {
    float value;
    std::uint16_t bfloat16;
    std::uint16_t float16;
  };
  const Known known[] = {
      {0.0f, 0x0000, 0x0000},        {-0.0f, 0x8000, 0x8000},         {1.0f, 0x3f80, 0x3c00},
      {-2.0f, 0xc000, 0xc000},       {65504.0f, 0x4780, 0x7bff},      {65519.0f, 0x4780, 0x7bff},
      {65520.0f, 0x4780, 0x7c00},    {3.4028235e38f, 0x7f80, 0x7c00}, {-INFINITY, 0xff80, 0xfc00},
      {0x1p-14f, 0x3880, 0x0400},    {0x1p-24f, 0x3380, 0x0001},      {0x1p-25f, 0x3300, 0x0000},
      {0x1.8p-25f, 0x3340, 0x0001},  {0x1.8p-24f, 0x33c0, 0x0002},    {0x1p-133f, 0x0001, 0x0000},
      {0x1p-134f, 0x0000, 0x0000},   {0x1.ffep-15f, 0x3880, 0x0400},  {1.00390625f, 0x3f80, 0x3c04},
      {1.01171875f, 0x3f82, 0x3c0c},
  };
  for (const Known& one : known) {
    const Buffer bfloat16 = cast(DType::Float32, &one.value, DType::BFloat16, 1);
    const Buffer float16 = cast(DType::Float32, &one.value, DType::Float16, 1);
    EXPECT_EQ(load<std::uint16_t>(bfloat16.data(), 0), one.bfloat16) << one.value;
    EXPECT_EQ(load<std::uint16_t>(float16.data(), 0), one.float16) << one.value;
  }
}

TEST_P(AnyPacker, NaNsStayNaNs) {
  for (const std::uint32_t bits : {0x7fc00000u, 0x7f800001u, 0xffc00000u, 0xff800001u, 0x7fc12345u,
                                   0x7fffffffu, 0x7fa00000u, 0xffffffffu}) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    const Buffer bfloat16 = cast(DType::Float32, &bits, DType::BFloat16, 1);
    const Buffer float16 = cast(DType::Float32, &bits, DType::Float16, 1);
    EXPECT_EQ(load<std::uint16_t>(bfloat16.data(), 0), narrow_nan(DType::BFloat16, bits))
        << std::hex << bits;
    EXPECT_EQ(load<std::uint16_t>(float16.data(), 0), narrow_nan(DType::Float16, bits))
        << std::hex << bits;
  }
}

// PyTorch casts fp64 to a half precision by way of fp32. Here the first of the two roundings makes
// a tie.
TEST_P(AnyPacker, RoundsDoublesToHalfPrecisionByWayOfFloat) {
  const double values[] = {1 + 0x1p-8 + 0x1p-40, 1 + 0x1p-11 + 0x1p-40};
  const Buffer bfloat16 = cast(DType::Float64, values, DType::BFloat16, 2);
  const Buffer float16 = cast(DType::Float64, values, DType::Float16, 2);
  EXPECT_EQ(load<std::uint16_t>(bfloat16.data(), 0), 0x3f80);
  EXPECT_EQ(load<std::uint16_t>(float16.data(), 1), 0x3c00);
}

// 256 + 1.001 would round to 258 if it were added in fp32. But 1.001 is 1 in bfloat16, and 257 is a
// tie, which rounds to 256.
TEST_P(AnyPacker, RoundsAnElementBeforeItIsAdded) {
  const float source = 1.001f;
  std::uint16_t sum = 0x4380;
  run_cast({{{0, 0, 1, DType::Float32, DType::BFloat16}}, nullptr}, CastMode::Add, &source, &sum,
           1.0);
  EXPECT_EQ(half_value(DType::BFloat16, sum), 256.0);
}

TEST_P(AnyPacker, MultipliesByTheScaleBeforeItRounds) {
  const double source = 3e40;  // infinite in fp32
  const Buffer actual = cast(DType::Float64, &source, DType::Float32, 1, 1e-10);
  EXPECT_EQ(load<float>(actual.data(), 0), static_cast<float>(source * 1e-10));
}

#if defined(__x86_64__)
// torch.set_flush_denormal sets this mode, and new threads inherit it.
TEST_P(AnyPacker, SubnormalHalvesSurviveWhereSubnormalFloatsAreFlushedToZero) {
  constexpr unsigned int kFlushToZero = 0x8000;
  constexpr unsigned int kDenormalsAreZero = 0x0040;
  const std::vector<std::uint16_t> patterns = every_pattern();
  const unsigned int mode = _mm_getcsr();
  _mm_setcsr(mode | kFlushToZero | kDenormalsAreZero);
  const Buffer there = cast(DType::Float16, patterns.data(), DType::Float32, 0x0400);
  const Buffer back = cast(DType::Float32, there.data(), DType::Float16, 0x0400);
  _mm_setcsr(mode);
  for (std::int64_t i = 0; i < 0x0400; ++i) {
    ASSERT_EQ(load<std::uint16_t>(back.data(), i), i);
  }
}
#endif

// - Bytes

TEST_P(AnyPacker, MovesBytesAsTheyAre) {
  Buffer source(256);
  for (std::size_t i = 0; i < source.size(); ++i) {
    source[i] = static_cast<unsigned char>(i);
  }
  EXPECT_EQ(cast(DType::Bytes, source.data(), DType::Bytes, 256), source);
}

TEST_P(AnyPacker, RefusesToCastScaleAddOrPackBytes) {
  Buffer memory(16);
  const auto cast_message = [&](DType from, DType to, double scale, bool accumulate) {
    return message_of([&] {
      run_cast({{{0, 8, 1, from, to}}, nullptr}, accumulate ? CastMode::Add : CastMode::Write,
               memory.data(), memory.data(), scale);
    });
  };
  const std::string what = "cast got ";
  const auto starts_with = [](const std::string& text, const std::string& start) {
    return text.compare(0, start.size(), start) == 0;
  };
  EXPECT_PRED2(starts_with, cast_message(DType::Bytes, DType::Float32, 1, false),
               what + "bytes to float32 with scale 1.");
  EXPECT_PRED2(starts_with, cast_message(DType::Float16, DType::Bytes, 1, false),
               what + "float16 to bytes with scale 1.");
  EXPECT_PRED2(starts_with, cast_message(DType::Bytes, DType::Bytes, 0.5, false),
               what + "bytes to bytes with scale 0.5.");
  EXPECT_PRED2(starts_with, cast_message(DType::Bytes, DType::Bytes, 1, true),
               what + "bytes to bytes with scale 1, accumulated.");

  const PackPlan plan{{{1, 1, 0}}, 1, 1, nullptr};
  const void* gradients[] = {memory.data()};
  for (const DType other : {DType::Bytes, DType::Float32}) {
    const std::string message = message_of(
        [&] { run_pack(plan, gradients, DType::Bytes, memory.data(), other, 1.0, false); });
    EXPECT_PRED2(starts_with, message,
                 "pack got gradients of bytes to reduce as " + std::string(name(other)));
  }
}

// - Streams

TEST_P(AnyPacker, WorksInTheOrderOfItsStreamAndReturnsAtOnce) {
  HostStream stream("pack", std::chrono::milliseconds(60000));
  std::promise<void> opened;
  const std::vector<float> gradient = {1, 2, 3};
  PackPlan pack_plan{{{3, 2, 0}}, 2, 2, nullptr};
  const void* gradients[] = {gradient.data()};
  std::vector<float> staging(4, NAN);
  std::vector<float> unsharded(4, NAN);
  std::vector<double> wide(4, NAN);
  UnpackPlan unpack_plan{{{8, 0, 0}}, 8, 2, nullptr};
  CastPlan cast_plan{{{0, 0, 4, DType::Float32, DType::Float64}}, nullptr};

  packer_->prepare(pack_plan);
  packer_->prepare(unpack_plan);
  packer_->prepare(cast_plan);
  stream.enqueue([future = opened.get_future().share()] { future.wait(); });
  packer_->pack(stream, pack_plan, gradients, DType::Float32, staging.data(), DType::Float32, 1.0,
                false, {});
  packer_->unpack(stream, unpack_plan, staging.data(), unsharded.data());
  packer_->cast(stream, cast_plan, nullptr, unsharded.data(), wide.data(), 2.0);
  HostEvent done;
  stream.record(done);
  EXPECT_FALSE(done.query());
  gradients[0] = nullptr;  // addresses are read before the call returns
  opened.set_value();
  done.synchronize(std::chrono::milliseconds(60000), "the packer");
  EXPECT_EQ(wide, (std::vector<double>{2, 4, 6, 0}));
}

}  // namespace
}  // namespace fsdp
