// The exchanged slices of all ranks, summed in rank order in fp32, divided once, rounded once, and their norm.
#include "launchers.h"
#include "zero1/reduce.cuh"

namespace zero1 {
namespace {

template <class In, class Out>
struct Sum {
  const In* received;
  const In* own;  // or null
  Out* out;

  __device__ __forceinline__ Sum(const SumSlicesArgs& a, int64_t begin)
      : received(static_cast<const In*>(a.received) + begin),
        own(a.own ? static_cast<const In*>(a.own) + begin : nullptr),
        out(static_cast<Out*>(a.out) + begin) {}

  // `out` may be `own`: a thread stores its elements after it has read them.
  template <int n>
  __device__ __forceinline__ void run(const SumSlicesArgs& a, int at, float (&mean)[n]) const {
    float sum[n] = {};
#pragma unroll(n == 1 ? 1 : 4)
    for (int64_t r = 0; r < a.world; ++r) {
      const In* slice = received + (own && r > a.rank ? r - 1 : r) * a.numel;
      if (own && r == a.rank) slice = own;
      In y[n];
      load<kStream>(slice + at, y);
#pragma unroll
      for (int i = 0; i < n; ++i) sum[i] = sum[i] + to_float(y[i]) * a.scale;
    }
    Out z[n];
#pragma unroll
    for (int i = 0; i < n; ++i) {
      mean[i] = canonical(sum[i] / a.divisor);
      z[i] = from_float<Out>(mean[i]);
    }
    store<kKeep>(out + at, z);  // adam_step reads it next
  }
};

// Elements [begin, begin + count) of the result; x: their means before rounding, zero beyond `count`.
template <class In, class Out>
__device__ __forceinline__ void sum_elements(const SumSlicesArgs& a, int64_t begin, int count, float (&x)[kPerThread]) {
  const Sum<In, Out> s(a, begin);
  const bool rows_aligned = a.numel * static_cast<int64_t>(sizeof(In)) % 16 == 0;
  if (count == kPerThread && rows_aligned && aligned(s.received, s.own, s.out)) {
    s.template run<kPerThread>(a, 0, x);
  } else {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      float mean[1] = {0.0f};
      if (i < count) s.template run<1>(a, i, mean);
      x[i] = mean[0];
    }
  }
}

// 4 blocks to a multiprocessor leave a thread 64 registers: no spills, and the loads of 4 ranks in flight.
__global__ void __launch_bounds__(kThreads, 4) sum_slices_kernel(const __grid_constant__ SumSlicesArgs a) {
  const int64_t chunks = (a.numel + kChunk - 1) / kChunk;
  int64_t word = 0;
  const int half = threadIdx.x / kThreadsPerChunk % 2;
  // add_chunk shuffles, so a warp stays in the loop as long as the first of its two chunks exists
  for (int64_t chunk = first_chunk(); chunk - half < chunks; chunk += chunk_stride()) {
    float x[kPerThread] = {};
    const int64_t begin = chunk * kChunk + lane_begin();
    const int count = count_of(begin, a.numel);
    if (count == 0) {
    } else if (a.dtype_in == kFloat32) {
      if (a.dtype_out == kFloat32) sum_elements<float, float>(a, begin, count, x);
      if (a.dtype_out == kFloat16) sum_elements<float, Half>(a, begin, count, x);
      if (a.dtype_out == kBFloat16) sum_elements<float, BFloat16>(a, begin, count, x);
    } else if (a.dtype_in == kFloat16) {
      if (a.dtype_out == kFloat32) sum_elements<Half, float>(a, begin, count, x);
      if (a.dtype_out == kFloat16) sum_elements<Half, Half>(a, begin, count, x);
    } else {
      if (a.dtype_out == kFloat32) sum_elements<BFloat16, float>(a, begin, count, x);
      if (a.dtype_out == kBFloat16) sum_elements<BFloat16, BFloat16>(a, begin, count, x);
    }
    if (a.norm) add_chunk(x, word);
  }
  if (a.norm) flush_norm(word, a.norm);
}

}  // namespace

cudaError_t launch_sum_slices(const SumSlicesArgs& args, cudaStream_t stream) {
  return launch<sum_slices_kernel>(blocks_for((args.numel + kChunk - 1) / kChunk), args, stream);
}

}  // namespace zero1
