"""What the kernels' sources must do, as functions of a Shim: run by test_kernel_source.py, and once more under the
sanitizers by running this file as a program: python checks.py LIBRARY."""

from __future__ import annotations

import copy
import itertools
import math
import sys
from pathlib import Path

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from helpers.ops_case import DTYPES, Case, Param
from shim.host import Shim

from zero1_cuda import ops

SIZES = [0, 1, 7, 8, 9, 127, 128, 129, 1023, 4097]
LARGE = 100_003
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 3.4e38, 1e-38, 65504.0, 6e-8, -3e-5]
AMSGRAD, MAXIMIZE, DECOUPLED = ops.GROUP_AMSGRAD, ops.GROUP_MAXIMIZE, ops.GROUP_DECOUPLED
MODES = [sum(flags) for flags in itertools.product((0, AMSGRAD), (0, MAXIMIZE), (0, DECOUPLED))]
MASTERS = [*((dtype, False) for dtype in DTYPES), (torch.bfloat16, True)]


def bits(t: Tensor) -> Tensor:
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def assert_same(got: list[Tensor | None], wanted: list[Tensor | None], what: str) -> None:
    """The same bits, of NaN too."""
    for k, (a, b) in enumerate(zip(got, wanted, strict=True)):
        if a is not None and b is not None:
            different = (bits(a) != bits(b)).nonzero()
            assert different.numel() == 0, f"{what}: tensor {k} differs at {different[:5].tolist()}"


