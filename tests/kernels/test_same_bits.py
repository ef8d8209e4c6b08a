"""The CPU kernels at every instruction set, the sources of the CUDA kernels run on the CPU, and the PTX that nvcc makes
of them give the same bits: all ops of a step, all dtypes, kinds of master and variants, ordinary numbers and any bits.

data/same_bits.json holds digests of every case's inputs and outputs. They were made by running the PTX with an
interpreter for PTX that is not part of the project; the file says which PTX, and which cases were made otherwise.
Inputs come from integer arithmetic alone, so they do not depend on any library's random numbers."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ops_case import DTYPES, Case, Param
from shim.host import Shim, build
from torch import Tensor

from zero1_cuda import ops

DATA = Path(__file__).parent / "data" / "same_bits.json"
SIZES = [1, 7, 8, 9, 128, 129, 1023]
AMSGRAD, MAXIMIZE, DECOUPLED = ops.GROUP_AMSGRAD, ops.GROUP_MAXIMIZE, ops.GROUP_DECOUPLED
MODES = [sum(flags) for flags in itertools.product((0, AMSGRAD), (0, MAXIMIZE), (0, DECOUPLED))]
MASTERS = [*((dtype, False) for dtype in DTYPES), (torch.bfloat16, True)]
KINDS = ("ordinary", "any")
SUMS = [(a, b) for a, b in itertools.product(DTYPES, DTYPES) if a == b or torch.float32 in (a, b)]
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

Items = list[tuple[str, Tensor]]


class Numbers:
    """splitmix64, from a seed that is a name."""

    def __init__(self, name: str) -> None:
        self.state = zlib.crc32(name.encode())

    def words(self, count: int) -> np.ndarray[Any, Any]:
        x = np.arange(self.state + 1, self.state + 1 + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self.state += count
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    def integers(self, count: int, below: int) -> Tensor:
        return torch.from_numpy((self.words(count) % np.uint64(below)).astype(np.int64))

    def fill(self, t: Tensor, kind: str = "any", low: int = -14, high: int = 1, signed: bool = True) -> None:
        """any: every pattern is as likely. ordinary: of magnitude 2^low to 2^high. large: near the largest value."""
        x = self.words(t.numel())
        if t.dtype == torch.int16 or kind == "any":
            bits = x
        else:
            mantissa, bias = {torch.float32: (23, 127), torch.bfloat16: (7, 127), torch.float16: (10, 15)}[t.dtype]
            low, high = (bias - 2, bias + 1) if kind == "large" else (low, high)
            exponent = np.uint64(bias + low) + (x >> np.uint64(32)) % np.uint64(high - low)
            sign = (x >> np.uint64(63)) * np.uint64(signed)
            bits = (x & np.uint64((1 << mantissa) - 1)) | (exponent << np.uint64(mantissa))
            bits |= sign << np.uint64(31 if t.dtype == torch.float32 else 15)
        if t.element_size() == 4:
            t.view(torch.int32).copy_(torch.from_numpy(bits.astype(np.uint32).view(np.int32)))
        else:
            t.view(torch.int16).copy_(torch.from_numpy(bits.astype(np.uint16).view(np.int16)))


def digest(items: Items) -> str:
    out = hashlib.sha256()
    for name, t in items:
        out.update(f"{name} {t.dtype} {tuple(t.shape)};".encode())
        if t.numel():
            out.update(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return out.hexdigest()


def one_nan(t: Tensor) -> Tensor:
    """In the control's own numbers any NaN is as good as another: it ends in the kernel, which stores one pattern."""
    return t.masked_fill(t.isnan(), float("nan"))


# ---- the cases: a function of the ops that runs them, which gives what goes in and what comes out


def contents(case: Case) -> Items:
    """Everything of every parameter, copied; not where it lies."""
    out = []
    for i in range(len(case.specs)):
        kinds = {"grad": case.grad(i), "param": case.param(i), "exp_avg": case.of(case.exp_avg, i)}
        kinds |= {"exp_avg_sq": case.of(case.exp_avg_sq, i), "max_exp_avg_sq": case.maximum(i)}
        if case.specs[i].dtype != torch.float32:
            store = case.remainder if case.is_split(i) else case.master
            assert store is not None
            kinds["master"] = case.of(store, i, 4)
        out += [(f"{name} {i}", t.clone()) for name, t in kinds.items() if t is not None]
    return out


