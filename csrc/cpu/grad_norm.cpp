// grad_norm on the CPU: the exact sum of squares of the gradients.
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "norm.h"
#include "runs.h"

#define ZERO1_LOOPS "grad_norm_loops.h"
#include "each_level.h"

namespace zero1::cpu {

static void run_at_level(const FlatBuffer& buffer, int64_t begin, int64_t count, int64_t* norm) {
  ZERO1_AT_LEVEL(norm_run, buffer, begin, count, norm);
}

int64_t grad_norm(const GradNormArgs& args, const TableSizes& sizes, int64_t chunk_begin, int64_t chunk_end,
                  int64_t* norm) {
  return for_each_run(args, sizes, chunk_begin, chunk_end, [&](const Segment& segment, int64_t offset, int64_t count) {
    run_at_level(args.buffers[segment.buffer], segment.grad_begin + offset, count, norm);
  });
}

}  // namespace zero1::cpu
