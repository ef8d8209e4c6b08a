"""What the tests in tests/gpu share: the ops of a device under their CPU names, and training runs on a device.

The reference is always the CPU: its kernels are compared with plain torch by other tests.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from helpers.ranks import exact, snapshot
from shim import checks
from torch import Tensor

from zero1_cuda import Zero1AdamW, ops
from zero1_cuda.cli import bench

# ---- kernels ---------------------------------------------------------------------------------------------------------


class OnDevice:
    """The ops under their own names, with CPU tensors, run on the device: what shim/checks.py calls a shim."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __getattr__(self, name: str) -> Callable[..., None]:
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
        rates = []
        words = groups.view(torch.int64)
        for g, (at, wide) in enumerate(words[:, [ops.GROUP_LR_AT, ops.GROUP_LR_IS_FP64]].tolist()):
            if at:
                kind = ctypes.c_double if wide else ctypes.c_float
                dtype = torch.float64 if wide else torch.float32
                rates.append(torch.tensor(kind.from_address(at).value, dtype=dtype, device=self.device))
                words[g, ops.GROUP_LR_AT] = rates[-1].data_ptr()
        return rates


STREAMS = [*itertools.product(bench.DTYPES, ("plain", "amsgrad")), ("bf16", "split")]


def check_stream_limit(ran: OnDevice, numel: int, dtype: str, variant: str) -> None:
    """The benchmark's own op, every kind of streams."""
    results = []
    for op in (ops.stream_limit, ran.stream_limit):
        torch.manual_seed(0)
        s = bench.Streams(numel, dtype, variant, "cpu")
        tensors = [s.grad, s.param, s.master, s.remainder, s.exp_avg, s.exp_avg_sq, s.max_exp_avg_sq]
        op(*tensors)
        results.append(tensors)
    checks.assert_same(results[1], results[0], f"stream_limit {numel} {dtype} {variant}")


# ---- the whole optimizer ---------------------------------------------------------------------------------------------

SHAPES = [(37, 5), (129,), (), (1000, 3), (0,), (7, 11, 13), (4096,)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "amsgrad": {"amsgrad": True, "maximize": True},
    "split": {"master_weights": "split"},
    "bare": {"max_grad_norm": None, "skip_nonfinite": False},
    "in place": {"overlap_reduce": False},
}


def make_params(device: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [torch.nn.Parameter(v.to(DTYPES[i % 3]).to(device)) for i, v in enumerate(values)]


def loss_of(params: list[torch.nn.Parameter], k: int, ranks: range = range(1)) -> Tensor:
    """Its gradients are the k-th mean of these ranks' gradients. Every parameter goes without one now and then."""
    loss = torch.zeros((), device=params[0].device)
    for i, p in enumerate(params):
        if (k + i) % 5 != 3:
            g = sum(exact(p.shape, k, i, r, ranks=2) for r in ranks) / len(ranks)
            loss = loss + (p * g.to(p)).float().sum()
    return loss


def everything(opt: Any, params: list[torch.nn.Parameter]) -> list[Tensor]:
    """The weights and the whole state, on the CPU."""
    return [t.cpu() for t in snapshot(opt, params)]


def trajectory(device: str, ranks: range = range(1), steps: int = 4, **options: Any) -> list[Tensor]:
    """Where `steps` steps lead."""
    params = make_params(device)
    opt = Zero1AdamW(params, **{"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 5.0, **options})
    for k in range(steps):
        loss_of(params, k, ranks).backward()
        opt.step()
        opt.zero_grad()
    return everything(opt, params)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def bytes_of_training(device: str, numel: int, world: int, overlap: bool) -> dict[str, int]:
    """Bytes that bf16 parameters, gradients and state take after two steps, which the formula must give within 2%."""
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
    assert 0.98 * predicted <= used <= 1.02 * predicted, f"{used} bytes, predicted {predicted:.0f}"
    return {"numel": numel, "world": world, "bytes": used, "predicted": int(predicted)}
