"""A step is stopped if a fact is not the same on all ranks, whatever the values: scale, backwards, digest.

Values that collide under weaker sums are the ones that matter: powers of two on halves of the ranks, single bits, and
values with the same total. The ranks' control vectors are made one per value and multiplied, as the all-reduce adds."""

from __future__ import annotations

import shutil
import struct
from typing import Any

import pytest
import torch
from helpers.ops_case import Case, Param, fact
from shim.host import Shim, build
from torch import Tensor

from zero1_cuda import ops

RANKS = [2, 3, 64, 1024, 2**15]
BITS = [0, 1, 15, 16, 17, 30, 31]


@pytest.fixture(scope="module", params=["cpu", "kernel source"])
def op(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "cpu":
        return ops
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("facts") / "kernels.so"
    build(library, [])
    return Shim(library)


def fp32(bits: int) -> float:
    return struct.unpack("f", struct.pack("I", bits))[0]


def with_scale(op: Any, scale: float | None) -> Tensor:
    control = Case([Param(1)]).control()
    norms = torch.zeros(1, ops.NORM_WORDS, dtype=torch.int64)
    op.pack_control(norms, None, None if scale is None else torch.tensor(scale), control)
    return control


def with_fact(word: int, value: int) -> Tensor:
    control = Case([Param(1)]).control()
    control[word : word + ops.FACT_WORDS] = fact(value)
    if word == ops.CONTROL_BACKWARDS:
        control[ops.CONTROL_BACKWARD_RANKS] = 1
    return control


def stops(op: Any, ranks: list[tuple[int, Tensor]]) -> bool:
    """Whether the step stops for so many ranks with each of these vectors."""
    case = Case([Param(1)])
    case.set_group(0)
    control = sum(count * vector for count, vector in ranks)
    world = sum(count for count, _ in ranks)
    op.step_control(
        control, world, case.param_group, case.groups, None, None, True, True, case.steps, case.scalars, case.skipped
    )
    stopped = case.skipped.tolist() == [0, 0, 1]
    assert stopped or case.skipped.tolist() == [0, 0, 0]
    assert case.steps.tolist() == [not stopped]
    return stopped


@pytest.mark.parametrize("n", RANKS)
def test_scales_that_differ(op: Any, n: int) -> None:
    pairs = [(65536.0, 1.0), (65536.0, 32768.0), (2.0**127, 2.0**-126), (0.0, None), (1.0, None), (0.0, -0.0)]
    pairs += [(1.0, fp32(0x3F800000 ^ 1 << bit)) for bit in BITS]
    for a, b in pairs:
        x, y = with_scale(op, a), with_scale(op, b)
        for count in {1, n // 2, n - 1}:
            assert stops(op, [(count, x), (n - count, y)]), (a, b, count)
        assert not stops(op, [(n, x)]), a
        assert not stops(op, [(n, y)]), b


@pytest.mark.parametrize("word", [ops.CONTROL_BACKWARDS, ops.CONTROL_FACTS])
@pytest.mark.parametrize("n", RANKS)
def test_facts_that_differ(op: Any, n: int, word: int) -> None:
    values = [0, 1, 2, 0xFFFF, 0x10000, 0xABCD1234, 0xFFFFFFFF]
    pairs = [(x, x ^ 1 << bit) for x in values for bit in BITS]
    pairs += [(0x00010002, 0x00020001), (0x12345678, 0x56781234)]  # the same halves, the other way about
    for a, b in pairs:
        x, y = with_fact(word, a), with_fact(word, b)
        for count in {1, n // 2, n - 1}:
            assert stops(op, [(count, x), (n - count, y)]), (hex(a), hex(b), count)
    for value in values:
        assert not stops(op, [(n, with_fact(word, value))]), hex(value)


@pytest.mark.parametrize("word", [ops.CONTROL_BACKWARDS, ops.CONTROL_FACTS])
@pytest.mark.parametrize("n", [4, 64, 1024, 2**15])
def test_values_with_the_same_sum(op: Any, n: int, word: int) -> None:
    """Other values whose sum is that of equal ones; and the same values on other ranks, which is no difference."""
    for a, b, c, d in [(5, 5, 4, 6), (3, 9, 6, 6), (0x20000, 0x40000, 0x30000, 0x30000), (1, 2, 3, 4)]:
        vectors = [(n // 4, with_fact(word, x)) for x in (a, b, c, d)]
        assert stops(op, vectors)
        assert stops(op, vectors[::-1])


def test_only_ranks_with_a_backward_are_compared(op: Any) -> None:
    some = with_fact(ops.CONTROL_BACKWARDS, 3)
    none = Case([Param(1)]).control()
    assert not stops(op, [(5, some), (59, none)])
    assert not stops(op, [(64, none)])
    assert stops(op, [(5, some), (1, with_fact(ops.CONTROL_BACKWARDS, 4)), (58, none)])


@pytest.mark.parametrize(
    "word", [ops.CONTROL_CONDITIONS, ops.CONTROL_MODIFIED, ops.CONTROL_IN_BACKWARD, ops.CONTROL_IN_CLIP]
)
def test_one_rank_stops_all(op: Any, word: int) -> None:
    fine, wrong = (Case([Param(1)]).control() for _ in range(2))
    wrong[word] = 1
    assert stops(op, [(63, fine), (1, wrong)])


def test_what_was_stopped_stays_known(op: Any) -> None:
    """The third word of `skipped` is never cleared; a step after it counts as any other."""
    case = Case([Param(1)])
    case.set_group(0)
    wrong, bad = case.control(), case.control()
    wrong[ops.CONTROL_CONDITIONS] = 1
    bad[ops.CONTROL_FOUND_INF] = 1
    for control, skipped in ((wrong, [0, 0, 1]), (bad, [1, 1, 1]), (case.control(), [1, 0, 1]), (wrong, [1, 0, 1])):
        op.step_control(
            control, 1, case.param_group, case.groups, None, None, True, True, case.steps, case.scalars, case.skipped
        )
        assert case.skipped.tolist() == skipped
    assert case.steps.tolist() == [1]
