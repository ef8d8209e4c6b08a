// adam_step on the CPU: one pass over each run of elements that share their scalars.
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels.h"
#include "runs.h"

namespace zero1::cpu {
namespace {

struct AdamRun {
  const AdamStepArgs& args;
  const Segment& segment;
  const AdamScalars& scalars;
  int64_t offset;  // from the segment's start
  int64_t count;
};

}  // namespace
}  // namespace zero1::cpu

#define ZERO1_LOOPS "adam_step_loops.h"
#include "each_level.h"

namespace zero1::cpu {

static void run_at_level(const AdamRun& run) { ZERO1_AT_LEVEL(adam_run, run); }

int64_t adam_step(const AdamStepArgs& args, const TableSizes& sizes, int64_t chunk_begin, int64_t chunk_end) {
  return for_each_run(args, sizes, chunk_begin, chunk_end,
                      [&args](const Segment& segment, int64_t offset, int64_t count) {
                        const AdamScalars& scalars = args.scalars[segment.param];
                        if (scalars.flags & kActive) run_at_level(AdamRun{args, segment, scalars, offset, count});
                      });
}

}  // namespace zero1::cpu
