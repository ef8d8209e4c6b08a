"""What happens in a step, from the gradients as the user left them to the gathered parameters.

The engine belongs to one optimizer. All that changes lives here and not in attributes of the optimizer: wrapper classes
copy those, and what a method rebinds on a copy is lost.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from .. import ops
from ..comm.collectives import Ranks
from ..config import Settings
from ..ops import profiled
from ..params.buffers import Arena
from ..params.registry import Faults, Roster
from .agreement import Agreement, HostWords, Report, raise_together, words_faulty
from .hyperparams import GroupOptions
from .reducer import Reducer


class Engine:
    """The run-time state of one optimizer."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        state: MutableMapping[Tensor, dict[str, Any]],
        settings: Settings,
        ranks: Ranks,
    ) -> None:
        self.groups, self.state, self.settings = groups, state, settings
        self.roster = Roster(groups, settings, ranks)
        self.reducer = Reducer(ranks, settings.overlap_reduce, self.roster)
        self.options = GroupOptions(groups, settings.decoupled, settings.capturable)
        self.roster.changed = self.reset_tables
        self.roster.adopted = self.reducer.use_ranks
        self.roster.watch = self.reducer.watch
        self.reducer.on_backward = self._on_backward

        int64 = torch.int64
        self.steps = torch.zeros(0, dtype=int64)  # [parameters]: how often each was updated
        self.skipped = torch.zeros(2, dtype=int64)  # steps skipped in all; whether the last one was
        self.norms = torch.zeros(0, ops.NORM_WORDS, dtype=int64)  # a row per bucket, then one per arena
        self.arena_norms: list[Tensor] = []  # the latter rows
        self.scalars = torch.zeros(0, ops.SCALAR_WORDS)
        self.param_group = torch.zeros(0, dtype=torch.int32)

        self.words = HostWords()
        self.steps_made = 0
        self.warned = dict.fromkeys(("ddp", "touched", "idle"), False)
        self.clip: Tensor | None = None  # [factor, norm] of a clip_grad_norm_ that waits for its step
        self.last_norm: Tensor | None = None
        self.whole: dict[str, Any] | None = None  # consolidate_state_dict()'s result
        self._late: tuple[Tensor, torch.cuda.Event, Report] | None = None

    @property
    def ranks(self) -> Ranks:
        """The grid; it may change once, when the process group was made late."""
        return self.roster.ranks

    def reset_tables(self) -> None:
        """Makes the tables with a row per parameter, bucket or arena anew; what they hold is kept."""
        roster, device = self.roster, self.roster.device
        steps = torch.zeros(len(roster.params), dtype=torch.int64, device=device)
        steps[: self.steps.numel()] = self.steps.to(device)
        buckets = sum(len(arena.layout.buckets) for arena in roster.arenas)
        norms = torch.zeros(buckets + len(roster.arenas), ops.NORM_WORDS, dtype=torch.int64, device=device)
        known = len(self.reducer.runs)
        norms[:known] = self.norms[:known].to(device)
        self.arena_norms = list(norms[buckets:])
        self.steps, self.norms, self.skipped = steps, norms, self.skipped.to(device)
        self.scalars = torch.zeros(len(roster.params), ops.SCALAR_WORDS, device=device)
        self.reducer.set_arenas(roster.arenas, norms)
        self.map_groups()
        self.expose_state()

    def map_groups(self) -> None:
        """Which group each parameter belongs to."""
        group_of = {p: g for g, group in enumerate(self.groups) for p in group["params"]}
        numbers = [group_of[p] for p in self.roster.params]
        self.param_group = torch.tensor(numbers, dtype=torch.int32).to(self.roster.device)

    def ready(self) -> None:
        """Before anything looks at parameters: they are complete, laid out, and the last step has been looked at."""
        self.reducer.finish_gathers()
        self.raise_late()
        self.roster.adopt_group()
        self.roster.build()

    # -- settling: every gradient reduced, all ranks agreed ----------------------------------------------------------

    def settle(
        self,
        call: str,
        max_norm: float | None,
        grad_scale: Tensor | None,
        found_inf: Any,
        scaled: bool,
        flows: bool = False,
    ) -> tuple[Agreement, list[int]]:
        """Collective: the mean of every gradient as the user left it; -> the agreement, numbers of edited weights.

        With `flows` in-place reduction is left to the caller. On CPU parameters anything wrong on any rank is raised on
        all. On CUDA the host does not wait: the agreement stops the kernels, and the next step raises.
        """
        r, ranks, roster = self.reducer, self.ranks, self.roster
        cpu = roster.device.type == "cpu"
        faults: Faults = [(kind, text) for text, kind in r.faults.items()]
        edited = roster.follow(faults)
        thawed = roster.thawed()
        self.options.update(roster.device)
        if not r.overlap:
            faults += r.used_up()
        suspicious = self._scaled_unseen(call, grad_scale, found_inf)
        found_inf = found_inf if isinstance(found_inf, Tensor) else None
        agreed = r.overlap or ranks.alone or not cpu  # in-place reduction must not start before all ranks have agreed
        while True:
            if flows and not r.overlap:
                r.fill_all()
                agreed = True
            elif agreed:
                r.reduce_all()
            r.join_flag_rounds()
            if scaled and not thawed and all(p.grad is None for p in roster.params):
                faults.append((RuntimeError, "a loss scaler is at work but no parameter has a gradient"))
            touched = r.touched(suspicious)
            if touched and not scaled and not suspicious:
                self._warn_touched(by_hand=r.syncs < 2)
            if self.settings.skip_nonfinite or scaled or max_norm is not None:
                self._add_norms()
            facts = self._facts(max_norm, scaled, edited, thawed)
            had = [h for arena in roster.arenas for h in arena.had]
            report = Report(call, had, touched, r.syncs, facts, faults + r.sparse())
            agreement = Agreement(ranks, report, len(r.runs), self.words, self.norms, found_inf, grad_scale)
            if (ranks.alone and not report.faults and not thawed) or not (cpu or touched or thawed):
                return agreement, edited
            if agreement.faulty():
                if not cpu:
                    return agreement, edited
                r.end_cycle()
                self.clip = None
                raise_together(ranks, report)
            again = agreement.touched_by()
            if not cpu and any(count != ranks.total for count in again.values()):
                return agreement, edited  # changed on some ranks only; the others do not wait: none can reduce again
            if agreed and not again and not thawed:
                return agreement, edited
            if again:
                r.reduce_again(set(again))
            if thawed:
                roster.lay_out(thawed)
                thawed = []
            agreed, suspicious = True, False

    def _scaled_unseen(self, call: str, grad_scale: Tensor | None, found_inf: Any) -> bool:
        """Whether GradScaler.unscale_, which leaves no trace on a tensor, may have scaled the gradients."""
        if grad_scale is not None:
            return False
        if call == "clip_grad_norm_":
            return self.reducer.amp
        # In a step it leaves found_inf behind; a clip_grad_norm_ after it has reduced anew already.
        return found_inf is not None and (self.clip is None or self.roster.device.type == "cpu")

    def _add_norms(self) -> None:
        """Sums of squares that the reduction itself has not taken."""
        r = self.reducer
        if self.ranks.alone or not r.takes_norm:
            for row, arena in zip(self.arena_norms, self.roster.arenas, strict=True):
                row.zero_()
                arena.add_norm(row)

    def _warn_touched(self, by_hand: bool) -> None:
        if self.warned["ddp"] and (self.warned["touched"] or not by_hand):
            return
        looked, self.warned["ddp"] = self.warned["ddp"], True
        if not looked and any(
            issubclass(type(o), DDP) and any(p in self.roster.places for p in o.parameters()) for o in gc.get_objects()
        ):
            self.warned["touched"] = True
            text = "DistributedDataParallel is around the model: it is not needed, and every gradient is sent twice"
            warnings.warn(text, stacklevel=2)
        elif by_hand:
            self.warned["touched"] = True
            text = (
                "gradients were changed between backward and step(), and are reduced again. "
                "torch.nn.utils.clip_grad_norm_ clips by this rank's own norm; use opt.clip_grad_norm_"
            )
            warnings.warn(text, stacklevel=2)

    def _warn_idle(self, agreement: Agreement) -> None:
        """Once: a step that no gradient reached. (On CUDA the host does not know of other ranks.)"""
        if self.warned["idle"] or any(agreement.report.had_grad):
            return
        if self.ranks.alone or (agreement.control.device.type == "cpu" and not agreement.had_grad()):
            self.warned["idle"] = True
            text = (
                "step() found no gradient on any rank. If there was a backward, the module's parameters are no longer "
                "the optimizer's: load_state_dict(assign=True) replaces them"
            )
            warnings.warn(text, stacklevel=2)

    def _facts(
        self, max_norm: float | None, scaled: bool, edited: list[int], thawed: list[torch.nn.Parameter]
    ) -> dict[str, Any]:
        if self.ranks.alone:
            return {}
        roster = self.roster
        return {
            "edited weights": [roster.name_of(roster.params[k]) for k in edited],
            "unfrozen parameters": [roster.name_of(p) for p in thawed],
            "steps made": 0 if self.settings.capturable else self.steps_made,  # (equal words from step to step)
            "loss scaling": scaled,
            "clipping": max_norm,
            "group options": self.options.digest(),
        }

    # -- a step ----------------------------------------------------------------------------------------------------

    def step(self, grad_scale: Tensor | None, found_inf: Any) -> None:
        """Collective: one step."""
        r, s = self.reducer, self.settings
        self.ready()
        self.last_norm = self.whole = None
        scaled = grad_scale is not None or found_inf is not None
        # Nothing depends on all gradients: buckets may flow from reduction through the kernel to the gather.
        flows = not (s.skip_nonfinite or scaled or s.max_grad_norm or self.clip is not None or self.ranks.alone)
        agreement, edited = self.settle("step", s.max_grad_norm, grad_scale, found_inf, scaled, flows)
        if not self.roster.params:
            return
        self._warn_idle(agreement)
        clip, self.clip = self.clip, None
        if clip is None and s.max_grad_norm is not None:
            clip = self._clip_factor(agreement, s.max_grad_norm, grad_scale)
        self.last_norm = None if clip is None else clip[1]
        self.make_room(create=True)
        self.roster.take_up(edited)
        self.roster.seen(edited)
        ops.step_control(
            agreement.control,
            self.ranks.total,
            self.param_group,
            self.options.table,
            grad_scale,
            clip,
            s.skip_nonfinite,
            scaled,
            self.steps,
            self.scalars,
            self.skipped,
        )
        if flows:
            for run in r.flow():
                self._adam_step(run.arena, run.bucket.index)
                r.start_gather(run)
        else:
            for arena in self.roster.arenas:
                self._adam_step(arena, None)
            r.start_gathers()
        if not s.gather_early:
            r.finish_gathers()
        r.amp = scaled
        r.end_cycle(stepped=True)
        self.steps_made += 1
        self._look_later(agreement)

    def _adam_step(self, arena: Arena, bucket: int | None) -> None:
        with profiled("zero1.adam_step"):
            arena.step(self.scalars, bucket)

    def clip_grad_norm(self, max_norm: float, grad_scale: Tensor | None) -> Tensor:
        """Collective: the norm of the averaged gradients; the factor waits for the next step."""
        self.ready()
        self.clip = None
        agreement, _ = self.settle("clip_grad_norm_", max_norm, grad_scale, None, False)
        clip = self._clip_factor(agreement, max_norm, grad_scale)
        self.clip = clip if self.roster.params else None
        return clip[1].clone()

    def _clip_factor(self, agreement: Agreement, max_norm: float, grad_scale: Tensor | None) -> Tensor:
        clip = torch.zeros(2, dtype=torch.float32, device=agreement.control.device)
        ops.clip_factor(agreement.control, grad_scale, max_norm, clip)
        return clip

    def make_room(self, create: bool = False) -> None:
        """Maxima where a group has turned amsgrad on; create: state for the arenas that have none."""
        fresh = False
        amsgrad = any(group.get("amsgrad") for group in self.groups)
        for arena in self.roster.arenas:
            if amsgrad:
                wanted = self.roster.wants_amsgrad(arena.params)
                if any(w and not a for w, a in zip(wanted, arena.amsgrad, strict=True)):
                    arena.set_amsgrad(wanted)
                    fresh = True
            if create and not arena.has_state:
                arena.make_state()
                fresh = True
        if fresh:
            self.expose_state()

    def expose_state(self) -> None:
        """Fills `opt.state` with views of this rank's part, for the arenas that have state."""
        for arena in self.roster.arenas:
            if arena.has_state:
                for k, p in enumerate(arena.params):
                    self.state[p] = {"step": self.steps[arena.first + k], **arena.local_state(k)}

    def loaded(self) -> None:
        """Collective: after a load every rank gathers the weights and takes them for seen."""
        self.reducer.end_cycle()
        self.reducer.start_gathers()
        self.reducer.finish_gathers()
        self.expose_state()
        self.roster.seen(list(range(len(self.roster.params))))
        self.clip = self.whole = None

    def _on_backward(self) -> None:
        if self.clip is not None:
            self.clip = None
            warnings.warn("a backward after clip_grad_norm_() and before step() discards the clipping", stacklevel=2)

    # -- CUDA: what was wrong is looked at one step later --------------------------------------------------------------

    def _look_later(self, agreement: Agreement) -> None:
        if self.roster.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        words = torch.empty(agreement.control.numel(), dtype=torch.int64, pin_memory=True)
        words.copy_(agreement.control, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._late = (words, event, agreement.report)

    def raise_late(self) -> None:
        """Raises on every rank what the last step on CUDA has found to be wrong on any."""
        if self._late is None:
            return
        words, event, report = self._late
        self._late = None
        event.synchronize()  # of the last step; newer work goes on
        head = words.tolist()
        if words_faulty(self.ranks, head) or head[ops.CONTROL_TOUCHED] > 0:
            raise_together(self.ranks, report)

    def tables(self) -> list[Tensor]:
        """What the engine holds besides the arenas."""
        return [self.steps, self.skipped, self.norms, self.scalars, self.param_group, self.options.table]
