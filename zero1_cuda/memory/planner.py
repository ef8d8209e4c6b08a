"""The memory of a model of given parameter shapes, padding and tables included: the optimizer's own layout, no tensors.

`memory` has the formula; this module asks `Layout` where everything would lie and counts bytes as `memory_report()`
does on the fullest rank. Shapes come from safetensors files, of which only the headers are read.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import ops
from ..params.layout import Layout, ParamSpec
from .model import Footprint, footprint

MAX_HEADER = 100_000_000  # bytes; the limit of the format's own reader

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TRAINABLE = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class Planned(Footprint):
    """A footprint with padding and tables in it."""

    #: params + grads + state of the elements themselves
    formula: int
    #: of the bytes above, those that belong to no parameter (a mean over the ranks)
    padding: int

    @property
    def predicted(self) -> int:
        """params + grads + state by formula, as in `memory_report()`."""
        return self.formula

    def as_dict(self) -> dict[str, int]:
        return {**super().as_dict(), "padding": self.padding}


def plan(specs: Sequence[ParamSpec], world_size: int, split: bool = False, overlap: bool = True) -> Planned:
    """Bytes on the fullest of `world_size` ranks for parameters of these sizes and types, in registration order.

    Buckets are those of `bucket_cap_mb=None`; one param group, no amsgrad.
    """
    layout = Layout(specs, world_size)
    plain = [
        footprint(sum(s.numel for s in specs if s.dtype == dtype), world_size, *_kind(dtype, split), overlap)
        for dtype in layout.flat_numel
    ]
    whole = sum(n * dtype.itemsize for dtype, n in layout.flat_numel.items())
    masters = {dtype: footprint(n, 1, *_kind(dtype, split)).state for dtype, n in layout.slices_numel.items()}
    slices = sum(n * dtype.itemsize for dtype, n in layout.slices_numel.items()) if overlap and world_size > 1 else 0
    state = sum(masters.values())
    return Planned(
        world_size=world_size,
        params=whole,
        grads=whole,
        state=state,
        buffers=slices + _table_bytes(layout),
        baseline=sum(row.baseline for row in plain),
        formula=sum(row.predicted for row in plain),
        padding=max(0, 2 * whole + state + slices - sum(row.total for row in plain)),
    )


def _kind(dtype: torch.dtype, split: bool) -> tuple[int, bool]:
    """Bytes per element, and whether the masters of this type are split."""
    return dtype.itemsize, split and dtype == torch.bfloat16


def _table_bytes(layout: Layout) -> int:
    """What the kernels are told: rows of 64-bit words per piece, parameter, bucket, group."""
    per_param = 8 + 4 * ops.SCALAR_WORDS + 4  # step count, scalars, group
    norms = (len(layout.buckets) + 1) * 8 * ops.NORM_WORDS
    chunks = layout.shard_numel // ops.CHUNK * 4
    skipped = ops.SKIPPED_WORDS * 8
    group = 8 * ops.GROUP_WORDS
    return (
        _most_pieces(layout) * 8 * ops.SEGMENT_WORDS + chunks + len(layout.specs) * per_param + norms + skipped + group
    )


def _most_pieces(layout: Layout) -> int:
    """How many parameters the fullest rank has a part of."""
    change = [0] * (layout.world_size + 1)
    for b in layout.buckets:
        for i, at in zip(b.params, b.begins, strict=True):
            if layout.specs[i].numel:
                change[at // b.slice_numel] += 1
                change[(at + layout.specs[i].numel - 1) // b.slice_numel + 1] -= 1
    return max(itertools.accumulate(change))


# ---- shapes --------------------------------------------------------------------------------------


def read_specs(path: str, dtype: str | None = None) -> tuple[list[ParamSpec], list[str]]:
    """The parameters in a safetensors file or in the shards of an index (.json); names of tensors that were left out.

    Integer and boolean tensors are left out: nothing trains them. dtype: of all parameters; None: as in the file.

    Raises:
        ValueError: not such a file, or a type that the optimizer does not take and no `dtype` is given.
        OSError: it cannot be read.
    """
    file = Path(path)
    tensors = _read_index(file) if file.suffix == ".json" else _read_header(file)
    specs, left_out = [], []
    for name, (kind, numel) in tensors.items():
        if not kind.startswith(("F", "BF")):
            left_out.append(name)
        elif dtype is None and kind not in TRAINABLE:
            raise ValueError(f"{path}: {name} is {kind}, which is not trained here: name the type with --dtype")
        else:
            specs.append(ParamSpec(numel, TORCH_DTYPES[dtype] if dtype else TRAINABLE[kind]))
    if not any(s.numel for s in specs):
        raise ValueError(f"{path}: holds no parameters")
    return specs, left_out


def _read_header(file: Path) -> dict[str, tuple[str, int]]:
    """{name: (type, number of elements)} of one safetensors file."""
    with file.open("rb") as f:
        size = file.stat().st_size
        head = f.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise ValueError(f"{file}: not a safetensors file (its header does not fit into {size} bytes)")
        text = f.read(length)
    found = {}
    for name, entry in _json_object(file, text).items():
        if name == "__metadata__":
            continue
        kind, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
        if (
            not isinstance(kind, str)
            or not isinstance(shape, list)
            or not all(type(n) is int and n >= 0 for n in shape)
        ):
            raise ValueError(f"{file}: not a safetensors file ({name!r} has no dtype and shape)")
        found[name] = (kind, math.prod(shape))
    return found


def _read_index(file: Path) -> dict[str, tuple[str, int]]:
    """The same of all tensors that an index names, from the shards beside it."""
    where = _json_object(file, file.read_bytes()).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(shard, str) for shard in where.values()):
        raise ValueError(f"{file}: not a safetensors index (it has no weight_map)")
    shards: dict[str, dict[str, tuple[str, int]]] = {}
    for name, shard in where.items():
        if Path(shard).name != shard:
            raise ValueError(f"{file}: the shard {shard!r} is not a file beside the index")
        if shard not in shards:
            if not (file.parent / shard).is_file():
                raise ValueError(f"{file}: the shard {shard} is not there")
            shards[shard] = _read_header(file.parent / shard)
        if name not in shards[shard]:
            raise ValueError(f"{file}: the shard {shard} has no tensor {name!r}")
    return {name: shards[shard][name] for name, shard in where.items()}


def _json_object(file: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: no JSON: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: wanted a JSON object, got a {type(value).__name__}")
    return value
