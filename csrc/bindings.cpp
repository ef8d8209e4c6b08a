// The library _C: the op schemas, and the ops on CPU tensors.
#include <atomic>

#include "cpu/kernels.h"
#include "cpu/runs.h"
#include "op_args.h"

namespace zero1 {
namespace {

// Chunks per task: less than this is not worth another thread.
constexpr int64_t kGrain = 128;

[[noreturn]] void refuse_tables(const char* op, const SegmentTable& table, const FlatBuffer* buffers,
                                const TableSizes& sizes, int64_t chunk) {
  const int64_t s = table.chunk_segment[chunk];
  if (s >= 0 && s < sizes.segments && !cpu::fits(table.segments[s], table.chunks, buffers, sizes)) {
    const Segment& row = table.segments[s];
    STD_TORCH_CHECK(false, op, ": segments: wanted rows that lie inside the buffers, got row ", s, " with numel ",
                    row.numel, ", shard_begin ", row.shard_begin, ", grad_begin ", row.grad_begin, ", param_begin ",
                    row.param_begin, ", master_begin ", row.master_begin, ", max_begin ", row.max_begin, ", param ",
                    row.param, ", buffer ", row.buffer);
  }
  STD_TORCH_CHECK(false, op, ": chunk_segment: wanted -1 or the row of the segment that covers the chunk, got ", s,
                  " at ", chunk, " of ", table.chunks, " with ", sizes.segments, " segments");
  __builtin_unreachable();
}

// Runs f(begin, end) in parallel over the chunks of the tables. It returns where it stopped.
template <class Args, class F>
void over_table(const Op<Args>& op, const F& f) {
  const SegmentTable& table = op.args.table;
  std::atomic<int64_t> wrong{table.chunks};  // the first chunk where a range found the tables to be wrong
  torch::stable::parallel_for(0, table.chunks, kGrain, [&](int64_t begin, int64_t end) {
    const int64_t stopped = f(begin, end);
    int64_t first = wrong.load();
    while (stopped < end && stopped < first && !wrong.compare_exchange_weak(first, stopped)) continue;
  });
  if (wrong < table.chunks) refuse_tables(op.name, table, op.args.buffers, op.sizes, wrong);
}

// Runs f(begin, end) in parallel over so many elements, a range of chunks at a time.
template <class F>
void over_elements(int64_t numel, const F& f) {
  torch::stable::parallel_for(0, (numel + kChunk - 1) / kChunk, kGrain, f);
}

// What a range adds to a norm: added at its end. The words are integers, so the order of the ranges does not matter.
class NormPart {
 public:
  explicit NormPart(int64_t* norm) : norm_(norm) {}
  NormPart(const NormPart&) = delete;
  ~NormPart() {
    for (int w = 0; norm_ && w < kNormWords; ++w) __atomic_fetch_add(norm_ + w, words_[w], __ATOMIC_RELAXED);
  }
  int64_t* words() { return norm_ ? words_ : nullptr; }

 private:
  int64_t* norm_;  // null: no norm
  int64_t words_[kNormWords] = {};
};

struct OnCpu {
  static void run(const Op<AdamStepArgs>& op) {
    over_table(op, [&](int64_t begin, int64_t end) { return cpu::adam_step(op.args, op.sizes, begin, end); });
  }
  static void run(const Op<RefreshMastersArgs>& op) {
    over_table(op, [&](int64_t begin, int64_t end) { return cpu::refresh_masters(op.args, op.sizes, begin, end); });
  }
  static void run(const Op<GradNormArgs>& op) {
    over_table(op, [&](int64_t begin, int64_t end) {
      NormPart part(op.args.norm);
      return cpu::grad_norm(op.args, op.sizes, begin, end, part.words());
    });
  }
  static void run(const Op<SumSlicesArgs>& op) {
    over_elements(op.args.numel, [&](int64_t begin, int64_t end) {
      NormPart part(op.args.norm);
      cpu::sum_slices(op.args, begin, end, part.words());
    });
  }
  static void run(const Op<PackControlArgs>& op) { cpu::pack_control(op.args); }
  static void run(const Op<ClipFactorArgs>& op) { cpu::clip_factor(op.args); }
  static void run(const Op<StepControlArgs>& op) { cpu::step_control(op.args); }
  static void run(const Op<StreamLimitArgs>& op) {
    over_elements(op.args.numel, [&](int64_t begin, int64_t end) { cpu::stream_limit(op.args, begin, end); });
  }
};

}  // namespace
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
  using namespace zero1;
  m.impl("adam_step", bind<adam_step_args, OnCpu>);
  m.impl("refresh_masters", bind<refresh_masters_args, OnCpu>);
  m.impl("grad_norm", bind<grad_norm_args, OnCpu>);
  m.impl("sum_slices", bind<sum_slices_args, OnCpu>);
  m.impl("pack_control", bind<pack_control_args, OnCpu>);
  m.impl("clip_factor", bind<clip_factor_args, OnCpu>);
  m.impl("step_control", bind<step_control_args, OnCpu>);
  m.impl("stream_limit", bind<stream_limit_args, OnCpu>);
}
