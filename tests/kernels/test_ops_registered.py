"""The ops are registered as PyTorch asks: schemas state every mutation, fake implementations exist, and a traced
program gives what the eager one gives."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_case import DTYPES, Case, Param

from zero1_cuda import ops


def case() -> Case:
    made = Case([Param(300, d, amsgrad=True) for d in DTYPES])
    for t in made.tensors():
        t.nan_to_num_(0.5)  # opcheck compares values
    made.set_group(0, mode=ops.GROUP_AMSGRAD)
    made.step_control(made.control())
    return made


def arguments(name: str) -> tuple:
    c = case()
    norm = torch.zeros(ops.NORM_WORDS, dtype=torch.int64)
    scale = torch.tensor(2.0)
    return {
        "adam_step": lambda: c.adam_args(),
        "refresh_masters": lambda: (
            c.segments, c.chunk_segment, c.params, c.master, None, torch.ones(3, dtype=torch.uint8)
        ),
        "grad_norm": lambda: (c.segments, c.chunk_segment, c.grads, norm),
        "sum_slices": lambda: (torch.randn(2, 300), torch.randn(300), 1, 0.5, 1.5, torch.empty(300), norm),
        "pack_control": lambda: (norm[None].clone(), scale, scale, c.control()),
        "clip_factor": lambda: (c.control(), scale, 1.0, torch.zeros(2)),
        "step_control": lambda: (
            c.control(), 1, c.param_group, c.groups, None, None, True, False, c.steps, c.scalars, c.skipped
        ),
    }[name]()  # fmt: skip


NAMES = ["adam_step", "refresh_masters", "grad_norm", "sum_slices", "pack_control", "clip_factor", "step_control"]


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.zero1, name).default, arguments(name))


@pytest.mark.parametrize("name", NAMES)
def test_what_the_schema_does_not_name_is_not_written(name: str) -> None:
    op = getattr(torch.ops.zero1, name).default
    args = arguments(name)

    def tensors(arg: object) -> list[torch.Tensor]:
        return [arg] if isinstance(arg, torch.Tensor) else list(arg) if isinstance(arg, (list, tuple)) else []

    before = [[t.clone() for t in tensors(arg)] for arg in args]
    op(*args)
    for arg, old, schema in zip(args, before, op._schema.arguments, strict=True):
        if not (schema.alias_info and schema.alias_info.is_write):
            assert all(torch.equal(a, b) for a, b in zip(tensors(arg), old, strict=True)), schema.name


def test_traces_whole() -> None:
    def step(c: list[torch.Tensor], norm: torch.Tensor) -> None:
        ops.grad_norm(c[0], c[1], [c[2]], norm)

    c = case()
    args = [c.segments[:1], c.chunk_segment[:3].clone(), c.grads[0]]
    want, got = (torch.zeros(ops.NORM_WORDS, dtype=torch.int64) for _ in range(2))
    step(args, want)
    torch.compile(step, backend="aot_eager", fullgraph=True)(args, got)
    assert torch.equal(want, got)
    assert want.any()
