"""The sources of the CUDA kernels, compiled as C++ and run thread by thread on the CPU, give the bits of the CPU ops:
all dtypes, kinds of master and modes, odd sizes, misaligned buffers, special values; in whatever order blocks and
threads run; under AddressSanitizer and UBSan; with a number of launches that does not grow. It does not prove that
nvcc's code does the same, only that what nvcc is given is right. Needs g++, neither CUDA nor a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.ops_case import DTYPES, Case, Param
from shim import checks
from shim.host import ORDERS, SANITIZE, Shim, build

from zero1_cuda import ops

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shim") / "kernels.so"
    build(path, [])
    return path


@pytest.fixture(params=ORDERS)
def shim(request: pytest.FixtureRequest, library: Path) -> Shim:
    result = Shim(library)
    result.set(request.param)
    return result


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(("dtype", "split"), checks.MASTERS)
def test_adam_step(shim: Shim, dtype: torch.dtype, split: bool, offset: int) -> None:
    checks.check_adam_step(shim, dtype, split, offset)


def test_adam_step_with_three_dtypes(shim: Shim) -> None:
    checks.check_mixed_dtypes(shim)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grad_norm(shim: Shim, dtype: torch.dtype, offset: int) -> None:
    checks.check_grad_norm(shim, dtype, offset)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(("kind_in", "kind_out"), checks.SUMS)
def test_sum_slices(shim: Shim, kind_in: torch.dtype, kind_out: torch.dtype, offset: int) -> None:
    checks.check_sum_slices(shim, kind_in, kind_out, offset)


@pytest.mark.parametrize("split", [False, True])
def test_refresh_masters(shim: Shim, split: bool) -> None:
    checks.check_refresh(shim, split, 0)
    checks.check_refresh(shim, split, 3)


def test_control(shim: Shim) -> None:
    checks.check_control(shim)


def test_under_sanitizers(tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    build(library, SANITIZE)
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    # Python itself never frees everything
    env = os.environ | {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    run = subprocess.run([sys.executable, checks.__file__, str(library)], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]


@pytest.mark.parametrize("resident", [1, 1000])
def test_any_grid(library: Path, resident: int) -> None:
    shim = Shim(library)
    shim.set("forward", resident)
    checks.check_mixed_dtypes(shim)
    checks.check_grad_norm(shim, torch.bfloat16, 0)
    checks.check_control(shim)


def test_launches_do_not_grow(library: Path) -> None:
    shim = Shim(library)
    shim.set("forward")
    for count in (1, 50):
        case = Case([Param(300, DTYPES[i % 3], group=i % 4, amsgrad=i % 2 == 0) for i in range(count)])
        control = case.control()
        norm = torch.zeros(1, ops.NORM_WORDS, dtype=torch.int64)
        clip = torch.zeros(2)
        edited = torch.ones(count, dtype=torch.uint8)
        before = shim.launches()
        shim.grad_norm(case.segments, case.chunk_segment, case.grads, norm[0])
        shim.pack_control(norm, None, None, control)
        shim.clip_factor(control, None, 1.0, clip)
        shim.step_control(
            control, 1, case.param_group, case.groups, None, clip, True, False, case.steps, case.scalars, case.skipped
        )
        shim.adam_step(*case.adam_args())
        shim.refresh_masters(case.segments, case.chunk_segment, case.params, case.master, case.remainder, edited)
        shim.sum_slices(torch.ones(3, count), None, 0, 1.0, 1.0, torch.ones(count), None)
        assert shim.launches() - before == 7


FAULTS = ["misaligned", "deadlock", "deadlock", "lane mask"]


@pytest.mark.parametrize("which", range(len(FAULTS)))
def test_the_shim_notices_a_fault(library: Path, which: int) -> None:
    code = f"import ctypes; ctypes.CDLL({str(library)!r}).shim_fault({which})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode != 0
    assert FAULTS[which] in run.stderr


def test_the_orders_show_a_race(library: Path) -> None:
    shim = Shim(library)
    seen = set()
    for order in ORDERS:
        shim.set(order)
        seen.add(shim.fault(len(FAULTS)))
    assert len(seen) == 3
