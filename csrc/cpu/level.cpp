#include "level.h"

#include <atomic>

namespace zero1::cpu {

bool usable(Level level) {
#if ZERO1_WIDE_LEVELS
  __builtin_cpu_init();
  if (level == Level::kAvx2) return __builtin_cpu_supports("avx2");
  if (level == Level::kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  }
#endif
  return level == Level::kPlain;
}

namespace {
Level widest() {
  for (int i = kLevels - 1; i > 0; --i) {
    if (usable(static_cast<Level>(i))) return static_cast<Level>(i);
  }
  return Level::kPlain;
}

std::atomic<Level>& current() {
  static std::atomic<Level> level{widest()};
  return level;
}
}  // namespace

Level level() { return current().load(std::memory_order_relaxed); }
void set_level(Level level) { current().store(level, std::memory_order_relaxed); }

}  // namespace zero1::cpu
