"""The checks of gpu_check.py: python bench/gpu_checks.py NAME cuda|cpu RESULT.json [RANK WORLD RENDEZVOUS]

A check takes the device, raises AssertionError (or anything else) if it fails and Skip if it cannot run, and gives what
it has measured. The reference is always the CPU: its kernels are compared with plain torch by the tests.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import hashlib
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

Details = dict[str, Any]
CHECKS: dict[str, Callable[[str], Details]] = {}
RANKED: dict[str, Callable[[str, int, int], Details]] = {}  # run by several processes, (device, rank, world)


class Skip(Exception):
    """The check cannot run here; the text says why."""


def check(function: Callable[[str], Details]) -> Callable[[str], Details]:
    CHECKS[function.__name__] = function
    return function


def ranked(function: Callable[[str, int, int], Details]) -> Callable[[str, int, int], Details]:
    RANKED[function.__name__] = function
    return function


def perform(name: str, device: str, *rank: str) -> Details:
    """{"status": "pass" | "fail" | "skip", "reason" or "details"}."""
    try:
        if rank or device == "cpu":
            torch.set_num_threads(1)  # which is quicker where others work, too; the results do not depend on it
        if rank:
            number, world, rendezvous = int(rank[0]), int(rank[1]), rank[2]
            timeout = datetime.timedelta(seconds=30)
            dist.init_process_group(
                "gloo", init_method=f"file://{rendezvous}", rank=number, world_size=world, timeout=timeout
            )
            details = RANKED[name](device, number, world)
        else:
            details = CHECKS[name](device)
        if device == "cuda":
            torch.cuda.synchronize()
        return {"status": "pass", "details": details}
    except Skip as reason:
        return {"status": "skip", "reason": str(reason)}
    except Exception as error:
        where = traceback.format_exc().replace(f"{ROOT}/", "").strip().splitlines()[-8:-1]
        return {"status": "fail", "reason": "\n".join([*where, f"{type(error).__name__}: {error}"])}


def output_of(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


# ---- the device ----------------------------------------------------------------------------------


@check
def device(kind: str) -> Details:
    """What this machine has. Must not need the extension: it is not built yet."""
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiler": (output_of("g++", "--version").splitlines() or ["none"])[0],
    }
    if kind == "cpu":
        return {"device": "cpu", "driver": "none", "capability": "", **facts}
    if torch.version.cuda is None:
        raise Skip(f"there is no GPU that torch could use: torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        raise Skip("there is no GPU: torch sees no CUDA device")
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    release = [line for line in output_of(nvcc or "nvcc", "--version").splitlines() if "release" in line]
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver[0] if driver else "unknown",
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "memory_bytes": torch.cuda.mem_get_info()[1],
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none",
        "nvcc": (release or ["none"])[0],
        **facts,
    }


# ---- the kernels against the CPU ops -------------------------------------------------------------


class OnDevice:
    """The ops under their own names, with CPU tensors, run on the device: what tests/shim/checks.py calls a shim."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __getattr__(self, name: str) -> Callable[..., None]:
        from zero1_cuda import ops

        def call(*args: Any) -> None:
            there: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # two arguments may be one tensor
            op_args = [self._move(arg, there) for arg in args]
            if name == "adam_step":  # refuses a shard without its last padding, which no kernel touches
                for k in (7, 8):
                    op_args[k] = self._padded(args[k], op_args[1].numel() * ops.CHUNK, there)
            keep = self._move_rates(op_args[3]) if name == "step_control" else []
            if keep:  # the caller's table goes on pointing to the caller's rates
                del there[args[3].data_ptr(), args[3].numel()]
            getattr(ops, name)(*op_args)
            for here, moved in there.values():
                here.copy_(moved)
            del keep

        return call

    def _move(self, arg: Any, there: dict[tuple[int, int], tuple[Tensor, Tensor]]) -> Any:
        if isinstance(arg, list):
            return [self._move(a, there) for a in arg]
        if not isinstance(arg, Tensor):
            return arg
        key = (arg.data_ptr(), arg.numel())
        if key not in there or not arg.numel():
            # as far from a multiple of 16 bytes as it is here
            offset = arg.data_ptr() % 16 // arg.element_size()
            memory = torch.empty(arg.numel() + offset, dtype=arg.dtype, device=self.device)[offset:]
            there[key] = (arg, memory.view(arg.shape).copy_(arg))
        return there[key][1]

    def _padded(self, t: Tensor, numel: int, there: dict[tuple[int, int], tuple[Tensor, Tensor]]) -> Tensor:
        """A tensor moved anew, with room for `numel` elements."""
        offset = t.data_ptr() % 16 // t.element_size()
        memory = torch.full((max(numel, t.numel()) + offset,), math.nan, device=self.device)[offset:]
        there[t.data_ptr(), t.numel()] = (t, memory[: t.numel()].copy_(t))
        return memory

    def _move_rates(self, groups: Tensor) -> list[Tensor]:
        """Learning rates that the group table points to live on the device, too."""
        from zero1_cuda import ops

        rates = []
        words = groups.view(torch.int64)
        for g, (at, wide) in enumerate(words[:, [ops.GROUP_LR_AT, ops.GROUP_LR_IS_FP64]].tolist()):
            if at:
                kind = ctypes.c_double if wide else ctypes.c_float
                dtype = torch.float64 if wide else torch.float32
                rates.append(torch.tensor(kind.from_address(at).value, dtype=dtype, device=self.device))
                words[g, ops.GROUP_LR_AT] = rates[-1].data_ptr()
        return rates


