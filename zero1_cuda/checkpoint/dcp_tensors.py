"""Tensor subclasses through which a rank's part of the state enters torch.distributed.checkpoint.

To DCP a `FlatShard` is a tensor of the parameter's own N-D shape of which this rank holds some boxes, so a file is that
of an unsharded optimizer and any number of ranks can load it. A `StepShard` is a 0-d float32 tensor, as torch.optim
stores step counts, that also says whose part it belongs to. Pickled, both are plain tensors: a part saved by torch.save
loads with ``weights_only=True`` and carries its marks along.

As in any state_dict of torch, what can be read is the optimizer's state itself, not a copy. A load does not write to
it: it has memory of its own on the CPU, so that a load which fails has changed nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

MARK_WORDS = 6  # step, rank, world_size, lo, hi, numel

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def boxes(shape: Sequence[int], lo: int, hi: int) -> list[Box]:
    """Elements [lo, hi) of a row-major tensor as boxes, in order; at most ``2 * ndim - 1`` of them.

    An empty tensor is one empty box on every rank: without any, DCP would lose its name.

    >>> boxes([3, 4], 2, 9)  # the end of row 0, row 1, the begin of row 2
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    shape = tuple(shape)
    if 0 in shape:
        return [((0,) * len(shape), shape)]
    if hi <= lo:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])

    def inside(r: int, a: int, b: int) -> list[Box]:
        return [((r, *offsets), (1, *sizes)) for offsets, sizes in boxes(shape[1:], a - r * row, b - r * row)]

    first, last = lo // row, (hi - 1) // row
    if first == last and hi - lo < row:
        return inside(first, lo, hi)
    out: list[Box] = []
    begin, end = -(-lo // row), hi // row  # whole rows
    if lo < begin * row:
        out += inside(first, lo, begin * row)
    if begin < end:
        out.append(((begin,) + (0,) * (len(shape) - 1), (end - begin, *shape[1:])))
    if end * row < hi:
        out += inside(last, end * row, hi)
    return out


class _DcpTensor(torch.Tensor):
    """What both subclasses share: a stand-in of the global shape around plain local data."""

    local: Tensor

    def _writable(self) -> Tensor:
        """The local data, in memory that is no part of the optimizer."""
        raise NotImplementedError

    def _parts(self) -> Iterator[tuple[torch.Size, torch.Size, Tensor]]:
        """(offsets, sizes, local data) of the boxes of the global tensor that are here."""
        raise NotImplementedError

    def _like(self, local: Tensor) -> _DcpTensor:
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        me = args[0]
        if isinstance(me, _DcpTensor):
            if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
                return me._like(func(me.local, **kwargs))
            if func is aten.copy_.default and isinstance(args[1], _DcpTensor):
                me._writable().copy_(args[1].local, *args[2:])
                return me
            if func in (aten.empty_like.default, aten.new_empty.default):
                kept = {k: v for k, v in kwargs.items() if k in ("dtype", "device", "pin_memory")}
                return me._like(torch.empty_like(me.local, **kept))
        raise NotImplementedError(
            f"{func} of a rank's part of a tensor; read whole states with full_param_state() or full_state_dict()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, local={self.local})"

    def __deepcopy__(self, memo: Any) -> _DcpTensor:
        return self._like(self.local.clone())

    # -- the protocol of torch.distributed.checkpoint ---------------------------------------------------------------

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets, sizes),
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.shape,
                ),
            )
            for offsets, sizes, _ in self._parts()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self._writable()  # DCP asks for this list when it is about to load, and then only
        return [ChunkStorageMetadata(offsets, sizes) for offsets, sizes, _ in self._parts()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offsets, _, part in self._parts():
            if offsets == index.offset:
                return part
        raise KeyError(index)


class FlatShard(_DcpTensor):
    """Elements [lo, lo + len(local)), in memory order, of a tensor of shape `shape` and dense strides `stride`."""

    @staticmethod
    def __new__(cls, local: Tensor, shape: Sequence[int], stride: Sequence[int], lo: int) -> FlatShard:
        self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=local.dtype, device=local.device)
        self.local, self.lo, self.dense_stride, self._apart = local, lo, tuple(stride), False
        return self

    lo: int
    dense_stride: tuple[int, ...]
    _apart: bool  # whether `local` is no memory of the optimizer

    def _writable(self) -> Tensor:
        if not self._apart:  # on the CPU: files are read there, and a GPU may be full
            self.local, self._apart = torch.empty(self.local.shape, dtype=self.dtype, device="cpu"), True
        return self.local

    def _like(self, local: Tensor) -> FlatShard:
        new = FlatShard(local, self.shape, self.dense_stride, self.lo)
        new._apart = local is not self.local
        return new

    def _parts(self) -> Iterator[tuple[torch.Size, torch.Size, Tensor]]:
        # In memory order the tensor is row-major with its dimensions sorted by stride.
        order = sorted(range(self.dim()), key=lambda d: (-self.dense_stride[d], d))
        back = [order.index(d) for d in range(self.dim())]
        at = 0
        for offsets, sizes in boxes([self.shape[d] for d in order], self.lo, self.lo + self.local.numel()):
            n = math.prod(sizes)
            part = self.local[at : at + n].view(sizes).permute(back)
            yield torch.Size(offsets[d] for d in back), torch.Size(sizes[d] for d in back), part
            at += n

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.local.__reduce_ex__(protocol)


class StepShard(_DcpTensor):
    """A step count, 0-d float32, and the marks of the part that its entry belongs to. count: 0-d, of any type."""

    @staticmethod
    def __new__(cls, count: Tensor, mark: Sequence[int]) -> StepShard:
        self = torch.Tensor._make_wrapper_subclass(cls, (), dtype=torch.float32, device=torch.device("cpu"))
        self.count, self.mark = count, list(mark)
        return self

    count: Tensor
    mark: list[int]

    @property
    def local(self) -> Tensor:  # type: ignore[override]
        return self.count.to("cpu", torch.float32)

    def _writable(self) -> Tensor:
        self.count = torch.zeros((), device="cpu")
        return self.count

    def _like(self, local: Tensor) -> StepShard:
        return StepShard(local, self.mark)

    def _parts(self) -> Iterator[tuple[torch.Size, torch.Size, Tensor]]:
        yield torch.Size(()), torch.Size(()), self.local

    def marked(self) -> Tensor:
        """int64 [MARK_WORDS]: step, rank, world_size, lo, hi, numel."""
        return torch.tensor([int(self.count), *self.mark], dtype=torch.int64, device="cpu")

    def item(self) -> float:
        return float(self.count)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.marked().__reduce_ex__(protocol)
