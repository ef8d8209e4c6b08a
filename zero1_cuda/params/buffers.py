"""Flat buffers: parameters and gradients as views into them, and the reduced slices.

One `FlatBuffers` holds one set of parameters laid out together. Parameters that come later (a new group, an unfrozen
layer) make a set of their own, so that nothing that exists moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .layout import Layout


def dense_strides(t: Tensor) -> tuple[int, ...]:
    """The strides of `t` without gaps between its elements: its own where it has none, else those of the same order."""
    return tuple(torch.empty_like(t, device="meta").stride())


def in_memory_order(t: Tensor, stride: Sequence[int]) -> Tensor:
    """1-D: the elements of `t` in the order in which a dense tensor of these strides holds them. Not always a copy."""
    if tuple(t.stride()) != tuple(stride) or not t.numel():
        dense = torch.empty_strided(t.shape, tuple(stride), dtype=t.dtype, device=t.device)
        dense.copy_(t)
        t = dense
    return t.as_strided((t.numel(),), (1,), t.storage_offset())


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


class FlatBuffers:
    """The flat buffers of one set of parameters.

    params: of one device. out_of_place: the reduced slices get a buffer of their own (early reduction); otherwise a
    slice is reduced inside the gradient buffer.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], layout: Layout, rank: int, out_of_place: bool) -> None:
        self.params, self.layout, self.rank, self.out_of_place = list(params), layout, rank, out_of_place
        self.device = params[0].device
        self.dtypes = list(layout.flat_numel)
        self.strides = [dense_strides(p) for p in params]
        self.flat_params: dict[torch.dtype, Tensor] = {}
        self.flat_grads: dict[torch.dtype, Tensor] = {}
        self.reduced: dict[torch.dtype, Tensor] = {}
        for dtype, numel in layout.flat_numel.items():
            self.flat_params[dtype] = torch.zeros(numel, dtype=dtype, device=self.device)
            self.flat_grads[dtype] = grads = torch.zeros(numel, dtype=dtype, device=self.device)
            slices = layout.slices_numel[dtype]
            self.reduced[dtype] = torch.zeros(slices, dtype=dtype, device=self.device) if out_of_place else grads

        # Tensors over one bucket. The gradient's has a version counter of its own, so that a write by anybody shows.
        self.bucket_params: list[Tensor] = []
        self.bucket_grads: list[Tensor] = []
        self.bucket_slices: list[Tensor] = []
        for b in layout.buckets:
            numel = b.slice_numel * layout.world_size
            self.bucket_params.append(self.flat_params[b.dtype][b.begin : b.begin + numel])
            self.bucket_grads.append(view_of(self.flat_grads[b.dtype], b.begin, [numel], [1], own_storage=True))
            begin = b.slice_begin if out_of_place else b.begin + rank * b.slice_numel
            self.bucket_slices.append(self.reduced[b.dtype][begin : begin + b.slice_numel])

        self.param_at = [0] * len(params)  # addresses, to notice a parameter that was moved
        self.grad_at = [0] * len(params)
        self.grad_views: list[Tensor] = []
        self.holds_nonzero = [False] * len(params)  # whether the gradient's range may hold something but zeros
        self.has_grad = [False] * len(params)  # whether there was a gradient when the range was last packed
        self.sparse: set[int] = set()  # parameters that were found to have a gradient that is not dense
        for k in range(len(params)):
            self.grad_views.append(self._grad_view(k))
            self.adopt_param(k)

    # -- parameters ------------------------------------------------------------------------------------------------

    def adopt_param(self, k: int) -> None:
        """Copies the values of a parameter into the flat buffer and makes it a view of it; shape and strides stay."""
        p = self.params[k]
        if p.numel():
            flat = self.flat_params[p.dtype]
            home = view_of(flat, self.layout.begin_of[k], p.shape, self.strides[k], own_storage=True)
            home.copy_(p.detach())
            p.data = home
        self.param_at[k] = p.data_ptr()

    def moved(self) -> list[int]:
        """Parameters that have been given other storage."""
        at = self.param_at
        now = [p.data_ptr() for p in self.params]
        return [] if now == at else [k for k, address in enumerate(now) if address != at[k]]

    def misfit(self, k: int) -> str | None:
        """What is wrong with a parameter that was given another dtype or shape."""
        p, dtype, shape = self.params[k], self.layout.specs[k].dtype, self.grad_views[k].shape
        if p.dtype == dtype and p.shape == shape:
            return None
        return (
            f"was {dtype} of shape {tuple(shape)} and is now {p.dtype} of shape {tuple(p.shape)}: "
            "cast the model before making the optimizer"
        )

    # -- gradients -------------------------------------------------------------------------------------------------

    def _grad_view(self, k: int) -> Tensor:
        p = self.params[k]
        if p.numel():
            b = self.layout.bucket_of[k]
            begin = self.layout.begin_of[k] - self.layout.buckets[b].begin
            view = view_of(self.bucket_grads[b], begin, p.shape, self.strides[k], own_storage=False)
        else:
            view = torch.zeros_like(p, device=self.device, requires_grad=False)
        self.grad_at[k] = view.data_ptr()
        return view

    def is_buffer_view(self, k: int, grad: Tensor) -> bool:
        """Whether this gradient is the view, where it was made."""
        return grad is self.grad_views[k] and grad.data_ptr() == self.grad_at[k]

    def adopt_grad(self, k: int, grad: Tensor) -> None:
        """Takes a dense gradient that was made elsewhere into the flat buffer; `.grad` becomes the view of it."""
        p, view = self.params[k], self.grad_views[k]
        if grad is view:  # its `.data` was replaced: the object no longer lies in the buffer
            view = self.grad_views[k] = self._grad_view(k)
        view.copy_(grad.detach() if grad.requires_grad else grad)  # (backward with create_graph=True)
        p.grad = view
        self.holds_nonzero[k] = True

    def clear_grad(self, k: int) -> None:
        """Zeros in the range of a parameter that has no gradient."""
        if self.holds_nonzero[k]:
            self.grad_views[k].zero_()
            self.holds_nonzero[k] = False

    def grad_state_changed(self, k: int) -> bool:
        """Whether `.grad` is no longer what was packed: gone, come, or another tensor."""
        grad = self.params[k].grad
        if grad is None:
            return self.has_grad[k]
        if grad.layout != torch.strided:
            self.sparse.add(k)
        return not self.has_grad[k] or not self.is_buffer_view(k, grad)

    def pack_grads(self, members: Sequence[int], rebind: bool) -> None:
        """Makes the buffer hold exactly the gradients that these parameters have now.

        rebind: `.grad` of a gradient made elsewhere becomes the view. Not inside backward, where DDP looks for its own.
        """
        params, views, at = self.params, self.grad_views, self.grad_at
        has_grad, nonzero = self.has_grad, self.holds_nonzero
        for k in members:
            grad = params[k].grad
            has_grad[k] = grad is not None
            if grad is None:
                if nonzero[k]:
                    self.clear_grad(k)
            elif grad is not views[k] or grad.data_ptr() != at[k]:
                if grad.layout != torch.strided:
                    self.sparse.add(k)
                    self.clear_grad(k)
                elif rebind or grad is views[k]:
                    self.adopt_grad(k, grad)
                else:
                    views[k].copy_(grad)
                    nonzero[k] = True
