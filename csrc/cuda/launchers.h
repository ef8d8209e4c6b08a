// One launcher per op: raw pointers and a stream in, the launch's status out.
#pragma once

#include <cuda_runtime_api.h>

#include "zero1/step_args.h"

namespace zero1 {

cudaError_t launch_adam_step(const AdamStepArgs& args, cudaStream_t stream);
cudaError_t launch_refresh_masters(const RefreshMastersArgs& args, cudaStream_t stream);
cudaError_t launch_grad_norm(const GradNormArgs& args, cudaStream_t stream);
cudaError_t launch_sum_slices(const SumSlicesArgs& args, cudaStream_t stream);
cudaError_t launch_pack_control(const PackControlArgs& args, cudaStream_t stream);
cudaError_t launch_clip_factor(const ClipFactorArgs& args, cudaStream_t stream);
cudaError_t launch_step_control(const StepControlArgs& args, cudaStream_t stream);

}  // namespace zero1
