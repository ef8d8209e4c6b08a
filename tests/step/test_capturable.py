"""With capturable=True nothing in a step depends on host values: a rate in a tensor is read by the step itself, so that
it can be changed in place between steps, as it is between the replays of a captured step.

Shown on the CPU, where the tensor is read by the same code: what a step's ops are given, tables and plain arguments
alike, does not change when the rate does, and handing the very same arguments to the ops again is a step with the new
rate. In every variant, with clipping and skipping, the trajectory is to the bit that of a rate set by the host, and to
rounding that of torch's AdamW or Adam. (Capture itself needs a GPU: `make gpu-check`.)"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zero1_cuda import Zero1Adam, Zero1AdamW, ops

RATES = [1e-3, 1e-3, 4e-3, 0.0, 2e-3, 5e-4]
DTYPES = [torch.float32, torch.bfloat16]


def make_params(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    torch.manual_seed(3)
    return [torch.nn.Parameter((torch.randn(shape) * 0.1).to(dtype)) for shape in ((40, 9), (129,), (7,))]


def set_gradients(params: list[torch.nn.Parameter], step: int, bad: bool = False) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in params:
        g = torch.randn(p.shape, generator=generator).to(p.dtype)
        if bad:
            g.view(-1)[3] = float("nan")
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad.copy_(g)


def everything(opt: Any, params: list[torch.nn.Parameter]) -> list[Tensor]:
    out = [p.detach() for p in params]
    for p in params:
        state = opt.full_param_state(p)
        out += [state[name] for name in sorted(state)]
    return [t.reshape(-1).view(torch.uint8) for t in out]


def name_of(variant: dict[str, Any]) -> str:
    return " ".join([variant["kind"].__name__, *(name for name, on in variant.items() if on is True)])


VARIANTS = [
    {"kind": kind, "amsgrad": amsgrad, "maximize": maximize}
    for kind, amsgrad, maximize in itertools.product((Zero1Adam, Zero1AdamW), (False, True), (False, True))
]
OPTIONS = [{}, {"max_grad_norm": 0.5}, {"skip_nonfinite": False}, {"master_weights": "split"}]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_a_rate_in_memory_is_a_rate_set_by_the_host(
    variant: dict[str, Any], options: dict[str, Any], dtype: torch.dtype
) -> None:
    """One group with a tensor and one with a float, both types of tensor, a step skipped where that is asked for."""
    for kind in (torch.float32, torch.float64):
        rate = torch.tensor(0.0, dtype=kind)
        ours, theirs = make_params(dtype), make_params(dtype)
        make, flags = variant["kind"], {k: v for k, v in variant.items() if k != "kind"} | options
        rest = {"params": [], "lr": 3e-3, "weight_decay": 0.0}
        opt = make([{"params": ours[:2], "lr": rate}, rest | {"params": ours[2:]}], **flags, capturable=True)
        other = make([{"params": theirs[:2], "lr": 1.0}, rest | {"params": theirs[2:]}], **flags)
        for step, lr in enumerate(RATES):
            rate.fill_(lr)
            other.param_groups[0]["lr"] = float(rate)
            bad = step == 2 and options.get("skip_nonfinite", True)
            for o, params in ((opt, ours), (other, theirs)):
                set_gradients(params, step, bad)
                o.step()
            for a, b in zip(everything(opt, ours), everything(other, theirs), strict=True):
                assert torch.equal(a, b)
        assert int(opt.skipped_steps) == int(other.skipped_steps) == options.get("skip_nonfinite", True)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_it_follows_torch(variant: dict[str, Any]) -> None:
    ours, theirs = make_params(torch.float32), make_params(torch.float32)
    rate = torch.tensor(1e-3)
    flags = {k: v for k, v in variant.items() if k != "kind"} | {"weight_decay": 0.1}
    opt = variant["kind"](ours, lr=rate, capturable=True, **flags)
    make = torch.optim.Adam if variant["kind"] is Zero1Adam else torch.optim.AdamW
    other = make(theirs, lr=1.0, foreach=False, **flags)
    for step, lr in enumerate(RATES):
        rate.fill_(lr)
        other.param_groups[0]["lr"] = lr
        for o, params in ((opt, ours), (other, theirs)):
            set_gradients(params, step)
            o.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


class Recorded(TorchDispatchMode):
    """What would be on the stream: every op that writes into memory, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self.calls.append((func, args, kwargs))
        return func(*args, **kwargs)

    def ours(self) -> dict[str, Any]:
        """The arguments of the package's ops."""
        return {f.name().removeprefix("zero1::"): args for f, args, _ in self.calls if f.name().startswith("zero1::")}


