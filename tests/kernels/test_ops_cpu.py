"""The CPU ops give, to the bit, what the plain torch reference gives, at every instruction set; and torch's own Adam
to rounding. Padding and inactive rows are never touched, norms are exact and independent of the partition, the split
master loses nothing, and non-finite values do what IEEE and torch say."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers.ops_case import DTYPES, Case, Param
from torch import Tensor

from zero1_cuda import ops
from zero1_cuda.reference import adam_reference, chunk_sums, norm_integer, settle_tie

SIZES = [0, 1, 7, 8, 9, 1023, 4097]
LEVELS = ops.cpu_levels()
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 3.4e38, 1e-38, 65504.0, 6e-8]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest):
    before = ops.cpu_level()
    ops.set_cpu_level(request.param)
    yield request.param
    ops.set_cpu_level(before)


def equal(a: Tensor, b: Tensor) -> bool:
    """The same bits; any two NaN are the same."""
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(((a.view(kind) == b.view(kind)) | (a.isnan() & b.isnan())).all())


def run_and_compare(case: Case, steps: int = 3, grad_scale: float | None = None, seed: int = 1) -> None:
    """Steps of the ops beside steps of the reference, on the same gradients; every tensor must agree."""
    generator = torch.Generator().manual_seed(seed)
    n = len(case.specs)
    scale = None if grad_scale is None else torch.tensor(grad_scale)
    master = [case.get_master(i) for i in range(n)]
    state = [[torch.zeros(p.numel) for _ in range(3)] for p in case.specs]
    for step in range(1, steps + 1):
        for i, p in enumerate(case.specs):
            case.grad(i).copy_(torch.randn(p.numel, generator=generator) * (grad_scale or 1.0))
        control = case.control()
        if scale is not None:
            ops.pack_control(torch.zeros(1, ops.NORM_WORDS, dtype=torch.int64), None, scale, control)
        case.step_control(control, grad_scale=scale)
        case.adam_step()
        for i, p in enumerate(case.specs):
            lr, beta1, beta2, eps, decay = case.groups[p.group, :5].tolist()
            mode = int(case.groups[p.group].view(torch.int64)[ops.GROUP_MODE])
            m, v, x = state[i]
            amsgrad = p.amsgrad and bool(mode & ops.GROUP_AMSGRAD)
            adam_reference(
                master[i], case.grad(i), m, v, x if amsgrad else None, step, lr, (beta1, beta2), eps, decay,
                bool(mode & ops.GROUP_DECOUPLED), bool(mode & ops.GROUP_MAXIMIZE), 1.0 / (grad_scale or 1.0),
            )  # fmt: skip
            if p.dtype == torch.bfloat16:
                master[i] = settle_tie(master[i])
            assert equal(case.get_master(i), master[i])
            assert equal(case.param(i), master[i].to(p.dtype))
            assert equal(case.of(case.exp_avg, i), m)
            assert equal(case.of(case.exp_avg_sq, i), v)
            if amsgrad:
                assert equal(case.maximum(i), x)


def assert_padding_untouched(case: Case) -> None:
    fresh = Case(case.specs, case.split, case.offset)
    for now, before, words in zip(case.tensors(), fresh.tensors(), padding_words(case), strict=True):
        used = torch.zeros(now.numel(), dtype=torch.bool)
        for i, row in enumerate(case.rows):
            if words(i) is not None:
                used[row[words(i)] : row[words(i)] + row[1]] = True
        kind = {2: torch.int16, 4: torch.int32}[now.element_size()]
        assert torch.equal(now.view(kind)[~used], before.view(kind)[~used])


def padding_words(case: Case):
    """For each of case.tensors(): which word of a row says where the row's segment lies in it (None: nowhere)."""
    for k in range(len(case.grads)):
        yield lambda i, k=k: 2 if case.rows[i][7] == k else None
    for k in range(len(case.params)):
        yield lambda i, k=k: 3 if case.rows[i][7] == k else None
    yield lambda i: 0
    yield lambda i: 0
    if case.master is not None:
        yield lambda i: 4 if case.specs[i].dtype != torch.float32 and not case.is_split(i) else None
    if case.remainder is not None:
        yield lambda i: 4 if case.is_split(i) else None
    if case.max_exp_avg_sq is not None:
        yield lambda i: 5 if case.rows[i][5] >= 0 else None


