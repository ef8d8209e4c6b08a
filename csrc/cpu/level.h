// The instruction sets that the CPU loops are compiled for, and the one in use.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)  // g++ and clang++
#define ZERO1_WIDE_LEVELS 1
#else
#define ZERO1_WIDE_LEVELS 0
#endif

// Before a loop whose iterations do not depend on each other, though the compiler may not see it.
#ifdef __clang__
#define ZERO1_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define ZERO1_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace zero1::cpu {

enum class Level { kPlain, kAvx2, kAvx512 };
constexpr const char* kLevelNames[] = {"plain", "avx2", "avx512"};
constexpr int kLevels = ZERO1_WIDE_LEVELS ? 3 : 1;

bool usable(Level level);
Level level();                // the widest usable one, unless set
void set_level(Level level);  // a usable one; for tests and benchmarks

}  // namespace zero1::cpu

// Calls `function` of the level in use; each_level.h has compiled one per level.
#if ZERO1_WIDE_LEVELS
#define ZERO1_AT_LEVEL(function, ...)       \
  switch (level()) {                        \
    case Level::kAvx512:                    \
      return avx512::function(__VA_ARGS__); \
    case Level::kAvx2:                      \
      return avx2::function(__VA_ARGS__);   \
    default:                                \
      return plain::function(__VA_ARGS__);  \
  }
#else
#define ZERO1_AT_LEVEL(function, ...) return plain::function(__VA_ARGS__)
#endif
