// The fused step over a rank's shard: unscale, clip, Adam, weight decay, fp32 state and parameter, in one pass.
#include <type_traits>

#include "launchers.h"
#include "zero1/vec.cuh"

namespace zero1 {
namespace {

template <class T, MasterMode mode, bool amsgrad, bool l2>
struct Update {
  const T* grad;
  T* param;
  float* master;        // kMasterFp32
  uint16_t* remainder;  // kMasterSplit
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;  // amsgrad

  // Pointers to the elements from `begin` on of a segment; null where this kind of update has none.
  __device__ __forceinline__ Update(const AdamStepArgs& a, const FlatBuffer& b, const Segment& s, int64_t begin)
      : grad(static_cast<const T*>(b.grad) + (s.grad_begin + begin)),
        param(static_cast<T*>(b.param) + (s.param_begin + begin)),
        master(mode == kMasterFp32 ? a.master + (s.master_begin + begin) : nullptr),
        remainder(mode == kMasterSplit ? a.remainder + (s.master_begin + begin) : nullptr),
        exp_avg(a.exp_avg + (s.shard_begin + begin)),
        exp_avg_sq(a.exp_avg_sq + (s.shard_begin + begin)),
        max_exp_avg_sq(amsgrad ? a.max_exp_avg_sq + (s.max_begin + begin) : nullptr) {}

  __device__ __forceinline__ bool all_aligned() const {
    return aligned(grad, param, master, remainder, exp_avg, exp_avg_sq, max_exp_avg_sq);
  }

  // Updates the n elements from `at` on.
  template <int n>
  __device__ __forceinline__ void run(const AdamScalars& k, int at) const {
    T g[n], w[n];
    uint16_t r[n];
    float p[n], m[n], v[n], x[n];
    load<kStream>(grad + at, g);
    if constexpr (mode != kMasterFp32) load<kStream>(param + at, w);
    if constexpr (mode == kMasterFp32) load<kStream>(master + at, p);
    if constexpr (mode == kMasterSplit) load<kStream>(remainder + at, r);
    load<kStream>(exp_avg + at, m);
    load<kStream>(exp_avg_sq + at, v);
    if constexpr (amsgrad) load<kStream>(max_exp_avg_sq + at, x);

#pragma unroll
    for (int i = 0; i < n; ++i) {
      AdamElement e;
      if constexpr (mode == kMasterOwn) e.master = w[i];
      if constexpr (mode == kMasterFp32) e.master = p[i];
      if constexpr (mode == kMasterSplit) e.master = join_master(w[i], r[i]);
      e.exp_avg = m[i];
      e.exp_avg_sq = v[i];
      if constexpr (amsgrad) e.max_exp_avg_sq = x[i];
      adam_element<amsgrad, l2>(e, to_float(g[i]), k);
      if constexpr (std::is_same_v<T, BFloat16>) e.master = settle_tie(e.master);
      w[i] = from_float<T>(e.master);
      if constexpr (mode == kMasterFp32) p[i] = e.master;
      if constexpr (mode == kMasterSplit) r[i] = split_remainder(e.master);
      m[i] = e.exp_avg;
      v[i] = e.exp_avg_sq;
      if constexpr (amsgrad) x[i] = e.max_exp_avg_sq;
    }

    store<kKeep>(param + at, w);  // the all-gather sends it next
    if constexpr (mode == kMasterFp32) store<kStream>(master + at, p);
    if constexpr (mode == kMasterSplit) store<kStream>(remainder + at, r);
    store<kStream>(exp_avg + at, m);
    store<kStream>(exp_avg_sq + at, v);
    if constexpr (amsgrad) store<kStream>(max_exp_avg_sq + at, x);
  }
};

template <class T, MasterMode mode, bool amsgrad, bool l2>
__device__ __forceinline__ void update(const AdamStepArgs& a, const FlatBuffer& b, const Segment& s,
                                       const AdamScalars& k, int64_t begin, int count) {
  const Update<T, mode, amsgrad, l2> u(a, b, s, begin);
  if (count == kPerThread && u.all_aligned()) {
    u.template run<kPerThread>(k, 0);
  } else {
#pragma unroll 1
    for (int i = 0; i < count; ++i) u.template run<1>(k, i);
  }
}

// A thread has all of its loads in flight, 112 bytes, so 3 blocks to a multiprocessor suffice, and 80 registers are
// what they leave a thread without spilling. The maximum of the variance is one stream more; a shard that keeps none
// should not pay for it (64 registers and a fourth block up to sm_90).
template <bool any_amsgrad>
__global__ void __launch_bounds__(kThreads, 3) adam_step_kernel(const __grid_constant__ AdamStepArgs a) {
  for (int64_t chunk = first_chunk(); chunk < a.table.chunks; chunk += chunk_stride()) {
    const int32_t row = a.table.chunk_segment[chunk];
    if (row < 0) continue;
    const Segment s = load_row(a.table.segments + row);
    const int64_t begin = chunk * kChunk - s.shard_begin + lane_begin();
    const int count = count_of(begin, s.numel);
    if (count == 0) continue;
    const AdamScalars k = load_row(a.scalars + s.param);
    if (!(k.flags & kActive)) continue;
    const FlatBuffer& b = a.buffers[s.buffer];
    const bool l2 = k.flags & kL2;
    dispatch(b, [&](auto type, auto mode) {
      using T = decltype(type);
      constexpr MasterMode kMode = decltype(mode)::value;
      if constexpr (any_amsgrad) {
        if ((k.flags & kAmsgrad) && s.max_begin >= 0) {
          l2 ? update<T, kMode, true, true>(a, b, s, k, begin, count)
             : update<T, kMode, true, false>(a, b, s, k, begin, count);
          return;
        }
      }
      l2 ? update<T, kMode, false, true>(a, b, s, k, begin, count)
         : update<T, kMode, false, false>(a, b, s, k, begin, count);
    });
  }
}

}  // namespace

cudaError_t launch_adam_step(const AdamStepArgs& args, cudaStream_t stream) {
  const int64_t blocks = blocks_for(args.table.chunks);
  return args.max_exp_avg_sq ? launch<adam_step_kernel<true>>(blocks, args, stream)
                             : launch<adam_step_kernel<false>>(blocks, args, stream);
}

}  // namespace zero1
