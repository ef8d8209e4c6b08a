"""How ranks agree on a step: one small integer vector, summed over the grid.

It carries the norm, the flags of parameters that had a gradient, the buckets that must be reduced again, and whatever
one rank alone may see and must become an error on all. Facts that have to be equal travel as a number x and its square:
``n * sum(x^2) == (sum x)^2`` holds only if all n are equal.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..comm.collectives import Ranks

SYNCS = "backward passes outside no_sync()"


@dataclass
class Report:
    """What one rank brings to an agreement."""

    call: str  # "step" or "clip_grad_norm_"
    had_grad: list[bool] = field(default_factory=list)  # per parameter
    touched: set[int] = field(default_factory=set)  # buckets that must be reduced again
    syncs: int = 0  # backward passes outside no_sync() since the last step; none at all is allowed
    facts: dict[str, Any] = field(default_factory=dict)  # must be equal on all ranks
    faults: list[tuple[type[Exception], str]] = field(default_factory=list)  # what this rank alone may have seen


def _lanes(flags: Sequence[bool]) -> bytes:
    """Flags as int16, four to an int64 word; sums over fewer than 2^15 ranks do not carry."""
    padding = -len(flags) % 4
    return struct.pack(f"={len(flags)}h{2 * padding}x", *flags)


class HostWords:
    """What the host writes into a control vector, on the device. The last copy is kept: while a CUDA graph is captured
    nothing may be copied there, and nothing has changed since the step before."""

    def __init__(self) -> None:
        self.written = b""
        self.copy = torch.empty(0, dtype=torch.int64)

    def on(self, device: torch.device, words: bytes) -> Tensor:
        """A fresh tensor of these words."""
        if words != self.written or self.copy.device != device:
            self.written = words
            self.copy = torch.frombuffer(bytearray(words), dtype=torch.int64).to(device, non_blocking=True)
        return self.copy.clone()


class Agreement:
    """The reduced control vector of one agreement: what the kernels read, and what the host may."""

    def __init__(
        self,
        ranks: Ranks,
        report: Report,
        buckets: int,
        words: HostWords,
        norms: Tensor,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
    ) -> None:
        self.ranks, self.report, self.buckets = ranks, report, buckets
        head = [0] * ops.CONTROL_FLAGS
        head[ops.CONTROL_CONDITIONS] = len(report.faults)
        lanes = _lanes(report.had_grad)
        if not ranks.alone:
            digest = zlib.crc32(repr([report.call, report.facts]).encode()) >> 1
            head[ops.CONTROL_TOUCHED] = int(bool(report.touched))
            head[ops.CONTROL_SYNC_RANKS] = int(report.syncs > 0)
            head[ops.CONTROL_SYNCS], head[ops.CONTROL_SYNCS2] = report.syncs, report.syncs**2
            head[ops.CONTROL_FACTS], head[ops.CONTROL_FACTS2] = digest, digest**2
            lanes += _lanes([b in report.touched for b in range(buckets)])
        self.control = words.on(norms.device, struct.pack(f"={len(head)}q", *head) + lanes)
        ops.pack_control(norms, found_inf, grad_scale, self.control)
        if ranks.replica:  # replicas hold the same slices: they count once
            self.control[: ops.NORM_LIMBS] = 0
        ranks.sum_(self.control)

    def touched_by(self) -> dict[int, int]:
        """Waits for the sum. {bucket that must be reduced again: how many ranks say so}."""
        if self.ranks.alone:
            return {}
        skip = ops.CONTROL_FLAGS + -(-len(self.report.had_grad) // 4)
        lanes = self.control[skip:].cpu().view(torch.int16)[: self.buckets]
        return {int(b): int(lanes[b]) for b in lanes.nonzero().view(-1)}

    def had_grad(self) -> bool:
        """Waits for the sum. Whether any parameter had a gradient on any rank."""
        return bool(self.control[ops.CONTROL_FLAGS :].any())

    def faulty(self) -> bool:
        """Waits for the sum. Whether something is wrong on any rank."""
        return words_faulty(self.ranks, self.control.tolist())


def words_faulty(ranks: Ranks, words: list[int]) -> bool:
    """Whether a summed control vector says that something is wrong. (Touched gradients are not, by themselves.)"""

    def unequal(n: int, x: int, squares: int) -> bool:
        return (n * squares - x * x) % 2**64 != 0

    return (
        words[ops.CONTROL_CONDITIONS] > 0
        or unequal(words[ops.CONTROL_SYNC_RANKS], words[ops.CONTROL_SYNCS], words[ops.CONTROL_SYNCS2])
        or unequal(ranks.total, words[ops.CONTROL_FACTS], words[ops.CONTROL_FACTS2])
        or unequal(ranks.total, words[ops.CONTROL_SCALE_DIGEST], words[ops.CONTROL_SCALE_DIGEST2])
    )


def raise_together(ranks: Ranks, report: Report) -> None:
    """Collective: tells every rank what was found, and raises it."""
    own = {
        "faults": [(kind.__name__, text) for kind, text in report.faults],
        "calls": report.call,
        SYNCS: report.syncs,
        "gradients changed after backward": sorted(report.touched),
        **report.facts,
    }
    reports: list[dict[str, Any]] = ranks.gather_objects(own)
    faults = [(r, kind, text) for r, o in enumerate(reports) for kind, text in o["faults"]]
    if faults:
        kinds = {"ValueError": ValueError, "TypeError": TypeError}
        texts: dict[str, list[int]] = {}
        for r, _, text in faults:
            texts.setdefault(text, []).append(r)
        told = [text if ranks.alone else f"rank {', '.join(map(str, rs))}: {text}" for text, rs in texts.items()]
        raise kinds.get(faults[0][1], RuntimeError)("; ".join(told))
    differing = []
    for name in own:
        values = [o.get(name) for o in reports]
        if name == SYNCS:
            values = [v for v in values if v]
        if any(v != values[0] for v in values):
            by_rank = ", ".join(f"rank {r}: {o.get(name)}" for r, o in enumerate(reports))
            differing.append(f"{name} ({by_rank})")
    raise RuntimeError(
        f"ranks differ in {'; '.join(differing) or 'the loss scale'}. Every rank must do the same between two steps; "
        "this step changed nothing"
    )
