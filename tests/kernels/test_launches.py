"""A step launches at most five kernels, and one more per bucket where the exchange is used, whatever the number of
parameters and groups; the rest of its work on tensors does not grow either. Nothing is read back to the host.

Counted on the CPU: calls of the package's ops in opt.step(), each of which is one launch on CUDA, and launches of the
kernels' sources. A bucket is a matter of bytes: it is filled by parameters and groups alike, so all numbers of both get
the same buckets here."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ranks
from helpers.ops_case import DTYPES, Case, Param
from shim.host import Shim, build
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zero1_cuda import Zero1AdamW, ops

SIZES = [(1, 1), (100, 1), (100, 8), (5000, 1), (5000, 8), (5000, 400)]  # parameters, groups
FEW_SIZES = [SIZES[0], SIZES[2], SIZES[-1]]
FIVE = {"grad_norm", "pack_control", "clip_factor", "step_control", "adam_step"}
DEPENDS_ON_ALL = {"max_grad_norm": 1.0}  # then buckets do not flow one by one


class Calls(TorchDispatchMode):
    """Counts the package's ops and torch's own, and remembers the arguments of the package's."""

    def __init__(self) -> None:
        super().__init__()
        self.ours: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self.arguments: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        if space == "zero1":
            self.ours[name] += 1
            self.arguments.append((name, args))
        else:
            self.others[name.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def model(params: int, groups: int, numel: int = 3) -> list[dict[str, Any]]:
    """`groups` groups of together `params` parameters of one dtype, with options of their own."""
    made: list[dict[str, Any]] = [{"params": [], "lr": 1e-3 * (g + 1), "betas": (0.9, 0.99)} for g in range(groups)]
    for i in range(params):
        made[i % groups]["params"].append(torch.nn.Parameter(torch.ones(numel, dtype=torch.bfloat16)))
    return made


def set_gradients(opt: Zero1AdamW, step: int) -> None:
    for group in opt.param_groups:
        for p in group["params"]:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            p.grad.fill_(0.5 + step)  # where a backward would have left it, after the first step


def warm(params: int, groups: int, **options: Any) -> Zero1AdamW:
    """An optimizer after two steps, when everything that a first step makes is there; with gradients for the next."""
    opt = Zero1AdamW(model(params, groups), **options)
    for step in range(3):
        set_gradients(opt, step)
        if step < 2:
            opt.step()
    return opt


def test_one_rank() -> None:
    """Five of ours, and torch's own work on tensors does not grow either. (The host looks at every parameter.)"""
    others = []
    for params, groups in SIZES:
        opt = warm(params, groups, **DEPENDS_ON_ALL, master_weights="split" if params == 100 else "fp32")
        with Calls() as calls:
            opt.step()
        assert calls.ours == dict.fromkeys(FIVE, 1)
        others.append(calls.others)
    assert all(counts == others[0] for counts in others), others
    assert sum(others[0].values()) < 15


def test_fewer_where_less_is_asked_for() -> None:
    for options, left_out in (
        ({}, {"clip_factor"}),
        ({"skip_nonfinite": False}, {"clip_factor", "grad_norm"}),
        ({"skip_nonfinite": False, "max_grad_norm": 1.0}, set()),
    ):
        opt = warm(100, 8, **options)
        with Calls() as calls:
            opt.step()
        assert calls.ours == dict.fromkeys(FIVE - left_out, 1)


def test_three_dtypes_are_one_launch() -> None:
    params = [torch.nn.Parameter(torch.ones(300, dtype=dtype)) for dtype in DTYPES]
    opt = Zero1AdamW(params, max_grad_norm=1.0, amsgrad=True)
    for step in range(2):
        set_gradients(opt, step)
        with Calls() as calls:
            opt.step()
        assert calls.ours == dict.fromkeys(FIVE, 1)


def test_a_loss_scaler_and_clipping_by_hand_add_nothing() -> None:
    opt = warm(100, 8)
    opt.grad_scale, opt.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    with Calls() as calls:
        opt.step()
    assert sum(calls.ours.values()) <= 5
    del opt.grad_scale, opt.found_inf
    set_gradients(opt, 4)
    with Calls() as calls:
        opt.clip_grad_norm_(1.0)
    assert calls.ours == {"grad_norm": 1, "pack_control": 1, "clip_factor": 1}
    with Calls() as calls:
        opt.step()
    assert calls.ours == {"grad_norm": 1, "pack_control": 1, "step_control": 1, "adam_step": 1}


def test_edited_weights_are_one_more() -> None:
    opt = warm(100, 8, **DEPENDS_ON_ALL)
    with torch.no_grad():
        for group in opt.param_groups:
            for p in group["params"]:
                p.add_(0.25)
    with Calls() as calls:
        opt.step()
    assert calls.ours == dict.fromkeys({*FIVE, "refresh_masters"}, 1)


def test_a_group_that_comes_later_is_two_more() -> None:
    """It gets buffers of its own, so that existing state never moves."""
    opt = warm(10, 2, **DEPENDS_ON_ALL)
    opt.add_param_group(model(50, 1)[0])
    for step in range(2):
        set_gradients(opt, step)
        with Calls() as calls:
            opt.step()
    assert calls.ours == {**dict.fromkeys(FIVE, 1), "grad_norm": 2, "adam_step": 2}


# ---- two ranks


def counted(rank: int, world: int, params: int, groups: int, options: dict[str, Any]) -> Any:
    """(calls in backward, calls in step, calls of torch's in step, buckets)."""
    opt = Zero1AdamW(model(params, groups), **options)
    everything = [p for group in opt.param_groups for p in group["params"]]
    for step in range(3):
        opt.zero_grad()
        with Calls() as backward:
            torch.autograd.backward(everything, [torch.full_like(p, step + 1.0) for p in everything])
        with Calls() as calls:
            opt.step()
    return dict(backward.ours), dict(calls.ours), sum(calls.others.values()), len(opt._runner.reducer.buckets)


@pytest.mark.parametrize("overlap", [True, False])
def test_two_ranks(overlap: bool) -> None:
    seen = []
    for params, groups in FEW_SIZES:
        options = DEPENDS_ON_ALL | {"overlap_reduce": overlap}
        for backward, step, others, buckets in ranks.run(2, counted, params, groups, options):
            assert buckets <= 2
            # in place: an agreement before anything is reduced, and one after
            wanted = dict.fromkeys(FIVE - {"grad_norm"}, 1) | ({} if overlap else {"pack_control": 2})
            assert Counter(backward) + Counter(step) == wanted | {"sum_slices": buckets}
            assert set(backward) <= ({"sum_slices"} if overlap else set())
            seen.append(others / buckets)
    assert max(seen) <= max(seen[:2]), "torch's own work has grown"


def test_two_ranks_and_several_buckets() -> None:
    """One more per bucket."""
    options = {"bucket_cap_mb": 0.01}  # 40 parameters, each in a chunk of its own, to a bucket
    for backward, step, _, buckets in ranks.run(2, counted, 400, 8, options | DEPENDS_ON_ALL):
        assert buckets == 10
        assert backward["sum_slices"] >= buckets - 3  # as many are on their way at most
        assert Counter(backward) + Counter(step) == dict.fromkeys(FIVE - {"grad_norm"}, 1) | {"sum_slices": buckets}
    for backward, step, _, buckets in ranks.run(2, counted, 400, 8, options | {"skip_nonfinite": False}):
        assert backward["sum_slices"] >= buckets - 3
        step = {name: n for name, n in step.items() if name != "sum_slices"}
        assert step == {"pack_control": 1, "step_control": 1, "adam_step": 1}


def launches_of(shim: Shim, params: int, groups: int) -> list[int]:
    """Launches of each op, given so many parameters and groups."""
    specs = [Param(3 + i % 300, DTYPES[i % 3], i % groups, amsgrad=i % 2 == 0) for i in range(params)]
    case = Case(specs, split=True)
    for g in range(case.groups.shape[0]):
        case.set_group(g)
    control, clip = case.control(), torch.zeros(2)
    norm = torch.zeros(1, ops.NORM_WORDS, dtype=torch.int64)
    edited = torch.ones(params, dtype=torch.uint8)
    tables = (case.segments, case.chunk_segment)
    options = (case.param_group, case.groups, None, clip, True, False, case.steps, case.scalars, case.skipped)
    found = []
    for function, arguments in (
        (shim.grad_norm, (*tables, case.grads, norm[0])),
        (shim.pack_control, (norm, None, None, control)),
        (shim.clip_factor, (control, None, 1.0, clip)),
        (shim.step_control, (control, 1, *options)),
        (shim.adam_step, case.adam_args()),
        (shim.refresh_masters, (*tables, case.params, case.master, case.remainder, edited)),
        (shim.sum_slices, (torch.ones(3, params), None, 0, 1.0, 1.0, torch.ones(params), None)),
    ):
        before = shim.launches()
        function(*arguments)
        found.append(shim.launches() - before)
    assert case.steps.tolist() == [1] * params
    return found


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_launches_of_the_kernels_sources(tmp_path: Path) -> None:
    """Every op is one launch, whatever it is given."""
    build(tmp_path / "kernels.so", [])
    shim = Shim(tmp_path / "kernels.so")
    for params, groups in FEW_SIZES:
        assert launches_of(shim, params, groups) == [1] * 7


# ---- reading back

READS = ["item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__", "__contains__"]

# shapes that depend on values and comparisons that give a bool are reads as well
VALUE_DEPENDENT = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2"}


@contextmanager
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Everything by which Python looks into a tensor."""
    found: list[str] = []

    def watched(name: str, original: Any) -> Any:
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return original(self, *args, **kwargs)

        return method

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.name().partition("::")[2].partition(".")[0]
            indices = args[1] if name in ("index", "index_put_") else ()
            masks = any(t is not None and t.dtype == torch.bool for t in indices)
            if masks or name in VALUE_DEPENDENT:
                found.append(func.name())
            return func(*args, **(kwargs or {}))

    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(Tensor, name, watched(name, getattr(Tensor, name)))
        with Mode():
            yield found


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}, {"skip_nonfinite": False}, {"amsgrad": True}], ids=str)
@pytest.mark.parametrize("split", [False, True])
def test_nothing_is_read_back(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], split: bool) -> None:
    """On one rank not even on the CPU, where several ranks read what they must agree on."""
    opt = Zero1AdamW(model(20, 2), master_weights="split" if split else "fp32", **options)
    scale, found_inf = torch.tensor(2.0), torch.tensor(0.0)
    for step in range(6):
        set_gradients(opt, step)
        with reads(monkeypatch) as found:
            if step == 2:
                opt.clip_grad_norm_(1.0)
            if step == 3:
                opt.param_groups[0]["lr"] = 0.5
            if step == 4:
                opt.grad_scale, opt.found_inf = scale, found_inf
            if step == 5:
                with torch.no_grad():
                    opt.param_groups[0]["params"][0].mul_(2.0)
            opt.step()
            _ = opt.grad_norm, opt.skipped_steps, opt.step_skipped
        assert found == []


def test_a_rate_in_a_tensor_is_the_only_thing_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with capturable=True it is not either."""
    for capturable in (False, True):
        groups = model(20, 2)
        groups[0]["lr"] = torch.tensor(1e-3)
        opt = Zero1AdamW(groups, capturable=capturable)
        for step in range(3):
            set_gradients(opt, step)
            with reads(monkeypatch) as found:
                opt.step()
            assert len(set(found)) <= (0 if capturable else 2)
            assert capturable == (found == [])


def test_the_watch_sees_every_read(monkeypatch: pytest.MonkeyPatch) -> None:
    t = torch.ones(3)
    looks: list[Callable[[], Any]] = [
        lambda: t[0].item(), lambda: t.tolist(), lambda: t.numpy(), lambda: t.cpu(), lambda: bool(t[0]),
        lambda: float(t[0]), lambda: int(t[0]), lambda: [1, 2][t[0].int()], lambda: torch.equal(t, t + 1),
        lambda: t.nonzero(), lambda: t[t > 2], lambda: 1.0 in t, lambda: t.unique(),
    ]  # fmt: skip
    for look in looks:
        with reads(monkeypatch) as found:
            look()
        assert found