def fill(case: Case, numbers: Numbers, kind: str) -> None:
    for i in range(len(case.specs)):
        numbers.fill(case.grad(i), kind)
        numbers.fill(case.param(i), kind, -6, 1)
        numbers.fill(case.of(case.exp_avg, i), kind, -16, -1)
        numbers.fill(case.of(case.exp_avg_sq, i), kind, -28, -2, signed=False)
        if (maximum := case.maximum(i)) is not None:
            numbers.fill(maximum, kind, -28, -2, signed=False)
        if case.is_split(i):
            numbers.fill(case.of(case.remainder, i, 4))
        elif case.specs[i].dtype != torch.float32:
            numbers.fill(case.of(case.master, i, 4), kind, -6, 1)


def set_groups(case: Case) -> None:
    for g, mode in enumerate(MODES[: case.groups.shape[0]]):
        betas = (0.9, 0.999) if g % 3 else (0.0, 0.95) if g % 2 else (0.6, 0.5)
        case.set_group(g, 0.1 / (g + 1), betas, 1e-8 if g % 4 else 0.0, 0.1 * (g % 3), mode)


def step_control(op: Any, case: Case, control: Tensor, scale: Tensor | None, clip: Tensor | None) -> None:
    op.step_control(
        control, 1, case.param_group, case.groups, scale, clip, True, scale is not None,
        case.steps, case.scalars, case.skipped,
    )  # fmt: skip


def adam_step(name: str, op: Any, dtype: torch.dtype, split: bool, offset: int, kind: str) -> tuple[Items, Items]:
    specs = [Param(n, dtype, g, amsgrad) for g in range(len(MODES)) for n in SIZES for amsgrad in (False, True)]
    case, numbers = Case(specs, split, offset), Numbers(name)
    fill(case, numbers, kind)
    set_groups(case)
    case.steps.copy_(numbers.integers(len(specs), 1000))
    given = [*contents(case), ("groups", case.groups), ("steps", case.steps.clone())]
    made: Items = []
    scale, clip = torch.tensor([0.5]), torch.tensor([0.75, 3.0])
    for step in range(2):
        # in the second step some parameters have no gradient
        control = case.control([step == 0 or i % 3 != 2 for i in range(len(specs))])
        step_control(op, case, control, scale if step else None, clip if step else None)
        op.adam_step(*case.adam_args())
        made += [*contents(case), ("steps", case.steps.clone()), ("scalars", one_nan(case.scalars))]
    return given, made


def grad_norm(name: str, op: Any, dtype: torch.dtype, offset: int, kind: str) -> tuple[Items, Items]:
    case, numbers = Case([Param(n, dtype) for n in (*SIZES, 5000)], offset=offset), Numbers(name)
    for i in range(len(case.specs)):
        numbers.fill(case.grad(i), kind)
    case.grad(7)[3000:] = 0.0
    given = [(f"grad {i}", case.grad(i).clone()) for i in range(len(case.specs))]
    norm = torch.full((ops.NORM_WORDS,), 3, dtype=torch.int64)
    op.grad_norm(case.segments, case.chunk_segment, case.grads, norm)
    return given, [("norm", norm)]


def sum_slices(name: str, op: Any, kind_in: torch.dtype, kind_out: torch.dtype, kind: str) -> tuple[Items, Items]:
    numbers, given, made = Numbers(name), [], []
    for n, world, own_rank, offset in itertools.product((1, 1031, 2048), (1, 2, 3, 5), (None, 0, -1), (0, 1)):
        rank = 0 if own_rank is None else own_rank % world
        slices = torch.empty(world, n, dtype=kind_in)
        numbers.fill(slices.view(-1), kind, -14, 8)
        given.append((f"slices {n} {world}", slices.clone()))
        rest = slices if own_rank is None else torch.cat([slices[:rank], slices[rank + 1 :]])
        received = torch.empty(rest.numel() + offset, dtype=kind_in)[offset:].view(rest.shape).copy_(rest)
        own = None if own_rank is None else torch.empty(n + offset, dtype=kind_in)[offset:].copy_(slices[rank])
        out = own if own is not None and kind_in == kind_out and n > 1 else torch.zeros(n, dtype=kind_out)
        norm = torch.zeros(ops.NORM_WORDS, dtype=torch.int64) if (n + world) % 4 else None
        scale = 0.5 ** (world - 1).bit_length()
        op.sum_slices(received, own, rank, scale, world * scale, out, norm)
        made.append((f"out {n} {world}", out))
        made += [] if norm is None else [("norm", norm)]
    return given, made


