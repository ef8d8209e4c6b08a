"""Counts gradients as autograd finishes them; starts and finishes the reductions and gathers of buckets.

Early reduction: a bucket is sent as soon as all of its gradients have come for the first time after a step, in bucket
order whatever order gradients arrive in, at most once per cycle. What is still missing goes in `step()`, so every rank
makes the same collectives in the same order, whichever of its parameters took part. Reduction is out of place: whoever
changes a gradient later, even one that is still being sent, makes its bucket *modified*, and a modified bucket is
reduced again in the step. A bucket for which that happens is left out of early reduction for some steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..comm.collectives import Scratch
from ..comm.grid import ProcessGrid
from ..params.registry import Faults
from ..params.state import ShardState
from .bucket import BucketState, EarlyBucket, InPlaceBucket


class Backward:
    """Which backward is running: the outermost one counts.

    Re-entrant checkpoints run backwards inside backward, each a task of autograd's with callbacks of its own. Only when
    a task ends does the thread show whether another one encloses it; then the callback moves on to that one.
    """

    def __init__(self) -> None:
        self._ended: Callable[[], None] | None = None  # set while one is running
        self._tasks: set[int] = set()  # that have our callback

    def enter(self, ended: Callable[[], None]) -> bool:
        """From a gradient's hook; whether an outermost backward has begun, at whose end `ended` is called."""
        task = torch._C._current_graph_task_id()
        if task in self._tasks:
            return False
        self._watch(task)
        began, self._ended = self._ended is None, ended
        return began

    def _watch(self, task: int) -> None:
        self._tasks.add(task)
        torch.autograd.Variable._execution_engine.queue_callback(self._task_ended)

    def _task_ended(self) -> None:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            ended = self._ended
            self.forget()
            if ended is not None:
                ended()
            return

        def after_node(*_: object) -> None:  # runs in the enclosing task
            task = torch._C._current_graph_task_id()
            if self._ended is not None and task not in self._tasks:
                self._watch(task)

        node.register_hook(after_node)

    def forget(self) -> None:
        """It has ended, or died."""
        self._ended = None
        self._tasks.clear()


