// The control ops on the CPU: a few words each, so one thread.
#include "kernels.h"
#include "zero1/control_math.h"

namespace zero1::cpu {

void pack_control(const PackControlArgs& args) { zero1::pack_control(args); }

void clip_factor(const ClipFactorArgs& args) { zero1::clip_factor(args); }

void step_control(const StepControlArgs& args) {
  const StepDecision decision = decide_step(args);
  for (int64_t p = 0; p < args.params; ++p) control_param(args, decision, p);
  count_step(args, decision);
}

}  // namespace zero1::cpu
