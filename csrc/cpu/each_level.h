// Includes the file ZERO1_LOOPS once per instruction set, in the namespaces plain, avx2 and avx512. The file includes
// nothing, and all of its functions are static: what is compiled for a wide set must not be linked in for a narrow one.
// Contraction stays off, so all levels give the same bits.
#include "level.h"

namespace zero1::cpu::plain {
#include ZERO1_LOOPS
}  // namespace zero1::cpu::plain

#if ZERO1_WIDE_LEVELS

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
namespace zero1::cpu::avx2 {
#include ZERO1_LOOPS
}  // namespace zero1::cpu::avx2
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#endif
namespace zero1::cpu::avx512 {
#include ZERO1_LOOPS
}  // namespace zero1::cpu::avx512
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
