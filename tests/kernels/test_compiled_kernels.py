"""What nvcc makes of the kernels: no spills and no local memory, few enough registers for the occupancy that each was
written for, 16-byte loads and stores for every stream, IEEE arithmetic, no fused multiply-add. Needs nvcc, no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
FLAGS = ["-O3", "-fmad=false", "-std=c++17", f"-I{CSRC / 'include'}"]  # as in setup.py
ARCHS = ["sm_90", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_100", "sm_120"))]

# 65536 registers: 80 a thread are 3 blocks of 256 threads, 64 are 4, 40 are 6
REGISTERS = {"adam_step": 80, "sum_slices": 64, "grad_norm": 40, "refresh_masters": 40, "control": 80}

# 16-byte accesses that the source asks for, over all dtypes and modes; fp32 streams take two.
ADAM_LOADS = {"own": 2 + 2 + 4, "float16": 1 + 2 + 4, "bfloat16": 1 + 2 + 4, "split": 1 + 1 + 1 + 4}
ADAM_STORES = {"own": 2 + 4, "float16": 1 + 2 + 4, "bfloat16": 1 + 2 + 4, "split": 1 + 1 + 4}
WIDE = {  # kernel: (loads, stores)
    "adam_step_kernelILb0E": (2 * sum(ADAM_LOADS.values()), 2 * sum(ADAM_STORES.values())),  # decoupled and L2
    "adam_step_kernelILb1E": (  # without and with two more for the maximum
        2 * sum(2 * n + 2 for n in ADAM_LOADS.values()),
        2 * sum(2 * n + 2 for n in ADAM_STORES.values()),
    ),
    "grad_norm_kernel": (2 + 1 + 1, 0),
    "sum_slices_kernel": (3 * 2 + 4 * 1, 3 * 2 + 4 * 1),
    "refresh_masters_kernel": (2 * (1 + 2), 2 * 2 + 1),
}

pytestmark = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


def nvcc(*arguments: str) -> str:
    assert NVCC is not None
    run = subprocess.run([NVCC, *FLAGS, *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stderr


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", REGISTERS)
def test_no_spills_and_few_registers(tmp_path: Path, name: str, arch: str) -> None:
    source = str(CSRC / "cuda" / f"{name}.cu")
    log = nvcc("-cubin", f"-arch={arch}", "-Xptxas", "-v", source, "-o", str(tmp_path / "x.cubin"))
    stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    assert len(stacks) == len(registers) >= 1, log
    assert set(stacks) == {("0", "0", "0")}, log
    assert max(registers) <= REGISTERS[name], log


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The PTX of every kernel, by mangled name."""
    result = {}
    for name in REGISTERS:
        path = tmp_path_factory.mktemp("ptx") / f"{name}.ptx"
        nvcc("-ptx", "-arch=sm_90", str(CSRC / "cuda" / f"{name}.cu"), "-o", str(path))
        for entry in path.read_text().split(".entry ")[1:]:
            result[entry.partition("(")[0].strip()] = entry
    return result


@pytest.mark.parametrize("name", WIDE)
def test_streams_are_read_and_written_16_bytes_at_a_time(kernels: dict[str, str], name: str) -> None:
    (ptx,) = (text for kernel, text in kernels.items() if name in kernel)
    loads, stores = WIDE[name]
    # the rows of the tables come through .nc
    assert len(re.findall(r"ld\.global\.c[sg]\.v4", ptx)) >= loads
    assert len(re.findall(r"st\.global\.c[sg]\.v4", ptx)) >= stores


def test_arithmetic_is_ieee(kernels: dict[str, str]) -> None:
    assert len(kernels) == 8
    for name, ptx in kernels.items():
        operations = set(re.findall(r"\b(?:fma|mad|div|sqrt|rsqrt|rcp|ex2|lg2)\.[\w.]*f(?:32|64)", ptx))
        assert operations <= {"div.rn.f32", "sqrt.rn.f32", "div.rn.f64", "sqrt.rn.f64", "rcp.rn.f64"}, name
        assert ".local" not in ptx, name
        assert not re.search(r"\b(?:atom|red)\.[\w.]*f(?:16|32|64)", ptx), name
