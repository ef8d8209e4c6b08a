// The library _cuda: the ops on CUDA tensors. On the tensors' device and its current stream, with nothing read back.
#define USE_CUDA  // shim.h declares aoti_torch_get_current_cuda_stream only then
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "cuda/launchers.h"
#include "op_args.h"

// The name and text of a failed launch, and where it was asked for.
#define ZERO1_LAUNCH(call)                                                                                           \
  do {                                                                                                               \
    const cudaError_t status = (call);                                                                               \
    STD_TORCH_CHECK(status == cudaSuccess, #call, ": ", cudaGetErrorName(status), ": ", cudaGetErrorString(status)); \
  } while (0)

namespace zero1 {
namespace {

// Makes a tensor's device the current one for as long as it lives, and knows its current stream.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& t) : guard_(t.get_device_index()) {
    void* stream = nullptr;
    const int32_t device = t.get_device_index();
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device, &stream) == 0, "no stream on CUDA device ", device);
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

// The kernels read the rows of these tables 16 bytes at a time.
void check_aligned(const char* op, const char* name, const void* p) {
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(p) % 16 == 0, op, ": ", name,
                  ": wanted memory that begins at a multiple of 16 bytes, got ", p);
}

void adam_step(const Tensor& segments, const Tensor& chunk_segment, const Tensor& scalars, std::vector<Tensor> grads,
               std::vector<Tensor> params, MaybeTensor master, MaybeTensor remainder, const Tensor& exp_avg,
               const Tensor& exp_avg_sq, MaybeTensor max_exp_avg_sq) {
  const AdamStepArgs args = adam_step_args(segments, chunk_segment, scalars, grads, params, master, remainder, exp_avg,
                                           exp_avg_sq, max_exp_avg_sq);
  check_aligned("adam_step", "segments", args.table.segments);
  check_aligned("adam_step", "scalars", args.scalars);
  const OnDeviceOf device(segments);
  ZERO1_LAUNCH(launch_adam_step(args, device.stream()));
}

void refresh_masters(const Tensor& segments, const Tensor& chunk_segment, std::vector<Tensor> params,
                     MaybeTensor master, MaybeTensor remainder, const Tensor& edited) {
  const RefreshMastersArgs args = refresh_masters_args(segments, chunk_segment, params, master, remainder, edited);
  check_aligned("refresh_masters", "segments", args.table.segments);
  const OnDeviceOf device(segments);
  ZERO1_LAUNCH(launch_refresh_masters(args, device.stream()));
}

void grad_norm(const Tensor& segments, const Tensor& chunk_segment, std::vector<Tensor> grads, const Tensor& norm) {
  const GradNormArgs args = grad_norm_args(segments, chunk_segment, grads, norm);
  check_aligned("grad_norm", "segments", args.table.segments);
  const OnDeviceOf device(segments);
  ZERO1_LAUNCH(launch_grad_norm(args, device.stream()));
}

void sum_slices(const Tensor& received, MaybeTensor own, int64_t rank, double scale, double divisor, const Tensor& out,
                MaybeTensor norm) {
  const SumSlicesArgs args = sum_slices_args(received, own, rank, scale, divisor, out, norm);
  const OnDeviceOf device(received);
  ZERO1_LAUNCH(launch_sum_slices(args, device.stream()));
}

void pack_control(const Tensor& norms, MaybeTensor found_inf, MaybeTensor grad_scale, const Tensor& control) {
  const PackControlArgs args = pack_control_args(norms, found_inf, grad_scale, control);
  const OnDeviceOf device(control);
  ZERO1_LAUNCH(launch_pack_control(args, device.stream()));
}

void clip_factor(const Tensor& control, MaybeTensor grad_scale, double max_norm, const Tensor& clip) {
  const ClipFactorArgs args = clip_factor_args(control, grad_scale, max_norm, clip);
  const OnDeviceOf device(control);
  ZERO1_LAUNCH(launch_clip_factor(args, device.stream()));
}

void step_control(const Tensor& control, int64_t world, const Tensor& param_group, const Tensor& groups,
                  MaybeTensor grad_scale, MaybeTensor clip, bool skip_nonfinite, bool scaled, const Tensor& steps,
                  const Tensor& scalars, const Tensor& skipped) {
  const StepControlArgs args = step_control_args(control, world, param_group, groups, grad_scale, clip, skip_nonfinite,
                                                 scaled, steps, scalars, skipped);
  const OnDeviceOf device(control);
  ZERO1_LAUNCH(launch_step_control(args, device.stream()));
}

void stream_limit(const Tensor& grad, const Tensor& param, MaybeTensor master, MaybeTensor remainder,
                  const Tensor& exp_avg, const Tensor& exp_avg_sq, MaybeTensor max_exp_avg_sq) {
  const StreamLimitArgs args = stream_limit_args(grad, param, master, remainder, exp_avg, exp_avg_sq, max_exp_avg_sq);
  const OnDeviceOf device(grad);
  ZERO1_LAUNCH(launch_stream_limit(args, device.stream()));
}

}  // namespace
}  // namespace zero1

STABLE_TORCH_LIBRARY_IMPL(zero1, CUDA, m) {
  m.impl("adam_step", TORCH_BOX(&zero1::adam_step));
  m.impl("refresh_masters", TORCH_BOX(&zero1::refresh_masters));
  m.impl("grad_norm", TORCH_BOX(&zero1::grad_norm));
  m.impl("sum_slices", TORCH_BOX(&zero1::sum_slices));
  m.impl("pack_control", TORCH_BOX(&zero1::pack_control));
  m.impl("clip_factor", TORCH_BOX(&zero1::clip_factor));
  m.impl("step_control", TORCH_BOX(&zero1::step_control));
  m.impl("stream_limit", TORCH_BOX(&zero1::stream_limit));
}
