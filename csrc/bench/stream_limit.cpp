// stream_limit on the CPU: what adam_step reads and writes, without its arithmetic.
#include "stream_limit.h"

#include <algorithm>
#include <cstdint>

#define ZERO1_LOOPS "bench/stream_limit_loops.h"
#include "cpu/each_level.h"

namespace zero1::cpu {

void stream_limit(const StreamLimitArgs& args, int64_t chunk_begin, int64_t chunk_end) {
  const int64_t begin = chunk_begin * kChunk;
  const int64_t end = std::min(chunk_end * kChunk, args.numel);
  ZERO1_AT_LEVEL(limit_range, args, begin, end);
}

}  // namespace zero1::cpu
