// The library _C: the op schemas, and the ops on CPU tensors.
#include <mutex>

#include "cpu/kernels.h"
#include "op_args.h"

namespace zero1 {
namespace on_cpu {

// Chunks per task: less than this is not worth another thread.
constexpr int64_t kGrain = 128;

int64_t chunks_of(int64_t numel) { return (numel + kChunk - 1) / kChunk; }

// On the CPU the tables can be read, so that a wrong one is an error and not a write out of bounds. `sizes` says how
// many elements each place has that a segment may point to.
struct TableLimits {
  std::vector<int64_t> grads, params;  // empty: the op does not use them
  int64_t master = 0, remainder = 0, max_exp_avg_sq = 0, rows = 0;
  bool uses_state = false;
};

void check_tables(const char* op, const Tensor& segments, const SegmentTable& table, const FlatBuffer* buffers,
                  const TableLimits& limits) {
  const int64_t count = segments.size(0);
  const int64_t buffer_count = static_cast<int64_t>(std::max(limits.grads.size(), limits.params.size()));
  const auto inside = [](int64_t begin, int64_t numel, int64_t size) { return begin >= 0 && begin <= size - numel; };
  for (int64_t s = 0; s < count; ++s) {
    const Segment& segment = table.segments[s];
    bool good = segment.numel >= 0 && segment.buffer >= 0 && segment.buffer < buffer_count &&
                inside(segment.shard_begin, segment.numel, table.chunks * kChunk) && segment.shard_begin % kChunk == 0;
    if (good && !limits.grads.empty()) good = inside(segment.grad_begin, segment.numel, limits.grads[segment.buffer]);
    if (good && !limits.params.empty()) {
      const int32_t master = buffers[segment.buffer].master;
      good = inside(segment.param_begin, segment.numel, limits.params[segment.buffer]) && segment.param >= 0 &&
             segment.param < limits.rows;
      if (good && master != kMasterOwn) {
        good = inside(segment.master_begin, segment.numel, master == kMasterFp32 ? limits.master : limits.remainder);
      }
    }
    if (good && limits.uses_state && segment.max_begin >= 0) {
      good = inside(segment.max_begin, segment.numel, limits.max_exp_avg_sq);
    }
    STD_TORCH_CHECK(good, op, ": segments: wanted rows that lie inside the buffers, got row ", s, " with numel ",
                    segment.numel, ", shard_begin ", segment.shard_begin, ", grad_begin ", segment.grad_begin,
                    ", param_begin ", segment.param_begin, ", master_begin ", segment.master_begin, ", max_begin ",
                    segment.max_begin, ", param ", segment.param, ", buffer ", segment.buffer);
  }
  for (int64_t c = 0; c < table.chunks; ++c) {
    const int64_t s = table.chunk_segment[c];
    bool good = s >= -1 && s < count;
    if (good && s >= 0) {
      const int64_t offset = c * kChunk - table.segments[s].shard_begin;
      good = offset >= 0 && offset < table.segments[s].numel;
    }
    STD_TORCH_CHECK(good, op, ": chunk_segment: wanted -1 or the row of the segment that covers the chunk, got ", s,
                    " at ", c, " of ", table.chunks, " with ", count, " segments");
  }
}

std::vector<int64_t> numels(const std::vector<Tensor>& tensors) {
  std::vector<int64_t> result;
  for (const Tensor& t : tensors) result.push_back(t.numel());
  return result;
}

int64_t numel(const MaybeTensor& t) { return t ? t->numel() : 0; }

// Runs f(begin, end, norm) in parallel, every range with a norm of its own, and adds them all to `norm`. The words are
// integers, so the order of the ranges does not matter.
template <class F>
void parallel_norm(int64_t chunks, int64_t* norm, const F& f) {
  std::mutex mutex;
  torch::stable::parallel_for(0, chunks, kGrain, [&](int64_t begin, int64_t end) {
    int64_t part[kNormWords] = {};
    f(begin, end, norm ? part : nullptr);
    if (!norm) return;
    const std::lock_guard<std::mutex> lock(mutex);
    for (int w = 0; w < kNormWords; ++w) norm[w] += part[w];
  });
}

void adam_step(const Tensor& segments, const Tensor& chunk_segment, const Tensor& scalars, std::vector<Tensor> grads,
               std::vector<Tensor> params, MaybeTensor master, MaybeTensor remainder, const Tensor& exp_avg,
               const Tensor& exp_avg_sq, MaybeTensor max_exp_avg_sq) {
  const AdamStepArgs args = adam_step_args(segments, chunk_segment, scalars, grads, params, master, remainder, exp_avg,
                                           exp_avg_sq, max_exp_avg_sq);
  const TableLimits limits{numels(grads),         numels(params),  numel(master), numel(remainder),
                           numel(max_exp_avg_sq), scalars.size(0), true};
  check_tables("adam_step", segments, args.table, args.buffers, limits);
  torch::stable::parallel_for(0, args.table.chunks, kGrain,
                              [&](int64_t begin, int64_t end) { cpu::adam_step(args, begin, end); });
}

void refresh_masters(const Tensor& segments, const Tensor& chunk_segment, std::vector<Tensor> params,
                     MaybeTensor master, MaybeTensor remainder, const Tensor& edited) {
  const RefreshMastersArgs args = refresh_masters_args(segments, chunk_segment, params, master, remainder, edited);
  const TableLimits limits{{}, numels(params), numel(master), numel(remainder), 0, edited.numel(), false};
  check_tables("refresh_masters", segments, args.table, args.buffers, limits);
  torch::stable::parallel_for(0, args.table.chunks, kGrain,
                              [&](int64_t begin, int64_t end) { cpu::refresh_masters(args, begin, end); });
}

void grad_norm(const Tensor& segments, const Tensor& chunk_segment, std::vector<Tensor> grads, const Tensor& norm) {
  const GradNormArgs args = grad_norm_args(segments, chunk_segment, grads, norm);
  check_tables("grad_norm", segments, args.table, args.buffers, TableLimits{numels(grads), {}, 0, 0, 0, 0, false});
  parallel_norm(args.table.chunks, args.norm,
                [&](int64_t begin, int64_t end, int64_t* part) { cpu::grad_norm(args, begin, end, part); });
}

void sum_slices(const Tensor& received, MaybeTensor own, int64_t rank, double scale, double divisor, const Tensor& out,
                MaybeTensor norm) {
  const SumSlicesArgs args = sum_slices_args(received, own, rank, scale, divisor, out, norm);
  parallel_norm(chunks_of(args.numel), args.norm,
                [&](int64_t begin, int64_t end, int64_t* part) { cpu::sum_slices(args, begin, end, part); });
}

void pack_control(const Tensor& norms, MaybeTensor found_inf, MaybeTensor grad_scale, const Tensor& control) {
  cpu::pack_control(pack_control_args(norms, found_inf, grad_scale, control));
}

void clip_factor(const Tensor& control, MaybeTensor grad_scale, double max_norm, const Tensor& clip) {
  cpu::clip_factor(clip_factor_args(control, grad_scale, max_norm, clip));
}

void step_control(const Tensor& control, int64_t world, const Tensor& param_group, const Tensor& groups,
                  MaybeTensor grad_scale, MaybeTensor clip, bool skip_nonfinite, bool scaled, const Tensor& steps,
                  const Tensor& scalars, const Tensor& skipped) {
  const StepControlArgs args = step_control_args(control, world, param_group, groups, grad_scale, clip, skip_nonfinite,
                                                 scaled, steps, scalars, skipped);
  for (int64_t p = 0; p < args.params; ++p) {
    const int32_t group = args.param_group[p];
    STD_TORCH_CHECK(group >= 0 && group < groups.size(0), "step_control: param_group: wanted rows of groups, 0 to ",
                    groups.size(0) - 1, ", got ", group, " at ", p);
  }
  cpu::step_control(args);
}

void stream_limit(const Tensor& grad, const Tensor& param, MaybeTensor master, MaybeTensor remainder,
                  const Tensor& exp_avg, const Tensor& exp_avg_sq, MaybeTensor max_exp_avg_sq) {
  const StreamLimitArgs args = stream_limit_args(grad, param, master, remainder, exp_avg, exp_avg_sq, max_exp_avg_sq);
  torch::stable::parallel_for(0, chunks_of(args.numel), kGrain,
                              [&](int64_t begin, int64_t end) { cpu::stream_limit(args, begin, end); });
}

}  // namespace on_cpu
}  // namespace zero1

