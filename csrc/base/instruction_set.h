// Loops that are compiled for several instruction sets of the host, and chosen when they run.
//
// Note [instruction sets]
// A build is for plain x86-64, so that one wheel runs everywhere, but most processors have AVX2 or
// AVX-512. A loop is therefore a struct with one static function `run`, which is always inlined.
// run_baseline, run_avx2 and run_avx512 inline it into functions that differ only in the
// instruction set the compiler may use there. The source stays one, no translation unit has flags
// of its own, and no function of one instruction set can be linked in place of another's. Results
// are the same bits: vectors change neither the operations of an element nor their order, and
// -ffp-contract=off keeps the compiler from fusing multiplications and additions.
// Compilers and processors without these instruction sets have the baseline only.
#pragma once

#include <cstdint>

#if defined(__GNUC__)
#define FSDP_ALWAYS_INLINE inline __attribute__((always_inline))
#define FSDP_NEVER_INLINE __attribute__((noinline))
#else
#define FSDP_ALWAYS_INLINE inline
#define FSDP_NEVER_INLINE
#endif

#if defined(__GNUC__) && defined(__x86_64__)
#define FSDP_HAS_INSTRUCTION_SETS 1
#define FSDP_TARGET_AVX2 __attribute__((target("avx2")))
#if defined(__clang__)
#define FSDP_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
// GCC would use vectors of 256 bits, which measured half as fast.
#define FSDP_TARGET_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#else
#define FSDP_HAS_INSTRUCTION_SETS 0
#endif

namespace fsdp {

enum class InstructionSet : std::uint8_t { Baseline, Avx2, Avx512 };

constexpr const char* name(InstructionSet set) {
  switch (set) {
    case InstructionSet::Baseline:
      return "baseline";
    case InstructionSet::Avx2:
      return "AVX2";
    case InstructionSet::Avx512:
      return "AVX-512";
  }
  return "unknown";
}

// Whether this build has loops for `set`, and this processor and its system can run them.
inline bool is_supported(InstructionSet set) {
#if FSDP_HAS_INSTRUCTION_SETS
  switch (set) {
    case InstructionSet::Baseline:
      return true;
    case InstructionSet::Avx2:
      return __builtin_cpu_supports("avx2") != 0;
    case InstructionSet::Avx512:
      return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
             __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
  }
#endif
  return set == InstructionSet::Baseline;
}

inline InstructionSet best_instruction_set() {
  if (is_supported(InstructionSet::Avx512)) {
    return InstructionSet::Avx512;
  }
  return is_supported(InstructionSet::Avx2) ? InstructionSet::Avx2 : InstructionSet::Baseline;
}

template <typename Loop, typename... Arguments>
FSDP_NEVER_INLINE void run_baseline(Arguments... arguments) {
  Loop::run(arguments...);
}

#if FSDP_HAS_INSTRUCTION_SETS
template <typename Loop, typename... Arguments>
FSDP_NEVER_INLINE FSDP_TARGET_AVX2 void run_avx2(Arguments... arguments) {
  Loop::run(arguments...);
}

template <typename Loop, typename... Arguments>
FSDP_NEVER_INLINE FSDP_TARGET_AVX512 void run_avx512(Arguments... arguments) {
  Loop::run(arguments...);
}
#endif

// Runs Loop::run(arguments...), compiled for `set`, which must be supported.
template <typename Loop, typename... Arguments>
void run_loop(InstructionSet set, Arguments... arguments) {
#if FSDP_HAS_INSTRUCTION_SETS
  if (set == InstructionSet::Avx512) {
    return run_avx512<Loop>(arguments...);
  }
  if (set == InstructionSet::Avx2) {
    return run_avx2<Loop>(arguments...);
  }
#else
  (void)set;
#endif
  run_baseline<Loop>(arguments...);
}

}  // namespace fsdp
