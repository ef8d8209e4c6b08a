// The ops: from tensors to the kernels' plain structs, with every check that a look at tensors allows; the same for CPU
// and CUDA. Each `*_args` function has an op's signature and gives that op's struct; bind<> makes the op of it.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "bench/stream_limit.h"
#include "zero1/step_args.h"

namespace zero1 {
namespace {  // in every library that includes this, on its own

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    default:
      return torch::headeronly::toString(type);
  }
}

inline std::string device_name(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  return (t.is_cuda() ? "cuda:" : "device ") + std::to_string(t.get_device_index());
}

inline std::string describe(const Tensor& t) {
  std::ostringstream out;
  out << dtype_name(t.scalar_type()) << " [";
  for (int64_t i = 0; i < t.dim(); ++i) out << (i ? ", " : "") << t.size(i);
  out << "] on " << device_name(t) << (t.is_contiguous() ? "" : ", not contiguous");
  return out.str();
}

constexpr int64_t kAny = -1;

// What a kernel is called with, and what is known of it besides.
template <class Args>
struct Op {
  Args args;
  TableSizes sizes;
  const char* name;
  int32_t device;
};

// One op's tensors: all on the device of the first.
class OpTensors {
 public:
  OpTensors(const char* op, const Tensor& first) : op_(op), first_(first) {}

  // The data of `t`, which has this dtype and these sizes (kAny: any) and at least `numel` elements.
  void* data(const Tensor& t, const std::string& name, ScalarType dtype, std::initializer_list<int64_t> sizes,
             int64_t numel = 0) const {
    bool good = t.scalar_type() == dtype && t.dim() == static_cast<int64_t>(sizes.size()) && t.is_contiguous() &&
                t.numel() >= numel && on_device(t);
    int64_t dim = 0;
    if (good) {
      for (const int64_t size : sizes) good &= size == kAny || t.size(dim) == size, ++dim;
    }
    if (!good) refuse(t, name, dtype, sizes, numel);
    return t.data_ptr();
  }

  template <class T>
  T* data(const Tensor& t, const std::string& name, ScalarType dtype, std::initializer_list<int64_t> sizes,
          int64_t numel = 0) const {
    return static_cast<T*>(data(t, name, dtype, sizes, numel));
  }

  // The same of a tensor that may be left out: null then.
  template <class T>
  T* data(const MaybeTensor& t, const std::string& name, ScalarType dtype, std::initializer_list<int64_t> sizes,
          int64_t numel = 0) const {
    return t ? static_cast<T*>(data(*t, name, dtype, sizes, numel)) : nullptr;
  }

  // A scalar that may be left out: one element of any shape.
  const float* scalar(const MaybeTensor& t, const char* name) const {
    if (!t) return nullptr;
    STD_TORCH_CHECK(t->scalar_type() == ScalarType::Float && t->numel() == 1 && on_device(*t), op_, ": ", name,
                    ": wanted one float32 element on ", device_name(first_), ", got ", describe(*t));
    return static_cast<const float*>(t->data_ptr());
  }

  DType float_type(const Tensor& t, const std::string& name) const {
    switch (t.scalar_type()) {
      case ScalarType::Float:
        return kFloat32;
      case ScalarType::Half:
        return kFloat16;
      case ScalarType::BFloat16:
        return kBFloat16;
      default:
        break;
    }
    STD_TORCH_CHECK(false, op_, ": ", name, ": wanted float32, float16 or bfloat16, got ", describe(t));
    return kFloat32;
  }

  // The rows of a table. The CUDA kernels read them 16 bytes at a time.
  template <class Row>
  Row* rows(const Tensor& t, const char* name, ScalarType dtype, int64_t words) const {
    Row* p = data<Row>(t, name, dtype, {kAny, words});
    STD_TORCH_CHECK(first_.is_cpu() || reinterpret_cast<uintptr_t>(p) % 16 == 0, op_, ": ", name,
                    ": wanted memory that begins at a multiple of 16 bytes, got ", p);
    return p;
  }

  SegmentTable table(const Tensor& segments, const Tensor& chunk_segment) {
    const Segment* first = rows<const Segment>(segments, "segments", ScalarType::Long, 8);
    sizes.segments = segments.size(0);
    return SegmentTable{first, data<const int32_t>(chunk_segment, "chunk_segment", ScalarType::Int, {kAny}),
                        chunk_segment.numel()};
  }