def refresh_masters(name: str, op: Any, split: bool, offset: int) -> tuple[Items, Items]:
    specs = [Param(n, dtype) for dtype in DTYPES for n in SIZES]
    case, numbers = Case(specs, split, offset), Numbers(name)
    fill(case, numbers, "any")
    for i, p in enumerate(specs):
        if p.dtype != torch.float32 and not case.is_split(i):  # half of the masters are near their weights
            master = case.of(case.master, i, 4)
            near = case.param(i).float().view(torch.int32) + numbers.integers(p.numel, 0x9000).to(torch.int32)
            numbers.fill(master)
            master.view(torch.int32)[::2] = near[::2]
    edited = (numbers.integers(len(specs), 4) != 0).to(torch.uint8)
    given = [*contents(case), ("edited", edited)]
    op.refresh_masters(case.segments, case.chunk_segment, case.params, case.master, case.remainder, edited)
    return given, contents(case)


def pack_and_clip(name: str, op: Any) -> tuple[Items, Items]:
    numbers, given, made = Numbers(name), [], []
    flags = [None, torch.zeros(1), torch.ones(1)]
    # norms up to the limb given: around 1e-5, around 1, beyond fp32
    for rows, top, found_inf, scale in itertools.product(
        (0, 1, 3, 40), (3, 4, 9), flags, (None, torch.tensor([1024.0]))
    ):
        norms = numbers.integers(rows * ops.NORM_WORDS, 2**32).view(rows, ops.NORM_WORDS)
        norms[:, top] >>= 8
        norms[:, top + 1 : ops.NORM_NON_FINITE] = 0
        norms[:, ops.NORM_NON_FINITE :] = (norms[:, ops.NORM_NON_FINITE :] % 40 == 0).to(torch.int64)
        control = torch.full((ops.CONTROL_FLAGS,), 5, dtype=torch.int64)
        op.pack_control(norms, found_inf, scale, control)
        given.append(("norms", norms))
        made.append(("control", control.clone()))
        control[ops.NORM_NON_FINITE : ops.CONTROL_CONDITIONS] *= found_inf is not None
        clip = torch.zeros(2)
        for max_norm in (1e-6, 1.0, 1e30, None):
            # the last: half as much again as the norm
            op.clip_factor(control, scale, 1.5 * float(clip[1]) if max_norm is None else max_norm, clip)
            made.append(("clip", one_nan(clip)))
    return given, made


def control(name: str, op: Any) -> tuple[Items, Items]:
    """step_control: rates in memory, ranks that differ, conditions, skipping; enough parameters for several blocks."""
    case, numbers = Case([Param(0, group=i % 8) for i in range(700)]), Numbers(name)
    set_groups(case)
    rates = [torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float32)]
    address: Callable[[Tensor], int] = getattr(op, "address", Tensor.data_ptr)
    steps = numbers.integers(700, 100_000)
    steps[:8] = torch.tensor([0, 1, 2, 2**20, 2**31, 2**40, 3, 7])
    had = [bool(x) for x in numbers.integers(700, 5)]
    given: Items = [("groups", case.groups.clone()), ("steps", steps)]
    made: Items = []
    words = [None, ops.CONTROL_CONDITIONS, ops.CONTROL_MODIFIED, ops.NORM_NON_FINITE, ops.CONTROL_FOUND_INF]
    words += [ops.CONTROL_FACTS, ops.CONTROL_BACKWARDS, ops.CONTROL_SCALE]
    words += [ops.CONTROL_IN_BACKWARD, ops.CONTROL_IN_CLIP, ops.CONTROL_NON_FINITE_GRADS]
    for word, scale, clip, skip in itertools.product(
        words, (None, torch.tensor([65536.0])), (None, torch.tensor([0.3, 9.0])), (False, True)
    ):
        vector = case.control(had)
        vector[: ops.NORM_LIMBS] = numbers.integers(ops.NORM_LIMBS, 2**32)
        if word is not None:
            vector[word] = 1
        given.append(("control", vector))
        rows = case.groups.view(torch.int64)
        for g, rate in enumerate(rates):
            rows[g, ops.GROUP_LR_AT], rows[g, ops.GROUP_LR_IS_FP64] = address(rate), rate.dtype == torch.float64
        case.steps.copy_(steps)
        case.scalars.zero_()
        op.step_control(
            vector, 1, case.param_group, case.groups, scale, clip, skip, scale is not None,
            case.steps, case.scalars, case.skipped,
        )  # fmt: skip
        results = [("steps", case.steps), ("scalars", one_nan(case.scalars)), ("skipped", case.skipped)]
        made += [(what, t.clone()) for what, t in results]
    return given, made


