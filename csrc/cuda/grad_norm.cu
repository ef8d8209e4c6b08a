// The exact sum of squares of a shard's gradients.
#include "launchers.h"
#include "zero1/reduce.cuh"

namespace zero1 {
namespace {

__global__ void __launch_bounds__(kThreads) grad_norm_kernel(const __grid_constant__ GradNormArgs a) {
  int64_t word = 0;
  const int half = threadIdx.x / kThreadsPerChunk % 2;
  // add_chunk shuffles, so a warp stays in the loop as long as the first of its two chunks exists
  for (int64_t chunk = first_chunk(); chunk - half < a.table.chunks; chunk += chunk_stride()) {
    float x[kPerThread] = {};
    const int32_t row = chunk < a.table.chunks ? a.table.chunk_segment[chunk] : -1;
    if (row >= 0) {
      const Segment s = load_row(a.table.segments + row);
      const int64_t begin = chunk * kChunk - s.shard_begin + lane_begin();
      const int count = count_of(begin, s.numel);
      const FlatBuffer& b = a.buffers[s.buffer];
      dispatch(b, [&](auto type, auto) {
        using T = decltype(type);
        const T* grad = static_cast<const T*>(b.grad) + (s.grad_begin + begin);
        T g[kPerThread] = {};
        if (count == kPerThread && aligned(grad)) {
          load<kKeep>(grad, g);  // adam_step reads it next
        } else {
#pragma unroll
          for (int i = 0; i < kPerThread; ++i) {
            if (i < count) g[i] = grad[i];
          }
        }
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) x[i] = to_float(g[i]);
      });
    }
    add_chunk(x, word);
  }
  flush_norm(word, a.norm);
}

}  // namespace

cudaError_t launch_grad_norm(const GradNormArgs& args, cudaStream_t stream) {
  return launch<grad_norm_kernel>(blocks_for(args.table.chunks), args, stream);
}

}  // namespace zero1