  // Fills in `buffers` from lists of flat tensors, of which one may be left out (null).
  void buffers(FlatBuffer* buffers, const std::vector<Tensor>* grads, const std::vector<Tensor>* params, bool split) {
    const std::vector<Tensor>& all = params ? *params : *grads;
    STD_TORCH_CHECK(all.size() >= 1 && all.size() <= kMaxBuffers, op_, ": ", params ? "params" : "grads",
                    ": wanted 1 to ", kMaxBuffers, " tensors, got ", all.size());
    STD_TORCH_CHECK(!grads || grads->size() == all.size(), op_, ": grads: wanted as many tensors as params, ",
                    all.size(), ", got ", grads->size());
    for (size_t k = 0; k < all.size(); ++k) {
      const std::string index = "[" + std::to_string(k) + "]";
      FlatBuffer& b = buffers[k];
      b = FlatBuffer{};
      b.dtype = float_type(all[k], (params ? "params" : "grads") + index);
      b.master = b.dtype == kFloat32 ? kMasterOwn : b.dtype == kBFloat16 && split ? kMasterSplit : kMasterFp32;
      if (params) b.param = data((*params)[k], "params" + index, all[k].scalar_type(), {kAny});
      if (grads) b.grad = data((*grads)[k], "grads" + index, all[k].scalar_type(), {kAny});
      if (params) sizes.params[k] = (*params)[k].numel();
      if (grads) sizes.grads[k] = (*grads)[k].numel();
    }
    sizes.buffers = static_cast<int64_t>(all.size());
  }

  // Fills in `master` and `remainder`, of which the buffers may need one or both.
  template <class Args>
  void masters(Args& a, const FlatBuffer* buffers, const MaybeTensor& master, const MaybeTensor& remainder,
               int64_t numel = 0) {
    a.master = data<float>(master, "master", ScalarType::Float, {kAny}, numel);
    a.remainder = data<uint16_t>(remainder, "remainder", ScalarType::Short, {kAny}, numel);
    for (int64_t k = 0; k < sizes.buffers; ++k) {
      STD_TORCH_CHECK(buffers[k].master != kMasterFp32 || master, op_,
                      ": master: wanted a float32 tensor, since params[", k, "] keeps an fp32 master, got None");
    }
    sizes.master = master ? master->numel() : 0;
    sizes.remainder = remainder ? remainder->numel() : 0;
  }

  template <class Args>
  Op<Args> with(const Args& args) const {
    return Op<Args>{args, sizes, op_, first_.get_device_index()};
  }

  TableSizes sizes;  // as far as the functions above have filled it in

 private:
  bool on_device(const Tensor& t) const {
    return t.is_cpu() == first_.is_cpu() && t.is_cuda() == first_.is_cuda() &&
           t.get_device_index() == first_.get_device_index();
  }

  [[noreturn]] void refuse(const Tensor& t, const std::string& name, ScalarType dtype,
                           std::initializer_list<int64_t> sizes, int64_t numel) const {
    std::ostringstream wanted;
    wanted << "contiguous " << dtype_name(dtype) << " [";
    const char* comma = "";
    for (const int64_t size : sizes) {
      wanted << comma << (size == kAny ? "*" : std::to_string(size));
      comma = ", ";
    }
    wanted << "] on " << device_name(first_);
    if (numel > 0) wanted << " with at least " << numel << " elements";
    STD_TORCH_CHECK(false, op_, ": ", name, ": wanted ", wanted.str(), ", got ", describe(t));
    __builtin_unreachable();
  }

  const char* op_;
  const Tensor& first_;
};