def stream_limit(on_device: OnDevice) -> None:
    """The benchmark's own op, every kind of streams."""
    from shim.checks import assert_same

    from zero1_cuda import ops
    from zero1_cuda.cli import bench

    for numel in (1, 129, 4097):
        for dtype, variant in [*((d, v) for d in bench.DTYPES for v in ("plain", "amsgrad")), ("bf16", "split")]:
            results = []
            for op in (ops.stream_limit, on_device.stream_limit):
                torch.manual_seed(0)
                s = bench.Streams(numel, dtype, variant, "cpu")
                tensors = [s.grad, s.param, s.master, s.remainder, s.exp_avg, s.exp_avg_sq, s.max_exp_avg_sq]
                op(*tensors)
                results.append(tensors)
            assert_same(results[1], results[0], f"stream_limit {numel} {dtype} {variant}")


@check
def kernels(device: str) -> Details:
    """Every op gives the bits of the CPU op: sizes, dtypes, variants, misaligned memory, special values."""
    from shim import checks

    ran = OnDevice(device)
    for dtype, split in checks.MASTERS:
        for offset in (0, 1):
            checks.check_adam_step(ran, dtype, split, offset)
    checks.check_mixed_dtypes(ran)
    for dtype in checks.DTYPES:
        for offset in (0, 1):
            checks.check_grad_norm(ran, dtype, offset)
    for kinds in checks.SUMS:
        for offset in (0, 1):
            checks.check_sum_slices(ran, *kinds, offset)
    for split, offset in ((False, 0), (True, 0), (False, 3), (True, 3)):
        checks.check_refresh(ran, split, offset)
    checks.check_control(ran)
    stream_limit(ran)
    return {}


@check
def few_kernels(device: str) -> Details:
    """Every kernel once or twice, with memory that ends with the last element: for the sanitizer."""
    from shim import checks

    ran = OnDevice(device)
    for dtype, split in checks.MASTERS:
        checks.check_adam_step_ends(ran, dtype, split, offset=int(split))
    checks.check_grad_norm(ran, torch.bfloat16, 0)
    checks.check_sum_slices(ran, torch.bfloat16, torch.bfloat16, 1)
    for split in (False, True):
        checks.check_refresh(ran, split, 0)
    checks.check_control(ran)
    stream_limit(ran)
    return {}


