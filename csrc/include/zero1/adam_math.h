// The formula: one Adam / AdamW update of one element, for host and device.
//
// Written once; the CPU loops, the CUDA kernels and their runs on the CPU all compile this file. Everything is fp32,
// in the order written. Contraction is off on both compilers (-ffp-contract=off, -fmad=false), division and square
// root are IEEE, so the same inputs give the same bits everywhere. The order is that of torch.optim.Adam / AdamW.
#pragma once

#include <cmath>
#include <cstdint>

#include "convert.h"

namespace zero1 {

enum AdamFlags : int32_t {
  kActive = 1,   // the parameter takes part in this step
  kAmsgrad = 2,  // keep and use the maximum of the variance
  kL2 = 4,       // weight decay enters the gradient (Adam); otherwise it is decoupled (AdamW)
};

// One row per parameter, written by step_control and read by adam_step. 12 words of 4 bytes.
struct AdamScalars {
  float grad_factor;  // clip factor / loss scale; negative for maximize
  float decay;        // decoupled: 1 - lr * weight_decay; L2: 1
  float l2;           // weight_decay of L2, read only under kL2 (0 * inf would be NaN)
  float beta1;
  float one_minus_beta1;  // subtracted in double
  float beta2;
  float one_minus_beta2;  // subtracted in double
  float step_size;        // lr / (1 - beta1^t)
  float inv_sqrt_bc2;     // 1 / sqrt(1 - beta2^t)
  float eps;
  int32_t flags;  // AdamFlags
  int32_t unused;
};
static_assert(sizeof(AdamScalars) == 48, "the Python side allocates rows of 12 words");

struct AdamElement {
  float master, exp_avg, exp_avg_sq, max_exp_avg_sq;
};

// A NaN's payload depends on which operand the machine keeps; one pattern is stored instead.
ZERO1_HD inline float canonical(float x) { return x != x ? bits_to_float(0x7fc00000u) : x; }

template <bool amsgrad, bool l2>
ZERO1_HD inline void adam_element(AdamElement& e, float grad, const AdamScalars& s) {
  float g = grad * s.grad_factor;
  float p = e.master * s.decay;
  if (l2) g = g + s.l2 * p;
  // torch.lerp: from the nearer end, so that beta1 = 0 gives the gradient itself
  const float d = g - e.exp_avg;
  const float m = s.one_minus_beta1 < 0.5f ? e.exp_avg + d * s.one_minus_beta1 : g - d * s.beta1;
  const float v = e.exp_avg_sq * s.beta2 + (s.one_minus_beta2 * g) * g;
  float var = v;
  if (amsgrad) {
    const float x = e.max_exp_avg_sq;
    var = (x >= v || x != x) ? x : v;  // as torch.maximum: NaN stays
    e.max_exp_avg_sq = canonical(var);
  }
  const float denom = sqrtf(var) * s.inv_sqrt_bc2 + s.eps;
  p = p - s.step_size * (m / denom);
  e.master = canonical(p);
  e.exp_avg = canonical(m);
  e.exp_avg_sq = canonical(v);
}

}  // namespace zero1