inline Op<AdamStepArgs> adam_step_args(const Tensor& segments, const Tensor& chunk_segment, const Tensor& scalars,
                                       const std::vector<Tensor>& grads, const std::vector<Tensor>& params,
                                       const MaybeTensor& master, const MaybeTensor& remainder, const Tensor& exp_avg,
                                       const Tensor& exp_avg_sq, const MaybeTensor& max_exp_avg_sq) {
  OpTensors op("adam_step", segments);
  AdamStepArgs a{};
  a.table = op.table(segments, chunk_segment);
  a.scalars = op.rows<const AdamScalars>(scalars, "scalars", ScalarType::Float, 12);
  op.sizes.rows = scalars.size(0);
  op.buffers(a.buffers, &grads, &params, remainder.has_value());
  op.masters(a, a.buffers, master, remainder);
  const int64_t shard = a.table.chunks * kChunk;
  a.exp_avg = op.data<float>(exp_avg, "exp_avg", ScalarType::Float, {kAny}, shard);
  a.exp_avg_sq = op.data<float>(exp_avg_sq, "exp_avg_sq", ScalarType::Float, {kAny}, shard);
  a.max_exp_avg_sq = op.data<float>(max_exp_avg_sq, "max_exp_avg_sq", ScalarType::Float, {kAny});
  op.sizes.max_exp_avg_sq = max_exp_avg_sq ? max_exp_avg_sq->numel() : 0;
  return op.with(a);
}

inline Op<RefreshMastersArgs> refresh_masters_args(const Tensor& segments, const Tensor& chunk_segment,
                                                   const std::vector<Tensor>& params, const MaybeTensor& master,
                                                   const MaybeTensor& remainder, const Tensor& edited) {
  OpTensors op("refresh_masters", segments);
  RefreshMastersArgs a{};
  a.table = op.table(segments, chunk_segment);
  op.buffers(a.buffers, nullptr, &params, remainder.has_value());
  op.masters(a, a.buffers, master, remainder);
  a.edited = op.data<const uint8_t>(edited, "edited", ScalarType::Byte, {kAny});
  op.sizes.rows = edited.numel();
  return op.with(a);
}

inline Op<GradNormArgs> grad_norm_args(const Tensor& segments, const Tensor& chunk_segment,
                                       const std::vector<Tensor>& grads, const Tensor& norm) {
  OpTensors op("grad_norm", segments);
  GradNormArgs a{};
  a.table = op.table(segments, chunk_segment);
  op.buffers(a.buffers, &grads, nullptr, false);
  a.norm = op.data<int64_t>(norm, "norm", ScalarType::Long, {kNormWords});
  return op.with(a);
}

inline Op<SumSlicesArgs> sum_slices_args(const Tensor& received, const MaybeTensor& own, int64_t rank, double scale,
                                         double divisor, const Tensor& out, const MaybeTensor& norm) {
  const OpTensors op("sum_slices", received);
  SumSlicesArgs a{};
  a.dtype_in = op.float_type(received, "received");
  a.dtype_out = op.float_type(out, "out");
  STD_TORCH_CHECK(a.dtype_in == kFloat32 || a.dtype_out == kFloat32 || a.dtype_in == a.dtype_out,
                  "sum_slices: out: wanted float32 or the dtype of received, ", dtype_name(received.scalar_type()),
                  ", got ", describe(out));
  a.out = op.data(out, "out", out.scalar_type(), {kAny});
  a.numel = out.numel();
  a.received = op.data(received, "received", received.scalar_type(), {kAny, a.numel});
  a.own = op.data<const void>(own, "own", received.scalar_type(), {a.numel});
  a.world = received.size(0) + (own ? 1 : 0);
  a.rank = rank;
  STD_TORCH_CHECK(a.world >= 1, "sum_slices: received: wanted at least one slice in received and own together, got ",
                  describe(received), " and no own");
  STD_TORCH_CHECK(!own || (rank >= 0 && rank < a.world), "sum_slices: rank: wanted 0 to ", a.world - 1, ", got ", rank);
  a.scale = static_cast<float>(scale);
  a.divisor = static_cast<float>(divisor);
  a.norm = op.data<int64_t>(norm, "norm", ScalarType::Long, {kNormWords});
  return op.with(a);
}

inline Op<PackControlArgs> pack_control_args(const Tensor& norms, const MaybeTensor& found_inf,
                                             const MaybeTensor& grad_scale, const Tensor& control) {
  const OpTensors op("pack_control", control);
  return op.with(PackControlArgs{op.data<const int64_t>(norms, "norms", ScalarType::Long, {kAny, kNormWords}),
                                 norms.size(0), op.scalar(found_inf, "found_inf"), op.scalar(grad_scale, "grad_scale"),
                                 op.data<int64_t>(control, "control", ScalarType::Long, {kAny}, kControlFlags)});
}

