// The loops of grad_norm.cpp; see each_level.h.
#include "norm_loops.h"

static void norm_run(const FlatBuffer& buffer, int64_t begin, int64_t count, int64_t* norm) {
  if (buffer.dtype == kFloat32) return add_squares<true>(static_cast<const float*>(buffer.grad) + begin, count, norm);
  if (buffer.dtype == kFloat16) return add_squares<true>(static_cast<const Half*>(buffer.grad) + begin, count, norm);
  add_squares<true>(static_cast<const BFloat16*>(buffer.grad) + begin, count, norm);
}
