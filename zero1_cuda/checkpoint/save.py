"""State that leaves: this rank's part, whole states in torch's format, single parameters.

Parts are addressed by parameter and element, never by a place in a padded buffer.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ..params.buffers import view_of
from ..params.state import ShardState
from ..step.runner import StepRunner
from .dcp_tensors import FlatShard, StepShard


def pack_groups(runner: StepRunner) -> list[dict[str, Any]]:
    """`param_groups` with numbers for parameters, as torch packs them."""
    registry = runner.registry
    number = {p: i for i, p in enumerate(registry.numbered())}
    return [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [number[p] for p in group["params"]]}
        for group in runner.groups
    ]


def local_state_dict(runner: StepRunner) -> dict[str, Any]:
    """This rank's part; no collective."""
    if runner.consolidated is not None:
        return copy.copy(runner.consolidated)
    runner.take_up_edits()
    registry = runner.registry
    places, pending = registry.places, {p: k for k, p in enumerate(registry.pending)}
    plan = registry.plan() if pending else None
    state = {}
    for number, p in enumerate(registry.numbered()):
        if p in places:
            state[number] = _entry(runner, *places[p], p)
        elif p in pending:
            assert plan is not None
            state[number] = _entry(runner, plan, pending[p], p)
    return {"state": state, "param_groups": pack_groups(runner)}


def _entry(runner: StepRunner, state: ShardState, k: int, p: torch.nn.Parameter) -> dict[str, Tensor]:
    grid, (lo, hi) = runner.grid, state.span(k)
    if state.has_state and lo < hi:
        # pickled, or copied by DCP before it saves beside training, a view would take all of its buffer along
        parts = {name: view_of(t, 0, t.shape, t.stride(), own_storage=True) for name, t in state.read(k).items()}
    else:
        parts = state.read_initial(k, p)
    if state.has_state:
        count = view_of(runner.steps, state.first + k, (), (), own_storage=True)
    else:
        count = torch.zeros((), dtype=torch.float32, device="cpu")
    shards = {name: FlatShard(t, p.shape, state.stride(k), lo) for name, t in parts.items()}
    return {"step": StepShard(count, [grid.rank, grid.world_size, lo, hi, p.numel()]), **shards}


def param_state(runner: StepRunner, p: Tensor, to: int | None = None) -> dict[str, Tensor] | None:
    """Collective: the whole state of one parameter, fp32, in its shape; on rank `to` of process_group only if given."""
    registry, grid = runner.registry, runner.grid
    if p not in registry.places:
        raise ValueError(
            f"full_param_state: parameter {registry.name_of(p)} is not one of this optimizer's, "
            "or has never been trainable"
        )
    state, k = registry.places[p]
    mine = to is None or grid.rank == to
    if not state.has_state:
        if not mine:
            return None
        zeros = {n: torch.zeros(p.shape, dtype=torch.float32, device=p.device) for n in state.moment_names(k)}
        master = p.detach().to(torch.float32, copy=True).contiguous()
        return {"step": torch.zeros((), dtype=torch.float32, device="cpu"), "master": master, **zeros}
    out = {"step": runner.steps[state.first + k].to(torch.float32)}
    numels, stride = state.segment_numels(k), state.stride(k)
    for name, part in state.read(k).items():
        if to is None:
            flat: Tensor | None = grid.gather_parts(part, numels)
        else:
            flat = grid.gather_parts_to(part, numels, to, tag=2**20 + k)
        if flat is not None:
            out[name] = flat.as_strided(tuple(p.shape), stride).contiguous()
    return out if mine else None


def whole_state_dict(runner: StepRunner, to: int | None) -> dict[str, Any]:
    """Collective: everything in the format of torch.optim.AdamW's state_dict(), on the CPU; `{}` where not `to`."""
    registry, grid = runner.registry, runner.grid
    state: dict[int, Any] = {}
    for number, p in enumerate(registry.numbered()):
        if p in registry.places:
            entry = param_state(runner, p, to)
            if entry is not None:
                state[number] = {name: t.to("cpu", copy=True) for name, t in entry.items()}
    if to is not None and grid.rank != to:
        return {}
    return {"state": state, "param_groups": copy.deepcopy(pack_groups(runner))}
