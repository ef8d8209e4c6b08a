// refresh_masters on the CPU: masters take up weights that were changed from outside. Rare, so one plain loop will do.
#include <cstdint>

#include "kernels.h"
#include "runs.h"

namespace zero1::cpu {
namespace {

template <class T>
bool same(T a, T b) {
  const float x = to_float(a), y = to_float(b);
  return a.bits == b.bits || (x != x && y != y);
}

template <class T>
void refresh(const T* param, float* master, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (!same(from_float<T>(master[i]), param[i])) master[i] = to_float(param[i]);
  }
}

}  // namespace

int64_t refresh_masters(const RefreshMastersArgs& args, const TableSizes& sizes, int64_t chunk_begin,
                        int64_t chunk_end) {
  return for_each_run(args, sizes, chunk_begin, chunk_end,
                      [&args](const Segment& segment, int64_t offset, int64_t count) {
                        const FlatBuffer& buffer = args.buffers[segment.buffer];
                        if (!args.edited[segment.param] || buffer.master == kMasterOwn) return;
                        const int64_t at = segment.param_begin + offset, place = segment.master_begin + offset;
                        if (buffer.master == kMasterSplit) {
                          std::fill_n(args.remainder + place, count, uint16_t{0});
                        } else if (buffer.dtype == kFloat16) {
                          refresh(static_cast<const Half*>(buffer.param) + at, args.master + place, count);
                        } else {
                          refresh(static_cast<const BFloat16*>(buffer.param) + at, args.master + place, count);
                        }
                      });
}

}  // namespace zero1::cpu
