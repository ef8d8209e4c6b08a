"""Everything that only a GPU can show, in one run of less than 8 minutes, as JSON.

    python bench/gpu_check.py [--json FILE] [--only NAME,...] [--skip NAME,...] [--budget SECONDS]

Needs Python, torch with CUDA, setuptools, nvcc and a C++ compiler; nothing is downloaded. The extension is built in
place first. Each check (gpu_checks.py) runs in a process of its own: a fault of the device, which spoils its whole
process, stops no other check. The exit status is 1 if a check fails or there is no GPU.

`--device cpu` runs the same script on the CPU; what only CUDA can do is skipped and says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

# In this order, with the seconds after which each is given up. What is cheap and says most comes first.
LIMITS = {
    "build": 240,
    "kernels": 90,
    "streams": 40,
    "optimizer": 60,
    "graph": 60,
    "scaler": 60,
    "storages": 40,
    "memory": 40,
    "large": 60,
    "host_time": 40,
    "benchmark": 120,
    "two_ranks": 100,
    "memcheck": 100,
    "racecheck": 100,
}
BUDGET = 450.0  # seconds for all of them


def tail(text: str, lines: int = 12) -> str:
    """The end of an output, without the paths of this machine."""
    return "\n".join(text.replace(f"{ROOT}/", "").strip().splitlines()[-lines:])


def run(command: list[str], limit: float, env: dict[str, str]) -> tuple[int | None, str]:
    """(exit status or None where it had to be ended, output) of a command and of whatever it starts."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def build(device: str, capability: str, limit: float) -> dict[str, Any]:
    """Builds in place, for this device only unless TORCH_CUDA_ARCH_LIST says otherwise."""
    env = dict(os.environ)
    if device == "cuda":
        env["ZERO1_CUDA"] = "1"  # no nvcc: an error
        env.setdefault("TORCH_CUDA_ARCH_LIST", capability)
    status, output = run([sys.executable, "setup.py", "build_ext", "--inplace"], limit, env)
    if status != 0:
        return {"status": "fail", "reason": f"exit status {status}\n{tail(output, 30)}"}
    return {"status": "pass", "details": {"archs": env.get("TORCH_CUDA_ARCH_LIST", "default")}}


def isolated(name: str, device: str, limit: float) -> dict[str, Any]:
    """A check in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, str(ROOT / "tests" / "gpu" / "gpu_checks.py"), name, device, str(result)]
        status, output = run(command, limit, dict(os.environ))
        if status is None:
            return {"status": "fail", "reason": f"no result within {limit:.0f} s\n{tail(output)}"}
        if not result.exists():
            return {"status": "fail", "reason": f"the process died, exit status {status}\n{tail(output)}"}
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def in_process(name: str, device: str, limit: float) -> dict[str, Any]:
    """The same here: quicker, and on the CPU as safe."""
    sys.path.insert(0, str(ROOT / "tests" / "gpu"))
    import gpu_checks

    return gpu_checks.perform(name, device)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: bench/results/gpu-check-<device>.json")
    parser.add_argument("--only", default=",".join(LIMITS), metavar="NAME,...")
    parser.add_argument("--skip", default="", metavar="NAME,...")
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS")
    parser.add_argument(
        "--isolate", action=argparse.BooleanOptionalAction, help="a process per check; default: on CUDA"
    )
    args = parser.parse_args(argv)
    args.only, args.skip = args.only.split(","), [name for name in args.skip.split(",") if name]
    unknown = {*args.only, *args.skip} - LIMITS.keys()
    if unknown:
        parser.error(f"unknown checks: {', '.join(sorted(unknown))}; there are {', '.join(LIMITS)}")
    if args.isolate is None:
        args.isolate = args.device == "cuda"
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    begin = time.monotonic()
    # torch is asked in another process: a context of this one would hold memory of the device
    device = isolated("device", args.device, 120)
    if device["status"] != "pass":
        print(f"gpu-check: {device['reason'].splitlines()[-1]}", file=sys.stderr)
        return 1
    facts = device["details"]
    print(f"{facts['device']}, driver {facts['driver']}, torch {facts['torch']}, Python {platform.python_version()}")
    checks: dict[str, Any] = {}
    for name, limit in LIMITS.items():
        if name not in args.only or name in args.skip:
            continue
        started = time.monotonic()
        left = args.budget - (started - begin)
        if left < 5:
            found = {"status": "skip", "reason": f"the budget of {args.budget:.0f} s is used up"}
        elif name == "build":
            found = build(args.device, facts["capability"], min(limit, left))
        else:
            found = (isolated if args.isolate else in_process)(name, args.device, min(limit, left))
        found["seconds"] = round(time.monotonic() - started, 1)
        checks[name] = found
        details = found.get("details", {})
        table = details.pop("table", None)
        short = "" if table else ", ".join(f"{name} {value}" for name, value in details.items())
        print(f"{found['status']}  {name:<10} {found['seconds']:>6.1f} s  {found.get('reason', short)}", flush=True)
        for line in table or []:
            print(f"    {line}")
    counts = {status: sum(c["status"] == status for c in checks.values()) for status in ("pass", "fail", "skip")}
    result = {**facts, "counts": counts, "seconds": round(time.monotonic() - begin, 1), "checks": checks}
    slug = re.sub(r"[^a-z0-9]+", "-", facts["device"].lower()).strip("-")
    path = args.json or HERE / "results" / f"gpu-check-{slug}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"gpu-check: {counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped -> {path.name}")
    return int(counts["fail"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
