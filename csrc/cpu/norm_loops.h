// The tree of norm_math.h over one whole chunk; see each_level.h. At every stride neighbours are added, so it is the
// balanced tree: 128 squares, 64 sums of two, 32 of four, ... (An addition's operands may be swapped freely.)

#include "prefetch.h"

static __attribute__((always_inline)) inline float square(float x) { return x * x; }

static __attribute__((always_inline)) inline void add_pairs(const float* x, float* sums) {
  for (int i = 0; i < 64; ++i) sums[i] = square(x[2 * i]) + square(x[2 * i + 1]);
}

// Two neighbours of 16 bits are one word, whose halves need no shuffling to come apart.
template <class T>
static __attribute__((always_inline)) inline void add_pairs(const T* x, float* sums) {
  for (int i = 0; i < 64; ++i) {
    uint32_t word;
    memcpy(&word, x + 2 * i, sizeof word);
    const T low{static_cast<uint16_t>(word)}, high{static_cast<uint16_t>(word >> 16)};
    sums[i] = square(to_float(low)) + square(to_float(high));
  }
}

template <class T>
static __attribute__((always_inline)) inline float chunk_sum(const T* x) {
  float a[64], b[32], c[16];
  add_pairs(x, a);
  for (int i = 0; i < 32; ++i) b[i] = a[2 * i] + a[2 * i + 1];
  for (int i = 0; i < 16; ++i) c[i] = b[2 * i] + b[2 * i + 1];
  // one at a time: vectors as short as these would wait for each other
  const float d0 = (c[0] + c[1]) + (c[2] + c[3]), d1 = (c[4] + c[5]) + (c[6] + c[7]);
  const float d2 = (c[8] + c[9]) + (c[10] + c[11]), d3 = (c[12] + c[13]) + (c[14] + c[15]);
  return (d0 + d1) + (d2 + d3);
}

// `count` elements from the start of a chunk; a short last chunk counts as filled with zeros.
// `ahead`: the elements come from memory, so the next ones are asked for.
template <bool ahead, class T>
static void add_squares(const T* x, int64_t count, int64_t* norm) {
  for (; count > 0; x += kChunk, count -= kChunk) {
    const int64_t n = count < kChunk ? count : kChunk;
    float sum;
    if (n == kChunk) {
      if constexpr (ahead) prefetch<kChunk>(x);
      sum = chunk_sum(x);
    } else {
      T filled[kChunk] = {};
      for (int64_t i = 0; i < n; ++i) filled[i] = x[i];
      sum = chunk_sum(filled);
    }
    if (is_finite(sum)) {
      add_to_norm(sum, norm);
    } else {
      count_non_finite(x, n, norm);
    }
  }
}
