"""compute-sanitizer finds no access outside memory and no race in any kernel."""

import os
import shutil

import pytest
from helpers.sanitizer import sanitize

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(device, tool, record_property):
    if device != "cuda":
        pytest.skip("compute-sanitizer checks CUDA kernels")
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{home}/bin")
    if program is None:
        pytest.skip("compute-sanitizer not found on PATH or in CUDA_HOME/bin")
    record_property("summary", sanitize(program, tool, device))
