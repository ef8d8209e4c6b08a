// The library _cuda: the ops on CUDA tensors. On the tensors' device and its current stream, with nothing read back.
#define USE_CUDA  // shim.h declares aoti_torch_get_current_cuda_stream only then
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "bench/stream_limit.cuh"
#include "cuda/launchers.h"
#include "op_args.h"

namespace zero1 {
namespace {

template <auto launch>
struct OnCuda {
  template <class Args>
  static void run(const Op<Args>& op) {
    const torch::stable::accelerator::DeviceGuard guard(op.device);
    void* stream = nullptr;
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(op.device, &stream) == 0, op.name, ": no stream on CUDA device ",
                    op.device);
    const cudaError_t status = launch(op.args, static_cast<cudaStream_t>(stream));
    STD_TORCH_CHECK(status == cudaSuccess, op.name, ": ", cudaGetErrorName(status), ": ", cudaGetErrorString(status));
  }
};

}  // namespace
}  // namespace zero1

STABLE_TORCH_LIBRARY_IMPL(zero1, CUDA, m) {
  using namespace zero1;
  m.impl("adam_step", bind<adam_step_args, OnCuda<launch_adam_step>>);
  m.impl("refresh_masters", bind<refresh_masters_args, OnCuda<launch_refresh_masters>>);
  m.impl("grad_norm", bind<grad_norm_args, OnCuda<launch_grad_norm>>);
  m.impl("sum_slices", bind<sum_slices_args, OnCuda<launch_sum_slices>>);
  m.impl("pack_control", bind<pack_control_args, OnCuda<launch_pack_control>>);
  m.impl("clip_factor", bind<clip_factor_args, OnCuda<launch_clip_factor>>);
  m.impl("step_control", bind<step_control_args, OnCuda<launch_step_control>>);
  m.impl("stream_limit", bind<stream_limit_args, OnCuda<launch_stream_limit>>);
}
