// The C face of the shim: one function per launcher, and what the tests set and count.
#include "host_shim.h"
#include "launchers.h"
#include "zero1/launch.cuh"

using namespace zero1;

extern "C" {
int shim_adam_step(const AdamStepArgs* a) { return launch_adam_step(*a, nullptr); }
int shim_refresh_masters(const RefreshMastersArgs* a) { return launch_refresh_masters(*a, nullptr); }
int shim_grad_norm(const GradNormArgs* a) { return launch_grad_norm(*a, nullptr); }
int shim_sum_slices(const SumSlicesArgs* a) { return launch_sum_slices(*a, nullptr); }
int shim_pack_control(const PackControlArgs* a) { return launch_pack_control(*a, nullptr); }
int shim_clip_factor(const ClipFactorArgs* a) { return launch_clip_factor(*a, nullptr); }
int shim_step_control(const StepControlArgs* a) { return launch_step_control(*a, nullptr); }

void shim_set(int order, int64_t resident, int64_t first_block) {
  host_shim::order = order;
  host_shim::resident = resident;
  host_shim::first_block = first_block;
}
int64_t shim_launches() { return host_shim::launches; }

// Kernels with one mistake each, to see that the shim notices.
int shim_fault(int which);
}

namespace {

struct FaultArgs {
  float* at;
  int* seen;
};

__global__ void misaligned_kernel(const __grid_constant__ FaultArgs a) {
  __ldcs(reinterpret_cast<const uint4*>(a.at + 1));
}

__global__ void divergent_barrier_kernel(const __grid_constant__ FaultArgs) {
  if (threadIdx.x < 100) __syncthreads();
}

__global__ void divergent_warp_kernel(const __grid_constant__ FaultArgs) {
  if (threadIdx.x % 32 < 16) __shfl_xor_sync(0xffffffffu, 1.0f, 1);
}

__global__ void partial_mask_kernel(const __grid_constant__ FaultArgs) { __any_sync(0xffffu, true); }

// Reads what a neighbour writes, without a barrier between.
__global__ void race_kernel(const __grid_constant__ FaultArgs a) {
  a.at[threadIdx.x] = 1.0f;
  if (threadIdx.x > 0 && a.at[threadIdx.x - 1] == 1.0f) ++*a.seen;
}

}  // namespace

int shim_fault(int which) {
  alignas(16) float at[kThreads + 4] = {};
  int seen = 0;
  const FaultArgs args{at, &seen};
  if (which == 0) launch<misaligned_kernel>(1, args, nullptr);
  if (which == 1) launch<divergent_barrier_kernel>(1, args, nullptr);
  if (which == 2) launch<divergent_warp_kernel>(1, args, nullptr);
  if (which == 3) launch<partial_mask_kernel>(1, args, nullptr);
  if (which == 4) launch<race_kernel>(1, args, nullptr);
  return seen;
}
