// The split master of convert.h, looked at pattern by pattern: for test_split_master.py.
#include <cstdint>

#include "zero1/convert.h"

using namespace zero1;

namespace {

bool is_nan(uint32_t u) { return (u & 0x7fffffffu) > 0x7f800000u; }

// Nearest even by cases, as it is defined.
uint32_t nearest_even(uint32_t u) {
  const uint32_t high = u >> 16, low = u & 0xffffu;
  const bool up = low > 0x8000u || (low == 0x8000u && (high & 1u));
  return high + (up ? 1u : 0u);
}

// What a master reads back as after it was stored: itself; one unit up where it is a tie that rounds up; a NaN whose
// payload lies in the low half alone gets the quiet bit.
uint32_t stored(uint32_t u) {
  if (is_nan(u)) return (u & 0x7f0000u) ? u : u | 0x400000u;
  const bool tie_going_up = (u & 0xffffu) == 0x8000u && (u >> 16 & 1u);
  return u + (tie_going_up ? 1u : 0u);
}

}  // namespace

extern "C" {

// Settles, splits and joins the masters with these bits.
void split_and_join(const uint32_t* masters, int64_t count, uint32_t* settled, uint16_t* params, uint16_t* remainders,
                    uint32_t* joined) {
  for (int64_t i = 0; i < count; ++i) {
    const float m = settle_tie(bits_to_float(masters[i]));
    const BFloat16 p = from_float<BFloat16>(m);
    settled[i] = float_to_bits(m);
    params[i] = p.bits;
    remainders[i] = split_remainder(m);
    joined[i] = float_to_bits(join_master(p, remainders[i]));
  }
}

// How many of the masters [begin, end) break a promise. moved: how many were settled elsewhere.
int64_t broken_masters(uint64_t begin, uint64_t end, int64_t* moved) {
  int64_t broken = 0, elsewhere = 0;
  for (uint64_t i = begin; i < end; ++i) {
    const uint32_t u = static_cast<uint32_t>(i);
    const float m = settle_tie(bits_to_float(u));
    const BFloat16 p = from_float<BFloat16>(m);
    const uint32_t s = float_to_bits(m);
    const uint32_t back = float_to_bits(join_master(p, split_remainder(m)));
    bool good = back == stored(u) && s == (is_nan(u) ? u : back);
    good &= is_nan(u) ? (p.bits & 0x7fffu) > 0x7f80u : p.bits == nearest_even(u) && p.bits == nearest_even(s);
    broken += !good;
    elsewhere += s != u;
  }
  *moved = elsewhere;
  return broken;
}

// How many (parameter, remainder) pairs, numbered parameter * 2^16 + remainder, break a promise: a pair gives a master
// that gives the pair back, or it is one that no master has. unused: how many of the latter there are.
int64_t broken_pairs(uint64_t begin, uint64_t end, int64_t* unused) {
  int64_t broken = 0, none = 0;
  for (uint64_t i = begin; i < end; ++i) {
    const BFloat16 p{static_cast<uint16_t>(i >> 16)};
    const uint16_t r = static_cast<uint16_t>(i);
    const uint32_t magnitude = p.bits & 0x7fffu;
    const bool went_up = r > 0x8000u;
    const bool no_master = (r == 0x8000u && (p.bits & 1u) && magnitude < 0x7f80u) ||  // the tie that gives way
                           (magnitude == 0x7f80u && r > 0 && !went_up) ||             // nothing beyond infinity
                           (magnitude == 0 && went_up);                               // nothing rounds up to zero
    const float m = join_master(p, r);
    const bool same = from_float<BFloat16>(m).bits == p.bits && split_remainder(m) == r &&
                      float_to_bits(settle_tie(m)) == float_to_bits(m);
    broken += !(same || no_master);
    none += no_master;
  }
  *unused = none;
  return broken;
}
}
