"""What tests with several ranks share.

`run(world, fn, *args)` calls `fn(rank, world, *args)` in `world` processes that form a gloo group. They are forked from
a server that has torch and the package loaded, so a case takes a fraction of a second; those that use a CUDA device are
started anew. A process that hangs is a failure: it is killed, and the message holds the tracebacks of all ranks.

`Plain` is what the package is compared with: plain data parallel, torch's own optimizer on fp32 copies that is fed the
mean of the ranks' gradients. `exact` makes gradients whose sums and means do not round, not even in 16 bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import hashlib
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

GROUP_TIMEOUT = 20  # seconds

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "zero1_cuda.optimizer", "pytest"])


def init(rank: int, world: int, path: str) -> None:
    """Makes the default group."""
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world, timeout=timeout)


def _tell(error: BaseException) -> str:
    """The traceback, and the variables of the test's own frames."""
    lines = traceback.format_exception(error)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if os.path.basename(frame.f_code.co_filename).startswith("test_"):
            lines.append(f"in {frame.f_code.co_name}:\n")
            shown = {name: " ".join(repr(value).split())[:120] for name, value in frame.f_locals.items()}
            lines += [f"    {name} = {value}\n" for name, value in shown.items()]
    return "".join(lines)


deferred = False  # whether ranks that are started now go the way of CUDA: the host reads no agreement in the same step


