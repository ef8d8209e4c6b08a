"""Where everything lies: order, alignment, buckets, slices, shards and segments. Pure arithmetic.

Parameters are laid out in reverse registration order, the order in which backward finishes their gradients. They are
packed into buckets of one dtype; a parameter is never split over two buckets. Inside its bucket every parameter starts
at a multiple of ``CHUNK`` elements, and a bucket is padded to ``world_size`` equal slices of whole chunks. Rank r owns
slice r of every bucket; its slices, in bucket order, are its shard. So a rank's part of a parameter is one contiguous
range, and a chunk never belongs to two parameters or two ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..ops import CHUNK

MIB = 2**20


@dataclass(frozen=True)
class ParamSpec:
    """What the layout needs to know of a parameter."""

    numel: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Bucket:
    """A run of parameters of one dtype that is reduced and gathered in one go. All offsets count elements."""

    index: int
    dtype: torch.dtype
    params: tuple[int, ...]
    begins: tuple[int, ...]  # of each parameter, from the bucket's begin
    begin: int  # in the flat buffer of this dtype
    slice_numel: int  # a rank's part; the bucket is world_size times as long
    shard_begin: int  # of the slice, in every rank's shard
    slice_begin: int  # of the slice, among the slices of this dtype


@dataclass(frozen=True)
class Segment:
    """This rank's part of one parameter: its elements [lo, hi), in memory order."""

    param: int
    bucket: int
    lo: int
    hi: int
    shard_begin: int
    slice_begin: int
    flat_begin: int


def aligned(numel: int, unit: int) -> int:
    """`numel` rounded up to a multiple of `unit`."""
    return -(-numel // unit) * unit


def default_bucket_cap(total_bytes: int, world_size: int) -> int:
    """Bytes of gradient per bucket where the user names none.

    25 MiB, as DistributedDataParallel has it, keeps a ring busy. A slice should stay above half a MiB, below which the
    latency of a message outweighs its bytes, so buckets grow with the number of ranks; that also keeps the padding
    (at most ``world_size * CHUNK`` elements a bucket) under 0.1%. A small model is cut into four, so that reduction can
    still overlap backward, as far as slices stay above half a MiB.
    """
    least = world_size * MIB // 2
    return max(MIB, least, min(25 * MIB, total_bytes // 4))


class Layout:
    """The layout of one set of parameters over `world_size` ranks."""

    def __init__(self, specs: Sequence[ParamSpec], world_size: int, bucket_cap_bytes: int | None = None) -> None:
        self.specs = tuple(specs)
        self.world_size = world_size
        total = sum(s.numel * s.dtype.itemsize for s in specs)
        cap = default_bucket_cap(total, world_size) if bucket_cap_bytes is None else bucket_cap_bytes
        # A small first bucket lets the first reduction start early in backward.
        first = min(cap, MIB) if bucket_cap_bytes is None else cap

        filled: list[tuple[torch.dtype, list[int]]] = []
        open_: dict[torch.dtype, list[int]] = {}
        size: dict[torch.dtype, int] = {}
        for i in reversed(range(len(specs))):
            dtype = specs[i].dtype
            nbytes = aligned(specs[i].numel, CHUNK) * dtype.itemsize
            limit = cap if any(d == dtype for d, _ in filled) else first
            if open_.get(dtype) and size[dtype] + nbytes > limit:
                filled.append((dtype, open_.pop(dtype)))
            if dtype not in open_:
                open_[dtype], size[dtype] = [], 0
            open_[dtype].append(i)
            size[dtype] += nbytes
        filled.extend(open_.items())

        self.flat_numel: dict[torch.dtype, int] = {}
        self.slices_numel: dict[torch.dtype, int] = {}
        self.shard_numel = 0
        self.bucket_of = [0] * len(specs)
        self.begin_of = [0] * len(specs)  # of each parameter, in the flat buffer of its dtype
        buckets = []
        for index, (dtype, members) in enumerate(filled):
            begin = self.flat_numel.get(dtype, 0)
            begins, used = [], 0
            for i in members:
                begins.append(used)
                self.bucket_of[i] = index
                self.begin_of[i] = begin + used
                used += aligned(specs[i].numel, CHUNK)
            slice_numel = aligned(used, world_size * CHUNK) // world_size
            slice_begin = self.slices_numel.get(dtype, 0)
            buckets.append(
                Bucket(index, dtype, tuple(members), tuple(begins), begin, slice_numel, self.shard_numel, slice_begin)
            )
            self.flat_numel[dtype] = begin + slice_numel * world_size
            self.slices_numel[dtype] = slice_begin + slice_numel
            self.shard_numel += slice_numel
        self.buckets = tuple(buckets)

    def segments(self, rank: int) -> Iterator[Segment]:
        """The parts of parameters that rank `rank` owns, in shard order; parameters it owns nothing of are left out."""
        for b in self.buckets:
            left, right = rank * b.slice_numel, (rank + 1) * b.slice_numel
            for i, at in zip(b.params, b.begins, strict=True):
                lo, hi = max(left, at), min(right, at + self.specs[i].numel)
                if lo < hi:
                    inside = lo - left
                    yield Segment(
                        i, b.index, lo - at, hi - at, b.shard_begin + inside, b.slice_begin + inside, b.begin + lo
                    )

    def chunk_segments(self, segments: Sequence[Segment]) -> torch.Tensor:
        """int32 [shard chunks]: the index of the segment that each chunk of the shard belongs to, -1 for padding."""
        ids, counts, at = [], [], 0
        for s, segment in enumerate(segments):
            chunk = segment.shard_begin // CHUNK
            ids += [-1, s]
            counts += [chunk - at, aligned(segment.hi - segment.lo, CHUNK) // CHUNK]
            at = chunk + counts[-1]
        ids.append(-1)
        counts.append(self.shard_numel // CHUNK - at)
        return torch.repeat_interleave(*(torch.tensor(t, dtype=torch.int32, device="cpu") for t in (ids, counts)))

    @property
    def padding(self) -> dict[torch.dtype, int]:
        """Elements of each dtype's flat buffer that belong to no parameter."""
        used: dict[torch.dtype, int] = dict.fromkeys(self.flat_numel, 0)
        for s in self.specs:
            used[s.dtype] += s.numel
        return {d: n - used[d] for d, n in self.flat_numel.items()}
