// fp32 <-> bf16 / fp16 and the split master, for host and device: integer arithmetic without branches, so that every
// compiler gives the same bits and the CPU loops vectorise.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define ZERO1_HD __host__ __device__ __attribute__((always_inline))
#else
#define ZERO1_HD __attribute__((always_inline))
#endif

namespace zero1 {

ZERO1_HD inline float bits_to_float(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}
ZERO1_HD inline uint32_t float_to_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

// 16-bit types are carried as their bits; the tag picks the conversion.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

ZERO1_HD inline float to_float(float x) { return x; }
ZERO1_HD inline float to_float(BFloat16 b) { return bits_to_float(static_cast<uint32_t>(b.bits) << 16); }
ZERO1_HD inline float to_float(Half h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
  const uint32_t u = static_cast<uint32_t>(h.bits & 0x7fffu) << 13;
  const uint32_t exponent = u & 0x0f800000u;
  // exponents are rebiased by 112; infinities and NaN by 112 more; subnormals are counted in units of 2^-24
  const uint32_t finite = u + (exponent == 0x0f800000u ? 0x70000000u : 0x38000000u);
  const uint32_t tiny =
      float_to_bits(static_cast<float>(static_cast<int32_t>(h.bits & 0x3ffu)) * 5.9604644775390625e-8f);
  return bits_to_float(sign | (exponent == 0 ? tiny : finite));
}

template <class T>
ZERO1_HD inline T from_float(float x);

template <>
ZERO1_HD inline float from_float<float>(float x) {
  return x;
}

// Nearest even by integer carry: infinities stay, overflow becomes infinity, a NaN stays a NaN.
template <>
ZERO1_HD inline BFloat16 from_float<BFloat16>(float x) {
  const uint32_t u = float_to_bits(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t hi = u >> 16;
  const uint32_t nan = (hi & 0x7fu) ? hi : (hi | 0x40u);
  // 1 for a NaN, by arithmetic: a comparison would make g++ split the loop of the split master into branches
  const uint32_t is_nan = (0x7f800000u - (u & 0x7fffffffu)) >> 31;
  return BFloat16{static_cast<uint16_t>(is_nan ? nan : rounded)};
}

template <>
ZERO1_HD inline Half from_float<Half>(float x) {
  const uint32_t u = float_to_bits(x);
  const uint32_t a = u & 0x7fffffffu;
  // normal: drop 13 bits to nearest even, rebias; everything from 65520 up becomes infinity
  uint32_t normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  normal = a >= 0x477ff000u ? 0x7c00u : normal;
  // below 2^-14: adding 0.5 lets the fp32 adder round to units of 2^-24
  const uint32_t tiny = float_to_bits(bits_to_float(a) + 0.5f) - 0x3f000000u;
  uint32_t h = a < 0x38800000u ? tiny : normal;
  h = a > 0x7f800000u ? 0x7e00u : h;
  return Half{static_cast<uint16_t>(h | ((u >> 16) & 0x8000u))};
}

// The split master. A bf16 parameter is its master rounded to nearest even; the remainder is the low half of the
// master's bits, and together they give the master back: a remainder above one half says that rounding went up.
// 65537 fp32 values round to an even bf16 value and 16 bits tell 65536 apart, so one of them has to give way: a master
// exactly halfway below an even value is moved up by one unit in its last place before it is rounded (it rounds to the
// same parameter). `settle_tie` does so wherever a bf16 parameter's master is stored, split or not, which keeps the two
// modes equal to the bit.
ZERO1_HD inline float settle_tie(float master) {
  const uint32_t u = float_to_bits(master);
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  return bits_to_float(u + ((!nan && (u & 0x1ffffu) == 0x18000u) ? 1u : 0u));
}

ZERO1_HD inline uint16_t split_remainder(float master) {
  return static_cast<uint16_t>(float_to_bits(master) & 0xffffu);
}

ZERO1_HD inline float join_master(BFloat16 param, uint16_t remainder) {
  const uint32_t b = param.bits;
  const bool nan = (b & 0x7fffu) > 0x7f80u;
  const uint32_t hi = b - ((!nan && remainder > 0x8000u) ? 1u : 0u);
  return bits_to_float((hi << 16) | remainder);
}

}  // namespace zero1
