// The exact sum of squares, for host and device.
//
// A chunk of 128 elements is summed in fp32 by one fixed tree: inside each group of 8 consecutive squares the strides
// are 1, 2, 4, then across the 16 groups 8, 16, 32, 64 (element i is added to element i + stride). That is the order in
// which a GPU thread of 8 elements and a shuffle over 16 lanes sum, and an AVX2 register too. What a parameter lacks to
// a whole chunk counts as zeros. The chunk's sum is then added as an integer, so the order of chunks does not matter.
#pragma once

#include <cmath>
#include <cstdint>

#include "step_args.h"

namespace zero1 {

// A finite, non-negative fp32 value as value * 2^149 = low * 2^(32 limb) + high * 2^(32 (limb + 1)).
struct NormTerm {
  int limb;
  int64_t low, high;
};

ZERO1_HD inline NormTerm norm_term(float sum) {
  const uint32_t u = float_to_bits(sum);
  const uint32_t exponent = u >> 23;
  const uint32_t mantissa = (u & 0x7fffffu) | (exponent ? 0x800000u : 0u);
  const uint32_t position = exponent ? exponent - 1 : 0;
  const uint64_t shifted = static_cast<uint64_t>(mantissa) << (position & 31u);
  return NormTerm{static_cast<int>(position >> 5), static_cast<int64_t>(shifted & 0xffffffffu),
                  static_cast<int64_t>(shifted >> 32)};
}

// Carries, so that every limb but the last is below 2^32.
ZERO1_HD inline void carry_limbs(int64_t* norm) {
  for (int i = 0; i + 1 < kNormLimbs; ++i) {
    norm[i + 1] += norm[i] >> 32;
    norm[i] &= 0xffffffffll;
  }
}

// The norm of carried limbs and counts, in double. NaN and infinities as torch.linalg.vector_norm reports them.
ZERO1_HD inline double total_norm(const int64_t* norm) {
  int64_t limbs[kNormLimbs];
  for (int i = 0; i < kNormLimbs; ++i) limbs[i] = norm[i];
  carry_limbs(limbs);
  double sum = 0.0;
  for (int i = kNormLimbs - 1; i >= 0; --i) sum = sum * 4294967296.0 + static_cast<double>(limbs[i]);
  sum = sum * 1.4012984643248170709e-45;  // 2^-149, exact
  double result = sqrt(sum);
  if (norm[kNormNonFinite] > 0 || norm[kNormOverflow] > 0) result = static_cast<double>(bits_to_float(0x7f800000u));
  if (norm[kNormNaN] > 0) result = static_cast<double>(bits_to_float(0x7fc00000u));
  return result;
}

}  // namespace zero1
