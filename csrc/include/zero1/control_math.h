// The step's control, for host and device: loss scale, clip factor, skip, per-parameter step counts and bias
// corrections. Everything here is double until it is stored, without libm calls that could differ between machines.
#pragma once

#include <cmath>
#include <cstdint>

#include "norm_math.h"
#include "step_args.h"

namespace zero1 {

// base^exponent by repeated squaring.
ZERO1_HD inline double power(double base, int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result = result * base;
    base = base * base;
  }
  return result;
}

ZERO1_HD inline double inverse_scale(const float* grad_scale) {
  return grad_scale ? 1.0 / static_cast<double>(*grad_scale) : 1.0;
}

// clip[0] = min(1, max_norm / (norm + 1e-6)), clip[1] = norm, both of the gradients divided by grad_scale.
ZERO1_HD inline void clip_factor(const ClipFactorArgs& a) {
  const double norm = total_norm(a.control) * inverse_scale(a.grad_scale);
  const double factor = a.max_norm / (norm + 1e-6);
  a.clip[0] = static_cast<float>(factor < 1.0 || factor != factor ? factor : 1.0);
  a.clip[1] = static_cast<float>(norm);
}

// Writes x, at most 2^32, as kFactWords words.
ZERO1_HD inline void write_fact(int64_t* words, uint64_t x) {
  const uint64_t low = x & 0xffffu, high = x >> 16;
  words[0] = static_cast<int64_t>(low);
  words[1] = static_cast<int64_t>(high);
  words[2] = static_cast<int64_t>(low * low);
  words[3] = static_cast<int64_t>(high * high);
}

// Whether the facts behind a sum over n ranks differ. n * sum(h^2) == (sum h)^2 only if all h are equal
// (Cauchy-Schwarz), and halves are at most 2^16, so that both sides stay below 2^63 for up to 2^15 ranks.
ZERO1_HD inline bool facts_differ(int64_t n, const int64_t* words) {
  return n * words[2] != words[0] * words[0] || n * words[3] != words[1] * words[1];
}

// Adds `rows` norms and this rank's scaler values into the control vector.
ZERO1_HD inline void pack_control(const PackControlArgs& a) {
  for (int w = 0; w < kNormWords; ++w) {
    if (w == kControlConditions) continue;
    int64_t sum = 0;
    for (int64_t r = 0; r < a.rows; ++r) sum += a.norms[r * kNormWords + w];
    a.control[w] = sum;
  }
  carry_limbs(a.control);
  a.control[kControlFoundInf] = a.found_inf && *a.found_inf != 0.0f;
  const uint64_t scale = a.grad_scale ? static_cast<uint64_t>(float_to_bits(*a.grad_scale)) + 1u : 0u;
  write_fact(a.control + kControlScale, scale);
}

// Whether this step may change anything, and whether it counts as skipped.
struct StepDecision {
  bool stop;     // a condition that the host raises as an error: nothing changes but `stopped`
  bool skipped;  // a non-finite gradient: nothing changes but skipped[0] and [1]
};

ZERO1_HD inline StepDecision decide_step(const StepControlArgs& a) {
  const int64_t* c = a.control;
  StepDecision d;
  d.stop = c[kControlConditions] > 0 || c[kControlModified] > 0 || c[kControlInBackward] > 0 || c[kControlInClip] > 0 ||
           facts_differ(a.world, c + kControlScale) || facts_differ(c[kControlBackwardRanks], c + kControlBackwards) ||
           facts_differ(a.world, c + kControlFacts);
  const bool non_finite = c[kNormNonFinite] > 0 && (a.skip_nonfinite || a.scaled);
  d.skipped = !d.stop && (non_finite || c[kControlFoundInf] > 0);
  return d;
}

ZERO1_HD inline void count_step(const StepControlArgs& a, const StepDecision& d) {
  a.skipped[0] += d.skipped;
  a.skipped[1] = d.skipped;
  if (a.stopped) *a.stopped |= d.stop;  // stays set, so that the host may look at it whenever it likes
}

// Row p of the scalars, and its step count.
ZERO1_HD inline void control_param(const StepControlArgs& a, const StepDecision& d, int64_t p) {
  const uint64_t flags = static_cast<uint64_t>(a.control[kControlFlags + p / 4]);
  const bool had_grad = ((flags >> (16 * (p % 4))) & 0xffffu) != 0;
  AdamScalars& s = a.scalars[p];
  if (d.stop || d.skipped || !had_grad) {
    s.flags = 0;
    return;
  }
  const GroupOptions& o = a.groups[a.param_group[p]];
  double lr = o.lr;
  if (o.lr_at) {
    lr = o.lr_is_fp64 ? *static_cast<const double*>(o.lr_at) : static_cast<double>(*static_cast<const float*>(o.lr_at));
  }
  const int64_t t = ++a.steps[p];
  const double clip = a.clip ? static_cast<double>(a.clip[0]) : 1.0;
  const double sign = (o.mode & kGroupMaximize) ? -1.0 : 1.0;
  const bool decoupled = (o.mode & kGroupDecoupled) != 0;
  const bool l2 = !decoupled && o.weight_decay != 0.0;
  s.grad_factor = static_cast<float>(sign * clip * inverse_scale(a.grad_scale));
  s.decay = static_cast<float>(decoupled ? 1.0 - lr * o.weight_decay : 1.0);
  s.l2 = static_cast<float>(l2 ? o.weight_decay : 0.0);
  s.beta1 = static_cast<float>(o.beta1);
  s.one_minus_beta1 = static_cast<float>(1.0 - o.beta1);
  s.beta2 = static_cast<float>(o.beta2);
  s.one_minus_beta2 = static_cast<float>(1.0 - o.beta2);
  s.step_size = static_cast<float>(lr / (1.0 - power(o.beta1, t)));
  s.inv_sqrt_bc2 = static_cast<float>(1.0 / sqrt(1.0 - power(o.beta2, t)));
  s.eps = static_cast<float>(o.eps);
  s.flags = kActive | ((o.mode & kGroupAmsgrad) ? kAmsgrad : 0) | (l2 ? kL2 : 0);
}

}  // namespace zero1
