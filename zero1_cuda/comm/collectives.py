"""The two large collectives: gradients are reduced (one slice per rank), parameters are gathered.

Gradients are reduced in one of two ways:

* *native*: ``reduce_scatter_tensor``, for NCCL;
* *exchange*: every rank sends slice r to rank r, and ``sum_slices`` adds the received slices in fp32, in rank order,
  divides once and rounds once. The same bytes on the wire, no 16-bit overflow, the same bits whatever the buckets; on
  gloo also several times faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from .grid import ProcessGrid, wire

# torch 2.13 renamed two collectives and warns of the old names.
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class Pending(Protocol):
    """Something on its way; `finish` waits for it (on CUDA: makes the current stream wait)."""

    def finish(self) -> None: ...


class _Gather:
    """An all-gather on its way, and the tensor that must outlive it. On CUDA several streams may wait for it."""

    def __init__(self, works: Sequence[Any], bucket: Tensor) -> None:
        self.works, self.bucket = list(works), bucket

    def finish(self) -> None:
        with ops.profiled("zero1.all_gather"):
            for work in self.works:
                work.wait()


class Scratch:
    """Receive buffers that live from the first reduction of a cycle to its last."""

    def __init__(self) -> None:
        self.free: list[Tensor] = []

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        for k, t in enumerate(self.free):
            if t.numel() >= nbytes and t.device == device:
                return self.free.pop(k)
        self.free.clear()
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def give(self, t: Tensor) -> None:
        if t.is_cuda:  # taken and used on streams that may differ: torch's allocator knows when it is free again
            t.record_stream(torch.cuda.current_stream(t.device))
        else:
            self.free.append(t)

    def clear(self) -> None:
        self.free.clear()


def start_reduction(
    grid: ProcessGrid, bucket: Tensor, out: Tensor, norm: Tensor | None, scratch: Scratch, tag: int, exchange: bool
) -> Pending:
    """Starts the mean over the grid of one bucket; this rank's slice of it goes to `out`.

    bucket: [world_size * n], out: [n], the same dtype; `out` may be this rank's slice of `bucket`. norm: int64
    [NORM_WORDS] that the slice's sum of squares is added to, or None where the caller takes it. A write into `bucket`
    before the result has finished spoils the result, on every rank.
    """
    with ops.profiled("zero1.reduce_scatter"):
        if exchange:
            return _Exchange(grid, bucket, out, norm, scratch, tag)
        return _Native(grid, bucket, out, norm)


def start_gather(grid: ProcessGrid, bucket: Tensor) -> Pending:
    """Starts filling `bucket` [world_size * n] in place, from slice r of every rank r."""
    n = bucket.numel() // grid.world_size
    group = grid.group
    with ops.profiled("zero1.all_gather"):
        if grid.backend(bucket.device) == "gloo":
            # gloo's all_gather_into_tensor is slower than one broadcast per rank into place
            slices = wire(bucket).view(grid.world_size, -1)
            works = [dist.broadcast(t, group=group, group_src=r, async_op=True) for r, t in enumerate(slices)]
        else:
            own = bucket[grid.rank * n : (grid.rank + 1) * n]
            works = [getattr(dist, _ALL_GATHER)(bucket, own, group=group, async_op=True)]
    return _Gather(works, bucket)


def _headroom(ranks: int) -> float:
    """A power of two that keeps the sum of `ranks` values below the largest of them."""
    return float(0.5 ** (ranks - 1).bit_length())


class _Exchange:
    def __init__(
        self, grid: ProcessGrid, bucket: Tensor, out: Tensor, norm: Tensor | None, scratch: Scratch, tag: int
    ) -> None:
        self.grid, self.out, self.norm, self.scratch, self.tag = grid, out, norm, scratch, tag
        n, world, rank = out.numel(), grid.world_size, grid.rank
        self.own: Tensor | None = bucket[rank * n : (rank + 1) * n]
        self.bucket: Tensor | None = bucket
        self.received = torch.empty(0, n, dtype=bucket.dtype, device=bucket.device)
        self.memory: Tensor | None = None
        self.works: list[Any] = []
        if world == 1:
            return
        pairs = grid.backend(bucket.device) == "gloo"
        rows = world - 1 if pairs else world
        self.memory = scratch.take(rows * n * bucket.element_size(), bucket.device)
        self.received = self.memory[: rows * n * bucket.element_size()].view(bucket.dtype).view(rows, n)
        if pairs:
            received, sent = wire(self.received), wire(bucket).view(world, -1)
            others = [(rank + k) % world for k in range(1, world)]
            for r in others:
                row = r if r < rank else r - 1
                self.works.append(dist.irecv(received[row], group=grid.group, group_src=r, tag=tag))
            for r in others:
                self.works.append(dist.isend(sent[r], group=grid.group, group_dst=r, tag=tag))
        else:
            self.own = None
            self.works.append(dist.all_to_all_single(self.received.view(-1), bucket, group=grid.group, async_op=True))

    def finish(self) -> None:
        if self.bucket is None:
            return
        with ops.profiled("zero1.reduce_scatter"):
            for work in self.works:
                work.wait()
            grid = self.grid
            scale = _headroom(grid.num_ranks)
            if grid.replicas == 1:
                divisor = grid.num_ranks * scale
                ops.sum_slices(self.received, self.own, grid.rank, scale, divisor, self.out, self.norm)
            else:
                part = torch.empty(self.out.numel(), dtype=torch.float32, device=self.out.device)
                ops.sum_slices(self.received, self.own, grid.rank, scale, 1.0, part, None)
                _sum_replicas(grid, part, 1.0, grid.num_ranks * scale, self.out, self.norm)
        if self.memory is not None:
            self.scratch.give(self.memory)
        self.works, self.bucket, self.own, self.memory = [], None, None, None


class _Native:
    def __init__(self, grid: ProcessGrid, bucket: Tensor, out: Tensor, norm: Tensor | None) -> None:
        self.grid, self.out, self.norm = grid, out, norm
        self.bucket: Tensor | None = bucket
        self.works: list[Any] = []
        if grid.world_size == 1:
            if grid.replicas == 1 or out.data_ptr() != bucket.data_ptr():
                out.copy_(bucket)
            return
        source, op = bucket, dist.ReduceOp.AVG
        if bucket.dtype == torch.float16 and grid.backend(bucket.device) == "gloo":
            # gloo's average adds first, which overflows where the mean does not
            source, op = bucket * (1.0 / grid.world_size), dist.ReduceOp.SUM
            self.bucket = source
        self.works.append(getattr(dist, _REDUCE_SCATTER)(out, source, op=op, group=grid.group, async_op=True))

    def finish(self) -> None:
        if self.bucket is None:
            return
        with ops.profiled("zero1.reduce_scatter"):
            for work in self.works:
                work.wait()
            grid = self.grid
            if grid.replicas > 1:
                scale = _headroom(grid.replicas)
                _sum_replicas(grid, self.out.clone(), scale, grid.replicas * scale, self.out, self.norm)
            elif self.norm is not None:
                empty = self.out.new_empty(0, self.out.numel())
                ops.sum_slices(empty, self.out, 0, 1.0, 1.0, self.out, self.norm)
        self.works, self.bucket = [], None


def _sum_replicas(
    grid: ProcessGrid, part: Tensor, scale: float, divisor: float, out: Tensor, norm: Tensor | None
) -> None:
    """The second half for replicas: sums of slices are exchanged and added in replica order."""
    received = torch.empty(grid.replicas, part.numel(), dtype=part.dtype, device=part.device)
    dist.all_gather(list(wire(received)), wire(part), group=grid.replicate_group)
    ops.sum_slices(received, None, grid.replica, scale, divisor, out, norm)