inline Op<ClipFactorArgs> clip_factor_args(const Tensor& control, const MaybeTensor& grad_scale, double max_norm,
                                           const Tensor& clip) {
  const OpTensors op("clip_factor", control);
  return op.with(ClipFactorArgs{op.data<const int64_t>(control, "control", ScalarType::Long, {kAny}, kNormWords),
                                op.scalar(grad_scale, "grad_scale"), max_norm,
                                op.data<float>(clip, "clip", ScalarType::Float, {2})});
}

inline Op<StepControlArgs> step_control_args(const Tensor& control, int64_t world, const Tensor& param_group,
                                             const Tensor& groups, const MaybeTensor& grad_scale,
                                             const MaybeTensor& clip, bool skip_nonfinite, bool scaled,
                                             const Tensor& steps, const Tensor& scalars, const Tensor& skipped) {
  const OpTensors op("step_control", control);
  StepControlArgs a{};
  a.params = param_group.numel();
  a.control = op.data<const int64_t>(control, "control", ScalarType::Long, {kAny}, kControlFlags + (a.params + 3) / 4);
  STD_TORCH_CHECK(world >= 1, "step_control: world: wanted at least 1, got ", world);
  a.world = world;
  a.param_group = op.data<const int32_t>(param_group, "param_group", ScalarType::Int, {kAny});
  a.groups = op.data<const GroupOptions>(groups, "groups", ScalarType::Double, {kAny, 8});
  for (int64_t p = 0; control.is_cpu() && p < a.params; ++p) {
    STD_TORCH_CHECK(a.param_group[p] >= 0 && a.param_group[p] < groups.size(0),
                    "step_control: param_group: wanted rows of groups, 0 to ", groups.size(0) - 1, ", got ",
                    a.param_group[p], " at ", p);
  }
  a.grad_scale = op.scalar(grad_scale, "grad_scale");
  a.clip = op.data<const float>(clip, "clip", ScalarType::Float, {2});
  a.skip_nonfinite = skip_nonfinite;
  a.scaled = scaled;
  a.steps = op.data<int64_t>(steps, "steps", ScalarType::Long, {a.params});
  a.scalars = op.data<AdamScalars>(scalars, "scalars", ScalarType::Float, {a.params, 12});
  // the sticky word may be left out by a caller that looks at every step itself
  a.skipped = op.data<int64_t>(skipped, "skipped", ScalarType::Long, {kAny}, kSkippedWords - 1);
  a.stopped = skipped.numel() >= kSkippedWords ? a.skipped + kSkippedWords - 1 : nullptr;
  return op.with(a);
}

inline Op<StreamLimitArgs> stream_limit_args(const Tensor& grad, const Tensor& param, const MaybeTensor& master,
                                             const MaybeTensor& remainder, const Tensor& exp_avg,
                                             const Tensor& exp_avg_sq, const MaybeTensor& max_exp_avg_sq) {
  OpTensors op("stream_limit", grad);
  const std::vector<Tensor> grads{grad}, params{param};
  StreamLimitArgs a{};
  op.buffers(&a.buffer, &grads, &params, remainder.has_value());
  a.numel = grad.numel();
  op.data(param, "param", grad.scalar_type(), {kAny}, a.numel);
  op.masters(a, &a.buffer, master, remainder, a.numel);
  a.exp_avg = op.data<float>(exp_avg, "exp_avg", ScalarType::Float, {kAny}, a.numel);
  a.exp_avg_sq = op.data<float>(exp_avg_sq, "exp_avg_sq", ScalarType::Float, {kAny}, a.numel);
  a.max_exp_avg_sq = op.data<float>(max_exp_avg_sq, "max_exp_avg_sq", ScalarType::Float, {kAny}, a.numel);
  return op.with(a);
}

template <auto args_of, class Backend>
struct Bound;
template <class Args, class... P, Op<Args> (*args_of)(P...), class Backend>
struct Bound<args_of, Backend> {
  static void call(std::decay_t<P>... p) { Backend::run(args_of(p...)); }
};

// The op that has the signature of `args_of` and runs on a backend, as the dispatcher takes it.
template <auto args_of, class Backend>
constexpr auto bind = TORCH_BOX((&Bound<args_of, Backend>::call));

}  // namespace
}  // namespace zero1
