"""Builds the extension modules and nothing else; everything that is known without a compiler is in pyproject.toml.

_C:    CPU kernels, op schemas, the Python module. Always built.
_cuda: CUDA kernels. Built where nvcc is found, even beside a CPU-only torch; ZERO1_CUDA=1 makes its absence an error,
       ZERO1_CUDA=0 leaves it out.

Environment: ZERO1_CUDA, CUDA_HOME or CUDA_PATH, TORCH_CUDA_ARCH_LIST, MAX_JOBS, CXX.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

if int(setuptools.__version__.partition(".")[0]) < 77:  # which does not know the licence field of pyproject.toml
    raise SystemExit(f"zero1_cuda needs setuptools >= 77, got {setuptools.__version__}: pip install -U setuptools")

CPU_SOURCES = ["csrc/bindings.cpp", "csrc/module.cpp", *sorted(map(str, Path("csrc").glob("*/*.cpp")))]
CUDA_SOURCES = ["csrc/bindings_cuda.cpp", *sorted(map(str, Path("csrc").glob("*/*.cu")))]
DEFAULT_ARCHS = "8.0 8.6 8.9 9.0 10.0 12.0"  # and PTX of the last for later ones
TORCH_TARGET = "0x020a000000000000"  # the stable ABI of torch 2.10: what is built loads in every later torch, too

# No contraction and no fast-math: CPU and CUDA must give the same bits. The two -fno-* only let loops vectorise.
MATH = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
CXX_FLAGS = ["-std=c++17", "-O3", *MATH, "-fPIC", "-fvisibility=hidden", "-Wall", "-Icsrc", "-Icsrc/include"]
NVCC_FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Icsrc/include"]
NVCC_FLAGS += ["--threads", "1" if os.environ.get("MAX_JOBS") == "1" else "2"]


def ask_nvcc(nvcc, *arguments):
    """What it prints, on both streams."""
    try:
        done = subprocess.run([nvcc, *arguments], capture_output=True, text=True, check=True)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"zero1_cuda: nvcc does not run ({error}); ZERO1_CUDA=0 builds without CUDA") from None
    return done.stdout + done.stderr


def find_nvcc():
    """Where torch looks for it, too: CUDA_HOME or CUDA_PATH where one is set, else PATH, else the usual place."""
    if os.environ.get("ZERO1_CUDA") == "0":
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [f"{home}/bin"] if home else [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    return next(filter(None, (shutil.which("nvcc", path=place) for place in places)), None)


def cuda_archs(nvcc):
    """TORCH_CUDA_ARCH_LIST, or those of the default list that this nvcc knows: ["8.0", ..., "12.0+PTX"]."""
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if not archs:
        known = ask_nvcc(nvcc, "--list-gpu-arch").split()
        archs = [arch for arch in DEFAULT_ARCHS.split() if "compute_" + arch.replace(".", "") in known]
        archs[-1] += "+PTX"
    for arch in archs:
        if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch):
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST: wanted versions such as '8.0;9.0+PTX', got {arch!r}")
    return archs


def gencode(arch):
    number = arch.removesuffix("+PTX").replace(".", "")
    codes = [f"sm_{number}"] + ([f"compute_{number}"] if arch.endswith("+PTX") else [])
    return f"-gencode=arch=compute_{number},code=[{','.join(codes)}]"


def write_if_changed(path, text):
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def run_steps(steps, folder):
    """With ninja: in parallel, only what changed. Without: one after the other. A step: output, inputs, command."""
    ninja = [shutil.which("ninja")] if shutil.which("ninja") else [sys.executable, "-m", "ninja"]
    if subprocess.run([*ninja, "--version"], capture_output=True).returncode != 0:
        print("zero1_cuda: ninja not found, so the files are compiled one after the other", flush=True)
        for _, _, command in steps:
            subprocess.run(command, check=True)
        return
    path = str.maketrans({c: "$" + c for c in "$ :"})
    lines = [f"builddir = {str(folder).translate(path)}"]
    lines += ["rule run", "  command = $line", "  depfile = $out.d", "  deps = gcc"]
    for out, inputs, command in steps:
        lines.append(f"build {out.translate(path)}: run {' '.join(i.translate(path) for i in inputs)}")
        lines.append("  line = " + shlex.join(command).replace("$", "$$"))
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")
    jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
    subprocess.run([*ninja, *jobs, "-f", str(folder / "build.ninja")], check=True)


class BuildExtensions(build_ext):
    def finalize_options(self):
        super().finalize_options()
        self.nvcc = find_nvcc()
        if not self.nvcc:
            self.extensions[:] = [e for e in self.extensions if e.name != "zero1_cuda._cuda"]
        if getattr(self, "editable_mode", False):
            self.build_temp = "build/editable"  # kept, so that the next build only compiles what changed

    def build_extensions(self):
        if sys.platform != "linux":
            raise SystemExit(f"zero1_cuda builds on Linux only, got {sys.platform}")
        if not self.nvcc and os.environ.get("ZERO1_CUDA") == "1":
            raise SystemExit("ZERO1_CUDA=1, but nvcc is not in CUDA_HOME/bin or, without CUDA_HOME, on PATH")
        try:
            import torch
        except ImportError as error:
            raise SystemExit(
                f"zero1_cuda is built against the torch that is installed, and there is none here ({error}): "
                "install torch >= 2.10, then run pip install --no-build-isolation ."
            ) from None
        if tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2]) < (2, 10):
            raise SystemExit(f"zero1_cuda needs torch >= 2.10, got {torch.__version__}")
        cxx = shlex.split(os.environ.get("CXX", "")) or ["g++"]
        if not shutil.which(cxx[0]):
            raise SystemExit(f"zero1_cuda needs a C++ compiler: {cxx[0]!r} is not on PATH (CXX names another one)")

        archs = cuda_archs(self.nvcc) if self.nvcc else []
        without = "ZERO1_CUDA=0" if os.environ.get("ZERO1_CUDA") == "0" else "nvcc not found"
        print("zero1_cuda: " + (f"CUDA for {' '.join(archs)}" if archs else f"CPU only, {without}"), flush=True)
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        facts = {  # what build_info() reports
            "VERSION": self.distribution.get_version(),
            "TORCH": torch.__version__,
            "CUDA_ARCHS": " ".join(archs),
            "NVCC": re.search(r"release .*|$", ask_nvcc(self.nvcc, "--version")).group() if self.nvcc else "",
        }
        lines = ["#pragma once", *(f'#define ZERO1_BUILD_{name} "{value}"' for name, value in facts.items())]
        lines += [f"#define ZERO1_BUILD_CUDA {int(bool(self.nvcc))}", ""]
        write_if_changed(folder / "build_config.h", "\n".join(lines))
        try:
            plans = [self.plan(e, folder, Path(torch.__file__).parent, cxx, archs) for e in self.extensions]
            run_steps([step for plan in plans for step in plan], folder)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"zero1_cuda: the build failed (exit status {error.returncode}), see above") from None
        Path(self.get_ext_fullpath("zero1_cuda._cuda")).unlink(missing_ok=True)  # of an earlier build
        for extension in self.extensions:
            target = Path(self.get_ext_fullpath(extension.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / f"{extension.name}.so", target)

    def plan(self, extension, folder, torch, cxx, archs):
        """The (output, inputs, command) of each object and of the library."""
        cuda = extension.name.endswith("_cuda")
        host = [*cxx, *CXX_FLAGS, f"-I{folder}", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]
        host += [f"-isystem{torch}/include", f"-isystem{sysconfig.get_paths()['include']}"]
        link = [*cxx, "-shared"]
        if cuda:
            # nvcc may be a script somewhere else than the toolkit: it is asked where that is
            dry = ask_nvcc(self.nvcc, "--dryrun", "-c", "csrc/cuda/adam_step.cu")
            host += [f.replace("-I", "-isystem") for f in re.findall(r"-I[^\s\"]+", dry.partition("INCLUDES=")[2])]
            link = [self.nvcc, "-shared", "--cudart", "static", "-Xlinker", "--exclude-libs=ALL,--no-as-needed"]
        device = [self.nvcc, *NVCC_FLAGS, *map(gencode, archs)]
        steps, objects = [], []
        for source in extension.sources:
            out = str(folder / f"{Path(source).name}.o")
            compiler = device if source.endswith(".cu") else host
            steps.append((out, [source], [*compiler, "-MMD", "-MF", f"{out}.d", "-c", source, "-o", out]))
            objects.append(out)
        library = str(folder / f"{extension.name}.so")
        link += [*objects, f"-L{torch}/lib", "-ltorch", "-ltorch_cpu", "-o", library]
        steps.append((library, objects, link))
        return steps


setup(
    ext_modules=[Extension("zero1_cuda._C", CPU_SOURCES), Extension("zero1_cuda._cuda", CUDA_SOURCES)],
    cmdclass={"build_ext": BuildExtensions},
)
