// How threads share the elements, and 16-byte access to them.
//
// One thread owns 8 consecutive elements: one 16-byte access to a 16-bit stream, two to an fp32 stream. 16 threads own
// a chunk, a warp two chunks, a block 16. Where a thread has fewer than 8 elements or an address that is not a multiple
// of 16, it goes element by element; it touches the same 8 elements either way, so no two threads ever overlap.
#pragma once

#include "launch.cuh"
#include "step_args.h"

namespace zero1 {

constexpr int kPerThread = 8;
constexpr int kThreadsPerChunk = kChunk / kPerThread;
constexpr int kChunksPerBlock = kThreads / kThreadsPerChunk;

__host__ __device__ __forceinline__ int64_t blocks_for(int64_t chunks) {
  return (chunks + kChunksPerBlock - 1) / kChunksPerBlock;
}

// The grid-stride loop over chunks: a thread's first chunk, and how far it is to the next.
__device__ __forceinline__ int64_t first_chunk() {
  return static_cast<int64_t>(blockIdx.x) * kChunksPerBlock + threadIdx.x / kThreadsPerChunk;
}
__device__ __forceinline__ int64_t chunk_stride() { return static_cast<int64_t>(gridDim.x) * kChunksPerBlock; }

// The first of a thread's 8 elements within its chunk.
__device__ __forceinline__ int lane_begin() { return threadIdx.x % kThreadsPerChunk * kPerThread; }

// How many of the 8 elements from `begin` on lie before `end`.
__device__ __forceinline__ int count_of(int64_t begin, int64_t end) {
  const int64_t left = end - begin;
  return left >= kPerThread ? kPerThread : left > 0 ? static_cast<int>(left) : 0;
}

template <class... T>
__device__ __forceinline__ bool aligned(const T*... p) {
  return ((reinterpret_cast<uintptr_t>(p) | ...) % 16) == 0;
}

// What the kernel after this one reads again may stay in L2 (kKeep); the rest of the traffic passes through once and
// should not push it out (kStream).
enum Cache { kStream, kKeep };

// n is 8, with p a multiple of 16, or 1.
template <Cache cache, class T, int n>
__device__ __forceinline__ void load(const T* p, T (&x)[n]) {
  if constexpr (n == kPerThread) {
    constexpr int kWords = sizeof(x) / 16;
    uint4 words[kWords];
    const uint4* from = reinterpret_cast<const uint4*>(p);
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = cache == kStream ? __ldcs(from + i) : __ldcg(from + i);
    memcpy(x, words, sizeof x);
  } else {
    static_assert(n == 1, "a whole vector or one element");
    x[0] = *p;
  }
}

template <Cache cache, class T, int n>
__device__ __forceinline__ void store(T* p, const T (&x)[n]) {
  if constexpr (n == kPerThread) {
    constexpr int kWords = sizeof(x) / 16;
    uint4 words[kWords];
    memcpy(words, x, sizeof x);
    uint4* to = reinterpret_cast<uint4*>(p);
#pragma unroll
    for (int i = 0; i < kWords; ++i) cache == kStream ? __stcs(to + i, words[i]) : __stcg(to + i, words[i]);
  } else {
    static_assert(n == 1, "a whole vector or one element");
    *p = x[0];
  }
}

// A row of one of the tables, which no kernel writes while it reads them. The tables begin at multiples of 16 bytes.
template <class Row>
__device__ __forceinline__ Row load_row(const Row* p) {
  constexpr int kWords = sizeof(Row) / 16;
  static_assert(sizeof(Row) % 16 == 0, "rows are read 16 bytes at a time");
  uint4 words[kWords];
  const uint4* from = reinterpret_cast<const uint4*>(p);
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = __ldg(from + i);
  Row row;
  memcpy(&row, words, sizeof row);
  return row;
}

// Calls f with a value of the buffer's element type and one of Mode<its master mode>.
template <MasterMode mode>
struct Mode {
  static constexpr MasterMode value = mode;
};
template <class F>
__device__ __forceinline__ void dispatch(const FlatBuffer& b, const F& f) {
  if (b.dtype == kFloat32) {
    f(float{}, Mode<kMasterOwn>{});
  } else if (b.dtype == kFloat16) {
    f(Half{}, Mode<kMasterFp32>{});
  } else if (b.master == kMasterFp32) {
    f(BFloat16{}, Mode<kMasterFp32>{});
  } else {
    f(BFloat16{}, Mode<kMasterSplit>{});
  }
}

}  // namespace zero1
