"""Kernel throughput: `adam_step` against the machine's limit and against what others do with the same streams.

A row is one parameter of `numel` elements. In one run, on the same buffers and in turns, it times

* ours: the op `adam_step`, the whole update in one pass;
* limit: the op `stream_limit`, which reads and writes exactly what `adam_step` does with next to no arithmetic;
* torch: the kernel behind torch.optim.AdamW(fused=True) (Adam for L2), without the optimizer's Python, on the fp32
  copies, with the casts that it needs: gradient to fp32 before it, parameter from fp32 after it;
* compile, if asked for: torch.compile of the same update with its casts, all hyperparameters constants: its best case;
* deepspeed, where it is installed: DeepSpeedCPUAdam on the fp32 copies, with the same casts (CPU).

GB/s counts each stream once per direction (28 bytes a parameter for bf16) over the median time. Before a timed call the
last-level cache is overwritten where the streams could still be in it. Clipping and loss scaling are one factor that
`adam_step` always multiplies by, so they are free and no variant of their own.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import ops

SIZES = (100_000, 1_000_000, 10_000_000, 2**26, 250_000_000)
QUICK_SIZES = SIZES[:3]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VARIANTS = ("plain", "amsgrad", "l2", "split")
ITERATIONS = 10
WARM_UP = 2

LR, BETA1, BETA2, EPS, WEIGHT_DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.1

Contestant = Callable[[], Any]
Row = dict[str, Any]


class Streams:
    """The buffers of one parameter, the tables that `adam_step` reads, and the ways to update it."""

    def __init__(self, numel: int, dtype: str, variant: str, device: str) -> None:
        self.numel, self.variant, self.device = numel, variant, device
        self.amsgrad, self.l2, self.split = (variant == name for name in ("amsgrad", "l2", "split"))
        chunks = -(-numel // ops.CHUNK)

        def zeros(n: int = chunks * ops.CHUNK, kind: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(n, dtype=kind, device=device)

        self.grad = torch.randn(numel, device=device).to(DTYPES[dtype])
        self.param = torch.randn(numel, device=device).to(DTYPES[dtype])
        self.casts = dtype != "fp32"
        self.master = self.param.float() if self.casts and not self.split else None
        self.remainder = zeros(numel, torch.int16) if self.split else None
        self.exp_avg, self.exp_avg_sq = zeros(), zeros()
        self.max_exp_avg_sq = zeros() if self.amsgrad else None

        row = [0, numel, 0, 0, 0, 0 if self.amsgrad else -1, 0, 0]
        self.segments = torch.tensor([row], device=device)
        self.chunk_segment = zeros(chunks, torch.int32)
        self.scalars = torch.zeros(1, ops.SCALAR_WORDS, device=device)
        self._fill_scalars()

    def _fill_scalars(self) -> None:
        """The row of a first step, as the optimizer's control makes it."""
        groups = torch.tensor([[LR, BETA1, BETA2, EPS, WEIGHT_DECAY, 0.0, 0.0, 0.0]], dtype=torch.float64)
        mode = (0 if self.l2 else ops.GROUP_DECOUPLED) | (ops.GROUP_AMSGRAD if self.amsgrad else 0)
        groups.view(torch.int64)[0, ops.GROUP_MODE] = mode
        control = torch.zeros(ops.CONTROL_FLAGS + 1, dtype=torch.int64)
        control[ops.CONTROL_FLAGS] = 1  # the parameter had a gradient
        zeros = [torch.zeros(n, dtype=torch.int64, device=self.device) for n in (1, ops.SKIPPED_WORDS)]
        group = torch.zeros(1, dtype=torch.int32, device=self.device)
        control, groups = control.to(self.device), groups.to(self.device)
        ops.step_control(control, 1, group, groups, None, None, True, False, zeros[0], self.scalars, zeros[1])

    @property
    def bytes_per_param(self) -> int:
        """Every stream that `adam_step` reads, and every one that it writes."""
        once = self.grad.element_size()  # read
        both = self.param.element_size() if self.master is None else 0
        once += self.param.element_size() if self.master is not None else 0  # written; the master is what is read
        for t in (self.master, self.remainder, self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq):
            both += 0 if t is None else t.element_size()
        return once + 2 * both

    def ours(self) -> None:
        ops.adam_step(
            self.segments, self.chunk_segment, self.scalars, [self.grad], [self.param], self.master, self.remainder,
            self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq,
        )  # fmt: skip

    def limit(self) -> None:
        n = self.numel
        ops.stream_limit(
            self.grad, self.param, self.master, self.remainder, self.exp_avg[:n], self.exp_avg_sq[:n],
            None if self.max_exp_avg_sq is None else self.max_exp_avg_sq[:n],
        )  # fmt: skip

    # -- the others, on the same fp32 buffers ------------------------------------------------------------------------

    def make_fp32(self) -> None:
        """What only the others need: an fp32 gradient, and an fp32 master where ours is not kept whole."""
        n = self.numel
        self.grad32 = torch.empty(n, device=self.device) if self.casts else self.grad
        self.master32 = self.master if self.master is not None else self.param.float() if self.casts else self.param
        self.moments = [self.exp_avg[:n], self.exp_avg_sq[:n]]
        self.maximum = [] if self.max_exp_avg_sq is None else [self.max_exp_avg_sq[:n]]

    def with_casts(self, update: Contestant) -> Contestant:
        """The update between the two casts that 16-bit parameters need."""
        if not self.casts:
            return update

        def run() -> None:
            self.grad32.copy_(self.grad)
            update()
            self.param.copy_(self.master32)

        return run

    def torch_fused(self) -> Contestant:
        kernel: Callable[..., Any] = torch._fused_adam_ if self.l2 else torch._fused_adamw_
        state = [[self.master32], [self.grad32], *([t] for t in self.moments), self.maximum]
        step = torch.ones((), device=self.device)
        options = {"lr": LR, "beta1": BETA1, "beta2": BETA2, "weight_decay": WEIGHT_DECAY, "eps": EPS}
        return self.with_casts(lambda: kernel(*state, [step], **options, amsgrad=self.amsgrad, maximize=False))

    def torch_compile(self) -> Contestant:
        inv_sqrt = 1.0 / math.sqrt(1.0 - BETA2)

        def adam(grad: Tensor, param: Tensor, master: Tensor, m: Tensor, v: Tensor, maximum: list[Tensor]) -> None:
            g = grad.float()
            p = master if self.l2 else master * (1.0 - LR * WEIGHT_DECAY)
            if self.l2:
                g = g + WEIGHT_DECAY * p
            m.lerp_(g, 1.0 - BETA1)
            v.mul_(BETA2).addcmul_(g, g, value=1.0 - BETA2)
            for x in maximum:
                x.copy_(torch.maximum(x, v))
            denom = (maximum[0] if maximum else v).sqrt() * inv_sqrt + EPS
            master.copy_(p - LR / (1.0 - BETA1) * (m / denom))
            if self.casts:
                param.copy_(master)

        torch._dynamo.reset()  # or the last sizes would count as recompilations
        compiled = torch.compile(adam, dynamic=False, fullgraph=True)
        m, v = self.moments

        def run() -> None:
            compiled(self.grad, self.param, self.master32, m, v, self.maximum)

        run()
        return run

    def deepspeed(self) -> Contestant:
        adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        p = torch.nn.Parameter(self.master32)
        p.grad = self.grad32
        options = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": WEIGHT_DECAY}
        optimizer = adam([p], **options, adamw_mode=not self.l2)
        optimizer.state[p] = {"step": 0, "exp_avg": self.moments[0], "exp_avg_sq": self.moments[1]}
        return self.with_casts(optimizer.step)