def find_sanitizer(device: str) -> str:
    if device != "cuda":
        raise Skip("compute-sanitizer checks CUDA kernels")
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{home}/bin")
    if program is None:
        raise Skip("compute-sanitizer not found on PATH or in CUDA_HOME/bin")
    return program


def sanitize(program: str, tool: str, device: str) -> Details:
    """Runs the kernels under compute-sanitizer."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [program, "--tool", tool, "--error-exitcode", "99"]
        command += ["--report-api-errors", "no"] if tool == "memcheck" else []  # torch asks and expects refusals
        command += [sys.executable, __file__, "few_kernels", device, str(result)]
        # without torch's cache every tensor is an allocation of its own, with its own end
        env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        run = subprocess.run(command, env=env, capture_output=True, text=True)
        output = run.stdout + run.stderr
        told = [line for line in output.splitlines() if line.startswith("=========")]
        if "not supported" in output and not result.exists():
            raise Skip(f"compute-sanitizer cannot work here: {' '.join(told)[:300]}")
        assert run.returncode == 0, f"{tool}: exit status {run.returncode}\n" + "\n".join(told[:20])
        assert json.loads(result.read_text())["status"] == "pass", result.read_text()
        return {"summary": told[-1] if told else ""}


@check
def memcheck(device: str) -> Details:
    return sanitize(find_sanitizer(device), "memcheck", device)


@check
def racecheck(device: str) -> Details:
    return sanitize(find_sanitizer(device), "racecheck", device)


@check
def streams(device: str) -> Details:
    """Ops run on the current stream: they see what was written before them there, without waiting for it."""
    from helpers.ops_case import Case, Param

    cuda = device == "cuda"
    fresh = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    results = []
    for where in ("cpu", device):
        case = Case([Param(fresh.numel(), torch.bfloat16)], device=where)
        case.set_group(0)
        control, grad = case.control(), fresh.to(where)
        side = torch.cuda.Stream() if cuda and where == device else None
        torch.cuda.synchronize() if side else None
        with torch.cuda.stream(side):  # None: as if it were not there
            torch.cuda._sleep(10**8) if side else None  # tens of milliseconds: an op on another stream would overtake
            case.grad(0).copy_(grad)
            case.step_control(control)
            case.adam_step()
        torch.cuda.synchronize() if side else None
        results.append([case.param(0).cpu(), case.get_master(0).cpu()])
    assert same(*results)
    if not cuda:
        raise Skip("streams need CUDA; without one the same code agrees")
    return {}


@check
def large(device: str) -> Details:
    """More elements than 32 bits can count."""
    from zero1_cuda import ops
    from zero1_cuda.cli import bench

    n = 2**31 + 8 if device == "cuda" else 2**20 + 8
    needed = bench.memory_needed(n, "bf16", "plain") + 8 * n  # and fp32 random numbers on the way
    if needed > bench.memory_free(device):
        raise Skip(f"needs {needed / 1e9:.0f} GB of memory, {bench.memory_free(device) / 1e9:.0f} GB are free")
    s = bench.Streams(n, "bf16", "plain", device)
    assert s.master is not None
    s.grad.fill_(1.0)
    s.param.zero_()
    s.master.zero_()
    norm, control = (torch.zeros(k, dtype=torch.int64, device=device) for k in (ops.NORM_WORDS, ops.CONTROL_FLAGS))
    clip = torch.zeros(2, device=device)
    ops.grad_norm(s.segments, s.chunk_segment, [s.grad], norm)
    control[: ops.NORM_WORDS] = norm
    ops.clip_factor(control, None, 1.0, clip)
    assert float(clip[1]) == float(torch.tensor(math.sqrt(n))), f"norm of {n} ones: {float(clip[1])}"
    s.ours()
    moved = [float(s.param[at]) for at in (0, n // 2, n - 1)]
    assert moved[0] != 0.0, moved
    assert bool((s.param == s.param[0]).all()), moved
    assert bool((s.master == s.master[0]).all())
    again = torch.zeros_like(norm)
    ops.sum_slices(s.grad[None], None, 0, 1.0, 1.0, s.param, again)
    assert torch.equal(again, norm)
    assert bool((s.param == 1.0).all())
    s.limit()
    assert bool((s.exp_avg[:n] == s.exp_avg[0]).all())
    return {"numel": n, "norm": float(clip[1])}


# ---- the whole optimizer -------------------------------------------------------------------------

SHAPES = [(37, 5), (129,), (), (1000, 3), (0,), (7, 11, 13), (4096,)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def exact(shape: tuple[int, ...], *seed: int) -> Tensor:
    """Quarters in [-4, 4]: their mean over two ranks does not round, in 16 bits neither."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    return torch.randint(-16, 17, shape, generator=generator) / 4