MODES = [ops.GROUP_DECOUPLED, 0, ops.GROUP_AMSGRAD, ops.GROUP_AMSGRAD | ops.GROUP_MAXIMIZE | ops.GROUP_DECOUPLED]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dtype", "split"), [*((d, False) for d in DTYPES), (torch.bfloat16, True)])
def test_adam_step_equals_the_reference(level: str, dtype: torch.dtype, split: bool, mode: int) -> None:
    amsgrad = bool(mode & ops.GROUP_AMSGRAD)
    for offset in (0, 1, 3):
        case = Case([Param(n, dtype, amsgrad=amsgrad) for n in SIZES], split, offset)
        case.set_group(0, mode=mode)
        run_and_compare(case)
        assert_padding_untouched(case)


def test_groups_and_dtypes_side_by_side(level: str) -> None:
    kinds = itertools.product(DTYPES, (0, 1))
    specs = [Param(n, d, g) for n, (d, g) in zip((300, 5, 128, 1000, 129, 1), kinds, strict=True)]
    specs[2].amsgrad = specs[5].amsgrad = True
    case = Case(specs, split=True, offset=1)
    case.set_group(0, mode=ops.GROUP_AMSGRAD | ops.GROUP_MAXIMIZE, betas=(0.0, 0.9), eps=1e-3)
    case.set_group(1, lr=0.5, betas=(0.4, 0.5), weight_decay=0.0, mode=ops.GROUP_AMSGRAD)
    run_and_compare(case, grad_scale=1024.0)
    assert_padding_untouched(case)


