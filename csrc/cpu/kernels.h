// The CPU kernels. The ones with a range work on part of the whole, in chunks of kChunk elements: the caller divides
// the chunks among threads. What a range adds to a norm goes to an array of its own. The ones with tables return
// chunk_end, or the chunk at which they found the tables to be wrong and stopped.
#pragma once

#include <cstdint>

#include "zero1/step_args.h"

namespace zero1::cpu {

int64_t adam_step(const AdamStepArgs& args, const TableSizes& sizes, int64_t chunk_begin, int64_t chunk_end);
int64_t refresh_masters(const RefreshMastersArgs& args, const TableSizes& sizes, int64_t chunk_begin,
                        int64_t chunk_end);
int64_t grad_norm(const GradNormArgs& args, const TableSizes& sizes, int64_t chunk_begin, int64_t chunk_end,
                  int64_t* norm);
void sum_slices(const SumSlicesArgs& args, int64_t chunk_begin, int64_t chunk_end, int64_t* norm);

void pack_control(const PackControlArgs& args);
void clip_factor(const ClipFactorArgs& args);
void step_control(const StepControlArgs& args);

}  // namespace zero1::cpu
