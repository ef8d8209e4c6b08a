// Chunk sums by the tree of norm_math.h and their exact total, without a floating-point atomic.
//
// Each of the 16 lanes that own a chunk keeps one of the 16 words of a norm in a register: after the shuffles all of
// them know the chunk's sum, and each adds what falls into its own word. Blocks meet in integer atomics only.
#pragma once

#include "norm_math.h"
#include "vec.cuh"

namespace zero1 {

static_assert(kNormWords == kThreadsPerChunk, "one lane of a chunk per word of the norm");
constexpr unsigned kFullWarp = 0xffffffffu;

// Adds a chunk's sum of squares to `word`. All 32 lanes of a warp call it together; missing elements are zero.
__device__ __forceinline__ void add_chunk(const float (&x)[kPerThread], int64_t& word) {
  float q[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) q[i] = x[i] * x[i];
  float sum = ((q[0] + q[1]) + (q[2] + q[3])) + ((q[4] + q[5]) + (q[6] + q[7]));
#pragma unroll
  for (int distance = 1; distance < kThreadsPerChunk; distance *= 2) {
    sum = sum + __shfl_xor_sync(kFullWarp, sum, distance);
  }

  const int lane = threadIdx.x % kThreadsPerChunk;
  const bool finite = float_to_bits(sum) < 0x7f800000u;  // a sum of squares has no sign, but a NaN may have one
  if (finite) {
    const NormTerm term = norm_term(sum);
    if (lane == term.limb) word += term.low;
    if (lane == term.limb + 1) word += term.high;
  }
  if (__any_sync(kFullWarp, !finite)) {  // rare: only now look at the elements themselves
    bool non_finite = false, nan = false;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const uint32_t magnitude = float_to_bits(x[i]) & 0x7fffffffu;
      non_finite = non_finite || magnitude >= 0x7f800000u;
      nan = nan || magnitude > 0x7f800000u;
    }
    const unsigned chunk_lanes = 0xffffu << (threadIdx.x & 16);
    const bool any_non_finite = (__ballot_sync(kFullWarp, non_finite) & chunk_lanes) != 0;
    const bool any_nan = (__ballot_sync(kFullWarp, nan) & chunk_lanes) != 0;
    if (lane == kNormNonFinite && any_non_finite) ++word;
    if (lane == kNormNaN && any_nan) ++word;
    if (lane == kNormOverflow && !finite && !any_non_finite) ++word;
  }
}

// Adds the words of all threads of a block to `norm`. Every thread of the block calls it, once, at its end.
__device__ __forceinline__ void flush_norm(int64_t word, int64_t* norm) {
  __shared__ int64_t words[kChunksPerBlock][kNormWords];
  words[threadIdx.x / kNormWords][threadIdx.x % kNormWords] = word;
  __syncthreads();
  if (threadIdx.x >= kNormWords) return;
  int64_t sum = 0;
  for (int i = 0; i < kChunksPerBlock; ++i) sum += words[i][threadIdx.x];
  if (sum != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(norm) + threadIdx.x, static_cast<unsigned long long>(sum));
  }
}

}  // namespace zero1