def test_a_large_shard_runs_in_parallel() -> None:
    case = Case([Param(1_000_003, torch.bfloat16), Param(70_001)])
    case.set_group(0)
    run_and_compare(case, steps=2)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_adam_step_follows_torch(decoupled: bool, amsgrad: bool, maximize: bool) -> None:
    case = Case([Param(1000, amsgrad=amsgrad)])
    mode = ops.GROUP_DECOUPLED * decoupled | ops.GROUP_AMSGRAD * amsgrad | ops.GROUP_MAXIMIZE * maximize
    case.set_group(0, mode=mode)
    weight = torch.nn.Parameter(case.param(0).clone())
    make = torch.optim.AdamW if decoupled else torch.optim.Adam
    other = make([weight], lr=1e-2, weight_decay=0.1, amsgrad=amsgrad, maximize=maximize, foreach=False)
    for step in range(20):
        case.grad(0).copy_(torch.randn(1000, generator=torch.Generator().manual_seed(step)))
        weight.grad = case.grad(0).clone()
        case.step_control(case.control())
        case.adam_step()
        other.step()
    torch.testing.assert_close(case.param(0), weight.data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(level: str, dtype: torch.dtype) -> None:
    values = torch.tensor(list(itertools.product(SPECIAL, SPECIAL, [0.0, 1e-45, math.inf, math.nan])))
    case = Case([Param(len(values), dtype, amsgrad=True)])
    for mode in (ops.GROUP_DECOUPLED, ops.GROUP_AMSGRAD):
        case.set_group(0, mode=mode)
        case.grad(0).copy_(values[:, 0])
        case.set_param(0, values[:, 1])
        case.of(case.exp_avg_sq, 0).copy_(values[:, 2])
        case.maximum(0).copy_(values[:, 2].flip(0))
        case.of(case.exp_avg, 0).copy_(values[:, 0].flip(0))
        case.steps.zero_()
        case.step_control(case.control())
        master, m, v = case.get_master(0), case.of(case.exp_avg, 0).clone(), case.of(case.exp_avg_sq, 0).clone()
        amsgrad = bool(mode & ops.GROUP_AMSGRAD)
        maximum = case.maximum(0).clone() if amsgrad else None
        decoupled = bool(mode & ops.GROUP_DECOUPLED)
        adam_reference(master, case.grad(0), m, v, maximum, 1, 1e-2, (0.9, 0.999), 1e-8, 0.1, decoupled)
        case.adam_step()
        if dtype == torch.bfloat16:
            master = settle_tie(master)
        assert equal(case.get_master(0), master)
        assert equal(case.param(0), master.to(dtype))
        assert equal(case.of(case.exp_avg, 0), m)
        assert equal(case.of(case.exp_avg_sq, 0), v)
        nan = case.of(case.exp_avg, 0)[m.isnan()].view(torch.int32)
        assert bool((nan == 0x7FC00000).all()), "NaN are stored as one pattern"


def test_inactive_rows_are_not_touched(level: str) -> None:
    case = Case([Param(200), Param(300, torch.bfloat16), Param(5, torch.float16)])
    case.set_group(0)
    before = case.bits()
    case.step_control(case.control([False, False, True]))
    case.adam_step()
    assert case.steps.tolist() == [0, 0, 1]
    after = case.bits()
    for i in (0, 1):
        for flat, word in ((case.params[case.rows[i][7]], 3), (case.exp_avg, 0), (case.exp_avg_sq, 0)):
            at = next(k for k, t in enumerate(case.tensors()) if t is flat)
            assert torch.equal(case.of(after[at], i, word), case.of(before[at], i, word))
    assert not torch.equal(case.grad(2), case.param(2))


def test_split_master_follows_the_fp32_master(level: str) -> None:
    cases = [Case([Param(4097, torch.bfloat16)], split=split) for split in (False, True)]
    for step in range(30):
        grad = torch.randn(4097, generator=torch.Generator().manual_seed(step))
        for case in cases:
            case.set_group(0, lr=1e-3 * 2 ** (step % 5))
            case.grad(0).copy_(grad)
            case.step_control(case.control())
            case.adam_step()
    assert equal(cases[0].get_master(0), cases[1].get_master(0))
    assert equal(cases[0].param(0), cases[1].param(0))


# ---- conversions: sum_slices with one slice converts and nothing else


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.numel(), dtype=dtype)
    ops.sum_slices(x.view(1, -1), None, 0, 1.0, 1.0, out, None)
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_value_converts_to_fp32(level: str, dtype: torch.dtype) -> None:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    assert equal(convert(x, torch.float32), x.float() + 0.0)
    assert equal(convert(x, dtype), x + 0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp32_rounds_as_torch_rounds(level: str, dtype: torch.dtype) -> None:
    # every high half with the low halves around a tie of either type, and many random ones
    high = torch.arange(2**16, dtype=torch.int64)[:, None] << 16
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    random = torch.randint(0, 2**32, (1_000_000,), generator=torch.Generator().manual_seed(0))
    x = torch.cat([(high | low).flatten(), random]).to(torch.int32).view(torch.float32)
    assert equal(convert(x, dtype), (x + 0.0).to(dtype))


# ---- norms


def norm_of(case: Case) -> Tensor:
    norm = torch.zeros(ops.NORM_WORDS, dtype=torch.int64)
    ops.grad_norm(case.segments, case.chunk_segment, case.grads, norm)
    return norm


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grad_norm_is_the_exact_sum_of_its_chunks(level: str, dtype: torch.dtype, offset: int) -> None:
    case = Case([Param(n, dtype) for n in (*SIZES, 100_000)], offset=offset)
    case.grad(5).mul_(1e-3)
    total = sum(int(s * 2.0**149) for i in range(len(case.specs)) for s in chunk_sums(case.grad(i)).double().tolist())
    norm = norm_of(case)
    assert norm_integer(norm) == total
    assert norm[ops.NORM_LIMBS :].tolist() == [0] * (ops.NORM_WORDS - ops.NORM_LIMBS)
    exact = sum(case.grad(i).double().square().sum().item() for i in range(len(case.specs)))
    assert total * 2.0**-149 == pytest.approx(exact, rel=1e-6)


def test_grad_norm_does_not_depend_on_the_partition(level: str) -> None:
    whole = Case([Param(5000)])
    cuts = [0, 128, 1280, 4992, 5000]
    parts = Case([Param(b - a) for a, b in itertools.pairwise(cuts)])
    for i, (a, b) in enumerate(itertools.pairwise(cuts)):
        parts.grad(i).copy_(whole.grad(0)[a:b])
    assert norm_integer(norm_of(whole)) == norm_integer(norm_of(parts))


def test_grad_norm_counts_what_is_not_finite(level: str) -> None:
    case = Case([Param(128 * 6)])
    case.grad(0).fill_(0.0)
    case.grad(0)[5] = math.inf
    case.grad(0)[128] = math.nan
    case.grad(0)[300], case.grad(0)[301] = -math.inf, math.nan
    case.grad(0)[400] = 1e30
    case.grad(0)[700] = 2.0
    norm = norm_of(case)
    assert norm[[ops.NORM_NON_FINITE, ops.NORM_NAN, ops.NORM_OVERFLOW]].tolist() == [3, 2, 1]
    assert norm_integer(norm) == 4 << 149


# ---- sum_slices


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_slices(level: str, dtype: torch.dtype, world: int) -> None:
    sizes, out_dtypes, own_ranks = (0, 1, 9, 1023, 4097), {dtype, torch.float32}, (None, 0, world - 1)
    for n, out_dtype, own_rank in itertools.product(sizes, out_dtypes, own_ranks):
        generator = torch.Generator().manual_seed(n)
        slices = (torch.randn(world * n + 1, generator=generator) * 100).to(dtype)[1:].view(world, n)
        scale = 0.25
        want = torch.zeros(n)
        for r in range(world):
            want = want + slices[r].float() * scale
        mean = want / (scale * world)
        out, norm = torch.empty(n, dtype=out_dtype), torch.zeros(ops.NORM_WORDS, dtype=torch.int64)
        if own_rank is None:
            ops.sum_slices(slices, None, 0, scale, scale * world, out, norm)
        else:
            rest = slices[[r for r in range(world) if r != own_rank]]
            ops.sum_slices(rest, slices[own_rank], own_rank, scale, scale * world, out, norm)
        assert equal(out, mean.to(out_dtype))
        assert norm_integer(norm) == sum(int(s * 2.0**149) for s in chunk_sums(mean).double().tolist())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_that_fits_does_not_overflow(level: str, dtype: torch.dtype) -> None:
    big = torch.finfo(dtype).max
    slices = torch.full((4, 300), big, dtype=dtype)
    out, norm = torch.empty(300, dtype=dtype), torch.zeros(ops.NORM_WORDS, dtype=torch.int64)
    ops.sum_slices(slices, None, 0, 0.25, 1.0, out, norm)
    assert bool((out == big).all())
    assert norm[ops.NORM_OVERFLOW] == (3 if dtype == torch.bfloat16 else 0)
    slices[2, 7] = math.nan
    slices[1, 200] = math.inf
    ops.sum_slices(slices, None, 0, 0.25, 1.0, out, norm.zero_())
    assert out.isnan().nonzero().tolist() == [[7]]
    assert out.isinf().nonzero().tolist() == [[200]]
    assert norm[[ops.NORM_NON_FINITE, ops.NORM_NAN]].tolist() == [2, 1]


def test_sum_slices_may_write_over_its_own_slice(level: str) -> None:
    slices = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    want = ((0.0 + slices[0] + slices[1]) + slices[2]) / 3.0
    own = slices[1].clone()
    ops.sum_slices(slices[[0, 2]], own, 1, 1.0, 3.0, own, None)
    assert equal(own, want)


# ---- refresh_masters


def test_refresh_takes_up_edited_weights_only() -> None:
    case = Case([Param(300, torch.float16), Param(300, torch.bfloat16), Param(300, torch.bfloat16), Param(10)])
    for i in range(3):
        case.of(case.master, i, 4).mul_(1.0001)  # rounds to another weight for some, to the same for others
    expected = [case.get_master(i) for i in range(3)]
    for i in (0, 1):
        case.param(i)[::7] = 3.0
        case.param(i)[5] = math.nan
        case.of(case.master, i, 4)[5] = expected[i][5] = math.nan
        differs = expected[i].to(case.specs[i].dtype) != case.param(i)
        differs[5] = False
        expected[i] = torch.where(differs, case.param(i).float(), expected[i])
    case.param(2)[0] = 9.0
    edited = torch.tensor([1, 1, 0, 1], dtype=torch.uint8)
    ops.refresh_masters(case.segments, case.chunk_segment, case.params, case.master, None, edited)
    for i in range(3):
        assert equal(case.get_master(i), expected[i])
    assert_padding_untouched(case)


def test_refresh_clears_split_remainders() -> None:
    case = Case([Param(200, torch.bfloat16), Param(200, torch.bfloat16)], split=True)
    case.of(case.remainder, 0, 4).fill_(5)
    case.of(case.remainder, 1, 4).fill_(6)
    edited = torch.tensor([0, 1], dtype=torch.uint8)
    ops.refresh_masters(case.segments, case.chunk_segment, case.params, None, case.remainder, edited)
    assert case.of(case.remainder, 0, 4).unique().tolist() == [5]
    assert case.of(case.remainder, 1, 4).unique().tolist() == [0]


# ---- control


def pack(case: Case, found_inf: float | None, scale: float | None) -> Tensor:
    control = case.control()
    scalars = [None if x is None else torch.tensor([x]) for x in (found_inf, scale)]
    ops.pack_control(norm_of(case)[None], *scalars, control)
    return control


def test_clip_factor_is_that_of_torch() -> None:
    case = Case([Param(1000), Param(77, torch.bfloat16)])
    norm = math.sqrt(sum(case.grad(i).double().square().sum().item() for i in range(2)))
    clip = torch.empty(2)
    ops.clip_factor(pack(case, None, None), None, 1.0, clip)
    assert clip.tolist() == pytest.approx([1.0 / (norm + 1e-6), norm], rel=1e-6)
    ops.clip_factor(pack(case, None, 4.0), torch.tensor(4.0), 1.0, clip)
    assert clip.tolist() == pytest.approx([4.0 / norm, norm / 4.0], rel=1e-5)
    ops.clip_factor(pack(case, None, None), None, 1e9, clip)
    assert clip[0] == 1.0


@pytest.mark.parametrize(
    ("bad", "found_inf", "skip_nonfinite", "scaled", "skips"),
    [
        (None, None, True, False, False),
        (math.inf, None, True, False, True),
        (math.nan, None, False, False, False),
        (math.nan, 0.0, False, True, True),
        (None, 1.0, False, True, True),
    ],
)
def test_a_step_is_skipped(
    bad: float | None, found_inf: float | None, skip_nonfinite: bool, scaled: bool, skips: bool
) -> None:
    case = Case([Param(300)])
    case.set_group(0)
    if bad is not None:
        case.grad(0)[17] = bad
    case.step_control(pack(case, found_inf, None), skip_nonfinite=skip_nonfinite, scaled=scaled)
    before = case.bits()
    case.adam_step()
    assert case.skipped.tolist() == [skips, skips, 0]
    assert case.steps.tolist() == [not skips]
    assert all(torch.equal(a, b) for a, b in zip(before, case.bits(), strict=True)) == skips


def test_conditions_and_unequal_scales_stop_the_step() -> None:
    case = Case([Param(300)])
    case.set_group(0)
    scales = [pack(case, None, s) for s in (2.0, 4.0)]
    case.step_control(scales[0] + scales[1], world=2)
    assert case.steps.tolist() == [0]
    case.step_control(scales[0] + scales[0], world=2, grad_scale=torch.tensor(2.0))
    assert case.steps.tolist() == [1]
    condition = case.control()
    condition[ops.CONTROL_CONDITIONS] = 1
    case.step_control(condition)
    assert case.steps.tolist() == [1]
    assert case.skipped.tolist() == [0, 0, 1]


def test_learning_rate_from_memory() -> None:
    for kind in (torch.float32, torch.float64):
        case = Case([Param(10)])
        case.set_group(0, lr=123.0, weight_decay=0.0)
        lr = torch.tensor(0.5, dtype=kind)
        case.groups[0].view(torch.int64)[ops.GROUP_LR_AT] = lr.data_ptr()
        case.groups[0].view(torch.int64)[ops.GROUP_LR_IS_FP64] = kind == torch.float64
        case.step_control(case.control())
        assert case.scalars[0, 7].item() == pytest.approx(0.5 / 0.1)


# ---- mistakes


def test_wrong_arguments_are_named() -> None:
    case = Case([Param(300, torch.bfloat16), Param(300)])
    norm = torch.zeros(ops.NORM_WORDS, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"norm: wanted contiguous int64 \[16\] on cpu, got float32 \[16\]"):
        ops.grad_norm(case.segments, case.chunk_segment, case.grads, norm.float())
    with pytest.raises(RuntimeError, match=r"grads\[0\].*not contiguous"):
        ops.grad_norm(case.segments, case.chunk_segment, [torch.zeros(4, 4).t()[0]], norm)
    with pytest.raises(RuntimeError, match="grad_norm: grads: wanted 1 to 3 tensors, got 0"):
        ops.grad_norm(case.segments, case.chunk_segment, [], norm)
    with pytest.raises(RuntimeError, match="grad_norm: segments: wanted rows that lie inside the buffers, got row 0"):
        ops.grad_norm(case.segments, case.chunk_segment, [case.grads[0], case.grads[1][:200]], norm)
    with pytest.raises(RuntimeError, match="chunk_segment: wanted -1 or the row"):
        ops.grad_norm(case.segments, case.chunk_segment + 1, case.grads, norm)
    args = list(case.adam_args())
    args[5] = None
    with pytest.raises(RuntimeError, match=r"adam_step: master: wanted a float32 tensor, since params\[1\]"):
        ops.adam_step(*args)
    args = list(case.adam_args())
    args[7] = case.exp_avg[:5]
    with pytest.raises(RuntimeError, match=r"adam_step: exp_avg: .* with at least 1024 elements"):
        ops.adam_step(*args)
    with pytest.raises(RuntimeError, match="sum_slices: rank: wanted 0 to 1, got 2"):
        ops.sum_slices(torch.zeros(1, 4), torch.zeros(4), 2, 1.0, 1.0, torch.zeros(4), None)
    with pytest.raises(RuntimeError, match="sum_slices: out: wanted float32 or the dtype of received"):
        ops.sum_slices(torch.zeros(1, 4).half(), None, 0, 1.0, 1.0, torch.zeros(4).bfloat16(), None)
    with pytest.raises(ValueError, match="set_cpu_level: name: wanted one of plain"):
        ops.set_cpu_level("quantum")


def through_torch(t: Tensor, at: tuple[int, ...], value: int) -> None:
    t[at] = value


def behind_its_back(t: Tensor, at: tuple[int, ...], value: int) -> None:
    """Without a trace in the tensor's version."""
    t.numpy()[at] = value


@pytest.mark.parametrize("change", [through_torch, behind_its_back])
@pytest.mark.parametrize(
    ("row", "column", "value"),
    [
        (1, 0, 1 << 40), (1, 0, 513), (0, 1, 10**6), (0, 1, -1), (2, 2, -128), (0, 3, 1 << 62), (1, 4, -1), (2, 5, 512),
        (2, 6, 3), (0, 6, -1), (1, 7, 3), (1, 7, -1),
    ],
)  # fmt: skip
def test_tables_that_change_after_a_step_are_refused(change: Any, row: int, column: int, value: int) -> None:
    """Each row is looked at whenever it is used, so nothing has to be remembered of a table that was right before."""
    case = Case([Param(300), Param(300, torch.bfloat16), Param(300, amsgrad=True)])
    case.set_group(0)
    case.step_control(case.control())
    case.adam_step()
    change(case.segments, (row, column), value)
    with pytest.raises(RuntimeError, match=f"adam_step: (segments: .* got row {row} |chunk_segment: .* at {4 * row} )"):
        case.adam_step()
    change(case.segments, (row, column), case.rows[row][column])
    case.adam_step()
    assert_padding_untouched(case)


@pytest.mark.parametrize("change", [through_torch, behind_its_back])
@pytest.mark.parametrize(("chunk", "value"), [(0, 1), (1, 1), (2, -1), (3, 0), (5, 2), (6, 7), (7, -2), (11, 1 << 30)])
def test_chunks_that_change_after_a_step_are_refused(change: Any, chunk: int, value: int) -> None:
    case = Case([Param(300), Param(300, torch.bfloat16), Param(300)])
    case.set_group(0)
    case.step_control(case.control())
    case.adam_step()
    change(case.chunk_segment, (chunk,), value)
    with pytest.raises(
        RuntimeError, match=f"adam_step: chunk_segment: .* got {value} at {chunk} of 12 with 3 segments"
    ):
        case.adam_step()
    assert_padding_untouched(case)


def test_the_first_of_many_wrong_chunks_is_named() -> None:
    """With more chunks than one thread takes."""
    case = Case([Param(128) for _ in range(1000)])
    case.chunk_segment[1500::2] = 1000
    case.chunk_segment[700] = 1001
    with pytest.raises(RuntimeError, match="got 1001 at 700 of 2000 with 1000 segments"):
        ops.grad_norm(case.segments, case.chunk_segment, case.grads, torch.zeros(ops.NORM_WORDS, dtype=torch.int64))
