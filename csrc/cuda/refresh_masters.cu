// Masters follow parameters whose weights were changed from outside, where they no longer belong together.
#include "launchers.h"
#include "zero1/vec.cuh"

namespace zero1 {
namespace {

template <class T>
__device__ __forceinline__ bool same_value(T x, T y) {
  const float a = to_float(x), b = to_float(y);
  return x.bits == y.bits || (a != a && b != b);
}

template <int n, class T>
__device__ __forceinline__ void follow(const T* param, float* master) {
  T w[n];
  float p[n];
  load<kStream>(param, w);
  load<kStream>(master, p);
  bool changed = false;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const bool differs = !same_value(from_float<T>(p[i]), w[i]);
    p[i] = differs ? to_float(w[i]) : p[i];
    changed = changed || differs;
  }
  if (changed) store<kStream>(master, p);
}

template <int n>
__device__ __forceinline__ void clear(uint16_t* remainder) {
  const uint16_t zero[n] = {};
  store<kStream>(remainder, zero);
}

__global__ void __launch_bounds__(kThreads) refresh_masters_kernel(const __grid_constant__ RefreshMastersArgs a) {
  for (int64_t chunk = first_chunk(); chunk < a.table.chunks; chunk += chunk_stride()) {
    const int32_t row = a.table.chunk_segment[chunk];
    if (row < 0) continue;
    const Segment s = load_row(a.table.segments + row);
    const int64_t begin = chunk * kChunk - s.shard_begin + lane_begin();
    const int count = count_of(begin, s.numel);
    if (count == 0 || !a.edited[s.param]) continue;
    const FlatBuffer& b = a.buffers[s.buffer];
    dispatch(b, [&](auto type, auto mode) {
      using T = decltype(type);
      constexpr MasterMode kMode = decltype(mode)::value;
      if constexpr (kMode == kMasterFp32) {
        const T* param = static_cast<const T*>(b.param) + (s.param_begin + begin);
        float* master = a.master + (s.master_begin + begin);
        if (count == kPerThread && aligned(param, master)) {
          follow<kPerThread>(param, master);
        } else {
          for (int i = 0; i < count; ++i) follow<1>(param + i, master + i);
        }
      } else if constexpr (kMode == kMasterSplit) {
        uint16_t* remainder = a.remainder + (s.master_begin + begin);
        if (count == kPerThread && aligned(remainder)) {
          clear<kPerThread>(remainder);
        } else {
          for (int i = 0; i < count; ++i) clear<1>(remainder + i);
        }
      }
    });
  }
}

}  // namespace

cudaError_t launch_refresh_masters(const RefreshMastersArgs& args, cudaStream_t stream) {
  return launch<refresh_masters_kernel>(blocks_for(args.table.chunks), args, stream);
}

}  // namespace zero1
