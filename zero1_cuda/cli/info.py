"""`python -m zero1_cuda info`: versions, what was built, what is usable here and why not.

It comes out whatever is broken, so nothing here imports torch or the extension at the top.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zero1_cuda

PACKAGE = Path(__file__).absolute().parents[1]


def _attempt(probe: Callable[[], Any]) -> Any:
    """What the probe finds, or in one line why it cannot: a report on a broken machine must not break itself."""
    try:
        return probe()
    except Exception as error:
        return f"not available: {one_line(error)}"


def one_line(error: BaseException) -> str:
    """The error and what caused it: the first cause is the one that names the file."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        text = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
        if text not in parts:
            parts.append(text)
        cause = cause.__cause__
    return " <- ".join(parts)


def _program_version(*program: str, pick: str = "") -> str:
    """`program --version`: its first line, or the first one that contains `pick`."""
    done = subprocess.run([*program, "--version"], check=False, capture_output=True, text=True, timeout=30)
    lines = [line.strip() for line in done.stdout.splitlines() if pick in line]
    return lines[0] if lines else f"{' '.join(program)} --version says nothing (exit status {done.returncode})"


def _compiler() -> str:
    """The one that the build would take."""
    words = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    return _program_version(*words) if shutil.which(words[0]) else f"{words[0]} not found"


def _nvcc() -> str:
    """As the build looks for it: CUDA_HOME or CUDA_PATH where one is set, else PATH, else the usual place."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = [f"{home}/bin"] if home else [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    return f"{found} ({_program_version(found, pick='release')})" if found else "not found"


def _torch() -> str:
    import torch

    return f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"


@functools.cache
def _fatal_signal() -> int:
    """The signal that loading the libraries ends with, 0: none. A file that was cut short can kill the process."""
    folder = str(PACKAGE.parent)
    code = f"import sys; sys.path.insert(0, {folder!r}); import zero1_cuda.ops"
    return max(0, -subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode)


def _ops() -> Any:
    if _fatal_signal():
        raise ImportError(f"loading the compiled libraries ends with signal {_fatal_signal()}: install again")
    return importlib.import_module("zero1_cuda.ops")


def _built() -> dict[str, Any]:
    return dict(_ops().build_info())


def _cpu_level() -> str:
    ops = _ops()
    return f"{ops.cpu_level()} (of {', '.join(ops.cpu_levels())})"


def _cuda() -> str:
    error = _ops().cuda_error()
    return f"not usable: {error}" if error else "usable"


def _gpus() -> list[str]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        found.append(f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})")
    return found


def _backend(name: str) -> str:
    import torch.distributed as dist

    return "available" if dist.is_available() and dist.is_backend_available(name) else "not available"


def _version() -> str:
    return f"{zero1_cuda.__version__} ({PACKAGE.resolve()})"


def info() -> dict[str, Any]:
    """Versions, what was built, what is usable here and why not. Never raises."""
    return {
        "zero1_cuda": _attempt(_version),
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "torch": _attempt(_torch),
        "compiler": _attempt(_compiler),
        "nvcc": _attempt(_nvcc),
        "built": _attempt(_built),
        "cpu_level": _attempt(_cpu_level),
        "cuda": _attempt(_cuda),
        "gpus": _attempt(_gpus),
        "gloo": _attempt(lambda: _backend("gloo")),
        "nccl": _attempt(lambda: _backend("nccl")),
    }


def run(args: argparse.Namespace) -> int:
    facts = info()
    if args.json:
        print(json.dumps(facts, indent=2, default=str))
        return 0
    lines = []
    for name, value in facts.items():
        if isinstance(value, dict):
            lines.append(f"{name}:")
            lines += [f"  {key}: {_plain(part)}" for key, part in value.items()]
        else:
            lines.append(f"{name}: {_plain(value)}")
    print("\n".join(lines))
    return 0


def _plain(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text or "none"
