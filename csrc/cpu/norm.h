// The sum of squares of one chunk, added to a norm. See norm_math.h for the tree and the words.
#pragma once

#include <cstdint>

#include "zero1/norm_math.h"

namespace zero1::cpu {

// A chunk whose sum is not finite: what it holds is counted instead.
template <class T>
void count_non_finite(const T* x, int64_t count, int64_t* norm) {
  bool nan = false, infinite = false;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t a = float_to_bits(to_float(x[i])) & 0x7fffffffu;
    nan |= a > 0x7f800000u;
    infinite |= a == 0x7f800000u;
  }
  norm[kNormNonFinite] += nan || infinite;
  norm[kNormNaN] += nan;
  norm[kNormOverflow] += !(nan || infinite);
}

inline void add_to_norm(float chunk_sum, int64_t* norm) {
  const NormTerm term = norm_term(chunk_sum);
  norm[term.limb] += term.low;
  norm[term.limb + 1] += term.high;
}

inline bool is_finite(float sum) { return (float_to_bits(sum) & 0x7f800000u) != 0x7f800000u; }

}  // namespace zero1::cpu
