"""Runs the tests of the kernels' memory under NVIDIA's compute-sanitizer, and reads what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def sanitize(program: str, tool: str, device: str) -> str:
    """Its summary; fails if it finds something, and skips where it cannot work."""
    command = [program, "--tool", tool, "--error-exitcode", "99"]
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []  # torch asks and expects refusals
    command += [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--gpu-device", device]
    command += [str(TESTS / "gpu" / "test_kernels_within_memory.py")]
    # without torch's cache every tensor is an allocation of its own, with its own end
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, cwd=TESTS.parent, env=env, capture_output=True, text=True)
    output = done.stdout + done.stderr
    told = [line for line in output.splitlines() if line.startswith("=========")]
    ran = " passed" in output
    if "not supported" in output and not ran:
        pytest.skip(f"compute-sanitizer cannot work here: {' '.join(told)[:300]}")
    assert done.returncode == 0, f"{tool}: exit status {done.returncode}\n" + "\n".join(told[:20] or [output[-1000:]])
    assert ran, output
    return told[-1] if told else ""