def memory_needed(numel: int, dtype: str, variant: str) -> int:
    """Bytes that a row allocates, those of the casts included."""
    fp32 = 2 + (variant == "amsgrad")  # exp_avg, exp_avg_sq, max_exp_avg_sq
    if dtype == "fp32":
        return numel * 4 * (2 + fp32)
    return numel * (2 + 2 + 4 * (fp32 + 2) + 2 * (variant == "split"))  # grad, param; master, fp32 gradient; remainder


def memory_free(device: str) -> int:
    """Bytes that may still be allocated."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    found = [
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    ]
    for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory"):  # a container's own bound, in either version
        for most, now in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            try:
                found.append(int(Path(folder, most).read_text()) - int(Path(folder, now).read_text()))
            except (OSError, ValueError):  # not there, or "max"
                continue
    return min(found)


def last_level_cache(device: str) -> int:
    """Bytes of the largest cache that this machine tells of."""
    if device == "cuda":
        return (
            int(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 0))
            or 128 * 2**20
        )
    sizes = [64 * 2**20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]])
    return max(sizes)


class Clock:
    """Times calls with a cold cache: CUDA events on a GPU, else the wall clock."""

    def __init__(self, device: str, flush_bytes: int | None) -> None:
        self.device = device
        self.cache = last_level_cache(device)
        # Twice the cache pushes out what was in it. On a GPU it also keeps the device busy while the host launches what
        # is timed, hence the floor.
        wanted = max(2 * self.cache, 512 * 2**20) if device == "cuda" else 2 * self.cache
        self.flush_bytes = min(wanted, memory_free(device) // 4) if flush_bytes is None else flush_bytes
        self.flush = torch.zeros(self.flush_bytes // 4, device=device)

    def describe(self) -> str:
        when = "every timed call" if self.device == "cuda" else "timed calls whose streams fill less than 4 caches"
        return f"{self.flush_bytes} bytes read and written before {when} (cache: {self.cache} bytes)"

    def start(self, call: Contestant) -> Callable[[], float]:
        """Starts a call; the result gives its milliseconds once it is done."""
        if self.device != "cuda":
            begin = time.perf_counter()
            call()
            end = time.perf_counter()
            return lambda: 1e3 * (end - begin)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        call()
        events[1].record()
        return lambda: float(events[0].elapsed_time(events[1]))

    def race(self, calls: dict[str, Contestant], iterations: int, stream_bytes: int) -> dict[str, list[float]]:
        """Milliseconds of each call, sorted. They take turns, and who begins changes: all see the same machine."""
        if iterations < 1:
            raise ValueError(f"iterations: at least 1 wanted, got {iterations}")
        cold = self.device == "cuda" or stream_bytes < 4 * self.cache
        for call in calls.values():
            for _ in range(WARM_UP):
                call()
        times: dict[str, list[float]] = {name: [] for name in calls}
        names = list(calls)
        for _ in range(iterations):
            pending = {}
            for name in names:
                if cold:
                    self.flush.add_(1.0)
                pending[name] = self.start(calls[name])
            if self.device == "cuda":
                torch.cuda.synchronize()
            for name, milliseconds in pending.items():
                times[name].append(milliseconds())
            names.append(names.pop(0))
        return {name: sorted(found) for name, found in times.items()}


def percentile(ordered: Sequence[float], q: float) -> float:
    """Linear between neighbours; q from 0 to 1."""
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def copy_gb_s(clock: Clock, iterations: int) -> float:
    """Bandwidth of a large copy, bytes read plus bytes written: what the device gives to the simplest kernel."""
    source = torch.ones(min(2**30, memory_free(clock.device) // 8) // 4, device=clock.device)
    target = torch.empty_like(source)
    times = clock.race({"copy": lambda: target.copy_(source)}, iterations, 2 * source.nbytes)["copy"]
    return 2 * source.nbytes / 1e6 / percentile(times, 0.5)


def measure(
    numel: int, dtype: str, variant: str, clock: Clock, iterations: int, compiled: bool, left_out: dict[str, str]
) -> Row:
    """One row. A baseline that cannot run is left out, and `left_out` says why."""
    streams = Streams(numel, dtype, variant, clock.device)
    streams.make_fp32()
    calls: dict[str, Contestant] = {"ours": streams.ours, "limit": streams.limit, "torch": streams.torch_fused()}
    others = {"compile": streams.torch_compile} if compiled else {}
    if clock.device == "cpu" and variant != "amsgrad":  # which DeepSpeedCPUAdam does not have
        others["deepspeed"] = streams.deepspeed
    for name, make in others.items():
        if name not in left_out:
            try:
                calls[name] = make()
            except Exception as error:  # a missing package or toolchain: the reason in one line
                left_out[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    counted = streams.bytes_per_param * numel
    times = clock.race(calls, iterations, counted)
    ms = {name: percentile(found, 0.5) for name, found in times.items()}
    row: Row = {
        "numel": numel,
        "dtype": dtype,
        "variant": variant,
        "bytes_per_param": streams.bytes_per_param,
        "ms": ms["ours"],
        "ms_p20": percentile(times["ours"], 0.2),
        "ms_p80": percentile(times["ours"], 0.8),
        "gb_s": counted / 1e6 / ms["ours"],
        "limit_ms": ms["limit"],
        "limit_gb_s": counted / 1e6 / ms["limit"],
        "share_of_limit": ms["limit"] / ms["ours"],
    }
    for name in ("torch", "compile", "deepspeed"):
        row[f"{name}_ms"] = ms.get(name)
        row[f"{name}_ratio"] = ms[name] / ms["ours"] if name in ms else None
    return row


def plan(dtypes: Sequence[str], variants: Sequence[str]) -> list[tuple[str, str]]:
    """(dtype, variant) of the rows of one size: plain for every dtype, the other variants for the first one only."""
    pairs = [(dtype, "plain") for dtype in dtypes if "plain" in variants]
    pairs += [(dtypes[0], variant) for variant in variants if variant != "plain"]
    return [(dtype, variant) for dtype, variant in pairs if variant != "split" or dtype == "bf16"]


def versions() -> dict[str, str]:
    """Of everything that takes part."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    for package in ("zero1_cuda", "deepspeed", "triton"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**found, "built": f"torch {ops.build_info()['torch']}, {ops.build_info()['compiler']}"}