# Arguments that are made anew in every step; a captured graph keeps those of the step that it captured.
ANEW = {("pack_control", 3), ("clip_factor", 0), ("step_control", 0), ("clip_factor", 3), ("step_control", 5)}


def fixed(a: Any, where: bool) -> Any:
    """A plain value; of a tensor its kind, and where it lies."""
    if isinstance(a, Tensor):
        return (tuple(a.shape), a.dtype, a.data_ptr() if where else None)
    return [fixed(x, where) for x in a] if isinstance(a, (list, tuple)) else a


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_ops_are_given_the_same_whatever_the_rate(options: dict[str, Any]) -> None:
    rate = torch.tensor(1e-3)
    params = make_params(torch.bfloat16)
    opt = Zero1AdamW(params, lr=rate, capturable=True, **options)
    seen = []
    for step, lr in enumerate(RATES):
        rate.fill_(lr)
        set_gradients(params, step)
        with Recorded() as recorded:
            opt.step()
        given = recorded.ours()
        lasting = {name: [fixed(a, (name, k) not in ANEW) for k, a in enumerate(args)] for name, args in given.items()}
        table = given["step_control"][3].view(torch.int64).tolist()
        host_words = given["pack_control"][3][ops.CONTROL_MODIFIED :].tolist()
        seen.append((lasting, table, host_words))
    assert all(now == seen[1] for now in seen[2:])


def test_without_it_the_rate_is_copied() -> None:
    """What the test above would see if the step depended on the host."""
    rate = torch.tensor(1e-3)
    params = make_params(torch.float32)
    opt = Zero1AdamW(params, lr=rate)
    tables = []
    for lr in RATES[1:3]:
        rate.fill_(lr)
        set_gradients(params, 0)
        with Recorded() as recorded:
            opt.step()
        tables.append(recorded.ours()["step_control"][3].tolist())
    assert tables[0] != tables[1]


def test_nothing_comes_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it has been warmed up, a step makes no tensor from the host's memory: a capture could not hold the copy."""
    rate = torch.tensor(1e-3)
    params = make_params(torch.float32)
    opt = Zero1AdamW(params, lr=rate, capturable=True, max_grad_norm=1.0)
    for step in range(3):
        set_gradients(params, step)
        made: list[str] = []
        with monkeypatch.context() as patch:
            for name in ("tensor", "frombuffer", "as_tensor", "from_numpy"):
                make = getattr(torch, name)
                patch.setattr(
                    torch, name, lambda *a, make=make, name=name, made=made, **k: made.append(name) or make(*a, **k)
                )
            opt.step()
    assert made == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_replaying_the_ops_is_a_step(variant: dict[str, Any], options: dict[str, Any], dtype: torch.dtype) -> None:
    """The ops of one step called again with the very same arguments: what a captured graph does. Rates, gradients, a
    clip factor and a skipped step come out as in steps of their own; Python's options are not looked at again."""
    ours, theirs = make_params(dtype), make_params(dtype)
    rates = [torch.tensor(0.0), torch.tensor(0.0)]
    flags = {k: v for k, v in variant.items() if k != "kind"} | options
    opts = [variant["kind"](ps, lr=r, capturable=True, **flags) for ps, r in zip((ours, theirs), rates, strict=True)]
    captured: list[tuple[Any, Any, Any]] = []
    for step, lr in enumerate(RATES):
        bad = step == 4 and options.get("skip_nonfinite", True)
        for rate, params in zip(rates, (ours, theirs), strict=True):
            rate.fill_(lr)
            set_gradients(params, step, bad)
        opts[1].step()
        if step < 3:
            with Recorded() as recorded:
                opts[0].step()
            captured = recorded.calls
        else:
            opts[0].param_groups[0]["lr"] = "not looked at"
            for func, args, kwargs in captured:
                func(*args, **kwargs)
        opts[0].param_groups[0]["lr"] = rates[0]
        for a, b in zip(everything(opts[0], ours), everything(opts[1], theirs), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(opts[0].skipped_steps, opts[1].skipped_steps)
