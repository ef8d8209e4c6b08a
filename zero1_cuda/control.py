"""How ranks agree on a step: one small integer vector, summed over the grid.

It carries the norm, the flags of parameters that had a gradient, the buckets that must be reduced again, and whatever
one rank alone may see and must become an error on all. Facts that have to be equal travel as a number x and its square:
``n * sum(x^2) == (sum x)^2`` holds only if all n are equal.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import ops
from .collectives import Ranks

_SYNCS, _SYNCS2, _ACTIVE = ops.CONTROL_HOST, ops.CONTROL_HOST + 1, ops.CONTROL_HOST + 2
_FACTS, _FACTS2 = ops.CONTROL_HOST + 3, ops.CONTROL_HOST + 4
_MASK = 2**64 - 1


@dataclass
class Report:
    """What one rank brings to an agreement."""

    call: str  # "step" or "clip_grad_norm_"
    had_grad: list[bool]  # per parameter
    touched: set[int] = field(default_factory=set)  # buckets that must be reduced again
    syncs: int = 0  # backward passes outside no_sync() since the last step; none at all is allowed
    facts: dict[str, Any] = field(default_factory=dict)  # must be equal on all ranks
    faults: list[tuple[type[Exception], str]] = field(default_factory=list)  # what this rank alone may have seen


def _lanes(flags: Sequence[bool]) -> Tensor:
    """Flags as int16, four to an int64 word; sums over fewer than 2^15 ranks do not carry."""
    t = torch.zeros(-(-len(flags) // 4) * 4, dtype=torch.int16)
    t[: len(flags)] = torch.tensor(flags, dtype=torch.int16)
    return t.view(torch.int64)


class Agreement:
    """The reduced control vector of one agreement; what the kernels read, and what the host may."""

    def __init__(
        self,
        ranks: Ranks,
        report: Report,
        buckets: int,
        norms: Tensor,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
    ) -> None:
        self.ranks, self.report, self.buckets = ranks, report, buckets
        head = [0] * ops.CONTROL_FLAGS
        head[ops.CONTROL_CONDITIONS] = len(report.faults)
        if not ranks.alone:
            digest = zlib.crc32(repr([report.call, report.facts]).encode()) >> 1
            head[_SYNCS], head[_SYNCS2] = report.syncs, report.syncs**2
            head[_ACTIVE] = int(report.syncs > 0)
            head[_FACTS], head[_FACTS2] = digest, digest**2
        touched = [b in report.touched for b in range(buckets)]
        words = torch.cat([torch.tensor(head, dtype=torch.int64), _lanes(report.had_grad), _lanes(touched)])
        self.control = words.to(norms.device)
        ops.pack_control(norms, found_inf, grad_scale, self.control)
        if ranks.replica:  # replicas hold the same slices: they count once
            self.control[: ops.NORM_LIMBS] = 0
        ranks.sum_(self.control)

    def read(self) -> set[int]:
        """Waits for the sum; raises on every rank what any rank has found; -> buckets that some rank wants again."""
        words = self.control.tolist()
        total = self.ranks.total
        check_words(self.ranks, words, self.report)
        skip = ops.CONTROL_FLAGS + -(-len(self.report.had_grad) // 4)
        touched: set[int] = set()
        if total == 1:
            return touched
        for k, word in enumerate(words[skip:]):
            if word:
                touched.update(4 * k + lane for lane in range(4) if (word >> (16 * lane)) & 0xFFFF)
        return touched


def check_words(ranks: Ranks, words: list[int], report: Report) -> None:
    """Raises, on every rank alike, what a summed control vector says to be wrong."""

    def differ(n: int, x: int, squares: int) -> bool:
        return (n * squares - x * x) & _MASK != 0

    if (
        words[ops.CONTROL_CONDITIONS]
        or differ(words[_ACTIVE], words[_SYNCS], words[_SYNCS2])
        or differ(ranks.total, words[_FACTS], words[_FACTS2])
        or differ(ranks.total, words[ops.CONTROL_SCALE_DIGEST], words[ops.CONTROL_SCALE_DIGEST2])
    ):
        raise_together(ranks, report)


def raise_together(ranks: Ranks, report: Report) -> None:
    """Collective: tells every rank what was found, and raises it."""
    own = {
        "faults": [(kind.__name__, text) for kind, text in report.faults],
        "calls": report.call,
        "backward passes outside no_sync()": report.syncs,
        **report.facts,
    }
    reports: list[dict[str, Any]] = ranks.gather_objects(own)
    faults = [(r, kind, text) for r, o in enumerate(reports) for kind, text in o["faults"]]
    if faults:
        kinds = {"ValueError": ValueError, "TypeError": TypeError}
        texts: dict[str, list[int]] = {}
        for r, _, text in faults:
            texts.setdefault(text, []).append(r)
        where = [text if ranks.alone else f"rank {', '.join(map(str, rs))}: {text}" for text, rs in texts.items()]
        raise kinds.get(faults[0][1], RuntimeError)("; ".join(where))
    differing = []
    for name in own:
        values = [o.get(name) for o in reports]
        if name == "backward passes outside no_sync()":
            values = [v for v in values if v]
        if any(v != values[0] for v in values):
            told = ", ".join(f"rank {r}: {o.get(name)}" for r, o in enumerate(reports))
            differing.append(f"{name} ({told})")
    raise RuntimeError(
        f"ranks differ in {'; '.join(differing) or 'the loss scale'}. Every rank must do the same between two steps; "
        "this step changed nothing"
    )
