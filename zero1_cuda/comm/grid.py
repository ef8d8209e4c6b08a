"""The grid of ranks, and the small messages over it.

A grid is ``process_group`` (the `world_size` ranks that split one state) by ``replicate_group`` (the `replicas` ranks
that hold the same shard).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Small tensors are broadcast together, in messages of about this many bytes.
BROADCAST_BYTES = 16 * 2**20

# Flags of one bit per rank are summed in 16 bits, and facts in halves whose squares must not overflow.
MAX_RANKS = 2**15


def wire(t: Tensor) -> Tensor:
    """The same bytes as uint8, a type that every backend sends."""
    return t.view(torch.uint8)


class ProcessGrid:
    """This process's place in the grid. One rank where torch.distributed is not initialised or the group has one.

    Raises:
        ValueError: this process is not a member of the groups, or they hold more than 2^15 ranks.
    """

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
        self.num_ranks = self.world_size * self.replicas
        if self.num_ranks > MAX_RANKS:
            raise ValueError(f"process_group and replicate_group: at most {MAX_RANKS} ranks, got {self.num_ranks}")
        self.is_single = self.num_ranks == 1
        self._params_on = torch.device("cpu")

    def groups(self) -> list[Any]:
        """The groups that hold more than this rank, in the order in which a grid-wide operation visits them."""
        pairs = ((self.replicate_group, self.replicas), (self.group, self.world_size))
        return [group for group, size in pairs if size > 1]

    def backend(self, device: torch.device) -> str:
        """Name of the backend that serves tensors on `device`; "none" for one rank."""
        for group in self.groups():
            return str(group._get_backend(torch.device(device.type)).name()).lower()
        return "none"

    def use_device(self, device: torch.device) -> None:
        """Where parameters lie: small messages go through that device where the groups send nothing from the CPU."""
        self._params_on = device

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Objects are sent through the current device, which need not be the parameters'."""
        return torch.cuda.device(self._params_on) if self._params_on.type == "cuda" else contextlib.nullcontext()

    def _message_device(self) -> torch.device:
        """A device whose tensors the groups can send, whatever the parameters are on."""
        for group in self.groups():
            try:
                group._get_backend(torch.device("cpu"))
            except RuntimeError:
                return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    # -- small messages --------------------------------------------------------------------------------------------

    def all_reduce_sum_(self, t: Tensor) -> Tensor:
        """Adds an integer tensor over the grid, in place."""
        for group in self.groups():
            dist.all_reduce(t, group=group)
        return t

    def gather_objects(self, obj: Any) -> list[Any]:
        """[obj of every rank of the grid], on every rank."""
        found = [obj]
        with self._on_device():
            for group in self.groups():
                parts: list[Any] = [None] * dist.get_world_size(group)
                dist.all_gather_object(parts, found, group=group)
                found = [x for part in parts for x in part]
        return found

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """The same for a short list of integers, without pickling."""
        with self._on_device():
            t = torch.tensor(values, dtype=torch.int64, device=self._message_device()).reshape(1, -1)
        for group in self.groups():
            parts = [torch.empty_like(t) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, t, group=group)
            t = torch.cat(parts)
        return [[int(x) for x in row] for row in t.tolist()]

    def broadcast_object(self, obj: Any) -> Any:
        """The object of the grid's first rank, on every rank."""
        with self._on_device():
            for group in self.groups():
                box = [obj]
                dist.broadcast_object_list(box, group=group, group_src=0)
                obj = box[0]
        return obj

    # -- weights of the grid's first rank --------------------------------------------------------------------------

    def broadcast_params(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites `tensors` on every rank with those of the grid's first rank, in place."""
        if self.is_single:
            return
        batch: list[Tensor] = []
        size = 0
        for t in tensors:
            if batch and (
                size + t.nbytes > BROADCAST_BYTES or t.dtype != batch[0].dtype or t.device != batch[0].device
            ):
                self._broadcast_batch(batch)
                batch, size = [], 0
            if t.numel():
                batch.append(t)
                size += t.nbytes
        if batch:
            self._broadcast_batch(batch)

    def _broadcast_batch(self, batch: list[Tensor]) -> None:
        # A large dense tensor goes in place; the others are packed.
        if len(batch) == 1 and batch[0].is_contiguous():
            self.broadcast_flat(batch[0].detach().view(-1))
            return
        flat = torch.cat([t.detach().reshape(-1) for t in batch])
        self.broadcast_flat(flat)
        for t, part in zip(batch, flat.split([t.numel() for t in batch]), strict=True):
            t.detach().copy_(part.view(t.shape))

    def broadcast_flat(self, flat: Tensor) -> None:
        """Overwrites a contiguous tensor with that of the grid's first rank."""
        for group in self.groups():
            dist.broadcast(wire(flat), group=group, group_src=0)

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
                works.append(dist.broadcast(wire(t), group=self.group, group_src=r, async_op=True))
        for work in works:
            work.wait()
        return out

    def gather_parts_to(self, part: Tensor, numels: Sequence[int], to: int, tag: int) -> Tensor | None:
        """The same on rank `to` of process_group only; None elsewhere."""
        if self.rank != to:
            if part.numel():
                dist.send(wire(part.contiguous()), group=self.group, group_dst=to, tag=tag)
            return None
        out = torch.empty(sum(numels), dtype=part.dtype, device=part.device)
        for r, t in enumerate(out.split(list(numels))):
            if r == self.rank:
                t.copy_(part)
            elif t.numel():
                dist.recv(wire(t), group=self.group, group_src=r, tag=tag)
        return out
