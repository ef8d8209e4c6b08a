// The Python module _C with facts about the build. No header of torch's: those of its stable ABI, which the other files
// are compiled for, and its copy of pybind11 refuse each other.
#undef TORCH_TARGET_VERSION
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "build_config.h"
#include "cpu/level.h"

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
  info["compiler"] = "g++ " __VERSION__;
  info["cuda"] = static_cast<bool>(ZERO1_BUILD_CUDA);
  info["cuda_archs"] = ZERO1_BUILD_CUDA_ARCHS;
  info["nvcc"] = ZERO1_BUILD_NVCC;
  info["cpu_levels"] = std::vector<std::string>(kLevelNames, kLevelNames + kLevels);
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled half of zero1_cuda. Importing it registers the ops torch.ops.zero1.*.";
  m.def("build_info", &build_info, "What was built, where from and with which compilers.");
  m.def("cpu_levels", &usable_levels, "The instruction sets that were compiled in and that this machine has.");
  m.def("cpu_level", [] { return kLevelNames[static_cast<int>(zero1::cpu::level())]; }, "The one in use.");
  m.def("set_cpu_level", &set_level_by_name, py::arg("name"), "Uses another one; ValueError if it cannot be used.");
}
