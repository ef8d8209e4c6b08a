// sum_slices on the CPU: the ranks' slices added in fp32, in rank order, rounded once, and their norm in the same pass.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "norm.h"

#define ZERO1_LOOPS "sum_slices_loops.h"
#include "each_level.h"

namespace zero1::cpu {

void sum_slices(const SumSlicesArgs& args, int64_t chunk_begin, int64_t chunk_end, int64_t* norm) {
  const int64_t begin = chunk_begin * kChunk;
  const int64_t end = std::min(chunk_end * kChunk, args.numel);
  ZERO1_AT_LEVEL(sum_range, args, begin, end, norm);
}

}  // namespace zero1::cpu