def cases() -> Iterator[tuple[str, Callable[[str, Any], tuple[Items, Items]]]]:
    for (dtype, split), offset, kind in itertools.product(MASTERS, (0, 1), KINDS):
        master = f"{NAMES[dtype]}{' split' if split else ''}"
        run = functools.partial(adam_step, dtype=dtype, split=split, offset=offset, kind=kind)
        yield f"adam_step {master} offset {offset} {kind}", run
    for dtype, offset, kind in itertools.product(DTYPES, (0, 1), ("ordinary", "large", "any")):
        run = functools.partial(grad_norm, dtype=dtype, offset=offset, kind=kind)
        yield f"grad_norm {NAMES[dtype]} offset {offset} {kind}", run
    for (a, b), kind in itertools.product(SUMS, ("ordinary", "large", "any")):
        run = functools.partial(sum_slices, kind_in=a, kind_out=b, kind=kind)
        yield f"sum_slices {NAMES[a]} {NAMES[b]} {kind}", run
    for split, offset in itertools.product((False, True), (0, 3)):
        run = functools.partial(refresh_masters, split=split, offset=offset)
        yield f"refresh_masters{' split' if split else ''} offset {offset}", run
    yield "pack_control, clip_factor", pack_and_clip
    yield "step_control", control


CASES = dict(cases())


def digests(name: str, op: Any) -> dict[str, str]:
    """{"inputs", "outputs"} of a case, run by an object with the functions of zero1_cuda.ops."""
    given, made = CASES[name](name, op)
    return {"inputs": digest(given), "outputs": digest(made)}


# ---- the tests


@functools.cache
def wanted() -> dict[str, Any]:
    return json.loads(DATA.read_text())


@pytest.fixture(params=["plain", "avx2", "avx512", "kernel source"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if request.param == "kernel source":
        if shutil.which("g++") is None:
            pytest.skip("needs g++")
        yield kernel_source(tmp_path_factory.getbasetemp() / "same_bits.so")
        return
    if request.param not in ops.cpu_levels():
        pytest.skip(f"this machine or this build has no {request.param}: nothing is shown for it")
    before = ops.cpu_level()
    ops.set_cpu_level(request.param)
    yield ops
    ops.set_cpu_level(before)


@functools.cache
def kernel_source(library: Path) -> Shim:
    build(library, [])
    shim = Shim(library)
    shim.set("shuffled")
    return shim


@pytest.mark.parametrize("name", CASES)
def test_digests(runner: Any, name: str) -> None:
    got, want = digests(name, runner), wanted()["cases"][name]
    assert got["inputs"] == want["inputs"], "the inputs are not those that the digests were made from"
    assert got["outputs"] == want["outputs"]


def test_every_digest_belongs_to_a_case() -> None:
    assert set(wanted()["cases"]) == set(CASES)
    assert set(wanted()["made by"]) == {"what", "nvcc", "flags", "architectures"}


def test_a_digest_sees_one_bit() -> None:
    """Every tensor of a case counts, and one bit of it is enough."""
    given, made = CASES["adam_step bf16 split offset 0 ordinary"]("adam_step bf16 split offset 0 ordinary", ops)
    for items in (given[:10], made[:10]):
        before = digest(items)
        for k, (name, t) in enumerate(items):
            other = t.clone()
            other.view(-1).view(torch.uint8)[-1] ^= 1
            assert digest([*items[:k], (name, other), *items[k + 1 :]]) != before