class Reducer:
    """The buckets of one optimizer and the order in which they are sent."""

    def __init__(self, grid: ProcessGrid, overlap: bool) -> None:
        self.grid, self.overlap = grid, overlap
        self.buckets: list[BucketState] = []
        self.displaced = False  # a parameter was moved to another device; buffers follow in the step
        self._exchange = False  # else native
        self._place: dict[Tensor, tuple[BucketState, int]] = {}
        self._scratch = Scratch()
        self._in_flight: list[BucketState] = []
        self._early: list[BucketState] = []  # those that may go in this cycle's backward, in order
        self._next = 0  # whose turn it is among them
        self._again: set[int] = set()  # buckets reduced again in this cycle

    def use_grid(self, grid: ProcessGrid) -> None:
        """A process group that was made late."""
        self.grid = grid

    def set_buckets(self, sets: list[ShardState], norms: Tensor, exchange: bool, sampled: bool) -> None:
        """Takes the buckets of all sets; norms: int64 [buckets, NORM_WORDS]. Progress of known ones is kept."""
        self.displaced = False
        self._exchange = exchange and not self.grid.is_single
        kind = EarlyBucket if self.overlap else InPlaceBucket
        old = {(id(bucket.buffers), bucket.bucket.index): bucket for bucket in self.buckets}
        self.buckets, self._place = [], {}
        for state in sets:
            buffers = state.buffers
            for index, spec in enumerate(state.layout.buckets):
                number = len(self.buckets)
                bucket = old.get((id(buffers), index)) or kind(buffers, index, number, norms[number], sampled)
                bucket.use_norm(norms[number])
                self.buckets.append(bucket)
                self._place.update((state.params[k], (bucket, k)) for k in spec.params)
        self._set_early()

    def _set_early(self) -> None:
        self._early = [bucket for bucket in self.buckets if not bucket.late_steps] if self.overlap else []
        self._next = 0

    def buckets_of(self, params: Iterable[Tensor]) -> list[BucketState]:
        """The buckets in which these parameters lie."""
        return list(dict.fromkeys(self._place[p][0] for p in params if p in self._place))

    @property
    def takes_norm(self) -> bool:
        """Whether a reduction takes the sum of squares in the same pass."""
        return self._exchange or self.grid.replicas > 1

    # -- backward --------------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """A cycle's first backward begins."""
        for bucket in self.buckets:
            bucket.arm()

    def take_grad(self, p: torch.nn.Parameter) -> bool:
        """Takes a finished gradient into the buffer; whether it was one."""
        place = self._place.get(p)
        grad = p.grad
        if place is None or grad is None:
            return False
        bucket, k = place
        if grad.device != bucket.device:
            self.displaced = True
        else:
            bucket.take_grad(k, grad)
        return True

    def grad_ready(self, p: torch.nn.Parameter) -> None:
        """Counts a finished gradient; sends its bucket where that is complete and has its turn."""
        bucket, k = self._place[p]
        if bucket.count_down(k) and self.overlap and not self.displaced:
            while self._next < len(self._early) and self._early[self._next].missing <= 0:
                self._launch_next(rebind=False)

    def _launch_next(self, rebind: bool) -> None:
        bucket = self._early[self._next]
        self._next += 1
        if not bucket.launched:
            self._launch(bucket, rebind)

    def _launch(self, bucket: BucketState, rebind: bool = True) -> None:
        # An exchange holds world_size - 1 slices: as many in flight as stay under two buckets.
        limit = (3 if self.grid.world_size <= 2 else 2) if self._exchange else len(self.buckets)
        while len(self._in_flight) >= limit:
            self._in_flight.pop(0).finish()
        bucket.launch(self.grid, self.takes_norm, self._scratch, self._exchange, rebind)
        self._in_flight.append(bucket)

    # -- step ------------------------------------------------------------------------------------------------------

    def reduce_early(self) -> None:
        """Sends those whose turn it would have been in backward."""
        while self._next < len(self._early) and not self.displaced:
            self._launch_next(rebind=True)

    def reduce_all(self) -> None:
        """Reduces, once per cycle, every bucket that has not been; waits for all."""
        if self.grid.is_single:
            self.pack_all()
            return
        self.reduce_early()
        for bucket in self.buckets:
            if not bucket.launched:
                self._launch(bucket)
        self.join()

    def reduce_again(self, modified: set[int]) -> None:
        """Reduces the modified buckets anew, in bucket order."""
        self._again |= modified
        for number in sorted(modified):
            self._launch(self.buckets[number])
        self.join()

    def join(self) -> None:
        """Waits for what is in flight."""
        while self._in_flight:
            self._in_flight.pop(0).finish()
        self._scratch.clear()

    def pack_all(self) -> None:
        """Every gradient buffer as the gradients are now."""
        for bucket in self.buckets:
            bucket.pack()

    def modified(self, maybe_unscaled: bool) -> set[int]:
        """Buckets whose gradients are not those that were reduced. maybe_unscaled: they may have been scaled unseen."""
        return {bucket.number for bucket in self.buckets if bucket.modified(maybe_unscaled)}

    def reduced_before_capture(self) -> bool:
        """Whether a bucket was sent by a backward that is not part of the graph that is captured now."""
        return any(bucket.launched and not bucket.captured for bucket in self.buckets)

    def faults(self) -> Faults:
        """What hooks have found, and in-place gradients that would be reduced a second time."""
        found = [text for bucket in self.buckets for text in (bucket.fault, bucket.used_up()) if text]
        return [(RuntimeError, text) for text in dict.fromkeys(found)]

    def nonfinite(self, num_backwards: int) -> Tensor:
        """int64 0-d: whether this rank has a non-finite gradient, or a mean that is."""
        if num_backwards == 1 and self._exchange and all(bucket.launched for bucket in self.buckets):
            counts = torch.stack([bucket.norm[ops.NORM_NON_FINITE] for bucket in self.buckets])
        else:
            counts = torch.stack([bucket.nonfinite() for bucket in self.buckets])
        return (counts > 0).any().to(torch.int64)

    def spoil(self, where: Tensor) -> None:
        """One gradient of this rank becomes NaN where `where` is true, so that its loss scaler sees it."""
        any(bucket.spoil(where) for bucket in self.buckets)

    def end_cycle(self, stepped: bool) -> None:
        """After a step, or an error on all ranks: the next backward reduces afresh."""
        self.join()
        for bucket in self.buckets:
            bucket.rearm(bucket.number in self._again if stepped else None)
        self._again.clear()
        self._set_early()

    def zeroed(self) -> None:
        """The gradients have been zeroed: they are fresh."""
        for bucket in self.buckets:
            bucket.zeroed()

    # -- gathers ---------------------------------------------------------------------------------------------------

    def start_gathers(self, order: Iterable[BucketState]) -> None:
        """Starts the all-gather of every bucket, in an order that is the same on every rank."""
        if self.grid.world_size > 1:
            for bucket in order:
                bucket.start_gather(self.grid)
