// Walks the segment table: calls f(segment, offset, count) for each longest run of elements, inside the chunks given,
// that belong to one segment. `offset` counts from the segment's start. Padding is never visited.
#pragma once

#include <algorithm>
#include <cstdint>

#include "zero1/step_args.h"

namespace zero1::cpu {

template <class F>
void for_each_run(const SegmentTable& table, int64_t chunk_begin, int64_t chunk_end, const F& f) {
  for (int64_t chunk = chunk_begin; chunk < chunk_end;) {
    const int32_t index = table.chunk_segment[chunk];
    if (index < 0) {
      ++chunk;
      continue;
    }
    const Segment& segment = table.segments[index];
    const int64_t offset = chunk * kChunk - segment.shard_begin;
    const int64_t count = std::min(segment.numel - offset, (chunk_end - chunk) * kChunk);
    f(segment, offset, count);
    chunk += (count + kChunk - 1) / kChunk;
  }
}

}  // namespace zero1::cpu
