"""What the scripts in bench/ share: ranks of this machine, their clock, facts about it, and how a result is written.

A result says what made it: `command`, `commit` ("-dirty" where tracked files differed from it; "unknown" outside a
clone), `date` and `versions`, then what was found.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """With the option that every script has."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="where to write what was found")
    return made


# -- ranks -------------------------------------------------------------------------------------------------------------


def run_ranks(world: int, worker: Callable[..., Any], *args: Any) -> Any:
    """What rank 0 gives for worker(rank, world, *args), called by `world` fresh processes that form a gloo group."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (world, folder, worker, args), nprocs=world)
        return json.loads(Path(folder, "result.json").read_text())


def _rank(rank: int, world: int, folder: str, worker: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))  # the cores are shared out
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    found = worker(rank, world, *args)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def slowest(call: Callable[[], Any]) -> float:
    """Seconds of a call that all ranks begin together, on the slowest of them."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    took = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


# -- facts -------------------------------------------------------------------------------------------------------------


def output_of(*command: str) -> str:
    """What it prints; "" where there is no such program, or it fails."""
    try:
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def process_bytes(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    return 1024 * int(Path("/proc/self/status").read_text().partition(f"\n{field}:")[2].split()[0])


def versions() -> dict[str, str]:
    """Of what takes part."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    for package in ("zero1_cuda", "deepspeed"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """As the machine calls it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def cuda_facts() -> dict[str, Any]:
    """What there is of CUDA; only a "missing" that says why where torch cannot use any. Needs no built extension."""
    if torch.version.cuda is None:
        return {"missing": f"there is no GPU that torch could use: torch {torch.__version__} is built without CUDA"}
    if not torch.cuda.is_available():
        return {"missing": "there is no GPU: torch sees no CUDA device"}
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin")
    release = [line for line in output_of(nvcc or "nvcc", "--version").splitlines() if "release" in line]
    return {
        "device": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "memory_bytes": torch.cuda.mem_get_info()[1],
        "driver": driver[0] if driver else "unknown",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none",
        "nvcc": (release or ["none"])[0],
    }


# -- results -----------------------------------------------------------------------------------------------------------


def command() -> str:
    """This run's, as it is called from the root of the repository; where it writes to is left out."""
    program = Path(sys.argv[0]).resolve()
    program = program.relative_to(ROOT) if program.is_relative_to(ROOT) else Path(program.name)
    return re.sub(r" --(json|plot|folder)[ =]\S+", "", shlex.join(["python", str(program), *sys.argv[1:]]))


def commit() -> str:
    """What is checked out; results are written one after another, so those do not make it dirty."""
    changed = output_of("git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    head = output_of("git", "rev-parse", "HEAD")
    return head + "-dirty" * bool(changed) if head else "unknown"


def write(path: Path | None, found: dict[str, Any], indent: int | None = 1) -> None:
    """Writes a result, with what made it in front; None: it is not wanted. indent=None: on one line, for long lists."""
    if path is None:
        return
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    made = {"command": command(), "commit": commit(), "date": date, "versions": versions()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**made, **found}, indent=indent) + "\n")
