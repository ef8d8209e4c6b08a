"""One bucket between two steps: what was sent, and whether its gradients are still that.

An `EarlyBucket` is reduced out of place, while backward runs, and may be reduced again. An `InPlaceBucket` is reduced
once, inside `step()`, and the reduction uses its gradients up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.collectives import Pending, Scratch, start_gather, start_reduction
from ..comm.grid import ProcessGrid
from ..params.buffers import FlatBuffers
from .streams import is_capturing, stream_id

SAMPLES = 64  # elements per bucket that are compared to notice writes that autograd's version counter does not show
RETRY_STEPS = 32  # for so many steps a bucket is left out of early reduction where that was in vain


class BucketState:
    """One bucket and where its reduction and its gather stand in this cycle, from one step to the next.

    buffers, index: which bucket of which set. number: its place among all buckets. norm: int64 [NORM_WORDS], its own.
    sampled: a few elements are compared to notice writes that leave no trace; on CUDA looking would make the host wait.
    """

    def __init__(self, buffers: FlatBuffers, index: int, number: int, norm: Tensor, sampled: bool) -> None:
        self.buffers, self.number, self.norm = buffers, number, norm
        self.bucket = buffers.layout.buckets[index]
        self.grads, self.out = buffers.bucket_grads[index], buffers.bucket_slices[index]
        self.weights, self.device = buffers.bucket_params[index], buffers.device
        self.members = self.bucket.params
        self.missing = 0  # gradients that have not come in this cycle
        self.ready_params: set[int] = set()
        self.launched = False
        self.captured = False  # it was launched inside a CUDA graph
        self.late_steps = 0  # steps still to come without early reduction
        self.fault: str | None = None  # what a gradient's hook has found
        self._version = 0  # of the gradients when they were sent
        self._pending: Pending | None = None
        self._gather: Pending | None = None
        self._waited: set[int] = set()  # streams that have waited for the gather
        self._streams: dict[int, torch.cuda.Stream] = {}  # on which gradients have come in this cycle
        self._sample: Tensor | None = None
        specs = buffers.layout.specs
        last = max((b + specs[k].numel for k, b in zip(self.members, self.bucket.begins, strict=True)), default=0) - 1
        at = torch.linspace(0, max(last, 0), min(SAMPLES, max(last + 1, 0)), dtype=torch.float64, device="cpu").long()
        self._sample_at = at if sampled else None

    def use_norm(self, norm: Tensor) -> None:
        """The table of norms has been made anew."""
        self.norm = norm

    # -- gradients arrive ------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """A cycle's first backward begins: all gradients are still to come."""
        params = self.buffers.params
        self.missing = sum(params[k].requires_grad for k in self.members)
        self.ready_params.clear()
        self._streams.clear()

    def take_grad(self, k: int, grad: Tensor) -> None:
        """Takes a gradient that autograd has finished into the buffer."""
        buffers = self.buffers
        if grad.layout != torch.strided:
            buffers.sparse.add(k)
        elif buffers.is_buffer_view(k, grad):
            buffers.holds_nonzero[k] = True
            self._accumulated(k)
        else:
            buffers.adopt_grad(k, grad)
            self._replaced(k)

    def _accumulated(self, k: int) -> None:
        """Autograd has added to a gradient that lay in the buffer."""

    def _replaced(self, k: int) -> None:
        """A fresh gradient was copied into the buffer."""

    def count_down(self, k: int) -> bool:
        """Notes that the gradient of parameter k has come; whether it was the last that was missing."""
        if self.launched or k in self.ready_params:
            return False
        if self.device.type == "cuda" and (stream := stream_id(self.device)) not in self._streams:
            self._streams[stream] = torch.cuda.current_stream(self.device)
        self.ready_params.add(k)
        self.missing -= 1
        return self.missing == 0

    # -- the reduction ---------------------------------------------------------------------------------------------

    def pack(self, rebind: bool = True) -> None:
        """Makes the gradient buffer hold exactly the gradients that the parameters have now."""
        self.buffers.pack_grads(self.members, rebind)

    def launch(self, grid: ProcessGrid, takes_norm: bool, scratch: Scratch, exchange: bool, rebind: bool) -> None:
        """Packs the gradients and starts their reduction."""
        if not rebind:  # inside backward: branches of the model may run on streams of their own
            for stream in self._streams.values():
                torch.cuda.current_stream(self.device).wait_stream(stream)
        self.pack(rebind)
        self.norm.zero_()
        norm = self.norm if takes_norm else None
        # tags of small numbers are those of the user's own messages and of whole states
        self._pending = start_reduction(grid, self.grads, self.out, norm, scratch, self.number + 1, exchange)
        self.launched, self.captured = True, is_capturing(self.grads)
        self._version = self.grads._version
        self._sample = self._take_sample()

    def finish(self) -> None:
        """Waits for the reduction."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.finish()

    def _take_sample(self) -> Tensor | None:
        """Bits of a few gradients."""
        if self._sample_at is None:
            return None
        bits = torch.int32 if self.grads.dtype == torch.float32 else torch.int16
        return self.grads[self._sample_at].view(bits)

    def modified(self, maybe_unscaled: bool) -> bool:
        """Whether the gradients are no longer what was sent. maybe_unscaled: they may have been scaled unseen."""
        if not self.launched:
            return False
        buffers = self.buffers
        if self.grads._version != self._version or any(buffers.grad_state_changed(k) for k in self.members):
            return True
        now = self._take_sample()
        if now is None or self._sample is None:
            return maybe_unscaled
        return not torch.equal(now, self._sample) or (maybe_unscaled and not bool(now.any()))

    def spoil(self, where: Tensor) -> bool:
        """Makes one element of a gradient NaN where `where`, bool [1], is true; whether there was a gradient.

        The write is no change by the user: a bucket that was as it was sent stays so, a modified one stays modified.
        """
        buffers = self.buffers
        for k, begin in zip(self.members, self.bucket.begins, strict=True):
            grad = buffers.params[k].grad
            if grad is not None and grad.numel() and buffers.is_buffer_view(k, grad):
                self.grads[begin : begin + 1].masked_fill_(where, float("nan"))
                self._version += 1
                if self._sample is not None and self._version == self.grads._version:
                    self._sample = self._take_sample()
                return True
        return False

    def nonfinite(self) -> Tensor:
        """bool 0-d: whether any gradient here is not finite."""
        if not self.launched:
            self.pack(rebind=False)  # in place, the range of a parameter without a gradient holds an old one
        return (~torch.isfinite(self.grads)).any()

    def rearm(self, again: bool | None) -> None:
        """The cycle has ended: the next backward reduces afresh. again: whether the bucket had to be reduced a second
        time in a step that was made; None: there was no step."""
        self.launched = False
        self.fault = None
        self.buffers.sparse.clear()
        if again is not None and self.late_steps:
            self.late_steps -= 1
        elif again:
            self.late_steps = RETRY_STEPS

    # -- the gather ------------------------------------------------------------------------------------------------

    def start_gather(self, grid: ProcessGrid) -> None:
        self._gather = start_gather(grid, self.weights)
        self._waited.clear()

    def finish_gather(self, last: bool) -> None:
        """Waits until the parameters are complete; on CUDA the current stream does. last: no other need wait later."""
        if self._gather is not None and (stream := stream_id(self.device)) not in self._waited:
            self._gather.finish()
            self._waited.add(stream)
        if last or self.device.type != "cuda":
            self._gather = None

    # -- gradients that are used up (in place only) --------------------------------------------------------------------

    def used_up(self) -> str | None:
        """What is wrong where gradients that a reduction has used up would have to be reduced again."""
        return None

    def zeroed(self) -> None:
        """The gradients have been zeroed: they are fresh."""


class EarlyBucket(BucketState):
    """Reduced out of place: its gradients stay this rank's own."""


