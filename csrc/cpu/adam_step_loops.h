// The loops of adam_step.cpp; see each_level.h.

#include "prefetch.h"

constexpr int64_t kBlock = kChunk;

template <class T, MasterMode mode, bool amsgrad, bool l2>
static void adam_loop(const AdamRun& r) {
  const AdamStepArgs& args = r.args;
  const FlatBuffer& buffer = args.buffers[r.segment.buffer];
  const int64_t shard = r.segment.shard_begin + r.offset;
  const int64_t place = r.segment.master_begin + r.offset;
  const T* __restrict grad = static_cast<const T*>(buffer.grad) + r.segment.grad_begin + r.offset;
  T* __restrict param = static_cast<T*>(buffer.param) + r.segment.param_begin + r.offset;
  float* __restrict master = mode == kMasterFp32 ? args.master + place : nullptr;
  uint16_t* __restrict remainder = mode == kMasterSplit ? args.remainder + place : nullptr;
  float* __restrict exp_avg = args.exp_avg + shard;
  float* __restrict exp_avg_sq = args.exp_avg_sq + shard;
  float* __restrict max_exp_avg_sq = amsgrad ? args.max_exp_avg_sq + r.segment.max_begin + r.offset : nullptr;
  const AdamScalars scalars = r.scalars;
  const int64_t count = r.count;

  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = count - begin < kBlock ? count : begin + kBlock;
    prefetch<kBlock>(grad + begin);
    prefetch<kBlock>(exp_avg + begin);
    prefetch<kBlock>(exp_avg_sq + begin);
    prefetch<kBlock>(param + begin);
    if constexpr (mode == kMasterFp32) prefetch<kBlock>(master + begin);
    if constexpr (mode == kMasterSplit) prefetch<kBlock>(remainder + begin);
    if constexpr (amsgrad) prefetch<kBlock>(max_exp_avg_sq + begin);
    ZERO1_INDEPENDENT
    for (int64_t i = begin; i < end; ++i) {
      AdamElement e;
      if constexpr (mode == kMasterOwn) e.master = param[i];
      if constexpr (mode == kMasterFp32) e.master = master[i];
      if constexpr (mode == kMasterSplit) e.master = join_master(param[i], remainder[i]);
      e.exp_avg = exp_avg[i];
      e.exp_avg_sq = exp_avg_sq[i];
      e.max_exp_avg_sq = amsgrad ? max_exp_avg_sq[i] : 0.0f;
      adam_element<amsgrad, l2>(e, to_float(grad[i]), scalars);
      if constexpr (std::is_same_v<T, BFloat16>) e.master = settle_tie(e.master);
      if constexpr (mode == kMasterFp32) master[i] = e.master;
      if constexpr (mode == kMasterSplit) remainder[i] = split_remainder(e.master);
      param[i] = from_float<T>(e.master);
      exp_avg[i] = e.exp_avg;
      exp_avg_sq[i] = e.exp_avg_sq;
      if constexpr (amsgrad) max_exp_avg_sq[i] = e.max_exp_avg_sq;
    }
  }
}

template <class T, MasterMode mode>
static void adam_with_flags(const AdamRun& r) {
  const bool amsgrad = (r.scalars.flags & kAmsgrad) && r.segment.max_begin >= 0;
  const bool l2 = r.scalars.flags & kL2;
  if (amsgrad) {
    l2 ? adam_loop<T, mode, true, true>(r) : adam_loop<T, mode, true, false>(r);
  } else {
    l2 ? adam_loop<T, mode, false, true>(r) : adam_loop<T, mode, false, false>(r);
  }
}

static void adam_run(const AdamRun& r) {
  const FlatBuffer& buffer = r.args.buffers[r.segment.buffer];
  if (buffer.dtype == kFloat32) return adam_with_flags<float, kMasterOwn>(r);
  if (buffer.dtype == kFloat16) return adam_with_flags<Half, kMasterFp32>(r);
  if (buffer.master == kMasterFp32) return adam_with_flags<BFloat16, kMasterFp32>(r);
  adam_with_flags<BFloat16, kMasterSplit>(r);
}
