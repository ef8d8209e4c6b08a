"""memory_report(): bytes on this rank, counted from real storages."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..params.registry import Roster
from .model import predicted_bytes

KINDS = ("params", "grads", "state", "buffers")


def address_bytes(tensors: list[Tensor]) -> int:
    """Bytes of memory under these tensors' storages, every address counted once."""
    storages = [t.untyped_storage() for t in tensors]
    total = end = 0
    for begin, size in sorted((s.data_ptr(), s.nbytes()) for s in storages):
        total += max(0, begin + size - max(begin, end))
        end = max(end, begin + size)
    return total


def memory_report(roster: Roster, tables: list[Tensor]) -> dict[str, int]:
    """Bytes by kind; tables: what the engine holds besides. Before the first step, sizes as they will be."""
    real: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    report = dict.fromkeys(KINDS, 0)
    padding = 0
    arenas = [*roster.arenas, *([roster.plan()] if roster.pending else [])]
    for arena in arenas:
        for kind, tensors in arena.tensors().items():
            if arena.device.type == "meta":
                report[kind] += sum(t.nbytes for t in tensors)
            else:
                real[kind] += tensors
        if not arena.has_state:
            report["state"] += arena.planned_state_bytes()
        padding += arena.padding_bytes()
    real["buffers"] += tables
    if roster.pending:  # rows that the tables will get: steps, scalars, group; norms; options
        report["buffers"] += len(roster.pending) * (8 + 4 * ops.SCALAR_WORDS + 4)
        report["buffers"] += (len(arenas[-1].layout.buckets) + 1) * 8 * ops.NORM_WORDS
        report["buffers"] += 0 if roster.arenas else len(roster.groups) * 8 * ops.GROUP_WORDS
    for kind, tensors in real.items():
        report[kind] += address_bytes(tensors)
    report["total"] = sum(report.values())
    report["padding"] = padding
    numel: dict[torch.dtype, int] = {}
    for arena in arenas:
        for spec in arena.layout.specs:
            numel[spec.dtype] = numel.get(spec.dtype, 0) + spec.numel
    split = {d: roster.settings.split and d == torch.bfloat16 for d in numel}
    world = roster.ranks.world_size
    report["predicted"] = sum(predicted_bytes(n, world, d.itemsize, split[d]) for d, n in numel.items())
    return report
