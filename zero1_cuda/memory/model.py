"""The memory arithmetic of ZeRO stage 1: 16 Psi bytes per rank become 4 Psi + 12 Psi / N.

Psi is the number of trainable parameters, N the number of ranks that share one state. With 16-bit parameters a rank
holds

    params  2 Psi        the whole model
    grads   2 Psi        its own gradients
    state  12 Psi / N    fp32 master, exp_avg, exp_avg_sq of its shard

fp32 parameters are their own masters: 4 Psi + 4 Psi + 8 Psi / N. A split master keeps only the 16 bits that the bf16
parameter lacks: 2 Psi + 2 Psi + 10 Psi / N. Reducing while backward runs takes one more slice of the gradients per rank
(`buffers`, 2 Psi / N or 4 Psi / N; none when N = 1). Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models", 2020, table 1.

Padding is left out; `planner.plan` and `Zero1AdamW.memory_report()` count it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal

#: bytes per element of the parameters and of their gradients
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

#: how many ranks are tried to find a number that fits
MOST_RANKS = 2**16

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank, in the words of `memory_report()`."""

    world_size: int
    params: int
    grads: int
    state: int
    buffers: int
    #: params + grads + the whole state: what plain data parallel training holds (16 Psi)
    baseline: int

    @property
    def predicted(self) -> int:
        """4 Psi + 12 Psi / N: params + grads + state."""
        return self.params + self.grads + self.state

    @property
    def total(self) -> int:
        """All of it: params + grads + state + buffers."""
        return self.params + self.grads + self.state + self.buffers

    @property
    def floor(self) -> int:
        """params + grads, which more ranks do not make less: 4 Psi, with fp32 parameters 8 Psi."""
        return self.params + self.grads

    def as_dict(self) -> dict[str, int]:
        return {
            "world_size": self.world_size,
            "params": self.params,
            "grads": self.grads,
            "state": self.state,
            "predicted": self.predicted,
            "buffers": self.buffers,
            "total": self.total,
            "baseline": self.baseline,
        }


def state_bytes_per_element(param_bytes: int, split: bool = False) -> int:
    """Optimizer state of one parameter: exp_avg and exp_avg_sq (8), and the fp32 master (4) or its lower half (2)."""
    if param_bytes not in (2, 4):
        raise ValueError(f"param_bytes must be 2 (bf16, fp16) or 4 (fp32), got {param_bytes}")
    if param_bytes == 4:
        return 8  # an fp32 parameter is its own master, split or not
    return 10 if split else 12


def footprint(
    numel: int, world_size: int, param_bytes: int = 2, split: bool = False, overlap: bool = False
) -> Footprint:
    """Bytes per rank for `numel` parameters of `param_bytes` bytes each, with the state split over `world_size` ranks.

    Args:
        split: bf16 parameters with `master_weights="split"`.
        overlap: `overlap_reduce=True`, which reduces out of place.

    Raises:
        ValueError: `numel` is negative, `world_size` below 1 or `param_bytes` neither 2 nor 4.
    """
    if numel < 0:
        raise ValueError(f"numel must not be negative, got {numel}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    whole = numel * param_bytes
    state = numel * state_bytes_per_element(param_bytes, split)
    return Footprint(
        world_size=world_size,
        params=whole,
        grads=whole,
        state=_share(state, world_size),
        buffers=_share(whole, world_size) if overlap and world_size > 1 else 0,
        # without sharding nothing is gained by splitting the master: AdamW with fp32 masters is what is compared with
        baseline=2 * whole + numel * state_bytes_per_element(param_bytes),
    )


def predicted_bytes(numel: int, world_size: int, param_bytes: int, split: bool = False) -> int:
    """4 Psi + 12 Psi / N (fp32: 8 Psi + 8 Psi / N; split: 4 Psi + 10 Psi / N), rounded up to whole bytes.

    >>> predicted_bytes(7_500_000_000, world_size=1, param_bytes=2)
    120000000000
    >>> predicted_bytes(7_500_000_000, world_size=64, param_bytes=2)
    31406250000
    """
    return footprint(numel, world_size, param_bytes, split).predicted


def smallest_world_size(limit: int, total: Callable[[int], int], most: int = MOST_RANKS) -> int | None:
    """The smallest number of ranks with total(ranks) <= limit; None: more than `most`. `total` must fall with ranks.

    >>> smallest_world_size(80_000_000_000, lambda ranks: predicted_bytes(7_500_000_000, ranks, 2))
    2
    """
    high = 1
    while high <= most and total(high) > limit:
        high *= 2
    if high > most:
        return None
    low = high // 2  # does not fit, or is 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if total(middle) <= limit else (middle, high)
    return high


def _share(size: int, world_size: int) -> int:
    """The largest of `world_size` equal parts, in whole integers: a float has too few digits for 10^12 parameters."""
    return -(-size // world_size)


def formula(param_bytes: int, split: bool = False) -> str:
    """`predicted` in words, such as '4 Psi + 12 Psi/N'."""
    return f"{2 * param_bytes} Psi + {state_bytes_per_element(param_bytes, split)} Psi/N"


def unit_of(largest: int) -> tuple[float, str]:
    """The decimal unit for figures up to this many bytes."""
    return next(((unit, name) for unit, name in _UNITS if largest >= unit), _UNITS[-1])


def size_text(value: int) -> str:
    """Such as '52.50 GB'."""
    unit, name = unit_of(value)
    return f"{value / unit:,.2f} {name}"


def parse_size(text: str) -> int:
    """Bytes of '80GB' (10^9 each) or '80GiB' (2^30 each).

    Raises:
        ValueError: no number above 0 with such a unit.
    """
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)\s*([kmgt])(i?)b", text.strip(), re.IGNORECASE)
    if match is None or not Decimal(match[1]):
        raise ValueError(f"a size with its unit is wanted, such as 80GB (10^9 bytes) or 80GiB (2^30), not {text!r}")
    base = 1024 if match[3] else 1000
    return int(Decimal(match[1]) * base ** ("kmgt".index(match[2].lower()) + 1))


def table(rows: Iterable[Footprint], formula: str) -> str:
    """The footprints as aligned text, one line per world size; decimal units, 1 GB = 10^9 bytes."""
    rows = list(rows)
    unit, name = unit_of(max((row.baseline for row in rows), default=0))

    def size(value: int) -> str:
        return f"{value / unit:,.2f}"

    head = ["ranks", "params", "grads", "state", formula, "16 Psi", "saved", "buffers", "total"]
    lines = [head]
    for row in rows:
        saved = f"{1 - row.predicted / row.baseline:.1%}" if row.baseline else "0.0%"
        parts = (row.params, row.grads, row.state, row.predicted, row.baseline)
        lines.append([str(row.world_size), *map(size, parts), saved, size(row.buffers), size(row.total)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    note = f"{name} per rank; buffers: one more slice of the gradients with overlap_reduce=True, none without"
    return "\n".join([*text, note])
