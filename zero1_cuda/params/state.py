"""This rank's shard of the optimizer state of one set of parameters: moments, masters, and the tables that map them.

State is addressed by parameter (its number k in the set) and element, never by a place in a padded buffer: whoever
saves, loads or reports state asks here, and nobody else knows where anything lies. Hence the length of this file.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .. import ops
from .buffers import FlatBuffers, in_memory_order
from .layout import Segment, aligned

JOINED = 2**16  # elements of a master that are converted at a time; temporaries stay small
SIXTEEN_BIT = (torch.float16, torch.bfloat16)
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of a split pair, 1-D bf16 `param` and int16 `remainder` (as convert.h has it)."""
    out = torch.empty(param.numel(), dtype=torch.float32, device=param.device)
    for part, p, r in zip(out.split(JOINED), param.split(JOINED), remainder.split(JOINED), strict=True):
        high = p.view(torch.int16).to(torch.int32)
        low = r.to(torch.int32) & 0xFFFF
        went_up = (low > 0x8000) & ~p.isnan()
        part.view(torch.int32).copy_(((high - went_up.to(torch.int32)) << 16) | low)
    return out


def settle_tie(master: Tensor) -> Tensor:
    """The master as a bf16 parameter's is stored: one unit up where it is halfway below an even bf16 value."""
    bits = master.view(torch.int32)
    if not master.numel() or master.view(torch.int16).min() != -0x8000:  # no half is 0x8000: nothing to settle, mostly
        return master
    tie = (bits & 0x1FFFF) == 0x18000
    return (bits + (tie & ~master.isnan()).to(torch.int32)).view(torch.float32)