def origin() -> dict[str, str]:
    """What made a result: the command, the commit of the sources ("none" where they are no clone), the date."""
    file = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(file.parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)  # an installed package may lie inside of another clone
        commit = git("rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        commit = "none"
    now = datetime.datetime.now(datetime.timezone.utc)
    command = shlex.join(["python", "-m", "zero1_cuda", *sys.argv[1:]])
    return {"command": command, "commit": commit, "date": now.isoformat(timespec="seconds")}


def device_name(device: str) -> str:
    """As the machine calls it."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def run(
    sizes: Sequence[int] = SIZES,
    dtypes: Sequence[str] = tuple(DTYPES),
    variants: Sequence[str] = VARIANTS,
    device: str | None = None,
    iterations: int = ITERATIONS,
    compiled: bool = False,
    flush_bytes: int | None = None,
    show: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Measures every row that fits into memory; -> facts about the run and its rows, as they go to JSON.

    Args:
        device: "cpu" or "cuda"; None: cuda where it can be used.
        compiled: torch.compile takes part.
        flush_bytes: of the buffer that makes the cache cold; None: from the cache's size.
        show: gets the table, line by line.

    Raises:
        ValueError: no iterations, an unknown dtype, variant or device, or nothing to measure.
        RuntimeError: cuda is asked for and cannot be used.
    """
    if iterations < 1:
        raise ValueError(f"iterations: at least 1 wanted, got {iterations}")
    for name, given, known in (("dtypes", dtypes, DTYPES), ("variants", variants, VARIANTS)):
        if not given or not set(given) <= set(known):
            raise ValueError(f"{name}: of {', '.join(known)} wanted, got {', '.join(given) or 'none'}")
    reason = ops.cuda_error() or (None if torch.cuda.is_available() else "torch sees no CUDA device")
    if device is None:
        device = "cpu" if reason else "cuda"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: cpu or cuda wanted, got {device!r}")
    if device == "cuda" and reason:
        raise RuntimeError(f"cuda cannot be used: {reason}")
    pairs = plan(dtypes, variants)
    if not pairs or not sizes or min(sizes) < 1:
        raise ValueError("nothing to measure: sizes of at least 1 wanted, and split goes with bf16 only")

    clock = Clock(device, flush_bytes)
    result: dict[str, Any] = {
        "device": device_name(device),
        "device_type": device,
        "cpu_level": ops.cpu_level(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "versions": versions(),
        "iterations": iterations,
        "warm_up": WARM_UP,
        "cold_cache": clock.describe(),
        "copy_gb_s": copy_gb_s(clock, iterations) if device == "cuda" else None,
        "left_out": {},
        "rows": [],
    }
    where = "" if device == "cuda" else f", {result['threads']} threads, {result['cpu_level']}"
    show(f"{result['device']}{where}, torch {torch.__version__}, load {result['load']:.1f}, {iterations} iterations")
    show(f"cold cache: {result['cold_cache']}")
    if result["copy_gb_s"]:
        show(f"a copy: {result['copy_gb_s']:.0f} GB/s, read plus written")
    show(HEADER)
    for numel in sizes:
        for dtype, variant in pairs:
            gc.collect()  # optimizers and compiled code of the last row hold its buffers in cycles
            if device == "cuda":
                torch.cuda.empty_cache()  # memory_free() counts what the allocator holds as taken
            needed, free = memory_needed(numel, dtype, variant), memory_free(device)
            if needed > 0.8 * free:
                text = f"needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
                result["left_out"][f"{numel} {dtype} {variant}"] = text
                show(f"{numel:>11} {dtype:>5} {variant:>8}  left out: {text}")
                continue
            row = measure(numel, dtype, variant, clock, iterations, compiled, result["left_out"])
            if result["copy_gb_s"]:
                row["share_of_copy"] = row["gb_s"] / result["copy_gb_s"]
            result["rows"].append(row)
            show(line(row))
    for name in ("compile", "deepspeed"):
        if name in result["left_out"]:
            show(f"{name} left out: {result['left_out'][name]}")
    return result


HEADER = (
    f"{'numel':>11} {'dtype':>5} {'variant':>8} {'ms':>9} {'p20':>9} {'p80':>9} {'GB/s':>7} {'limit':>7} {'share':>6}"
    f" {'torch':>6} {'compile':>7} {'deepspeed':>9}"
)


def line(row: Row) -> str:
    """A row of the table; the last three columns say how many times as long the others take."""
    ratios = [row[f"{name}_ratio"] for name in ("torch", "compile", "deepspeed")]
    columns = (f"{'-' if r is None else format(r, '.2f') + 'x':>{w}}" for r, w in zip(ratios, (6, 7, 9), strict=True))
    return (
        f"{row['numel']:>11} {row['dtype']:>5} {row['variant']:>8} {row['ms']:>9.3f} {row['ms_p20']:>9.3f} "
        f"{row['ms_p80']:>9.3f} {row['gb_s']:>7.1f} {row['limit_gb_s']:>7.1f} {row['share_of_limit']:>6.2f} "
        + " ".join(columns)
    )


def plot(result: dict[str, Any], path: str) -> None:
    """Draws throughput against size, each kind of row with the machine's limit on its streams."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")  # a file is written; no display is needed
    figure, axes = importlib.import_module("matplotlib.pyplot").subplots(figsize=(7.5, 4.5))
    kinds = dict.fromkeys((row["dtype"], row["variant"]) for row in result["rows"])
    for dtype, variant in kinds:
        rows = [row for row in result["rows"] if (row["dtype"], row["variant"]) == (dtype, variant)]
        sizes = [row["numel"] for row in rows]
        (drawn,) = axes.plot(sizes, [row["gb_s"] for row in rows], marker="o", label=f"{dtype} {variant}")
        axes.plot(sizes, [row["limit_gb_s"] for row in rows], linestyle="--", linewidth=1, color=drawn.get_color())
    axes.set(xscale="log", xlabel="parameters", ylabel="GB/s", title=f"adam_step on {result['device']} (dashed: limit)")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main(args: argparse.Namespace) -> int:
    """`python -m zero1_cuda bench`."""
    level = ops.cpu_level()
    try:
        if args.plot:
            importlib.import_module("matplotlib")  # before minutes of measuring
        for path in filter(None, (args.json, args.plot)):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        ops.set_cpu_level(args.cpu_level or level)
        sizes = args.sizes or (QUICK_SIZES if args.quick else SIZES)
        result = run(sizes, args.dtypes, args.variants, args.device, args.iterations, args.compile)
        if args.json:
            Path(args.json).write_text(json.dumps({**origin(), **result}, indent=1) + "\n")
        if args.plot:
            plot(result, args.plot)
    except ModuleNotFoundError as error:
        print(f"zero1_cuda bench: --plot needs matplotlib ({error})", file=sys.stderr)
        return 1
    except (OSError, RuntimeError, ValueError) as error:
        print(f"zero1_cuda bench: {error}", file=sys.stderr)
        return 1
    finally:
        ops.set_cpu_level(level)
    return 0
