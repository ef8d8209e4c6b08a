"""The grid of ranks, and every collective the package makes. The only file that calls torch.distributed's.

A grid is ``process_group`` (the `world_size` ranks that split one state) by ``replicate_group`` (the `replicas` ranks
that hold the same shard). Gradients are reduced in one of two ways:

* *native*: ``reduce_scatter_tensor``, for NCCL;
* *exchange*: every rank sends slice r to rank r, and ``sum_slices`` adds the received slices in fp32, in rank order,
  divides once and rounds once. The same bytes on the wire, no 16-bit overflow, the same bits whatever the buckets; on
  gloo also several times faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops

# torch 2.13 renamed two collectives and warns of the old names.
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"

# Small tensors are broadcast together, in messages of about this many bytes.
BROADCAST_BYTES = 16 * 2**20


class Pending(Protocol):
    """Something on its way; `finish` waits for it (on CUDA: makes the current stream wait)."""

    def finish(self) -> None: ...


class Works:
    """Asynchronous works, and the tensors that must outlive them."""

    def __init__(self, works: Sequence[Any], *keep: Tensor) -> None:
        self.works, self.keep = list(works), keep

    def finish(self) -> None:
        for work in self.works:
            work.wait()
        self.works, self.keep = [], ()


class Scratch:
    """Receive buffers that live from the first reduction of a backward to its last."""

    def __init__(self) -> None:
        self.free: list[Tensor] = []

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        for k, t in enumerate(self.free):
            if t.numel() >= nbytes and t.device == device:
                return self.free.pop(k)
        self.free.clear()
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def give(self, t: Tensor) -> None:
        self.free.append(t)

    def clear(self) -> None:
        self.free.clear()


def _wire(t: Tensor) -> Tensor:
    """The same bytes as uint8, a type that every backend sends."""
    return t.view(torch.uint8)


class Ranks:
    """This process's place in the grid. One rank where torch.distributed is not initialised or the group has one."""

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, replicate_group: dist.ProcessGroup | None = None
    ) -> None:
        self.initialized = dist.is_available() and dist.is_initialized()
        self.group: Any = (process_group or dist.group.WORLD) if self.initialized else None
        self.replicate_group: Any = replicate_group if self.initialized else None
        self.rank = dist.get_rank(self.group) if self.group is not None else 0
        self.world_size = dist.get_world_size(self.group) if self.group is not None else 1
        self.replica = dist.get_rank(self.replicate_group) if self.replicate_group is not None else 0
        self.replicas = dist.get_world_size(self.replicate_group) if self.replicate_group is not None else 1
        if min(self.rank, self.replica) < 0:
            raise ValueError(
                f"this process (global rank {dist.get_rank()}) is not a member of "
                f"{'process_group' if self.rank < 0 else 'replicate_group'}; only its members may use the optimizer"
            )
        self.total = self.world_size * self.replicas
        self.alone = self.total == 1

    def _groups(self) -> list[Any]:
        """The groups that hold more than this rank, in the order in which a grid-wide operation visits them."""
        pairs = ((self.replicate_group, self.replicas), (self.group, self.world_size))
        return [group for group, size in pairs if size > 1]

    def backend(self, device: torch.device) -> str:
        """Name of the backend that serves tensors on `device`; "none" for one rank."""
        for group in self._groups():
            return str(group._get_backend(torch.device(device.type)).name()).lower()
        return "none"

    def _message_device(self) -> torch.device:
        """A device whose tensors the groups can send, whatever the parameters are on."""
        for group in self._groups():
            try:
                group._get_backend(torch.device("cpu"))
            except RuntimeError:
                return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    # -- over the whole grid -------------------------------------------------------------------------------------------

    def sum_(self, t: Tensor) -> Tensor:
        """Adds an integer tensor over the grid, in place."""
        for group in self._groups():
            dist.all_reduce(t, group=group)
        return t

    def gather_objects(self, obj: Any) -> list[Any]:
        """[obj of every rank of the grid], on every rank."""
        found = [obj]
        for group in self._groups():
            parts: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, found, group=group)
            found = [x for part in parts for x in part]
        return found

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """The same for a short list of integers, without pickling."""
        t = torch.tensor(values, dtype=torch.int64, device=self._message_device()).reshape(1, -1)
        for group in self._groups():
            parts = [torch.empty_like(t) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, t, group=group)
            t = torch.cat(parts)
        return [[int(x) for x in row] for row in t.tolist()]

    def send_weights(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites `tensors` on every rank with those of the grid's first rank, in place."""
        if self.alone:
            return
        batch: list[Tensor] = []
        size = 0
        for t in tensors:
            if batch and (
                size + t.nbytes > BROADCAST_BYTES or t.dtype != batch[0].dtype or t.device != batch[0].device
            ):
                self._send_batch(batch)
                batch, size = [], 0
            if t.numel():
                batch.append(t)
                size += t.nbytes
        if batch:
            self._send_batch(batch)

    def _send_batch(self, batch: list[Tensor]) -> None:
        # A large dense tensor goes in place; the others are packed.
        if len(batch) == 1 and batch[0].is_contiguous():
            self.send_flat(batch[0].detach().view(-1))
            return
        flat = torch.cat([t.detach().reshape(-1) for t in batch])
        self.send_flat(flat)
        for t, part in zip(batch, flat.split([t.numel() for t in batch]), strict=True):
            t.detach().copy_(part.view(t.shape))

    def send_flat(self, flat: Tensor) -> None:
        """Overwrites a contiguous tensor with that of the grid's first rank."""
        for group in self._groups():
            dist.broadcast(_wire(flat), group=group, group_src=0)

    # -- gradients: reduce-scatter ---------------------------------------------------------------------------------

    def start_reduction(
        self, bucket: Tensor, out: Tensor, norm: Tensor | None, scratch: Scratch, tag: int, exchange: bool
    ) -> Pending:
        """Starts the mean over the grid of one bucket; this rank's slice of it goes to `out`.

        bucket: [world_size * n], out: [n], the same dtype; `out` may be this rank's slice of `bucket`. norm: int64
        [NORM_WORDS] that the slice's sum of squares is added to, or None where the caller takes it. Nobody may write
        into `bucket` until the result has finished.
        """
        if exchange:
            return _Exchange(self, bucket, out, norm, scratch, tag)
        return _Native(self, bucket, out, norm)

    # -- parameters: all-gather ------------------------------------------------------------------------------------

    def start_gather(self, bucket: Tensor) -> Pending:
        """Starts filling `bucket` [world_size * n] in place, from slice r of every rank r."""
        n = bucket.numel() // self.world_size
        if self.backend(bucket.device) == "gloo":
            # gloo's all_gather_into_tensor is slower than one broadcast per rank into place
            wire = _wire(bucket).view(self.world_size, -1)
            return Works(
                [dist.broadcast(wire[r], group=self.group, group_src=r, async_op=True) for r in range(self.world_size)],
                bucket,
            )
        own = bucket[self.rank * n : (self.rank + 1) * n]
        return Works([getattr(dist, _ALL_GATHER)(bucket, own, group=self.group, async_op=True)], bucket)

    # -- whole values of split tensors -----------------------------------------------------------------------------

    def gather_parts(self, part: Tensor, numels: Sequence[int]) -> Tensor:
        """Joins 1-D parts of the given lengths, rank by rank of process_group, on every rank."""
        if self.world_size == 1:
            return part.clone()
        out = torch.empty(sum(numels), dtype=part.dtype, device=part.device)
        works = []
        for r, t in enumerate(out.split(list(numels))):
            if r == self.rank:
                t.copy_(part)
            if t.numel():
                works.append(dist.broadcast(_wire(t), group=self.group, group_src=r, async_op=True))
        for work in works:
            work.wait()
        return out

    def send_parts(self, part: Tensor, numels: Sequence[int], to: int, tag: int) -> Tensor | None:
        """The same on rank `to` of process_group only; None elsewhere."""
        if self.rank != to:
            if part.numel():
                dist.send(_wire(part.contiguous()), group=self.group, group_dst=to, tag=tag)
            return None
        out = torch.empty(sum(numels), dtype=part.dtype, device=part.device)
        for r, t in enumerate(out.split(list(numels))):
            if r == self.rank:
                t.copy_(part)
            elif t.numel():
                dist.recv(_wire(t), group=self.group, group_src=r, tag=tag)
        return out

    def share_object(self, obj: Any) -> Any:
        """The object of the grid's first rank, on every rank."""
        for group in self._groups():
            box = [obj]
            dist.broadcast_object_list(box, group=group, group_src=0)
            obj = box[0]
        return obj


def _headroom(ranks: int) -> float:
    """A power of two that keeps the sum of `ranks` values below the largest of them."""
    return float(0.5 ** (ranks - 1).bit_length())


class _Exchange:
    def __init__(
        self, ranks: Ranks, bucket: Tensor, out: Tensor, norm: Tensor | None, scratch: Scratch, tag: int
    ) -> None:
        self.ranks, self.out, self.norm, self.scratch, self.tag = ranks, out, norm, scratch, tag
        n, world, rank = out.numel(), ranks.world_size, ranks.rank
        self.own: Tensor | None = bucket[rank * n : (rank + 1) * n]
        self.bucket: Tensor | None = bucket
        self.received = torch.empty(0, n, dtype=bucket.dtype, device=bucket.device)
        self.memory: Tensor | None = None
        self.works: list[Any] = []
        if world == 1:
            return
        pairs = ranks.backend(bucket.device) == "gloo"
        rows = world - 1 if pairs else world
        self.memory = scratch.take(rows * n * bucket.element_size(), bucket.device)
        self.received = self.memory[: rows * n * bucket.element_size()].view(bucket.dtype).view(rows, n)
        if pairs:
            wire, sent = _wire(self.received), _wire(bucket).view(world, -1)
            others = [(rank + k) % world for k in range(1, world)]
            for r in others:
                row = r if r < rank else r - 1
                self.works.append(dist.irecv(wire[row], group=ranks.group, group_src=r, tag=tag))
            for r in others:
                self.works.append(dist.isend(sent[r], group=ranks.group, group_dst=r, tag=tag))
        else:
            self.own = None
            self.works.append(dist.all_to_all_single(self.received.view(-1), bucket, group=ranks.group, async_op=True))

    def finish(self) -> None:
        if self.bucket is None:
            return
        for work in self.works:
            work.wait()
        r = self.ranks
        scale = _headroom(r.total)
        if r.replicas == 1:
            ops.sum_slices(self.received, self.own, r.rank, scale, r.total * scale, self.out, self.norm)
        else:
            part = torch.empty(self.out.numel(), dtype=torch.float32, device=self.out.device)
            ops.sum_slices(self.received, self.own, r.rank, scale, 1.0, part, None)
            _sum_replicas(r, part, 1.0, r.total * scale, self.out, self.norm)
        if self.memory is not None:
            self.scratch.give(self.memory)
        self.works, self.bucket, self.own, self.memory = [], None, None, None


class _Native:
    def __init__(self, ranks: Ranks, bucket: Tensor, out: Tensor, norm: Tensor | None) -> None:
        self.ranks, self.out, self.norm = ranks, out, norm
        self.bucket: Tensor | None = bucket
        self.works: list[Any] = []
        if ranks.world_size == 1:
            if ranks.replicas == 1 or out.data_ptr() != bucket.data_ptr():
                out.copy_(bucket)
            return
        source, op = bucket, dist.ReduceOp.AVG
        if bucket.dtype == torch.float16 and ranks.backend(bucket.device) == "gloo":
            # gloo's average adds first, which overflows where the mean does not
            source, op = bucket * (1.0 / ranks.world_size), dist.ReduceOp.SUM
            self.bucket = source
        self.works.append(getattr(dist, _REDUCE_SCATTER)(out, source, op=op, group=ranks.group, async_op=True))

    def finish(self) -> None:
        if self.bucket is None:
            return
        for work in self.works:
            work.wait()
        r = self.ranks
        if r.replicas > 1:
            scale = _headroom(r.replicas)
            _sum_replicas(r, self.out.clone(), scale, r.replicas * scale, self.out, self.norm)
        elif self.norm is not None:
            empty = self.out.new_empty(0, self.out.numel())
            ops.sum_slices(empty, self.out, 0, 1.0, 1.0, self.out, self.norm)
        self.works, self.bucket = [], None


def _sum_replicas(r: Ranks, part: Tensor, scale: float, divisor: float, out: Tensor, norm: Tensor | None) -> None:
    """The second half for replicas: sums of slices are exchanged and added in replica order."""
    received = torch.empty(r.replicas, part.numel(), dtype=part.dtype, device=part.device)
    dist.all_gather(list(_wire(received)), _wire(part), group=r.replicate_group)
    ops.sum_slices(received, None, r.replica, scale, divisor, out, norm)
