"""With capturable=True nothing in a step depends on host values: a rate in a tensor is read by the step itself, so that
it can be changed in place between steps, as it is between the replays of a captured step.

Shown on the CPU, where the tensor is read by the same code: what a step's ops are given, tables and plain arguments
alike, does not change when the rate does, and handing the very same arguments to the ops again is a step with the new
rate. In every variant, with clipping and skipping, the trajectory is to the bit that of a rate set by the host, and that
of torch's AdamW or Adam to rounding. (Capture itself needs a GPU: `make gpu-check`.)"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zero1_cuda import Zero1Adam, Zero1AdamW

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


class Given(TorchDispatchMode):
    """The package's ops and what they are given: tensors and the rest. Torch's own ops that take a value from the host
    are listed too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []
        self.before: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("zero1::"):
            self.calls.append((func, args))
            self.before.append((func.name(), [fixed(a) for a in args]))
        return func(*args, **(kwargs or {}))


def fixed(a: Any) -> Any:
    """A value, or where a tensor lies."""
    if isinstance(a, Tensor):
        return a.data_ptr(), tuple(a.shape), a.dtype
    return [fixed(x) for x in a] if isinstance(a, (list, tuple)) else a


def options_of(calls: list[tuple[Any, Any]]) -> Tensor:
    """The table of options that step_control got, as bits."""
    (args,) = (args for func, args in calls if func.name() == "zero1::step_control")
    return args[3].view(torch.int64).clone()


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}, {"master_weights": "split"}], ids=str)
def test_the_ops_are_given_the_same_whatever_the_rate(options: dict[str, Any]) -> None:
    """Values and the places of all that lasts; and the contents of the options and of what the host writes."""
    rate = torch.tensor(1e-3)
    params = make_params(torch.bfloat16)
    opt = Zero1AdamW(params, lr=rate, capturable=True, **options)
    seen = []
    for step, lr in enumerate(RATES):
        rate.fill_(lr)
        set_gradients(params, step)
        with Given() as given:
            opt.step()
        head = next(args for func, args in given.calls if func.name() == "zero1::pack_control")[3]
        seen.append((given, options_of(given.calls), head[16:].clone()))
    first = seen[1]
    for given, table, head in seen[2:]:
        assert torch.equal(table, first[1])
        assert torch.equal(head, first[2])
        for (name, now), (same_name, then) in zip(given.before, first[0].before, strict=True):
            assert name == same_name
            for a, b in zip(now, then, strict=True):
                # made anew in every step: the control vector and the clip factor
                if a != b:
                    assert (a[1:], name) in (
                        (b[1:], n) for n in ("zero1::pack_control", "zero1::clip_factor", "zero1::step_control")
                    )


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
    captured: list[tuple[Any, Any]] = []
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
