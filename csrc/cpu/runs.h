// Walks the segment table, and looks at each row when it comes to it: checked before used, without a pass of its own.
#pragma once

#include <algorithm>
#include <cstdint>

#include "zero1/step_args.h"

namespace zero1::cpu {

inline bool inside(int64_t begin, int64_t numel, int64_t size) {
  return size == TableSizes::kUnused || (begin >= 0 && begin <= size - numel);
}

// Whether all that a segment points to lies inside the buffers.
inline bool fits(const Segment& s, int64_t chunks, const FlatBuffer* buffers, const TableSizes& sizes) {
  if (s.numel < 0 || s.buffer < 0 || s.buffer >= sizes.buffers || s.shard_begin % kChunk != 0) return false;
  const int32_t master = buffers[s.buffer].master;
  return inside(s.shard_begin, s.numel, chunks * kChunk) && inside(s.grad_begin, s.numel, sizes.grads[s.buffer]) &&
         inside(s.param_begin, s.numel, sizes.params[s.buffer]) && inside(s.param, 1, sizes.rows) &&
         (master != kMasterFp32 || inside(s.master_begin, s.numel, sizes.master)) &&
         (master != kMasterSplit || inside(s.master_begin, s.numel, sizes.remainder)) &&
         (s.max_begin < 0 || inside(s.max_begin, s.numel, sizes.max_exp_avg_sq));
}

// Calls f(segment, offset, count) for each longest run of elements, inside the chunks given, that belong to one
// segment. `offset` counts from the segment's start. Padding is never visited. Returns chunk_end, or the first chunk
// where the tables are wrong: nothing is done from the run of that chunk on.
template <class Args, class F>
int64_t for_each_run(const Args& args, const TableSizes& sizes, int64_t chunk_begin, int64_t chunk_end, const F& f) {
  const SegmentTable& table = args.table;
  for (int64_t chunk = chunk_begin; chunk < chunk_end;) {
    const int32_t index = table.chunk_segment[chunk];
    if (index == -1) {
      ++chunk;
      continue;
    }
    if (index < 0 || index >= sizes.segments) return chunk;
    const Segment& segment = table.segments[index];
    const int64_t offset = chunk * kChunk - segment.shard_begin;
    if (!fits(segment, table.chunks, args.buffers, sizes) || offset < 0 || offset >= segment.numel) return chunk;
    const int64_t count = std::min(segment.numel - offset, (chunk_end - chunk) * kChunk);
    const int64_t run_end = chunk + (count + kChunk - 1) / kChunk;
    int32_t differs = 0;
    for (int64_t other = chunk; other < run_end; ++other) differs |= table.chunk_segment[other] ^ index;  // vectorises
    if (differs) {
      while (table.chunk_segment[chunk] == index) ++chunk;
      return chunk;
    }
    f(segment, offset, count);
    chunk = run_end;
  }
  return chunk_end;
}

}  // namespace zero1::cpu
