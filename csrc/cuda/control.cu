// The step's control: a few words each, so that nothing is read back to the host.
#include "launchers.h"
#include "zero1/control_math.h"
#include "zero1/launch.cuh"

namespace zero1 {
namespace {

// There may be a norm per bucket: 256 threads first add the rows into one, then one thread does the rest.
__global__ void __launch_bounds__(kThreads, 1) pack_control_kernel(const __grid_constant__ PackControlArgs a) {
  constexpr int kRows = kThreads / kNormWords;
  __shared__ int64_t sums[kRows][kNormWords];
  const int word = threadIdx.x % kNormWords;
  int64_t sum = 0;
  for (int64_t r = threadIdx.x / kNormWords; r < a.rows; r += kRows) sum += a.norms[r * kNormWords + word];
  sums[threadIdx.x / kNormWords][word] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  PackControlArgs rest = a;
  rest.norms = sums[0];
  rest.rows = kRows;
  pack_control(rest);
}

__global__ void __launch_bounds__(kThreads, 1) clip_factor_kernel(const __grid_constant__ ClipFactorArgs a) {
  if (threadIdx.x == 0) clip_factor(a);
}

__global__ void __launch_bounds__(kThreads, 1) step_control_kernel(const __grid_constant__ StepControlArgs a) {
  const StepDecision decision = decide_step(a);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t p = first; p < a.params; p += static_cast<int64_t>(gridDim.x) * kThreads) control_param(a, decision, p);
  if (first == 0) count_step(a, decision);
}

}  // namespace

cudaError_t launch_pack_control(const PackControlArgs& args, cudaStream_t stream) {
  return launch<pack_control_kernel>(1, args, stream);
}

cudaError_t launch_clip_factor(const ClipFactorArgs& args, cudaStream_t stream) {
  return launch<clip_factor_kernel>(1, args, stream);
}

cudaError_t launch_step_control(const StepControlArgs& args, cudaStream_t stream) {
  // a rank without parameters still counts a skipped step
  return launch<step_control_kernel>(std::max<int64_t>(1, (args.params + kThreads - 1) / kThreads), args, stream);
}

}  // namespace zero1
