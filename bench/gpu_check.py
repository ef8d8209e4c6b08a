"""Everything that only a GPU can show, in one run of less than 8 minutes, as JSON.

    python bench/gpu_check.py [--json FILE] [--only NAME,...] [--skip NAME,...] [--budget SECONDS]

Needs Python, torch with CUDA, setuptools, pytest, nvcc and a C++ compiler; nothing is downloaded. The extension is
built in place first. Then the tests in tests/gpu run, each file in a process of its own: a fault of the device, which
spoils its whole process, stops no other file. The exit status is 1 if a test fails or there is no GPU.

`--device cpu` runs the same tests on the CPU; what only CUDA can do is skipped and says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

TESTS = common.ROOT / "tests" / "gpu"
# In this order, with the seconds after which each is given up. What is cheap and says most comes first.
LIMITS = {
    "build": 240,
    "kernels_on_device": 90,
    "kernels_within_memory": 40,
    "streams": 40,
    "optimizer_on_device": 60,
    "graph": 60,
    "scaler_on_device": 60,
    "storages": 40,
    "memory_on_device": 40,
    "large": 60,
    "host_time": 40,
    "benchmark": 120,
    "two_ranks_on_device": 100,
    "sanitizer": 200,
}
BUDGET = 450.0  # seconds for all of them
Found = dict[str, Any]  # "status": pass, fail or skip; "reason"; "details": what was measured


def tail(text: str, lines: int = 12) -> str:
    """The end of an output, without the paths of this machine."""
    return "\n".join(text.replace(f"{common.ROOT}/", "").strip().splitlines()[-lines:])


def run(command: list[str], limit: float, env: dict[str, str]) -> tuple[int | None, str]:
    """(exit status or None where it had to be ended, output) of a command and of whatever it starts."""
    process = subprocess.Popen(
        command,
        cwd=common.ROOT,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def facts_of(device: str) -> Found:
    """About the device, asked in another process: a context of this one would hold memory of it."""
    if device == "cpu":
        return {"device": common.cpu_name(), "capability": ""}
    script = "import common, json; print(json.dumps(common.cuda_facts()))"
    env = os.environ | {"PYTHONPATH": str(common.ROOT / "bench")}
    status, output = run([sys.executable, "-c", script], 120, env)
    if status != 0:
        return {"missing": f"the GPU does not answer, exit status {status}: {tail(output, 1)}"}
    found: Found = json.loads(output.splitlines()[-1])
    return found


def build(device: str, capability: str, limit: float) -> list[Found]:
    """Builds in place, for this device only unless TORCH_CUDA_ARCH_LIST says otherwise."""
    env = dict(os.environ)
    if device == "cuda":
        env["ZERO1_CUDA"] = "1"  # no nvcc: an error
        env.setdefault("TORCH_CUDA_ARCH_LIST", capability)
    status, output = run([sys.executable, "setup.py", "build_ext", "--inplace"], limit, env)
    if status != 0:
        return [{"test": "build", "status": "fail", "reason": f"exit status {status}\n{tail(output, 30)}"}]
    return [{"test": "build", "status": "pass", "details": {"archs": env.get("TORCH_CUDA_ARCH_LIST", "default")}}]


def tests_in(names: list[str], device: str, limit: float) -> list[Found]:
    """What the tests of these files have found, in one process; its death or delay is one more failure."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        files = [str(TESTS / f"test_{name}.py") for name in names]
        options = ["-m", "gpu", "-v", "--tb", "short", "-p", "no:cacheprovider", "--gpu-device", device]
        command = [sys.executable, "-m", "pytest", *options, "--gpu-report", str(report), *files]
        status, output = run(command, limit, dict(os.environ))
        found = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    if status is None:
        found.append({"test": "all", "status": "fail", "reason": f"no result within {limit:.0f} s\n{tail(output)}"})
    elif status not in (0, 1) or not found or (status == 1) != any(f["status"] == "fail" for f in found):
        reason = f"the process died, exit status {status}\n{tail(output)}"
        found.append({"test": "all", "status": "fail", "reason": reason})
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default=",".join(LIMITS), metavar="NAME,...")
    parser.add_argument("--skip", default="", metavar="NAME,...")
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS")
    parser.add_argument("--isolate", action=argparse.BooleanOptionalAction, help="a process per file; default: on CUDA")
    args = parser.parse_args(argv)
    args.only, args.skip = args.only.split(","), [name for name in args.skip.split(",") if name]
    unknown = {*args.only, *args.skip} - LIMITS.keys()
    if unknown:
        parser.error(f"unknown checks: {', '.join(sorted(unknown))}; there are {', '.join(LIMITS)}")
    if args.isolate is None:
        args.isolate = args.device == "cuda"
    return args


def show(name: str, check: Found) -> None:
    print(f"{check['status']}  {name:<22} {check['seconds']:>6.1f} s", flush=True)
    for test in check["tests"]:
        details = test.get("details", {})
        table = details.get("table")
        told = "" if table else ", ".join(f"{key} {value}" for key, value in details.items())
        if test.get("reason") or told:
            print(f"      {test['test']}: {test.get('reason') or told}")
        for line in table or []:
            print(f"      {line}", flush=True)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    begin = time.monotonic()
    facts = facts_of(args.device)
    missing = facts.get("missing")
    if missing is None and importlib.util.find_spec("pytest") is None:
        missing = f"pytest is missing, and nothing is downloaded here: {sys.executable} -m pip install pytest"
    if missing:
        print(f"gpu-check: {missing}", file=sys.stderr)
        return 1
    versions = common.versions()
    print(f"{facts['device']}, torch {versions['torch']}, Python {versions['python']}")
    names = [name for name in LIMITS if name in args.only and name not in args.skip]
    files = [name for name in names if name != "build"]
    parts = [["build"]] * ("build" in names) + (
        [[name] for name in files] if args.isolate else [files] if files else []
    )
    checks: dict[str, Found] = {}
    for part in parts:
        started = time.monotonic()
        left = args.budget - (started - begin)
        limit = min(left, sum(LIMITS[name] for name in part))
        if left < 5:
            found: list[Found] = [
                {"test": "all", "status": "skip", "reason": f"the budget of {args.budget:.0f} s is used up"}
            ]
        elif part == ["build"]:
            found = build(args.device, facts["capability"], limit)
        else:
            found = tests_in(part, args.device, limit)
        worst = next((s for s in ("fail", "pass", "skip") if any(f["status"] == s for f in found)), "skip")
        name = part[0] if len(part) == 1 else "all"
        checks[name] = {"status": worst, "seconds": round(time.monotonic() - started, 1), "tests": found}
        show(name, checks[name])
    statuses = [test["status"] for check in checks.values() for test in check["tests"]]
    counts = {status: statuses.count(status) for status in ("pass", "fail", "skip")}
    slug = re.sub(r"[^a-z0-9]+", "-", facts["device"].lower()).strip("-") if args.device == "cuda" else "cpu"
    path = args.json or common.ROOT / "bench" / "results" / f"gpu-check-{slug}.json"
    seconds = round(time.monotonic() - begin, 1)
    common.write(path, {**facts, "counts": counts, "seconds": seconds, "checks": checks})
    print(f"gpu-check: {counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped -> {path.name}")
    return int(counts["fail"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