class InPlaceBucket(BucketState):
    """Reduced inside the gradient buffer, of which this rank's slice then holds means."""

    def __init__(self, buffers: FlatBuffers, index: int, number: int, norm: Tensor, sampled: bool) -> None:
        super().__init__(buffers, index, number, norm, sampled=False)  # the reduction itself changes the elements
        self.consumed: set[int] = set()  # gradients that the reduction has used up
        self.refilled = False  # fresh ones have come since

    def launch(self, grid: ProcessGrid, takes_norm: bool, scratch: Scratch, exchange: bool, rebind: bool) -> None:
        super().launch(grid, takes_norm, scratch, exchange, rebind)
        buffers = self.buffers
        self.refilled = False
        for k in self.members:
            buffers.holds_nonzero[k] = True  # whatever is there now must not be sent again
        self.consumed = {k for k in self.members if buffers.has_grad[k]}

    def _accumulated(self, k: int) -> None:
        if k not in self.consumed:
            return
        # One write since the step: autograd's own. More: somebody zeroed the gradients in place.
        self._version += 1
        if self.grads._version == self._version:
            self.fault = (
                "with overlap_reduce=False a step uses the gradients up: call zero_grad() before the next backward"
            )
        else:
            self.consumed.clear()

    def _replaced(self, k: int) -> None:
        if self.consumed:
            self.consumed.discard(k)
            self._version += 1  # the copy is a write too
            self.refilled = True

    def modified(self, maybe_unscaled: bool) -> bool:
        return self.launched and (self.refilled or super().modified(False))

    def used_up(self) -> str | None:
        grads = [(k, self.buffers.params[k].grad) for k in self.consumed]
        if not any(grad is not None and self.buffers.is_buffer_view(k, grad) for k, grad in grads):
            return None
        if self.launched:
            if self.modified(False):
                return "with overlap_reduce=False gradients must not change between clip_grad_norm_() and step()"
        elif self.grads._version == self._version:
            return "with overlap_reduce=False a step uses the gradients up: there has been no backward since"
        return None

    def zeroed(self) -> None:
        self.consumed.clear()