class ShardState:
    """The state of one set of parameters on this rank; there is none before `make_state`.

    first: number of the set's first parameter among all the optimizer's. split: bf16 masters are kept as remainders.
    amsgrad: per parameter.
    """

    def __init__(self, buffers: FlatBuffers, first: int, split: bool, amsgrad: Sequence[bool]) -> None:
        self.buffers, self.layout, self.params = buffers, buffers.layout, buffers.params
        self.first, self.split, self.device, self.dtypes = first, split, buffers.device, buffers.dtypes
        self.segments: list[Segment] = list(self.layout.segments(buffers.rank))
        self.segment_of: dict[int, Segment] = {segment.param: segment for segment in self.segments}
        self.exp_avg: Tensor | None = None
        self.exp_avg_sq: Tensor | None = None
        self.master: Tensor | None = None
        self.remainder: Tensor | None = None
        self.max_exp_avg_sq: Tensor | None = None
        self.amsgrad = [False] * len(self.params)
        self.max_begin: dict[int, int] = {}
        self.chunk_segment = self.layout.chunk_segments(self.segments).to(self.device)
        self.table = torch.empty(0, device="cpu")
        self.set_amsgrad(amsgrad)

    # -- tables ----------------------------------------------------------------------------------------------------

    def set_amsgrad(self, amsgrad: Sequence[bool]) -> None:
        """Makes room for the maxima of the parameters that want them; what is there stays."""
        old_begin, old = self.max_begin, self.max_exp_avg_sq
        self.amsgrad = [a or b for a, b in zip(self.amsgrad, amsgrad, strict=True)]
        self.max_begin, numel = {}, 0
        for segment in self.segments:
            if self.amsgrad[segment.param]:
                self.max_begin[segment.param] = numel
                numel += aligned(segment.hi - segment.lo, ops.CHUNK)
        self.max_numel = numel
        if self.exp_avg is not None and numel:
            new = torch.zeros(numel, dtype=torch.float32, device=self.device)
            for k, begin in old_begin.items():
                n = self.segment_of[k].hi - self.segment_of[k].lo
                assert old is not None
                new[self.max_begin[k] : self.max_begin[k] + n].copy_(old[begin : begin + n])
            self.max_exp_avg_sq = new
        rows = [self._row(segment) for segment in self.segments]
        table = torch.tensor(rows, dtype=torch.int64, device="cpu")
        self.table = table.reshape(-1, ops.SEGMENT_WORDS).to(self.device)

    def _row(self, s: Segment) -> tuple[int, ...]:
        """struct Segment of step_args.h."""
        return (
            s.shard_begin,
            s.hi - s.lo,
            s.slice_begin if self.buffers.out_of_place else s.flat_begin,
            s.flat_begin,
            self._master_begin(s),
            self.max_begin.get(s.param, -1),
            self.first + s.param,
            self.dtypes.index(self._dtype(s)),
        )

    def _dtype(self, segment: Segment) -> torch.dtype:
        return self.layout.specs[segment.param].dtype

    def _mode(self, dtype: torch.dtype) -> str:
        if dtype not in SIXTEEN_BIT:
            return "own"
        return "split" if self.split and dtype == torch.bfloat16 else "fp32"

    def _master_begin(self, segment: Segment) -> int:
        dtype = self._dtype(segment)
        mode = self._mode(dtype)
        if mode == "own":
            return 0
        before = self.dtypes[: self.dtypes.index(dtype)]
        return segment.slice_begin + sum(self.layout.slices_numel[d] for d in before if self._mode(d) == mode)

    def _numel(self, mode: str) -> int:
        return sum(self.layout.slices_numel[d] for d in self.dtypes if self._mode(d) == mode)

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        return self.exp_avg is not None

    def planned_bytes(self) -> int:
        """Bytes that `make_state` allocates."""
        return 8 * self.layout.shard_numel + 4 * self._numel("fp32") + 2 * self._numel("split") + 4 * self.max_numel

    def make_state(self) -> None:
        """Zero moments; masters from the weights as they are now."""
        if self.has_state:
            return

        def zeros(numel: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
            return torch.zeros(numel, dtype=dtype, device=self.device) if numel else None

        n = self.layout.shard_numel
        self.exp_avg = torch.zeros(n, dtype=torch.float32, device=self.device)
        self.exp_avg_sq = torch.zeros(n, dtype=torch.float32, device=self.device)
        self.master, self.remainder = zeros(self._numel("fp32")), zeros(self._numel("split"), torch.int16)
        self.max_exp_avg_sq = zeros(self.max_numel)
        for segment in self.segments:
            master = self._master_view(segment)
            if master is not None and master.dtype == torch.float32:
                master.copy_(self._weights(segment))

    def moved_to_params(self) -> ShardState:
        """The same set where its parameters are now."""
        old = self.buffers
        buffers = FlatBuffers(old.params, old.layout, old.rank, old.out_of_place)
        new = ShardState(buffers, self.first, self.split, self.amsgrad)
        for name in (*MOMENTS, "master", "remainder"):
            t = getattr(self, name)
            setattr(new, name, None if t is None else t.to(new.device))
        return new

    # -- one parameter ---------------------------------------------------------------------------------------------

    def span(self, k: int) -> tuple[int, int]:
        """This rank's elements [lo, hi) of parameter k, in memory order."""
        segment = self.segment_of.get(k)
        return (segment.lo, segment.hi) if segment else (0, 0)

    def stride(self, k: int) -> tuple[int, ...]:
        """The dense strides of parameter k, which define its memory order."""
        return self.buffers.strides[k]

    def segment_numels(self, k: int) -> list[int]:
        """How many elements of parameter k each rank owns."""
        b = self.layout.buckets[self.layout.bucket_of[k]]
        at, n = self.layout.begin_of[k] - b.begin, self.layout.specs[k].numel
        edges = [min(max(r * b.slice_numel - at, 0), n) for r in range(self.layout.world_size + 1)]
        return [hi - lo for lo, hi in itertools.pairwise(edges)]

    def moment_names(self, k: int) -> list[str]:
        return [*MOMENTS[:2], *(MOMENTS[2:] if self.amsgrad[k] else [])]

    def _weights(self, segment: Segment) -> Tensor:
        """The weights of a segment, 1-D, in the flat buffer."""
        flat = self.buffers.flat_params[self._dtype(segment)]
        return flat[segment.flat_begin : segment.flat_begin + segment.hi - segment.lo]

    def _master_view(self, segment: Segment) -> Tensor | None:
        store = {"fp32": self.master, "split": self.remainder, "own": None}[self._mode(self._dtype(segment))]
        begin = self._master_begin(segment)
        return None if store is None else store[begin : begin + segment.hi - segment.lo]

    def _moments(self, segment: Segment) -> dict[str, Tensor]:
        """Views [hi - lo] of the moments of a segment, by torch's names. Only after `make_state`."""
        assert self.exp_avg is not None
        assert self.exp_avg_sq is not None
        begin, n = segment.shard_begin, segment.hi - segment.lo
        out = {"exp_avg": self.exp_avg[begin : begin + n], "exp_avg_sq": self.exp_avg_sq[begin : begin + n]}
        if segment.param in self.max_begin:
            assert self.max_exp_avg_sq is not None
            at = self.max_begin[segment.param]
            out["max_exp_avg_sq"] = self.max_exp_avg_sq[at : at + n]
        return out

    def read(self, k: int) -> dict[str, Tensor]:
        """fp32 [hi - lo]: this rank's part of moments and master, zero-size where it holds nothing. Some are views."""
        segment = self.segment_of.get(k)
        if segment is None:
            empty = torch.zeros(0, dtype=torch.float32, device=self.device)
            return dict.fromkeys([*self.moment_names(k), "master"], empty)
        weights, stored = self._weights(segment), self._master_view(segment)
        if stored is None:
            master = weights.float()
        else:
            master = stored if stored.dtype == torch.float32 else join_master(weights, stored)
        return {**self._moments(segment), "master": master}

    def read_initial(self, k: int, p: Tensor) -> dict[str, Tensor]:
        """The same for state that has not been made: what a first step would begin with. p: where the weights are."""
        lo, hi = self.span(k)
        zeros = torch.zeros(1, dtype=torch.float32, device=p.device).expand(hi - lo)
        master = in_memory_order(p.detach(), self.stride(k))[lo:hi].to(torch.float32, copy=True)
        return {**dict.fromkeys(self.moment_names(k), zeros), "master": master}

    def write(self, k: int, entry: Mapping[str, Tensor]) -> None:
        """Sets this rank's part of moments and master, 1-D each; moments that are missing become 0, a missing master
        the present weight. The weights become the masters, rounded."""
        segment = self.segment_of.get(k)
        if segment is None:
            return
        for name, view in self._moments(segment).items():
            if name in entry:
                view.copy_(entry[name])
            else:
                view.zero_()
        weights, stored = self._weights(segment), self._master_view(segment)
        master = entry["master"] if "master" in entry else weights.float()
        for at in range(0, weights.numel(), JOINED):
            block = master[at : at + JOINED]
            if weights.dtype == torch.bfloat16:
                block = settle_tie(block)
            weights[at : at + JOINED].copy_(block)
            if stored is not None and stored.dtype == torch.float32:
                stored[at : at + JOINED].copy_(block)
            elif stored is not None:
                stored[at : at + JOINED].copy_((block.view(torch.int32) & 0xFFFF).to(torch.int16))

    def local_state(self, k: int) -> dict[str, Tensor]:
        """Views of this rank's part of the state of parameter k, as stored; zero-size where it holds nothing of it."""
        segment = self.segment_of.get(k)
        if segment is not None:
            stored = self._master_view(segment)
            stored = self._weights(segment) if stored is None else stored
            return {**self._moments(segment), "master" if stored.dtype == torch.float32 else "remainder": stored}
        out = self.read(k)
        if self._mode(self.layout.specs[k].dtype) == "split":
            out["remainder"] = out.pop("master").to(torch.int16)
        return out

    def undo_edit(self, k: int) -> None:
        """The weights of this rank's part become their rounded masters again, where there are masters to tell."""
        segment = self.segment_of.get(k)
        if segment is not None and self.has_state and self._mode(self._dtype(segment)) == "fp32":
            stored = self._master_view(segment)
            assert stored is not None
            self._weights(segment).copy_(stored)

    # -- kernels ---------------------------------------------------------------------------------------------------

    def add_norm(self, norm: Tensor) -> None:
        """Adds the sum of squares of the reduced shard to `norm`, int64 [NORM_WORDS]."""
        reduced = self.buffers.reduced
        ops.grad_norm(self.table, self.chunk_segment, [reduced[d] for d in self.dtypes], norm)

    def adam_step(self, scalars: Tensor) -> None:
        """The fused step over the shard; the new weights go into this rank's slices of the flat parameters."""
        assert self.exp_avg is not None
        assert self.exp_avg_sq is not None
        reduced, flat = self.buffers.reduced, self.buffers.flat_params
        with ops.profiled("zero1.adam_step"):
            ops.adam_step(
                self.table,
                self.chunk_segment,
                scalars,
                [reduced[d] for d in self.dtypes],
                [flat[d] for d in self.dtypes],
                self.master,
                self.remainder,
                self.exp_avg,
                self.exp_avg_sq,
                self.max_exp_avg_sq,
            )

    def refresh_masters(self, edited: Tensor) -> None:
        """Masters := weights where they differ, for the parameters marked in `edited`, uint8 [all parameters]."""
        if self.has_state:
            params = [self.buffers.flat_params[d] for d in self.dtypes]
            ops.refresh_masters(self.table, self.chunk_segment, params, self.master, self.remainder, edited)

    # -- bytes -----------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, list[Tensor]]:
        """Every tensor of the set that holds memory, by the kinds of memory_report()."""
        flat = self.buffers
        state = [self.exp_avg, self.exp_avg_sq, self.master, self.remainder, self.max_exp_avg_sq]
        return {
            "params": list(flat.flat_params.values()),
            "grads": list(flat.flat_grads.values()),
            "state": [t for t in state if t is not None],
            "buffers": [*(flat.reduced.values() if flat.out_of_place else []), self.table, self.chunk_segment],
        }

    def padding_bytes(self) -> int:
        """Bytes of the above that belong to no parameter."""
        owned: dict[torch.dtype, int] = dict.fromkeys(self.dtypes, 0)
        for segment in self.segments:
            owned[self._dtype(segment)] += segment.hi - segment.lo
        unused = {d: self.layout.slices_numel[d] - n for d, n in owned.items()}
        master_bytes = {"own": 0, "fp32": 4, "split": 2}
        padding = sum(2 * n * d.itemsize for d, n in self.layout.padding.items())  # parameters and gradients
        padding += sum(n * (8 + master_bytes[self._mode(d)]) for d, n in unused.items())
        maxima = (self.segment_of[k] for k in self.max_begin)
        padding += 4 * (self.max_numel - sum(segment.hi - segment.lo for segment in maxima))
        return padding + (sum(n * d.itemsize for d, n in unused.items()) if self.buffers.out_of_place else 0)
