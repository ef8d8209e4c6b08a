"""How ranks agree: one small integer vector, the control vector, summed over the grid.

It carries the norm, the flags of parameters that had a gradient, the buckets that must be reduced again, and whatever
one rank alone may see and must become an error on all. Facts that have to be equal travel as the sums of their 16-bit
halves and of the halves' squares: ``n * sum(h^2) == (sum h)^2`` only if all n are equal, and below 2^15 ranks nothing
overflows.

Every message between ranks that are on their way to a step is such a vector, of one length, and says where it comes
from: the end of a backward, clip_grad_norm_, or step(). So a rank that is elsewhere than the others meets nothing that
it could take for something else.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..comm.grid import ProcessGrid
from .streams import is_capturing

BACKWARD, CLIP, STEP = "backward", "clip_grad_norm_", "step"  # where a message comes from, in the order of a cycle
NUM_BACKWARDS = "backward passes outside no_sync()"


@dataclass
class Report:
    """What one rank brings to an agreement."""

    call: str  # BACKWARD, CLIP, STEP, or a name of its own where no control vector is sent
    has_grad: list[bool] = field(default_factory=list)  # per parameter
    modified: set[int] = field(default_factory=set)  # buckets that must be reduced again
    num_backwards: int = 0  # outside no_sync() since the last step; none at all is allowed
    facts: dict[str, Any] = field(default_factory=dict)  # must be equal on all ranks
    faults: list[tuple[type[Exception], str]] = field(default_factory=list)  # what this rank alone may have seen


def _lanes(flags: Sequence[bool]) -> bytes:
    """Flags as int16, four to an int64 word; sums over at most 2^15 ranks do not carry."""
    padding = -len(flags) % 4
    return struct.pack(f"={len(flags)}h{2 * padding}x", *flags)


def _fact(x: int) -> list[int]:
    """A number of at most 32 bits as its halves and their squares."""
    low, high = x & 0xFFFF, x >> 16
    return [low, high, low * low, high * high]


def _facts_differ(n: int, words: list[int]) -> bool:
    low, high, low2, high2 = words
    return n * low2 != low * low or n * high2 != high * high


class ControlHeader:
    """What the host writes into a control vector, on the device.

    The last copies are kept: while a CUDA graph is captured nothing may be copied there, and what is written is mostly
    what was written in the step before.
    """

    KEPT = 3  # one for each place that messages come from

    def __init__(self) -> None:
        self._copies: dict[tuple[bytes, torch.device], Tensor] = {}
        self._captured: list[Tensor] = []

    def on(self, device: torch.device, words: bytes) -> Tensor:
        """A fresh tensor of these words."""
        copy = self._copies.get((words, device))
        if copy is None:
            while len(self._copies) >= self.KEPT:
                del self._copies[next(iter(self._copies))]
            copy = torch.frombuffer(bytearray(words), dtype=torch.int64).to(device, non_blocking=True)
            self._copies[words, device] = copy
        if is_capturing(copy):
            self._captured.append(copy)  # replays read it
        return copy.clone()


def pack_header(report: Report, num_buckets: int) -> bytes:
    """The words of a control vector that the host knows."""
    head = [0] * ops.CONTROL_FLAGS
    head[ops.CONTROL_CONDITIONS] = len(report.faults)
    head[ops.CONTROL_MODIFIED] = int(bool(report.modified))
    head[ops.CONTROL_IN_BACKWARD] = int(report.call == BACKWARD)
    head[ops.CONTROL_IN_CLIP] = int(report.call == CLIP)
    head[ops.CONTROL_BACKWARD_RANKS] = int(report.num_backwards > 0)
    facts = zlib.crc32(repr([report.call, report.facts]).encode())
    for at, fact in ((ops.CONTROL_BACKWARDS, report.num_backwards), (ops.CONTROL_FACTS, facts)):
        head[at : at + ops.FACT_WORDS] = _fact(fact)
    modified = [b in report.modified for b in range(num_buckets)]
    return struct.pack(f"={len(head)}q", *head) + _lanes(report.has_grad) + _lanes(modified)


class Agreement:
    """The reduced control vector of one agreement: what the kernels read, and what the host may.

    norms: int64 [rows, NORM_WORDS], added up. nonfinite: int64 0-d, whether this rank's gradients are not all finite
    (from the end of a backward). Collective.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        report: Report,
        num_buckets: int,
        header: ControlHeader,
        norms: Tensor,
        found_inf: Tensor | None = None,
        grad_scale: Tensor | None = None,
        nonfinite: Tensor | None = None,
    ) -> None:
        self.grid, self.report, self.num_buckets = grid, report, num_buckets
        self.control = header.on(norms.device, pack_header(report, num_buckets))
        ops.pack_control(norms, found_inf, grad_scale, self.control)
        if grid.replica:  # replicas hold the same slices: they count once
            self.control[: ops.NORM_LIMBS] = 0
        if nonfinite is not None:
            self.control[ops.CONTROL_NON_FINITE_GRADS] = nonfinite
        grid.all_reduce_sum_(self.control)

    @property
    def spoiled(self) -> Tensor:
        """bool [1], on the device: whether a rank has seen a gradient that is not finite."""
        at = ops.CONTROL_NON_FINITE_GRADS
        return self.control[at : at + 1] > 0

    @functools.cached_property
    def words(self) -> list[int]:
        """The sum on the host, which waits for it, once."""
        words: list[int] = self.control.tolist()
        return words

    def modified_by(self) -> dict[int, int]:
        """{bucket that must be reduced again: how many ranks say so}."""
        if self.grid.is_single:
            return {}
        skip = ops.CONTROL_FLAGS + -(-len(self.report.has_grad) // 4)
        lanes = torch.tensor(self.words[skip:], dtype=torch.int64, device="cpu").view(torch.int16)
        return {b: count for b, count in enumerate(lanes[: self.num_buckets].tolist()) if count}

    def any_grad(self) -> bool:
        """Whether any parameter had a gradient on any rank."""
        return any(self.words[ops.CONTROL_FLAGS :])

    def where(self) -> dict[str, int]:
        """How many ranks sent their message from where."""
        backward, clip = self.words[ops.CONTROL_IN_BACKWARD], self.words[ops.CONTROL_IN_CLIP]
        return {BACKWARD: backward, CLIP: clip, STEP: self.grid.num_ranks - backward - clip}

    def faulty(self) -> bool:
        """Whether something is wrong on any rank. (Modified gradients are not, by themselves.)"""
        return words_faulty(self.grid.num_ranks, self.words)


def words_faulty(num_ranks: int, words: list[int]) -> bool:
    """Whether a summed control vector says that something is wrong, besides modified gradients."""

    def differ(n: int, at: int) -> bool:
        return _facts_differ(n, words[at : at + ops.FACT_WORDS])

    return (
        words[ops.CONTROL_CONDITIONS] > 0
        or differ(words[ops.CONTROL_BACKWARD_RANKS], ops.CONTROL_BACKWARDS)
        or differ(num_ranks, ops.CONTROL_FACTS)
        or differ(num_ranks, ops.CONTROL_SCALE)
    )


def raise_together(grid: ProcessGrid, report: Report) -> None:
    """Collective: tells every rank what was found, and raises it."""
    own = {
        "faults": [(kind.__name__, text) for kind, text in report.faults],
        "calls": report.call,
        NUM_BACKWARDS: report.num_backwards,
        "gradients changed after backward": sorted(report.modified),
        **report.facts,
    }
    reports: list[dict[str, Any]] = grid.gather_objects(own)
    faults = [(r, kind, text) for r, o in enumerate(reports) for kind, text in o["faults"]]
    if faults:
        kinds = {"ValueError": ValueError, "TypeError": TypeError}
        texts: dict[str, list[int]] = {}
        for r, _, text in faults:
            texts.setdefault(text, []).append(r)
        told = [text if grid.is_single else f"rank {', '.join(map(str, rs))}: {text}" for text, rs in texts.items()]
        raise kinds.get(faults[0][1], RuntimeError)("; ".join(told))
    differing = []
    for name in own:
        if not all(name in o for o in reports):  # a rank that was elsewhere has not come so far
            continue
        values = [o.get(name) for o in reports]
        if name == NUM_BACKWARDS:
            values = [v for v in values if v]
        if any(v != values[0] for v in values):
            by_rank = ", ".join(f"rank {r}: {o.get(name)}" for r, o in enumerate(reports))
            differing.append(f"{name} ({by_rank})")
    raise RuntimeError(
        f"ranks differ in {'; '.join(differing) or 'the loss scale'}. Every rank must do the same between two steps; "
        "this step changed nothing"
    )