def _child(
    pipe: Any, rank: int, world: int, path: str, group: bool, later: bool, fn: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        if later:
            from zero1_cuda.step.runner import StepRunner

            StepRunner.reads_on_host = False  # type: ignore[method-assign,assignment]
        if group:
            init(rank, world, path)
        answer = (True, fn(rank, world, *args))
    except BaseException as error:
        answer = (False, _tell(error))
    with contextlib.suppress(OSError, EOFError):
        try:
            pipe.send(answer)
        except TypeError as error:
            pipe.send((False, _tell(error)))
        pipe.recv()  # stay: to the others, a rank that leaves is a broken connection
    os._exit(0)  # without waiting for the threads of a group that may be broken


def run(
    world: int, fn: Callable[..., Any], *args: Any, timeout: float = 60, group: bool = True, anew: bool = False
) -> list[Any]:
    """[fn(rank, world, *args) of every rank]; fn: a function of a module. group=False: without a process group.

    anew: processes that are not forked, since what CUDA has set up does not outlive a fork.
    """
    __tracebackhide__ = True
    context = multiprocessing.get_context("spawn") if anew else _context
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            pipe, theirs = context.Pipe()
            given = (theirs, rank, world, os.path.join(folder, "rendezvous"), group, deferred, fn, args)
            process = context.Process(target=_child, args=given, daemon=True)
            process.start()
            theirs.close()
            pipes.append(pipe)
            processes.append(process)
        answers: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + timeout
        while len(answers) < world and time.monotonic() < end:
            waiting = {pipes[r]: r for r in range(world) if r not in answers}
            for pipe in multiprocessing.connection.wait(list(waiting), end - time.monotonic()):
                try:
                    answers[waiting[pipe]] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[waiting[pipe]] = (False, "the process died\n")
            if not all(ok for ok, _ in answers.values()):  # the others wait for it in vain
                end = min(end, time.monotonic() + 3)
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for rank, process in enumerate(processes):
            process.join(5 if rank in answers else 0)
            process.kill()
            process.join()
    if len(answers) < world or not all(ok for ok, _ in answers.values()):
        told = []
        for rank in range(world):
            ok, value = answers.get(rank, (False, "no answer: it hangs, or waits for another rank\n"))
            told.append(f"--- rank {rank} of {world} ---\n{'done' if ok else value}")
        raise AssertionError("\n".join(told))
    return [answers[rank][1] for rank in range(world)]


def caught(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """(type, message) of what `fn` raises; ("", "") if nothing."""
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


# -- gradients and parameters -----------------------------------------------------------------------------------------


def exact(shape: Sequence[int], *seed: int, ranks: int = 1) -> Tensor:
    """fp32 multiples of `ranks` / 8 in [-2 * ranks, 2 * ranks]: few bits, and a mean over `ranks` ranks stays exact."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    return torch.randint(-16, 17, tuple(shape), generator=generator) * (ranks / 8)


def backward(params: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    """A backward that gives every parameter just this gradient; None: it takes no part."""
    sum((p * g.to(p)).sum() for p, g in zip(params, grads, strict=True) if g is not None).backward()


def backward_of(params: Sequence[Tensor], rank: int, k: int) -> None:
    """The k-th backward of a rank: exact gradients for every parameter."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    backward(params, [exact(p.shape, rank, k, i, ranks=world) for i, p in enumerate(params)])


def weights(shapes: Iterable[Sequence[int]], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Parameters with the same values on every rank."""
    generator = torch.Generator().manual_seed(5)
    return [torch.nn.Parameter(torch.randn(tuple(s), generator=generator).to(dtype)) for s in shapes]


# -- the other side ---------------------------------------------------------------------------------------------------


def mean_grad(p: Tensor, grad: Tensor | None, group: Any = None) -> Tensor | None:
    """fp32: the mean over ranks of a gradient, summed in fp32; None where no rank has one."""
    if not dist.is_initialized():
        return None if grad is None else grad.float().contiguous().clone()
    has = torch.tensor(float(grad is not None))
    dist.all_reduce(has, group=group)
    if not has:
        return None
    mean = torch.zeros(p.shape) if grad is None else grad.detach().float().contiguous().clone()
    dist.all_reduce(mean, group=group)
    return mean.div_(dist.get_world_size(group))


class Plain:
    """Plain data parallel: torch's optimizer on fp32 copies of `params`, which may be groups.

    `.grad` stays a rank's own. group: the ranks that average; default: all.
    """

    def __init__(self, params: Any, kind: type = torch.optim.AdamW, group: Any = None, **options: Any) -> None:
        groups = [p if isinstance(p, dict) else {"params": [p]} for p in params]
        if not any(isinstance(p, dict) for p in params):
            groups = [{"params": list(params)}]
        copies: dict[Tensor, torch.nn.Parameter] = {}
        for g in groups:
            for p in g["params"]:
                copies.setdefault(p, torch.nn.Parameter(p.detach().float().clone(), requires_grad=p.requires_grad))
        self.group = group
        self.opt = kind([{**g, "params": [copies[p] for p in g["params"]]} for g in groups], **options)
        self.params = list(copies.values())
        self.param_groups = self.opt.param_groups
        self.norm: Tensor | None = None

    def no_sync(self) -> Any:
        return contextlib.nullcontext()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.opt.zero_grad(set_to_none)

    def step(self, max_norm: float | None = None) -> None:
        """One step with the mean gradients, clipped if asked for."""
        own = [p.grad for p in self.params]
        for p, grad in zip(self.params, own, strict=True):
            p.grad = mean_grad(p, grad, self.group)
        self.norm = torch.nn.utils.get_total_norm([p.grad for p in self.params if p.grad is not None])
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.params, max_norm, self.norm)
        self.opt.step()
        for p, grad in zip(self.params, own, strict=True):
            p.grad = grad

    def check(self, opt: Any, params: Sequence[Tensor], state: bool = True) -> None:
        """Collective: the parameters and the state of `opt` are those of torch, and ranks are equal to the bit."""
        for i, (p, q) in enumerate(zip(params, self.params, strict=True)):
            if p.dtype == torch.float32:
                lr = max(float(g["lr"]) for g in self.param_groups)
                bound = 1e-3 * lr + 1e-6 * float(q.detach().abs().max()) if q.numel() else 0.0
                torch.testing.assert_close(p.detach(), q.detach(), rtol=0.0, atol=bound, msg=lambda m, i=i: f"{i}: {m}")
            else:
                assert rounded(p.detach(), q.detach()), f"parameter {i}: {p} is not {q} rounded once"
        equal_on_all_ranks(params)
        for p, q in zip(params, self.params, strict=True) if state else ():
            theirs = self.opt.state.get(q) or {}
            if p.requires_grad:
                ours = opt.full_param_state(p)
                assert ours["step"] == theirs.get("step", 0)
                assert set(ours) >= {"master", "exp_avg", "exp_avg_sq", "step"}
                for name in {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"} & set(ours):
                    want = theirs.get(name, torch.zeros_like(q))
                    torch.testing.assert_close(ours[name], want, rtol=1e-5, atol=1e-6, check_stride=False)
                torch.testing.assert_close(ours["master"], q.detach(), rtol=1e-5, atol=1e-6, check_stride=False)


def rounded(p: Tensor, master: Tensor) -> bool:
    """Whether p is `master` rounded once; it may be off by a few units of fp32, which matters next to a tie only."""
    shift = master.abs() * 2.0**-20 + 2.0**-26
    low, high = (master - shift).to(p.dtype), (master + shift).to(p.dtype)
    same = p == master.to(p.dtype)
    return bool(((low <= p) & (p <= high)).all()) and int((~same).sum()) <= p.numel() // 100


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash of every bit."""
    out = hashlib.sha1()
    for t in tensors:
        t = t.detach().cpu().contiguous()
        out.update(ctypes.string_at(t.data_ptr(), t.nbytes))
    return out.hexdigest()


def equal_on_all_ranks(tensors: Iterable[Tensor]) -> None:
    """Collective: every rank holds the same bits."""
    if dist.is_initialized():
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, digest(tensors))
        assert len(set(found)) == 1, f"ranks differ: {found}"


def snapshot(opt: Any, params: Sequence[Tensor]) -> list[Tensor]:
    """Collective: copies of everything a step may change."""
    out = [p.detach().clone() for p in params]
    for p in params:
        out += [t.clone() for _, t in sorted(opt.full_param_state(p).items())]
    return out
