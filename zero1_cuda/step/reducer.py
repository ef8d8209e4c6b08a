"""Counts gradients as autograd finishes them; starts and finishes the reductions and gathers of buckets.

Early reduction: the first backward outside ``no_sync()`` after a step reduces every bucket once, in bucket order,
whatever order its gradients arrive in; what is still missing at the end of backward goes then. So every rank makes the
same collectives, whichever of its parameters took part. Reduction is out of place: whoever changes a gradient later
makes its bucket *touched*, and a touched bucket is reduced again in the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from .. import ops
from ..comm.collectives import Pending, Ranks, Scratch
from ..ops import profiled
from ..params.buffers import Arena
from ..params.registry import Roster
from .bucket import BucketRun

RETRY_STEPS = 32  # for so many steps early reduction is left out where it was in vain


class Reducer:
    """The hooks and the collectives of one optimizer."""

    def __init__(self, ranks: Ranks, overlap: bool, roster: Roster) -> None:
        self.ranks, self.overlap, self.roster = ranks, overlap, roster
        self.exchange = False  # else native
        self.runs: list[BucketRun] = []
        self.place: dict[torch.nn.Parameter, tuple[BucketRun, int]] = {}
        self.scratch = Scratch()
        self.flying: list[tuple[BucketRun, Pending]] = []
        self.quiet = 0  # depth of no_sync()
        self.amp = True  # a loss scaler may be at work: until a step was made without one
        self.faults: dict[str, type[Exception]] = {}
        self.on_backward: Callable[[], None] = lambda: None
        self.syncs = 0
        self.next = 0  # the bucket whose turn it is
        self.task = -1  # autograd's number of the backward that is running
        self.fired: set[torch.nn.Parameter] = set()
        self.again: set[int] = set()  # buckets reduced again in this cycle
        self.in_vain = 0  # steps in a row before which every bucket was touched
        self.late_steps = 0  # steps still to come without early reduction
        self.displaced = False  # a parameter was moved to another device; buffers follow in the step

    # -- set-up ----------------------------------------------------------------------------------------------------

    def watch(self, p: torch.nn.Parameter) -> None:
        """Hooks a parameter. The hook does not keep the optimizer alive."""
        me = weakref.ref(self)

        def hook(param: Tensor) -> None:
            reducer = me()
            if reducer is not None:
                reducer.on_grad(param)  # type: ignore[arg-type]

        p.register_post_accumulate_grad_hook(_disable_dynamo(hook))

    def use_ranks(self, ranks: Ranks) -> None:
        """A process group that was made late."""
        self.ranks = ranks

    @property
    def takes_norm(self) -> bool:
        """Whether a reduction takes the sum of squares in the same pass."""
        return self.exchange or self.ranks.replicas > 1

    def set_arenas(self, arenas: list[Arena], norms: Tensor) -> None:
        """Takes the buckets of new arenas; norms: int64 [buckets, NORM_WORDS]. Progress of the old ones is kept."""
        self.displaced = False
        wanted = self.roster.settings.reduce_in_fp32
        if wanted is None:
            wanted = bool(arenas) and self.ranks.backend(arenas[0].device) == "gloo"
        self.exchange = wanted and not self.ranks.alone
        old = {(id(run.arena), run.bucket.index): run for run in self.runs}
        self.runs, self.place = [], {}
        for arena in arenas:
            for bucket in arena.layout.buckets:
                number = len(self.runs)
                run = old.get((id(arena), bucket.index)) or BucketRun(arena, bucket, number, norms[number])
                run.norm = norms[number]
                self.runs.append(run)
                for k in bucket.params:
                    self.place[arena.params[k]] = (run, k)

    # -- hooks -----------------------------------------------------------------------------------------------------

    def on_grad(self, p: torch.nn.Parameter) -> None:
        """A gradient is complete: takes it into the buffer and counts its bucket down."""
        self.roster.build()
        self.on_backward()
        place = self.place.get(p)
        grad = p.grad
        if place is None or grad is None:
            return
        run, k = place
        if grad.layout != torch.strided:
            run.arena.sparse.add(k)
        elif grad.device != run.grads.device:
            self.displaced = True
        elif run.arena.is_home(k, grad):
            run.arena.dirty[k] = True
            if k in run.used:
                self._reused(run)
        else:
            run.arena.adopt_grad(k, grad)
            if run.used:  # (a fresh gradient, whose copy is a write too)
                run.used.discard(k)
                run.version += 1
                run.stale = True
        if self.quiet or self.ranks.alone:
            return
        self._enter_backward()
        if self.early and self.syncs == 1 and p not in self.fired:
            self.fired.add(p)
            run.waiting -= 1
            if run.waiting == 0 and not self.displaced:
                while self.next < len(self.runs) and self.runs[self.next].waiting <= 0:
                    self._launch(self.runs[self.next])

    def _reused(self, run: BucketRun) -> None:
        # One write since the step: autograd's own. More: somebody zeroed the gradients in place.
        run.version += 1
        if run.grads._version == run.version:
            self.faults[
                "with overlap_reduce=False a step uses the gradients up: call zero_grad() before the next backward"
            ] = RuntimeError
        else:
            run.used.clear()

    def _enter_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task == self.task:
            return
        self.task = task
        self._join()  # an earlier backward may have died half-way
        self.syncs += 1
        if self.syncs == 1:
            self.fired.clear()
            for run in self.runs:
                run.waiting = sum(run.arena.params[k].requires_grad for k in run.bucket.params)
        torch.autograd.Variable._execution_engine.queue_callback(self._leave_backward)

    @_disable_dynamo
    def _leave_backward(self) -> None:
        if self.early and not self.displaced:
            self.reduce_all()
        self.task = -1
        if self.amp and not self.displaced:
            self.flag_round(in_backward=True)

    # -- reductions ------------------------------------------------------------------------------------------------

    def _launch(self, run: BucketRun) -> None:
        assert run is self.runs[self.next]
        self.next += 1
        run.fill(rebind=self.task == -1)
        self._start(run)
        run.launched = True

    def _start(self, run: BucketRun) -> None:
        # An exchange holds world_size - 1 slices: as many in flight as stay under two buckets.
        limit = (3 if self.ranks.world_size <= 2 else 2) if self.exchange else len(self.runs)
        while len(self.flying) >= limit:
            self._finish_first()
        run.norm.zero_()
        norm = run.norm if self.takes_norm else None
        with profiled("zero1.reduce_scatter"):
            pending = self.ranks.start_reduction(run.grads, run.out, norm, self.scratch, run.number + 1, self.exchange)
        self.flying.append((run, pending))
        run.snapshot()
        if not self.overlap:
            run.use_up()
            run.sample = None  # the reduction itself changes it

    def _finish_first(self) -> None:
        pending = self.flying.pop(0)[1]
        with profiled("zero1.reduce_scatter"):
            pending.finish()

    def reduce_all(self) -> None:
        """Reduces, once per cycle, every bucket that has not been; waits for all."""
        if self.ranks.alone:
            for run in self.runs:
                run.fill()
            return
        while self.next < len(self.runs):
            self._launch(self.runs[self.next])
        self._join()

    def reduce_again(self, touched: set[int]) -> None:
        """Reduces the touched buckets anew, in bucket order."""
        self.again |= touched
        for number in sorted(touched):
            run = self.runs[number]
            run.fill()
            self._start(run)
        self._join()

    def _join(self) -> None:
        while self.flying:
            self._finish_first()
        self.scratch.clear()

    def flow(self) -> Iterator[BucketRun]:
        """Reduces what has not been reduced: every bucket in order, as soon as it is there, the next on its way."""
        for run in self.runs:
            while self.next < len(self.runs) and self.next <= run.number + 1:
                self._launch(self.runs[self.next])
            while any(flying is run for flying, _ in self.flying):
                self._finish_first()
            yield run
        self._join()

    def fill_all(self) -> None:
        """Every gradient buffer as the gradients are now, before anything is reduced."""
        for run in self.runs[self.next :]:
            run.fill()

    def touched(self, suspicious: bool = False) -> set[int]:
        """Buckets whose gradients are not those that were reduced. suspicious: they may have been scaled unseen."""
        if self.ranks.alone:
            return set()
        suspicious = suspicious and self.overlap
        return {run.number for run in self.runs if run.launched and run.touched(suspicious)}

    def sparse(self) -> list[tuple[type[Exception], str]]:
        """A fault for each gradient that was found not to be dense."""
        found = [arena.params[k] for arena in self.roster.arenas for k in sorted(arena.sparse)]
        names = [self.roster.name_of(p) for p in found]
        return [(ValueError, f"the gradient of parameter {name} is sparse; dense ones are wanted") for name in names]

    def used_up(self) -> list[tuple[type[Exception], str]]:
        """In-place reduction: a fault where gradients that it has used up would have to be reduced again."""
        for run in self.runs:
            if not run.used or not run.used_at_home():
                continue
            if run.launched and run.touched(False):
                text = "with overlap_reduce=False gradients must not change between clip_grad_norm_() and step()"
                return [(RuntimeError, text)]
            if not run.launched and run.grads._version == run.version:
                text = "with overlap_reduce=False a step uses the gradients up: there has been no backward since"
                return [(RuntimeError, text)]
        return []

    @property
    def early(self) -> bool:
        """Whether the next backward reduces."""
        return self.overlap and not self.late_steps

    def _learn(self) -> None:
        """Where all gradients are changed before every step (by DDP around the model, by torch's clip_grad_norm_) an
        early reduction only has to be made again: it is left out, and tried anew from time to time. All ranks know the
        same, so all do the same."""
        if self.late_steps:
            self.late_steps -= 1
            return
        self.in_vain = self.in_vain + 1 if self.runs and len(self.again) == len(self.runs) else 0
        if self.in_vain > 1:
            self.late_steps = RETRY_STEPS

    def end_cycle(self, stepped: bool = False) -> None:
        """After a step, or an error on all ranks: the next backward reduces afresh."""
        if stepped:
            self._learn()
        self.again.clear()
        self.next = self.syncs = 0
        self.task = -1
        self.faults.clear()
        for arena in self.roster.arenas:
            arena.sparse.clear()
        for run in self.runs:
            run.launched = False

    def forget_used(self) -> None:
        """The gradients have been zeroed: they are fresh."""
        for run in self.runs:
            run.used.clear()

    # -- loss scaling ----------------------------------------------------------------------------------------------

    def flag_round(self, in_backward: bool) -> bool:
        """Makes a non-finite gradient of one rank non-finite on all, so that every rank's loss scaler sees it.

        One tiny all-reduce at the end of every backward while a scaler may be at work; if any rank reports one, every
        rank spoils one element of its own gradients. A rank that is in step() already joins the rounds of those that
        are still in backward. -> whether there were any (on CUDA, where that would have to be read back: False).
        """
        device = self.runs[0].grads.device
        message = torch.zeros(2, dtype=torch.int64, device=device)
        if in_backward:
            message[0] = 1
            message[1] = self._non_finite()
        self.ranks.sum_(message)
        if device.type == "cpu" and not bool(message[1]):
            return bool(message[0])
        for run in self.runs:
            arena = run.arena
            for k, begin in zip(run.bucket.params, run.bucket.begins, strict=True):
                grad = arena.params[k].grad
                if grad is not None and grad.numel() and arena.is_home(k, grad):
                    run.grads[begin : begin + 1].masked_fill_(message[1:2] > 0, float("nan"))
                    if run.launched:
                        run.version, run.sample = run.grads._version, run.take_sample()
                    return device.type == "cpu" and bool(message[0])
        return device.type == "cpu" and bool(message[0])

    def join_flag_rounds(self) -> None:
        """In step(): takes part in the rounds of ranks that are still in backward."""
        if self.ranks.alone or not self.amp or not self.runs:
            return
        if self.runs[0].grads.device.type == "cpu":
            while self.flag_round(in_backward=False):
                pass
        elif self.syncs == 0:
            self.flag_round(in_backward=False)

    def _non_finite(self) -> Tensor:
        """int64 0-d: whether this rank has a non-finite gradient, or a mean that is."""
        if self.early and self.syncs == 1 and self.exchange:
            counts = torch.stack([run.norm[ops.NORM_NON_FINITE] for run in self.runs])
        else:
            counts = torch.stack([(~torch.isfinite(run.grads)).any() for run in self.runs])
        return (counts > 0).any().to(torch.int64)

    # -- gathers ---------------------------------------------------------------------------------------------------

    def start_gathers(self) -> None:
        """Starts the all-gather of every bucket, in order."""
        for run in self.runs:
            self.start_gather(run)

    def start_gather(self, run: BucketRun) -> None:
        """Starts the all-gather of one bucket."""
        if self.ranks.world_size > 1:
            with profiled("zero1.all_gather"):
                run.gather = self.ranks.start_gather(run.params)

    def finish_gathers(self, runs: list[BucketRun] | None = None) -> None:
        """Waits until the parameters of these buckets (None: of all) are complete."""
        for run in self.runs if runs is None else runs:
            if run.gather is not None:
                gather, run.gather = run.gather, None
                with profiled("zero1.all_gather"):
                    gather.finish()
