"""memory_report(): bytes on this rank, counted from real storages."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..step.runner import StepRunner
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


def memory_report(runner: StepRunner) -> dict[str, int]:
    """Bytes by kind. Before the first step, sizes as they will be."""
    registry, config, grid = runner.registry, runner.config, runner.grid
    real: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    report = dict.fromkeys(KINDS, 0)
    padding = 0
    sets = [*registry.sets, *([registry.plan()] if registry.pending else [])]
    for state in sets:
        for kind, tensors in state.tensors().items():
            if state.device.type == "meta":
                report[kind] += sum(t.nbytes for t in tensors)
            else:
                real[kind] += tensors
        if not state.has_state:
            report["state"] += state.planned_bytes()
        padding += state.padding_bytes()
    real["buffers"] += runner.tables()
    if registry.pending:  # rows that the tables will get: steps, scalars, group; norms; options
        layout = sets[-1].layout
        report["buffers"] += len(registry.pending) * (8 + 4 * ops.SCALAR_WORDS + 4)
        report["buffers"] += (len(layout.buckets) + 1) * 8 * ops.NORM_WORDS
        report["buffers"] += 0 if registry.sets else len(registry.groups) * 8 * ops.GROUP_WORDS
    for kind, tensors in real.items():
        report[kind] += address_bytes(tensors)
    report["total"] = sum(report.values())
    report["padding"] = padding
    numel: dict[torch.dtype, int] = {}
    for state in sets:
        layout = state.layout
        for spec in layout.specs:
            numel[spec.dtype] = numel.get(spec.dtype, 0) + spec.numel
    split = {d: config.split and d == torch.bfloat16 for d in numel}
    world = grid.world_size
    report["predicted"] = sum(predicted_bytes(n, world, d.itemsize, split[d]) for d, n in numel.items())
    return report
