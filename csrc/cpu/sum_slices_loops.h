// The loops of sum_slices.cpp; see each_level.h.
#include "norm_loops.h"

template <class In, class Out>
static void sum_loop(const SumSlicesArgs& args, int64_t begin, int64_t end, int64_t* norm) {
  // A block's partial sums stay in the first-level cache while the ranks' slices stream past.
  constexpr int64_t kBlock = 512;
  static_assert(kBlock % kChunk == 0);
  const In* received = static_cast<const In*>(args.received);
  const In* own = static_cast<const In*>(args.own);
  Out* out = static_cast<Out*>(args.out);
  const float scale = args.scale, divisor = args.divisor;
  float sum[kBlock];
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = end - at < kBlock ? end - at : kBlock;
    for (int64_t rank = 0; rank < args.world; ++rank) {
      const bool is_own = own && rank == args.rank;
      const int64_t row = own && rank > args.rank ? rank - 1 : rank;
      const In* __restrict slice = is_own ? own + at : received + row * args.numel + at;
      prefetch<kBlock>(slice);
      if (rank == 0) {
        ZERO1_INDEPENDENT
        for (int64_t i = 0; i < count; ++i) sum[i] = 0.0f + to_float(slice[i]) * scale;  // -0 becomes +0, as any sum's
      } else {
        ZERO1_INDEPENDENT
        for (int64_t i = 0; i < count; ++i) sum[i] = sum[i] + to_float(slice[i]) * scale;
      }
    }
    // `out` may be the rank's own slice: by now all of the block has been read
    ZERO1_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
      sum[i] = canonical(sum[i] / divisor);
      out[at + i] = from_float<Out>(sum[i]);
    }
    if (norm) add_squares<false>(sum, count, norm);
  }
}

static void sum_range(const SumSlicesArgs& args, int64_t begin, int64_t end, int64_t* norm) {
  const int32_t in = args.dtype_in, out = args.dtype_out;
  if (in == kFloat32 && out == kFloat32) return sum_loop<float, float>(args, begin, end, norm);
  if (in == kFloat32 && out == kFloat16) return sum_loop<float, Half>(args, begin, end, norm);
  if (in == kFloat32) return sum_loop<float, BFloat16>(args, begin, end, norm);
  if (in == kFloat16 && out == kFloat16) return sum_loop<Half, Half>(args, begin, end, norm);
  if (in == kFloat16) return sum_loop<Half, float>(args, begin, end, norm);
  if (out == kBFloat16) return sum_loop<BFloat16, BFloat16>(args, begin, end, norm);
  sum_loop<BFloat16, float>(args, begin, end, norm);
}
