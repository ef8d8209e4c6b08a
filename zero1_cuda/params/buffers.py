"""Flat buffers: parameters and gradients as views into them, and this rank's shard of the optimizer state.

An `Arena` is one set of parameters laid out together. Parameters that come later (a new group, an unfrozen layer) make
an arena of their own, so that existing state never moves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import ops
from .layout import Layout, ParamSpec, Piece, aligned

JOINED = 2**16  # elements of a master that are converted at a time; temporaries stay small
SIXTEEN_BIT = (torch.float16, torch.bfloat16)


def dense_strides(t: Tensor) -> tuple[int, ...]:
    """The strides of `t` without gaps between its elements: its own where it has none, else those of the same order."""
    return tuple(torch.empty_like(t, device="meta").stride())


def view_of(flat: Tensor, begin: int, shape: Sequence[int], stride: Sequence[int], own_storage: bool) -> Tensor:
    """A tensor over flat[begin:...].

    With `own_storage` it has a storage object of its own over the same memory: savers that look for tied weights
    compare storage objects, and would take all views of one tensor for a single weight.
    """
    if not own_storage:
        return flat.as_strided(shape, stride, flat.storage_offset() + begin)
    if flat.device.type == "meta":  # no storage to slice; .data has at least a version counter of its own
        return flat.as_strided(shape, stride, flat.storage_offset() + begin).data
    numel = math.prod(int(n) for n in shape)
    size = flat.element_size()
    begin += int(flat.storage_offset())
    storage = flat.untyped_storage()[begin * size : (begin + numel) * size]
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(storage, 0, tuple(shape), tuple(stride))


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


class Arena:
    """The flat buffers, tables and state of one set of parameters.

    params: of one device. first: number of the first among all the optimizer's parameters. apart: the reduced slices
    get a buffer of their own (early reduction); otherwise a slice is reduced inside the gradient buffer. split: bf16
    masters are kept as remainders. amsgrad: per parameter.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        layout: Layout,
        rank: int,
        first: int,
        apart: bool,
        split: bool,
        amsgrad: Sequence[bool],
    ) -> None:
        self.params = list(params)
        self.layout = layout
        self.first = first
        self.split = split
        self.apart = apart
        self.rank = rank
        self.device = params[0].device
        self.dtypes = list(layout.flat_numel)
        self.pieces: list[Piece] = list(layout.pieces(rank))
        self.piece_of: dict[int, Piece] = {piece.param: piece for piece in self.pieces}
        self.strides = [dense_strides(p) for p in params]

        self.flat_params: dict[torch.dtype, Tensor] = {}
        self.flat_grads: dict[torch.dtype, Tensor] = {}
        self.reduced: dict[torch.dtype, Tensor] = {}
        for dtype, numel in layout.flat_numel.items():
            self.flat_params[dtype] = torch.zeros(numel, dtype=dtype, device=self.device)
            self.flat_grads[dtype] = torch.zeros(numel, dtype=dtype, device=self.device)
            if apart:
                self.reduced[dtype] = torch.zeros(layout.slices_numel[dtype], dtype=dtype, device=self.device)
            else:
                self.reduced[dtype] = self.flat_grads[dtype]

        # Tensors over one bucket. The gradient's has a version counter of its own, so that a write by anybody shows.
        self.bucket_params: list[Tensor] = []
        self.bucket_grads: list[Tensor] = []
        self.bucket_slices: list[Tensor] = []
        for b in layout.buckets:
            numel = b.slice_numel * layout.world_size
            self.bucket_params.append(self.flat_params[b.dtype][b.begin : b.begin + numel])
            self.bucket_grads.append(view_of(self.flat_grads[b.dtype], b.begin, [numel], [1], own_storage=True))
            begin = b.slice_begin if apart else b.begin + rank * b.slice_numel
            self.bucket_slices.append(self.reduced[b.dtype][begin : begin + b.slice_numel])

        self.param_at = [0] * len(params)  # addresses, to notice a parameter that was moved
        self.grad_at = [0] * len(params)
        self.grad_views: list[Tensor] = []
        self.dirty = [False] * len(params)  # whether the gradient's range may hold something but zeros
        self.sparse: set[int] = set()  # parameters that were found to have a gradient that is not dense
        self.had = [False] * len(params)  # whether there was a gradient when the range was last filled
        for k, p in enumerate(params):
            self.grad_views.append(self._grad_view(k))
            self.adopt_param(k, p)

        self.exp_avg: Tensor | None = None
        self.exp_avg_sq: Tensor | None = None
        self.master: Tensor | None = None
        self.remainder: Tensor | None = None
        self.max_exp_avg_sq: Tensor | None = None
        self.amsgrad = [False] * len(params)
        self.max_begin: dict[int, int] = {}
        self.chunk_segment = layout.chunk_segments(self.pieces).to(self.device)
        self.segments = torch.empty(0)
        self.bucket_tables: dict[int, tuple[Tensor, Tensor]] = {}
        self.set_amsgrad(amsgrad)

    # -- parameters and gradients ----------------------------------------------------------------------------------

    def adopt_param(self, k: int, p: torch.nn.Parameter) -> None:
        """Copies the values of a parameter into the flat buffer and makes it a view of it; shape and strides stay."""
        if not p.numel():
            self.param_at[k] = p.data_ptr()
            return
        flat = self.flat_params[self.layout.specs[k].dtype]
        home = view_of(flat, self.layout.begin_of[k], p.shape, self.strides[k], own_storage=True)
        home.copy_(p.detach())
        p.data = home
        self.param_at[k] = p.data_ptr()

    def _grad_view(self, k: int) -> Tensor:
        p = self.params[k]
        if not p.numel():
            view = torch.zeros_like(p, device=self.device, requires_grad=False)
            self.grad_at[k] = view.data_ptr()
            return view
        b = self.layout.bucket_of[k]
        begin = self.layout.begin_of[k] - self.layout.buckets[b].begin
        view = view_of(self.bucket_grads[b], begin, p.shape, self.strides[k], own_storage=False)
        self.grad_at[k] = view.data_ptr()
        return view

    def adopt_grad(self, k: int, grad: Tensor) -> None:
        """Takes a dense gradient that was made elsewhere into the flat buffer; `.grad` becomes the view of it."""
        p, view = self.params[k], self.grad_views[k]
        if grad is view:  # its `.data` was replaced: the object no longer lies in the buffer
            view = self.grad_views[k] = self._grad_view(k)
        view.copy_(grad.detach() if grad.requires_grad else grad)  # (backward with create_graph=True)
        p.grad = view
        self.dirty[k] = True

    def clear_grad(self, k: int) -> None:
        """Zeros in the range of a parameter that has no gradient."""
        if self.dirty[k]:
            self.grad_views[k].zero_()
            self.dirty[k] = False

    def is_home(self, k: int, grad: Tensor) -> bool:
        """Whether this gradient is the view, where it was made."""
        return grad is self.grad_views[k] and grad.data_ptr() == self.grad_at[k]

    def fill_grads(self, members: Sequence[int], rebind: bool) -> None:
        """Makes the buffer hold exactly the gradients that these parameters have now.

        rebind: `.grad` of a gradient made elsewhere becomes the view. Not inside backward, where DDP looks for its own.
        """
        params, views, at, had, dirty = self.params, self.grad_views, self.grad_at, self.had, self.dirty
        for k in members:
            grad = params[k].grad
            had[k] = grad is not None
            if grad is None:
                if dirty[k]:
                    self.clear_grad(k)
            elif grad is not views[k] or grad.data_ptr() != at[k]:
                if grad.layout == torch.strided and (rebind or grad is views[k]):
                    self.adopt_grad(k, grad)
                elif grad.layout == torch.strided:
                    views[k].copy_(grad)
                    dirty[k] = True
                else:
                    self.sparse.add(k)
                    self.clear_grad(k)

    # -- tables ----------------------------------------------------------------------------------------------------

    def set_amsgrad(self, amsgrad: Sequence[bool]) -> None:
        """Makes room for the maxima of the parameters that want them; what is there stays."""
        old_begin, old = self.max_begin, self.max_exp_avg_sq
        self.amsgrad = [a or b for a, b in zip(self.amsgrad, amsgrad, strict=True)]
        self.max_begin, numel = {}, 0
        for piece in self.pieces:
            if self.amsgrad[piece.param]:
                self.max_begin[piece.param] = numel
                numel += aligned(piece.hi - piece.lo, ops.CHUNK)
        self.max_numel = numel
        if self.exp_avg is not None and numel:
            new = torch.zeros(numel, dtype=torch.float32, device=self.device)
            for k, begin in old_begin.items():
                n = self.piece_of[k].hi - self.piece_of[k].lo
                assert old is not None
                new[self.max_begin[k] : self.max_begin[k] + n].copy_(old[begin : begin + n])
            self.max_exp_avg_sq = new
        rows = []
        for piece in self.pieces:
            dtype = self.layout.specs[piece.param].dtype
            rows.append(
                (
                    piece.shard_begin,
                    piece.hi - piece.lo,
                    piece.slice_begin if self.apart else piece.flat_begin,
                    piece.flat_begin,
                    self._master_begin(piece),
                    self.max_begin.get(piece.param, -1),
                    self.first + piece.param,
                    self.dtypes.index(dtype),
                )
            )
        self.segments = torch.tensor(rows, dtype=torch.int64).reshape(-1, ops.SEGMENT_WORDS).to(self.device)
        self.bucket_tables.clear()

    def _mode(self, dtype: torch.dtype) -> str:
        if dtype not in SIXTEEN_BIT:
            return "own"
        return "split" if self.split and dtype == torch.bfloat16 else "fp32"

    def _master_begin(self, piece: Piece) -> int:
        dtype = self.layout.specs[piece.param].dtype
        mode = self._mode(dtype)
        if mode == "own":
            return 0
        before = self.dtypes[: self.dtypes.index(dtype)]
        return piece.slice_begin + sum(self.layout.slices_numel[d] for d in before if self._mode(d) == mode)

    def _numel(self, mode: str) -> int:
        return sum(self.layout.slices_numel[d] for d in self.dtypes if self._mode(d) == mode)

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        return self.exp_avg is not None

    def planned_state_bytes(self) -> int:
        """Bytes that `make_state` allocates."""
        return 8 * self.layout.shard_numel + 4 * self._numel("fp32") + 2 * self._numel("split") + 4 * self.max_numel

    def make_state(self) -> None:
        """Zero moments; masters from the weights as they are now."""
        if self.has_state:
            return
        n, device = self.layout.shard_numel, self.device
        self.exp_avg = torch.zeros(n, dtype=torch.float32, device=device)
        self.exp_avg_sq = torch.zeros(n, dtype=torch.float32, device=device)
        if self._numel("fp32"):
            self.master = torch.zeros(self._numel("fp32"), dtype=torch.float32, device=device)
        if self._numel("split"):
            self.remainder = torch.zeros(self._numel("split"), dtype=torch.int16, device=device)
        if self.max_numel:
            self.max_exp_avg_sq = torch.zeros(self.max_numel, dtype=torch.float32, device=device)
        for piece in self.pieces:
            master = self._master_view(piece)
            if master is not None and master.dtype == torch.float32:
                master.copy_(self.param_piece(piece))

    def param_piece(self, piece: Piece) -> Tensor:
        """The weights of a piece, 1-D, in the flat buffer."""
        flat = self.flat_params[self.layout.specs[piece.param].dtype]
        return flat[piece.flat_begin : piece.flat_begin + piece.hi - piece.lo]

    def _master_view(self, piece: Piece) -> Tensor | None:
        mode = self._mode(self.layout.specs[piece.param].dtype)
        store = {"fp32": self.master, "split": self.remainder, "own": None}[mode]
        begin = self._master_begin(piece)
        return None if store is None else store[begin : begin + piece.hi - piece.lo]

    def read_master(self, piece: Piece) -> Tensor:
        """fp32 [hi - lo]: the masters of a piece. Not always a copy."""
        param, stored = self.param_piece(piece), self._master_view(piece)
        if stored is None:
            return param.float()
        return stored if stored.dtype == torch.float32 else join_master(param, stored)

    def write_master(self, piece: Piece, master: Tensor) -> None:
        """Sets masters, and the weights to them, rounded."""
        param, stored = self.param_piece(piece), self._master_view(piece)
        for at in range(0, param.numel(), JOINED):
            block = master[at : at + JOINED]
            if param.dtype == torch.bfloat16:
                block = settle_tie(block)
            param[at : at + JOINED].copy_(block)
            if stored is not None and stored.dtype == torch.float32:
                stored[at : at + JOINED].copy_(block)
            elif stored is not None:
                stored[at : at + JOINED].copy_((block.view(torch.int32) & 0xFFFF).to(torch.int16))

    def moments(self, piece: Piece) -> dict[str, Tensor]:
        """Views [hi - lo] of the moments of a piece, by torch's names. Only after `make_state`."""
        assert self.exp_avg is not None
        assert self.exp_avg_sq is not None
        begin, n = piece.shard_begin, piece.hi - piece.lo
        out = {"exp_avg": self.exp_avg[begin : begin + n], "exp_avg_sq": self.exp_avg_sq[begin : begin + n]}
        if piece.param in self.max_begin:
            assert self.max_exp_avg_sq is not None
            at = self.max_begin[piece.param]
            out["max_exp_avg_sq"] = self.max_exp_avg_sq[at : at + n]
        return out

    def local_state(self, k: int) -> dict[str, Tensor]:
        """Views of this rank's part of the state of parameter k, as stored; zero-size where it holds nothing of it."""
        piece = self.piece_of.get(k)
        if piece is None:
            empty = torch.zeros(0, dtype=torch.float32, device=self.device)
            names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if self.amsgrad[k] else [])
            out = dict.fromkeys(names, empty)
            mode = self._mode(self.layout.specs[k].dtype)
            out["remainder" if mode == "split" else "master"] = empty.to(torch.int16) if mode == "split" else empty
            return out
        out = self.moments(piece)
        stored = self._master_view(piece)
        if stored is None:
            stored = self.param_piece(piece)
        out["master" if stored.dtype == torch.float32 else "remainder"] = stored
        return out

    def piece_numels(self, k: int) -> list[int]:
        """How many elements of parameter k each rank owns."""
        b = self.layout.buckets[self.layout.bucket_of[k]]
        at, n = self.layout.begin_of[k] - b.begin, self.layout.specs[k].numel
        edges = [min(max(r * b.slice_numel - at, 0), n) for r in range(self.layout.world_size + 1)]
        return [hi - lo for lo, hi in itertools.pairwise(edges)]

    # -- kernels ---------------------------------------------------------------------------------------------------

    def add_norm(self, norm: Tensor) -> None:
        """Adds the sum of squares of the reduced shard to `norm`, int64 [NORM_WORDS]."""
        ops.grad_norm(self.segments, self.chunk_segment, [self.reduced[d] for d in self.dtypes], norm)

    def step(self, scalars: Tensor, bucket: int | None = None) -> None:
        """The fused step over the shard, or over this rank's slice of one bucket."""
        assert self.exp_avg is not None
        assert self.exp_avg_sq is not None
        segments, chunk_segment, exp_avg, exp_avg_sq = self.segments, self.chunk_segment, self.exp_avg, self.exp_avg_sq
        if bucket is not None:
            b = self.layout.buckets[bucket]
            segments, chunk_segment = self._bucket_tables(bucket)
            exp_avg = exp_avg[b.shard_begin : b.shard_begin + b.slice_numel]
            exp_avg_sq = exp_avg_sq[b.shard_begin : b.shard_begin + b.slice_numel]
        ops.adam_step(
            segments,
            chunk_segment,
            scalars,
            [self.reduced[d] for d in self.dtypes],
            [self.flat_params[d] for d in self.dtypes],
            self.master,
            self.remainder,
            exp_avg,
            exp_avg_sq,
            self.max_exp_avg_sq,
        )

    def _bucket_tables(self, bucket: int) -> tuple[Tensor, Tensor]:
        """The rows of one bucket, counted from its slice's begin."""
        if bucket not in self.bucket_tables:
            b = self.layout.buckets[bucket]
            rows = [s for s, piece in enumerate(self.pieces) if piece.bucket == bucket]
            first = rows[0] if rows else 0
            segments = self.segments[first : first + len(rows)].clone()
            segments[:, 0] -= b.shard_begin
            chunks = slice(b.shard_begin // ops.CHUNK, (b.shard_begin + b.slice_numel) // ops.CHUNK)
            chunk_segment = self.chunk_segment[chunks]
            chunk_segment = torch.where(chunk_segment < 0, chunk_segment, chunk_segment - first)
            self.bucket_tables[bucket] = (segments, chunk_segment)
        return self.bucket_tables[bucket]

    def refresh_masters(self, edited: Tensor) -> None:
        """Masters := weights where they differ, for the parameters marked in `edited`, uint8 [all parameters]."""
        if self.has_state:
            params = [self.flat_params[d] for d in self.dtypes]
            ops.refresh_masters(self.segments, self.chunk_segment, params, self.master, self.remainder, edited)

    def on_device_of_params(self) -> Arena:
        """The same arena where the parameters are now."""
        new = Arena(self.params, self.layout, self.rank, self.first, self.apart, self.split, self.amsgrad)
        for name in ("exp_avg", "exp_avg_sq", "master", "remainder", "max_exp_avg_sq"):
            t = getattr(self, name)
            setattr(new, name, None if t is None else t.to(new.device))
        return new

    # -- bytes -----------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, list[Tensor]]:
        """Every tensor that holds memory, by the kinds of memory_report()."""
        state = [self.exp_avg, self.exp_avg_sq, self.master, self.remainder, self.max_exp_avg_sq]
        apart = list(self.reduced.values()) if self.apart else []
        return {
            "params": list(self.flat_params.values()),
            "grads": list(self.flat_grads.values()),
            "state": [t for t in state if t is not None],
            "buffers": [*apart, self.segments, self.chunk_segment, *sum(self.bucket_tables.values(), ())],
        }

    def padding_bytes(self) -> int:
        """Bytes of the above that belong to no parameter."""
        flat = sum(n * d.itemsize for d, n in self.layout.padding.items())
        owned = sum(piece.hi - piece.lo for piece in self.pieces)
        padding = 2 * flat + 8 * (self.layout.shard_numel - owned)
        for mode, size in (("fp32", 4), ("split", 2)):
            held = sum(
                piece.hi - piece.lo for piece in self.pieces if self._mode(self.layout.specs[piece.param].dtype) == mode
            )
            padding += size * (self._numel(mode) - held)
        padding += 4 * (self.max_numel - sum(self.piece_of[k].hi - self.piece_of[k].lo for k in self.max_begin))
        if self.apart:
            for d in self.dtypes:
                held = sum(piece.hi - piece.lo for piece in self.pieces if self.layout.specs[piece.param].dtype == d)
                padding += d.itemsize * (self.layout.slices_numel[d] - held)
        return padding


def specs_of(params: Sequence[torch.nn.Parameter]) -> list[ParamSpec]:
    """What the layout needs to know of parameters."""
    return [ParamSpec(p.numel(), p.dtype) for p in params]
