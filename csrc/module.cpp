// The Python module _C with facts about the build. No header of torch's: those of its stable ABI, which the other files
// are compiled for, and its copy of pybind11 refuse each other.
#undef TORCH_TARGET_VERSION
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "build_config.h"
#include "cpu/level.h"
#include "zero1/step_args.h"

namespace {

namespace py = pybind11;
using zero1::cpu::kLevelNames;
using zero1::cpu::kLevels;
using zero1::cpu::Level;

std::vector<std::string> usable_levels() {
  std::vector<std::string> names;
  for (int i = 0; i < kLevels; ++i) {
    if (zero1::cpu::usable(static_cast<Level>(i))) names.push_back(kLevelNames[i]);
  }
  return names;
}

void set_level_by_name(const std::string& name) {
  for (int i = 0; i < kLevels; ++i) {
    if (name == kLevelNames[i] && zero1::cpu::usable(static_cast<Level>(i))) {
      return zero1::cpu::set_level(static_cast<Level>(i));
    }
  }
  std::string wanted;
  for (const std::string& usable : usable_levels()) wanted += (wanted.empty() ? "" : ", ") + usable;
  throw py::value_error("set_cpu_level: name: wanted one of " + wanted + ", got '" + name + "'");
}

py::dict build_info() {
  py::dict info;
  info["version"] = ZERO1_BUILD_VERSION;
  info["torch"] = ZERO1_BUILD_TORCH;
#ifdef __clang__
  info["compiler"] = __VERSION__;  // which says "Clang" itself
#else
  info["compiler"] = "g++ " __VERSION__;
#endif
  info["cuda"] = static_cast<bool>(ZERO1_BUILD_CUDA);
  info["cuda_archs"] = ZERO1_BUILD_CUDA_ARCHS;
  info["nvcc"] = ZERO1_BUILD_NVCC;
  info["cpu_levels"] = std::vector<std::string>(kLevelNames, kLevelNames + kLevels);
  return info;
}

// What Python has to know of the structs and enums of step_args.h and adam_math.h: sizes and places in words.
void add_constants(py::module_& m) {
  using namespace zero1;
  const std::pair<const char*, int64_t> constants[] = {
      {"CHUNK", kChunk},
      {"MAX_BUFFERS", kMaxBuffers},
      {"SEGMENT_WORDS", sizeof(Segment) / sizeof(int64_t)},
      {"SCALAR_WORDS", sizeof(AdamScalars) / sizeof(float)},
      {"GROUP_WORDS", sizeof(GroupOptions) / sizeof(double)},
      {"SCALAR_FLAGS", offsetof(AdamScalars, flags) / sizeof(float)},
      {"FLAG_ACTIVE", kActive},
      {"FLAG_AMSGRAD", kAmsgrad},
      {"FLAG_L2", kL2},
      {"NORM_WORDS", kNormWords},
      {"NORM_LIMBS", kNormLimbs},
      {"NORM_NON_FINITE", kNormNonFinite},
      {"NORM_NAN", kNormNaN},
      {"NORM_OVERFLOW", kNormOverflow},
      {"CONTROL_CONDITIONS", kControlConditions},
      {"CONTROL_FOUND_INF", kControlFoundInf},
      {"CONTROL_SCALE", kControlScale},
      {"CONTROL_MODIFIED", kControlModified},
      {"CONTROL_IN_BACKWARD", kControlInBackward},
      {"CONTROL_IN_CLIP", kControlInClip},
      {"CONTROL_NON_FINITE_GRADS", kControlNonFiniteGrads},
      {"CONTROL_BACKWARD_RANKS", kControlBackwardRanks},
      {"CONTROL_BACKWARDS", kControlBackwards},
      {"CONTROL_FACTS", kControlFacts},
      {"CONTROL_FLAGS", kControlFlags},
      {"FACT_WORDS", kFactWords},
      {"SKIPPED_WORDS", kSkippedWords},
      {"GROUP_MODE", offsetof(GroupOptions, mode) / sizeof(double)},
      {"GROUP_AMSGRAD", int64_t{kGroupAmsgrad}},
      {"GROUP_MAXIMIZE", int64_t{kGroupMaximize}},
      {"GROUP_DECOUPLED", int64_t{kGroupDecoupled}},
      {"GROUP_LR_AT", offsetof(GroupOptions, lr_at) / sizeof(double)},
      {"GROUP_LR_IS_FP64", offsetof(GroupOptions, lr_is_fp64) / sizeof(double)},
  };
  for (const auto& [name, value] : constants) m.attr(name) = value;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled half of zero1_cuda. Importing it registers the ops torch.ops.zero1.*.";
  add_constants(m);
  m.def("build_info", &build_info, "What was built, where from and with which compilers.");
  m.def("cpu_levels", &usable_levels, "The instruction sets that were compiled in and that this machine has.");
  m.def("cpu_level", [] { return kLevelNames[static_cast<int>(zero1::cpu::level())]; }, "The one in use.");
  m.def("set_cpu_level", &set_level_by_name, py::arg("name"), "Uses another one; ValueError if it cannot be used.");
}
