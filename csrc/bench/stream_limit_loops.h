// The loops of stream_limit.cpp; see cpu/each_level.h. Blocks and prefetches are those of cpu/adam_step_loops.h.

#include "cpu/prefetch.h"

constexpr int64_t kBlock = kChunk;

template <class T, MasterMode mode, bool amsgrad>
static void limit_loop(const StreamLimitArgs& args, int64_t first, int64_t last) {
  constexpr float kStep = 0x1p-20f;  // small enough that values stay ordinary over many runs
  const T* __restrict grad = static_cast<const T*>(args.buffer.grad);
  T* __restrict param = static_cast<T*>(args.buffer.param);
  float* __restrict master = args.master;
  uint16_t* __restrict remainder = args.remainder;
  float* __restrict exp_avg = args.exp_avg;
  float* __restrict exp_avg_sq = args.exp_avg_sq;
  float* __restrict max_exp_avg_sq = args.max_exp_avg_sq;

  for (int64_t begin = first; begin < last; begin += kBlock) {
    const int64_t end = last - begin < kBlock ? last : begin + kBlock;
    prefetch<kBlock>(grad + begin);
    prefetch<kBlock>(exp_avg + begin);
    prefetch<kBlock>(exp_avg_sq + begin);
    prefetch<kBlock>(param + begin);
    if constexpr (mode == kMasterFp32) prefetch<kBlock>(master + begin);
    if constexpr (mode == kMasterSplit) prefetch<kBlock>(remainder + begin);
    if constexpr (amsgrad) prefetch<kBlock>(max_exp_avg_sq + begin);
    ZERO1_INDEPENDENT
    for (int64_t i = begin; i < end; ++i) {
      exp_avg[i] = exp_avg[i] + to_float(grad[i]);
      exp_avg_sq[i] = exp_avg_sq[i] + kStep;
      if constexpr (amsgrad) max_exp_avg_sq[i] = max_exp_avg_sq[i] + kStep;
      float p;
      if constexpr (mode == kMasterOwn) p = param[i] + kStep;
      if constexpr (mode == kMasterFp32) p = master[i] + kStep;
      if constexpr (mode == kMasterSplit) p = bits_to_float(param[i].bits << 16 | remainder[i]) + kStep;
      if constexpr (mode == kMasterFp32) master[i] = p;
      if constexpr (mode == kMasterSplit) remainder[i] = static_cast<uint16_t>(float_to_bits(p));
      if constexpr (mode == kMasterOwn) {
        param[i] = p;
      } else {
        param[i].bits = static_cast<uint16_t>(float_to_bits(p) >> 16);
      }
    }
  }
}

template <class T, MasterMode mode>
static void limit_mode(const StreamLimitArgs& args, int64_t begin, int64_t end) {
  args.max_exp_avg_sq ? limit_loop<T, mode, true>(args, begin, end) : limit_loop<T, mode, false>(args, begin, end);
}

static void limit_range(const StreamLimitArgs& args, int64_t begin, int64_t end) {
  if (args.buffer.dtype == kFloat32) return limit_mode<float, kMasterOwn>(args, begin, end);
  // an fp16 stream moves as many bytes as a bf16 one
  if (args.buffer.master == kMasterFp32) return limit_mode<BFloat16, kMasterFp32>(args, begin, end);
  limit_mode<BFloat16, kMasterSplit>(args, begin, end);
}
