"""One bucket between two steps: what was sent, and whether its gradients are still that."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.collectives import Pending
from ..params.buffers import Arena
from ..params.layout import Bucket

SAMPLES = 64  # elements per bucket that are compared to notice writes that autograd's version counter does not show


class BucketRun:
    """One bucket and where its reduction stands in this cycle, from one step to the next."""

    def __init__(self, arena: Arena, bucket: Bucket, number: int, norm: Tensor) -> None:
        self.arena, self.bucket, self.number, self.norm = arena, bucket, number, norm
        self.grads = arena.bucket_grads[bucket.index]
        self.out = arena.bucket_slices[bucket.index]
        self.params = arena.bucket_params[bucket.index]
        self.waiting = 0
        self.launched = False
        self.version = 0  # of the gradients when they were sent
        self.sample: Tensor | None = None
        self.used: set[int] = set()  # in-place reduction: gradients that it has used up
        self.stale = False  # in-place reduction: fresh gradients have come since
        self.gather: Pending | None = None
        ends = [b + arena.layout.specs[k].numel for k, b in zip(bucket.params, bucket.begins, strict=True)]
        last = max(ends) - 1
        self.sample_at = torch.linspace(0, max(last, 0), min(SAMPLES, max(last + 1, 0)), dtype=torch.float64).long()

    def take_sample(self) -> Tensor | None:
        """Bits of a few gradients; on CUDA None, as looking would make the host wait."""
        if self.grads.device.type != "cpu":
            return None
        bits = torch.int32 if self.grads.dtype == torch.float32 else torch.int16
        return self.grads[self.sample_at].view(bits)

    def snapshot(self) -> None:
        """Remembers what was sent."""
        self.version = self.grads._version
        self.sample = self.take_sample()
        self.stale = False

    def touched(self, suspicious: bool) -> bool:
        """Whether the gradients are no longer what was sent. suspicious: they may have been scaled unseen."""
        if self.stale or self.grads._version != self.version:
            return True
        arena = self.arena
        for k in self.bucket.params:
            grad = arena.params[k].grad
            if (grad is not None) != arena.had[k] or (grad is not None and not arena.is_home(k, grad)):
                return True
        now = self.take_sample()
        if now is None or self.sample is None:
            return suspicious
        return not torch.equal(now, self.sample) or (suspicious and not bool(now.any()))

    def fill(self, rebind: bool = True) -> None:
        """Makes the gradient buffer hold exactly the gradients that the parameters have now."""
        self.arena.fill_grads(self.bucket.params, rebind)

    def use_up(self) -> None:
        """In-place reduction: part of the buffer now holds means, and nothing of it may be sent again."""
        arena = self.arena
        for k in self.bucket.params:
            arena.dirty[k] = True
        self.used = {k for k in self.bucket.params if arena.had[k]}

    def used_at_home(self) -> bool:
        """Whether a gradient that was used up is still some parameter's."""
        grads = [(k, self.arena.params[k].grad) for k in self.used]
        return any(grad is not None and self.arena.is_home(k, grad) for k, grad in grads)