STABLE_TORCH_LIBRARY(zero1, m) {
  m.def(
      "adam_step(Tensor segments, Tensor chunk_segment, Tensor scalars, Tensor[] grads, Tensor(a!)[] params, "
      "Tensor(b!)? master, Tensor(c!)? remainder, Tensor(d!) exp_avg, Tensor(e!) exp_avg_sq, "
      "Tensor(f!)? max_exp_avg_sq) -> ()");
  m.def(
      "refresh_masters(Tensor segments, Tensor chunk_segment, Tensor[] params, Tensor(a!)? master, "
      "Tensor(b!)? remainder, Tensor edited) -> ()");
  m.def("grad_norm(Tensor segments, Tensor chunk_segment, Tensor[] grads, Tensor(a!) norm) -> ()");
  m.def(
      "sum_slices(Tensor received, Tensor? own, int rank, float scale, float divisor, Tensor(a!) out, "
      "Tensor(b!)? norm) -> ()");
  m.def("pack_control(Tensor norms, Tensor? found_inf, Tensor? grad_scale, Tensor(a!) control) -> ()");
  m.def("clip_factor(Tensor control, Tensor? grad_scale, float max_norm, Tensor(a!) clip) -> ()");
  m.def(
      "step_control(Tensor control, int world, Tensor param_group, Tensor groups, Tensor? grad_scale, Tensor? clip, "
      "bool skip_nonfinite, bool scaled, Tensor(a!) steps, Tensor(b!) scalars, Tensor(c!) skipped) -> ()");
  m.def(
      "stream_limit(Tensor grad, Tensor(a!) param, Tensor(b!)? master, Tensor(c!)? remainder, Tensor(d!) exp_avg, "
      "Tensor(e!) exp_avg_sq, Tensor(f!)? max_exp_avg_sq) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero1, CPU, m) {
  m.impl("adam_step", TORCH_BOX(&zero1::on_cpu::adam_step));
  m.impl("refresh_masters", TORCH_BOX(&zero1::on_cpu::refresh_masters));
  m.impl("grad_norm", TORCH_BOX(&zero1::on_cpu::grad_norm));
  m.impl("sum_slices", TORCH_BOX(&zero1::on_cpu::sum_slices));
  m.impl("pack_control", TORCH_BOX(&zero1::on_cpu::pack_control));
  m.impl("clip_factor", TORCH_BOX(&zero1::on_cpu::clip_factor));
  m.impl("step_control", TORCH_BOX(&zero1::on_cpu::step_control));
  m.impl("stream_limit", TORCH_BOX(&zero1::on_cpu::stream_limit));
}