def sprinkle(t: Tensor, every: int = 37) -> None:
    """Special values here and there."""
    values = torch.tensor(SPECIAL, dtype=torch.float32).to(t.dtype)
    places = t[::every]
    places.copy_(values.repeat(-(-places.numel() // len(SPECIAL)) + 1)[: places.numel()])


def tight(case: Case) -> Case:
    """The same case with every buffer in memory of its own that ends with the last element in use, for the sanitizer.
    One parameter only: chunks of padding stay in the table, but nothing is there for them."""
    case = copy.deepcopy(case)
    n = case.specs[0].numel

    def cut(t: Tensor | None, numel: int) -> Tensor | None:
        if t is None:
            return None
        own = torch.empty(numel + case.offset, dtype=t.dtype)[case.offset :]
        return own.copy_(t[:numel])

    case.grads = [cut(case.grads[0], n)]
    case.params = [cut(case.params[0], ops.CHUNK + n)]
    for name in ("exp_avg", "exp_avg_sq", "master", "remainder", "max_exp_avg_sq"):
        setattr(case, name, cut(getattr(case, name), n))
    return case


def adam_steps(shim: Shim, case: Case, steps: int = 2) -> None:
    """Steps of the CPU op and of the kernel from one state; in the second, every third parameter is inactive."""
    for g, mode in enumerate(MODES[: case.groups.shape[0]]):
        case.set_group(g, mode=mode, weight_decay=0.1 * (g % 3))
    for i in range(len(case.specs)):
        for tensor in (case.grad(i), case.of(case.exp_avg, i)):
            sprinkle(tensor, 37 + i)
    case.of(case.exp_avg_sq, 0).uniform_(0, 1e-3)
    kernel, cut = copy.deepcopy(case), tight(case) if len(case.specs) == 1 else None
    for step in range(steps):
        had_grad = [step == 0 or i % 3 != 2 for i in range(len(case.specs))]
        for run in (case, kernel):
            run.step_control(run.control(had_grad))
        case.adam_step()
        shim.adam_step(*kernel.adam_args())
        assert_same(kernel.tensors(), case.tensors(), f"adam_step {step}")
        if cut is not None:
            cut.scalars = case.scalars
            shim.adam_step(*cut.adam_args())
            for a, b in zip(cut.tensors(), case.tensors(), strict=True):
                assert_same([a], [b[: a.numel()]], f"adam_step {step}, cut")


def check_adam_step(shim: Shim, dtype: torch.dtype, split: bool, offset: int) -> None:
    """Every size in every mode, amsgrad with and without a place for the maximum, and one large parameter."""
    specs = [Param(size, dtype, g, amsgrad) for g in range(len(MODES)) for size in SIZES for amsgrad in (False, True)]
    adam_steps(shim, Case(specs, split, offset))
    adam_steps(shim, Case([Param(LARGE, dtype)], split, offset))
    adam_steps(shim, Case([Param(129, dtype, 0, True), Param(300, dtype, 0)], split, offset))


def check_adam_step_ends(shim: Shim, dtype: torch.dtype, split: bool, offset: int) -> None:
    """One parameter whose memory ends with it, for each size: with the sanitizer, nothing beyond is touched."""
    for size in SIZES[1:]:
        adam_steps(shim, Case([Param(size, dtype, 0, amsgrad=size % 2 == 0)], split, offset), steps=1)


def mixed(split: bool, offset: int = 0) -> Case:
    specs = [Param(size, dtype, k % 8, k % 3 == 0) for k, (size, dtype) in enumerate(itertools.product(SIZES, DTYPES))]
    return Case(specs, split, offset)


def check_mixed_dtypes(shim: Shim) -> None:
    for split, offset in ((False, 0), (True, 0), (True, 3)):
        adam_steps(shim, mixed(split, offset))


def check_grad_norm(shim: Shim, dtype: torch.dtype, offset: int) -> None:
    cases = [Case([Param(size, dtype)], offset=offset) for size in SIZES]
    cases += [Case([Param(size, dtype) for size in SIZES], offset=offset), mixed(False, offset)]
    large = Case([Param(LARGE, dtype)], offset=offset)
    for kind, case in [("special", large), *itertools.product(("finite", "special", "overflow"), cases)]:
        case = copy.deepcopy(case)
        for i in range(len(case.specs)):
            if kind == "special":
                sprinkle(case.grad(i), 150 + i)
            if kind == "overflow" and case.specs[i].dtype != torch.float16:
                case.grad(i)[::300] = 3e38
        norms = torch.full((3, ops.NORM_WORDS), 5, dtype=torch.int64)
        ops.grad_norm(case.segments, case.chunk_segment, case.grads, norms[0])
        shim.grad_norm(case.segments, case.chunk_segment, case.grads, norms[1])
        assert_same([norms[1]], [norms[0]], f"grad_norm {kind}")
        if len(case.specs) == 1:
            cut = tight(case)
            shim.grad_norm(cut.segments, cut.chunk_segment, cut.grads, norms[2])
            assert_same([norms[2]], [norms[0]], f"grad_norm {kind}, cut")


def check_sum_slices(shim: Shim, kind_in: torch.dtype, kind_out: torch.dtype, offset: int) -> None:
    generator = torch.Generator().manual_seed(3)
    options = [*itertools.product((False, True), repeat=2)]
    for size, world in [*itertools.product(SIZES, (1, 2, 5)), (2048, 4), (LARGE, 3)]:
        for with_own, with_norm in options if size < LARGE else options[-1:]:
            rank = world // 2
            slices = torch.randn(world, size, generator=generator).to(kind_in)
            if size:
                sprinkle(slices.view(-1), 61)
            rest = torch.cat([slices[:rank], slices[rank + 1 :]]) if with_own else slices
            received = torch.empty(rest.numel() + offset, dtype=kind_in)[offset:].view(rest.shape).copy_(rest)
            results = []
            for op in (ops.sum_slices, shim.sum_slices):
                own = torch.empty(size + offset, dtype=kind_in)[offset:].copy_(slices[rank]) if with_own else None
                out = torch.empty(size + offset, dtype=kind_out)[offset:]
                if own is not None and kind_in == kind_out and with_norm:
                    out = own  # in place
                norm = torch.zeros(ops.NORM_WORDS, dtype=torch.int64) if with_norm else None
                op(received, own, rank, 0.125, world * 0.125, out, norm)
                results.append([out, norm])
            assert_same(results[1], results[0], f"sum_slices {size} {world} {with_own} {with_norm}")


SUMS = [(a, b) for a, b in itertools.product(DTYPES, DTYPES) if a == b or torch.float32 in (a, b)]


def check_refresh(shim: Shim, split: bool, offset: int) -> None:
    case = mixed(split, offset)
    for i in range(len(case.specs)):
        if case.specs[i].dtype == torch.float32:
            continue
        if case.is_split(i):
            case.of(case.remainder, i, 4).copy_(torch.arange(case.specs[i].numel) * 77)
        else:
            case.of(case.master, i, 4).mul_(1.001)
        case.param(i)[1::3] += 0.5
        sprinkle(case.param(i), 5)
    kernel = copy.deepcopy(case)
    edited = (torch.arange(len(case.specs)) % 4 != 0).to(torch.uint8)
    for op, run in ((ops.refresh_masters, case), (shim.refresh_masters, kernel)):
        op(run.segments, run.chunk_segment, run.params, run.master, run.remainder, edited)
    assert_same(kernel.tensors(), case.tensors(), "refresh_masters")


def check_control(shim: Shim) -> None:
    """All inputs of the three control ops, and enough parameters for several blocks."""
    generator = torch.Generator().manual_seed(4)
    scale = torch.tensor(1024.0)
    some = [None, torch.tensor(0.0), torch.tensor(1.0)]
    controls = []
    for rows, found_inf, grad_scale in itertools.product((0, 1, 3, 40), some, (None, scale)):
        norms = torch.randint(0, 2**40, (rows, ops.NORM_WORDS), generator=generator)
        norms[:, ops.NORM_NON_FINITE :] = (torch.rand(rows, 6, generator=generator) < 0.02).to(torch.int64)
        results = torch.full((2, ops.CONTROL_FLAGS), 3, dtype=torch.int64)
        results[:, ops.CONTROL_CONDITIONS] = 0
        ops.pack_control(norms, found_inf, grad_scale, results[0])
        shim.pack_control(norms, found_inf, grad_scale, results[1])
        assert_same([results[1]], [results[0]], "pack_control")
        controls.append((results[0], grad_scale))

    for (control, grad_scale), max_norm in itertools.product(controls, (1e-3, 1e30)):
        clips = torch.zeros(2, 2)
        ops.clip_factor(control, grad_scale, max_norm, clips[0])
        shim.clip_factor(control, grad_scale, max_norm, clips[1])
        assert_same([clips[1]], [clips[0]], "clip_factor")

    groups = Case([Param(0, group=g) for g in range(8)])
    for g, mode in enumerate(MODES):
        groups.set_group(g, lr=0.1 / (g + 1), betas=(0.9, 1 - 0.1**g), weight_decay=0.1 * (g % 2), mode=mode)
    rate = torch.tensor(0.375, dtype=torch.float64)
    groups.groups[0].view(torch.int64)[ops.GROUP_LR_AT] = rate.data_ptr()
    groups.groups[0].view(torch.int64)[ops.GROUP_LR_IS_FP64] = 1
    clip = torch.tensor([0.25, 4.0])
    for count in (0, 1, 5, 2000):
        had_grad = (torch.arange(-(-count // 4) * 4) % 5 != 3).to(torch.int16).view(torch.int64)
        param_group = (torch.arange(count) % 8).to(torch.int32)
        for (head, grad_scale), clipped, skip, condition in itertools.product(
            controls[::5], (None, clip), (False, True), (None, ops.CONTROL_CONDITIONS, ops.CONTROL_MODIFIED)
        ):
            control = torch.cat([head, had_grad])
            control[ops.CONTROL_MODIFIED : ops.CONTROL_FLAGS] = 0
            if condition is not None:
                control[condition] = 1
            results = []
            for op in (ops.step_control, shim.step_control):
                steps = torch.arange(count) * 13
                scalars = torch.zeros(count, ops.SCALAR_WORDS)
                skipped = torch.tensor([3, 5, 0])
                op(
                    control, 1, param_group, groups.groups, grad_scale, clipped, skip, grad_scale is not None,
                    steps, scalars, skipped,
                )  # fmt: skip
                results.append([steps, scalars, skipped])
            assert_same(results[1], results[0], "step_control")


def main(library: str) -> None:
    shim = Shim(Path(library))
    for (dtype, split), offset in itertools.product(MASTERS, (0, 1)):
        check_adam_step_ends(shim, dtype, split, offset)
    check_mixed_dtypes(shim)
    for dtype, offset in itertools.product(DTYPES, (0, 1)):
        check_grad_norm(shim, dtype, offset)
    for kinds in SUMS:
        check_sum_slices(shim, *kinds, offset=1)
    for split in (False, True):
        check_refresh(shim, split, 0)
    check_control(shim)


if __name__ == "__main__":
    main(sys.argv[1])
