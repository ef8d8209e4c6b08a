// The op of the benchmarks that moves what adam_step moves, with next to no arithmetic.
#pragma once

#include <cstdint>

#include "zero1/step_args.h"

namespace zero1 {

// The streams of one AdamStepArgs without its tables: one run of `numel` elements that all begin at 0.
struct StreamLimitArgs {
  FlatBuffer buffer;
  float* master;
  uint16_t* remainder;
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;  // null: none
  int64_t numel;
};

namespace cpu {

void stream_limit(const StreamLimitArgs& args, int64_t chunk_begin, int64_t chunk_end);

}  // namespace cpu
}  // namespace zero1