def make_params(device: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [torch.nn.Parameter(v.to(DTYPES[i % 3]).to(device)) for i, v in enumerate(values)]


def backward(params: list[torch.nn.Parameter], k: int, ranks: range, scaled: Any = None) -> None:
    """The k-th backward: the mean of these ranks' gradients. Every parameter goes without one now and then.

    scaled: what is done to the loss.
    """
    loss = torch.zeros((), device=params[0].device)
    for i, p in enumerate(params):
        if (k + i) % 5 != 3:
            g = sum(exact(tuple(p.shape), k, i, r) for r in ranks) / len(ranks)
            loss = loss + (p * g.to(p)).float().sum()
    (scaled(loss) if scaled else loss).backward()


def everything(opt: Any, params: list[torch.nn.Parameter]) -> list[Tensor]:
    """The weights and the whole state, on the CPU."""
    states = [opt.full_param_state(p) for p in params]
    return [t.detach().cpu() for t in (*params, *(s[name] for s in states for name in sorted(s)))]


def trajectory(device: str, ranks: range = range(1), steps: int = 4, **options: Any) -> list[Tensor]:
    """Where `steps` steps lead."""
    from zero1_cuda import Zero1AdamW

    params = make_params(device)
    opt = Zero1AdamW(params, **{"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 5.0, **options})
    for k in range(steps):
        backward(params, k, ranks)
        opt.step()
        opt.zero_grad()
    return everything(opt, params)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


VARIANTS: dict[str, Details] = {
    "plain": {},
    "amsgrad": {"amsgrad": True, "maximize": True},
    "split": {"master_weights": "split"},
    "bare": {"max_grad_norm": None, "skip_nonfinite": False},
    "in place": {"overlap_reduce": False},
}


@check
def optimizer(device: str) -> Details:
    """Every mode of the optimizer, with and without a process group of one rank, to the bit as on the CPU. And the
    collectives of NCCL are called as it takes them."""
    wanted = {name: trajectory("cpu", **options) for name, options in VARIANTS.items()}
    for name, options in VARIANTS.items():
        assert same(trajectory(device, **options), wanted[name]), f"{name}, no group"
    backend = "nccl" if device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            for name, options in VARIANTS.items():
                assert same(trajectory(device, **options), wanted[name]), f"{name}, {backend}"
            one_rank_collectives(device)
        finally:
            dist.destroy_process_group()
    return {"backend": backend}


def one_rank_collectives(device: str) -> None:
    """As collectives.py calls them, which leaves them out for one rank: mean, out of place; gather, in place."""
    from zero1_cuda.comm import collectives

    for dtype in DTYPES:
        bucket = torch.randn(1024, device=device).to(dtype)
        out, kept = torch.empty_like(bucket), bucket.clone()
        reduce_scatter, all_gather = (
            getattr(dist, collectives.__dict__[n]) for n in ("_REDUCE_SCATTER", "_ALL_GATHER")
        )
        reduce_scatter(out, bucket, op=dist.ReduceOp.AVG, async_op=True).wait()
        all_gather(bucket, bucket[:1024], async_op=True).wait()
        assert same([out.cpu(), bucket.cpu()], [kept.cpu(), kept.cpu()]), dtype


@check
def graph(device: str) -> Details:
    """A captured step, replayed 5 times with new gradients and a new learning rate, gives the bits of 5 eager steps."""
    from zero1_cuda import Zero1AdamW

    if device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # capturing the default stream is not allowed
    results = []
    for captured in (False, device == "cuda"):
        params = make_params(device)
        lr = torch.tensor(1e-2, device=device)
        opt = Zero1AdamW(params, lr=lr, weight_decay=0.1, max_grad_norm=5.0, capturable=True)
        recorded = torch.cuda.CUDAGraph() if captured else None
        for k in range(2 + 5):
            lr.fill_(1e-2 / (k + 1))
            for i, p in enumerate(params):
                g = exact(tuple(p.shape), k, i).to(p)
                p.grad = g if p.grad is None else p.grad.copy_(g)
            if k == 2 and recorded is not None:
                with torch.cuda.graph(recorded, stream=torch.cuda.current_stream()):
                    opt.step()
            if k >= 2 and recorded is not None:
                recorded.replay()
            else:
                opt.step()
        results.append(everything(opt, params))
    assert same(*results)
    if device != "cuda":
        raise Skip("CUDA graphs need CUDA; eager steps with capturable=True agree")
    return {}


@check
def scaler(device: str) -> Details:
    """torch.amp.GradScaler: an overflow skips the step and halves the scale, and the rest is as on the CPU."""
    from zero1_cuda import Zero1AdamW

    results = []
    for where in ("cpu", device):
        params = make_params(where)
        opt = Zero1AdamW(params, lr=1e-2, weight_decay=0.1)
        amp = torch.amp.GradScaler(where, init_scale=256.0, growth_interval=1000)
        for k in range(4):
            overflow = math.inf if k == 2 else 1.0
            backward(params, k, range(1), lambda loss, amp=amp, factor=overflow: amp.scale(loss) * factor)
            amp.step(opt)
            amp.update()
            opt.zero_grad()
            assert bool(opt.step_skipped) == (k == 2), f"step {k}"
        assert amp.get_scale() == 128.0, amp.get_scale()
        assert int(opt.skipped_steps) == 1
        results.append(everything(opt, params))
    assert same(*results)
    return {}


@check
def storages(device: str) -> Details:
    """Parameters lie in one buffer, each in a storage of its own, and outlive the optimizer."""
    from zero1_cuda import Zero1AdamW

    params = make_params(device)
    opt = Zero1AdamW(params, lr=1e-2)
    backward(params, 0, range(1))
    opt.step()
    full = [p for p in params if p.numel()]
    for p in full:
        storage = p.untyped_storage()
        assert storage.data_ptr() == p.data_ptr(), tuple(p.shape)
        assert storage.nbytes() == p.nbytes, tuple(p.shape)
    kept = [p.detach().cpu() for p in params]
    del opt
    gc.collect()
    noise = [torch.full((100_000,), 7.0, device=device) for _ in range(20)]  # takes whatever memory was given back
    assert same([p.detach().cpu() for p in params], kept)
    del noise
    return {"storages": len({p.untyped_storage().data_ptr() for p in full})}


def bytes_of_training(device: str, numel: int, world: int, overlap: bool) -> Details:
    """Bytes that bf16 parameters, gradients and state take after two steps, against the formula."""
    from zero1_cuda import Zero1AdamW

    gc.collect()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    params = [torch.nn.Parameter(torch.randn(numel // 10, device=device).bfloat16()) for _ in range(10)]
    opt = Zero1AdamW(params, lr=1e-3, overlap_reduce=overlap)
    for _ in range(2):
        opt.zero_grad()
        (sum(p.float().sum() for p in params) * 0.5).backward()
        opt.step()
    gc.collect()
    used = torch.cuda.memory_allocated() - before if device == "cuda" else opt.memory_report()["total"]
    predicted = numel * (4 + 12 / world + (2 / world if overlap and world > 1 else 0))
    assert used <= 1.02 * predicted, f"{used} bytes, predicted {predicted:.0f}"
    assert used >= 0.98 * predicted, f"{used} bytes, predicted {predicted:.0f}"
    return {"numel": numel, "world": world, "bytes": used, "predicted": int(predicted)}


@check
def memory(device: str) -> Details:
    """torch.cuda.memory_allocated against 4 Psi + 12 Psi / N for one rank; memory_report() on the CPU."""
    return bytes_of_training(device, 10_000_000 if device == "cuda" else 500_000, 1, False)


# ---- two ranks on one device ---------------------------------------------------------------------


def start_ranks(name: str, device: str, world: int = 2, limit: float = 60) -> list[Details]:
    """The results of a ranked check; a process that dies or hangs is a failure of that rank."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{r}.json") for r in range(world)]
        base = [sys.executable, __file__, name, device]
        processes = []
        for r, path in enumerate(paths):
            command = [*base, str(path), str(r), str(world), f"{folder}/rendezvous"]
            processes.append(subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        end = time.monotonic() + limit
        results = []
        for path, process in zip(paths, processes, strict=True):
            try:
                output, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                output = process.communicate()[0] + f"\nno result within {limit:.0f} s"
            last = output.replace(f"{ROOT}/", "").strip().splitlines()[-3:]
            died = {"status": "fail", "reason": f"exit status {process.returncode}: {' | '.join(last)}"}
            results.append(json.loads(path.read_text()) if path.exists() else died)
        return results


PROBES = ("gloo_sums", "gloo_broadcasts", "gloo_sends", "gloo_reduce_scatters")


@ranked
def gloo_sums(device: str, rank: int, world: int) -> Details:
    t = torch.full((64,), rank + 1, dtype=torch.int64, device=device)
    dist.all_reduce(t)
    assert t.tolist() == [3] * 64
    return {}


@ranked
def gloo_broadcasts(device: str, rank: int, world: int) -> Details:
    t = torch.full((64,), rank + 1, dtype=torch.uint8, device=device)
    dist.broadcast(t, group_src=1, async_op=True).wait()
    assert t.tolist() == [2] * 64
    return {}


@ranked
def gloo_sends(device: str, rank: int, world: int) -> Details:
    sent = torch.full((64,), rank + 1, dtype=torch.uint8, device=device)
    received = torch.zeros_like(sent)
    works = [dist.irecv(received, group_src=1 - rank, tag=1), dist.isend(sent, group_dst=1 - rank, tag=1)]
    for work in works:
        work.wait()
    assert received.tolist() == [2 - rank] * 64
    return {}


@ranked
def gloo_reduce_scatters(device: str, rank: int, world: int) -> Details:
    from zero1_cuda.comm import collectives

    out = torch.zeros(64, dtype=torch.bfloat16, device=device)
    bucket = torch.full((128,), 2.0 * rank, dtype=torch.bfloat16, device=device)
    getattr(dist, collectives._REDUCE_SCATTER)(out, bucket, op=dist.ReduceOp.AVG, async_op=True).wait()
    assert out.tolist() == [1.0] * 64
    return {}


def digest(tensors: list[Tensor]) -> str:
    """A hash of every bit."""
    out = hashlib.sha1()
    for t in tensors:
        out.update(bytes(t.contiguous().view(-1).view(torch.uint8).tolist()) if t.numel() else b"")
    return out.hexdigest()


@ranked
def trains(device: str, rank: int, world: int) -> Details:
    """Two ranks with gradients of their own; exchange where the environment says nothing else."""
    if device == "cpu":  # (on CUDA each has processes of its own, since a refusal may end them)
        for probe in PROBES:
            RANKED[probe](device, rank, world)
    in_fp32 = os.environ.get("ZERO1_CHECK_NATIVE") is None
    ours = range(rank, rank + 1)
    found = {name: digest(trajectory(device, ours, reduce_in_fp32=in_fp32, **o)) for name, o in VARIANTS.items()}
    numel = 4_000_000 if device == "cuda" else 200_000
    return {"digests": found, "bytes": [bytes_of_training(device, numel, world, o) for o in (False, True)]}


@check
def two_ranks(device: str) -> Details:
    """Two processes share the device: the optimizer over gloo, to the bit as one rank fed the mean gradients."""
    details: Details = {}
    if device == "cuda":
        for probe in PROBES:
            found = start_ranks(probe, device, limit=20)
            refused = [r["reason"].splitlines()[-1] for r in found if r["status"] != "pass"]
            details[probe] = refused[0] if refused else "served"
    served = {name for name, told in details.items() if told == "served"} or set()
    ways = {"exchange": "gloo_sends", "native": "gloo_reduce_scatters"}
    if device == "cuda" and not {"gloo_sums", "gloo_broadcasts"} <= served:
        raise Skip(f"torch's gloo does not serve CUDA tensors: {details}")
    wanted = {name: digest(trajectory("cpu", range(2), **options)) for name, options in VARIANTS.items()}
    tried = [way for way, needs in ways.items() if needs in served or (device == "cpu" and way == "exchange")]
    if not tried:
        raise Skip(f"torch's gloo neither sends nor reduce-scatters CUDA tensors: {details}")
    for way in tried:
        os.environ.pop("ZERO1_CHECK_NATIVE", None)
        if way == "native":
            os.environ["ZERO1_CHECK_NATIVE"] = "1"
        for rank, found in enumerate(start_ranks("trains", device)):
            assert found["status"] == "pass", f"{way}, rank {rank}: {found['reason'][-600:]}"
            wrong = [name for name, told in found["details"]["digests"].items() if told != wanted[name]]
            assert not wrong, f"{way}, rank {rank}: other bits than one rank in {', '.join(wrong)}"
            details[way] = found["details"]["bytes"]
    return details


# ---- time ----------------------------------------------------------------------------------------


@check
def host_time(device: str) -> Details:
    """Microseconds of the host in a step of one rank. A figure, not a verdict: the host may be busy."""
    from zero1_cuda import Zero1AdamW

    found = {}
    for count in (1, 100, 1000) if device == "cuda" else (1, 20):
        params = [torch.nn.Parameter(torch.randn(1000, device=device).bfloat16()) for _ in range(count)]
        for p in params:
            p.grad = torch.ones_like(p)
        opt = Zero1AdamW(params, lr=1e-3)
        times = []
        for _ in range(25):
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            opt.step()
            times.append(1e6 * (time.perf_counter() - begin))
        found[str(count)] = round(statistics.median(times[5:]), 1)
    wanted = {n: 100 + int(n) for n in found}
    return {"microseconds": found, "wanted": wanted, "reached": all(found[n] <= wanted[n] for n in found)}


@check
def benchmark(device: str) -> Details:
    """The table of `python -m zero1_cuda bench`; against torch.compile at the largest size."""
    from zero1_cuda.cli import bench

    table: list[str] = []
    if device == "cpu":  # only that it runs
        result = bench.run((20_000,), ["bf16"], ["plain"], device, 1, flush_bytes=2**20, show=table.append)
    else:
        result = bench.run(device=device, iterations=20, show=table.append)
        compiled = bench.run(bench.SIZES[-1:], ["bf16"], ["plain"], device, 20, compiled=True, show=table.append)
        result["rows"] += compiled["rows"]
        result["left_out"].update(compiled["left_out"])
    return {**result, "table": table}


if __name__ == "__main__":
    name, kind, path, *rank = sys.argv[1:]
    Path(path).write_text(json.dumps(perform(name, kind, *rank)))
    if rank:
        os._exit(0)  # without waiting for threads of a group that may be broken
