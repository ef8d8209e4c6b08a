// The streams of adam_step, without its arithmetic: what the device could do.
#include <type_traits>

#include "stream_limit.cuh"
#include "zero1/vec.cuh"

namespace zero1 {
namespace {

constexpr float kStep = 0x1p-20f;  // small enough that values stay ordinary over many runs

// The n elements from `at` on.
template <class T, MasterMode mode, bool amsgrad, int n>
__device__ __forceinline__ void pass(const StreamLimitArgs& a, int64_t at) {
  T g[n], w[n];
  uint16_t r[n];
  float p[n], m[n], v[n], x[n];
  T* param = static_cast<T*>(a.buffer.param) + at;
  load<kStream>(static_cast<const T*>(a.buffer.grad) + at, g);
  if constexpr (mode != kMasterFp32) load<kStream>(param, w);
  if constexpr (mode == kMasterFp32) load<kStream>(a.master + at, p);
  if constexpr (mode == kMasterSplit) load<kStream>(a.remainder + at, r);
  load<kStream>(a.exp_avg + at, m);
  load<kStream>(a.exp_avg_sq + at, v);
  if constexpr (amsgrad) load<kStream>(a.max_exp_avg_sq + at, x);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if constexpr (mode == kMasterOwn) p[i] = w[i];
    if constexpr (mode == kMasterSplit) p[i] = bits_to_float(static_cast<uint32_t>(w[i].bits) << 16 | r[i]);
    p[i] = p[i] + kStep;
    m[i] = m[i] + to_float(g[i]);
    v[i] = v[i] + kStep;
    if constexpr (amsgrad) x[i] = x[i] + kStep;
    if constexpr (mode == kMasterSplit) r[i] = static_cast<uint16_t>(float_to_bits(p[i]));
    if constexpr (mode == kMasterOwn) {
      w[i] = p[i];
    } else {
      w[i].bits = static_cast<uint16_t>(float_to_bits(p[i]) >> 16);
    }
  }
  store<kKeep>(param, w);
  if constexpr (mode == kMasterFp32) store<kStream>(a.master + at, p);
  if constexpr (mode == kMasterSplit) store<kStream>(a.remainder + at, r);
  store<kStream>(a.exp_avg + at, m);
  store<kStream>(a.exp_avg_sq + at, v);
  if constexpr (amsgrad) store<kStream>(a.max_exp_avg_sq + at, x);
}

template <bool amsgrad>
__global__ void __launch_bounds__(kThreads, 3) stream_limit_kernel(const __grid_constant__ StreamLimitArgs a) {
  // pass() reads 8 elements of each stream at multiples of 8: aligned everywhere if the first ones are
  const bool wide =
      aligned(a.buffer.grad, a.buffer.param, a.master, a.remainder, a.exp_avg, a.exp_avg_sq, a.max_exp_avg_sq);
  for (int64_t chunk = first_chunk(); chunk * kChunk < a.numel; chunk += chunk_stride()) {
    const int64_t begin = chunk * kChunk + lane_begin();
    const int count = count_of(begin, a.numel);
    if (count == 0) continue;
    dispatch(a.buffer, [&](auto type, auto mode) {
      // an fp16 stream moves as many bytes as a bf16 one
      using T = std::conditional_t<std::is_same_v<decltype(type), Half>, BFloat16, decltype(type)>;
      constexpr MasterMode kMode = decltype(mode)::value;
      if (count == kPerThread && wide) {
        pass<T, kMode, amsgrad, kPerThread>(a, begin);
      } else {
#pragma unroll 1
        for (int i = 0; i < count; ++i) pass<T, kMode, amsgrad, 1>(a, begin + i);
      }
    });
  }
}

}  // namespace

cudaError_t launch_stream_limit(const StreamLimitArgs& args, cudaStream_t stream) {
  const int64_t blocks = blocks_for((args.numel + kChunk - 1) / kChunk);
  return args.max_exp_avg_sq ? launch<stream_limit_kernel<true>>(blocks, args, stream)
                             : launch<stream_limit_kernel<false>>(blocks, args, stream);
}

}  // namespace zero1
