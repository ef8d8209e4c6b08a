"""One step: reduce -> agree -> control -> adam_step -> gather.

One file, though a long one: these five in this order are the method, and what stands around them (hooks before, state
after) holds no logic of its own.

The runner belongs to one optimizer and is the only one that knows all the others: it owns the hooks of parameters, asks
the registry what has changed, and tells the reducer. All that changes lives here and not in attributes of the
optimizer: wrapper classes copy those, and what a method rebinds on a copy is lost.

On CPU parameters the host reads the agreement and whatever is wrong on any rank is raised on all in the same step. On
CUDA it does not wait: the agreement itself stops the kernels, a copy of it is looked at when the next step begins, and
that one raises (`LastStep`). Only a rank that does something else than in the step before looks at once (`CallOrder`).
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from .. import ops
from ..comm.grid import ProcessGrid
from ..config import Config
from ..params.registry import Faults, ParamRegistry
from .agreement import BACKWARD, CLIP, STEP, Agreement, ControlHeader, Report, raise_together
from .deferred import CallOrder, LastStep
from .gather_hooks import GatherUnits
from .hyperparams import Hyperparams
from .reducer import Backward, Reducer
from .streams import is_capturing


@dataclass
class Call:
    """What a clip_grad_norm_() or a step() was asked to do, and what was found while it was agreed on."""

    name: str  # CLIP or STEP
    max_norm: float | None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    scaled: bool = False  # a loss scaler hands over its scale or its flag
    maybe_unscaled: bool = False  # GradScaler.unscale_, which leaves no trace on a tensor, may have been here
    faults: Faults = field(default_factory=list)
    edited: list[int] = field(default_factory=list)  # numbers of parameters whose weights others may have changed
    new: list[torch.nn.Parameter] = field(default_factory=list)  # frozen when they came, trainable now
    void: bool = False  # the host knows that the device makes nothing of this step


class StepRunner:
    """The run-time state of one optimizer."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        state: MutableMapping[Tensor, dict[str, Any]],
        config: Config,
        grid: ProcessGrid,
    ) -> None:
        self.groups, self.state, self.config, self.grid = groups, state, config, grid
        self.registry = ParamRegistry(groups, config, grid)
        self.reducer = Reducer(grid, config.overlap_reduce)
        self.backward = Backward()
        self.hyperparams = Hyperparams(groups, config.decoupled, config.capturable)
        for group in groups:
            self._watch(self.registry.register(group))

        # tables with a row per parameter, and norms: a row per bucket, then one per set
        self.steps = torch.zeros(0, dtype=torch.int64, device="cpu")  # how often each parameter was updated
        # steps skipped in all, whether the last one was, whether any step was stopped since that was looked at
        self.skipped = torch.zeros(ops.SKIPPED_WORDS, dtype=torch.int64, device="cpu")
        self.norms = torch.zeros(0, ops.NORM_WORDS, dtype=torch.int64, device="cpu")
        self.scalars = torch.zeros(0, ops.SCALAR_WORDS, dtype=torch.float32, device="cpu")
        self.param_group = torch.zeros(0, dtype=torch.int32, device="cpu")

        self.header = ControlHeader()
        self.order = CallOrder()
        self.last = LastStep()
        self.num_backwards = 0  # outside no_sync(), since the last step
        self.no_sync_depth = 0
        self.maybe_scaled = True  # a loss scaler may be at work: until a step was made, and looked at, without one
        self.was_scaled = True  # in the last step
        self.steps_made = 0
        self.warned: set[str] = set()
        # [factor, norm] of a clip_grad_norm_ that no step has used yet, with its max_norm and its scale
        self.clip: tuple[Tensor, float, Tensor | None] | None = None
        self.grad_norm: Tensor | None = None  # of the last step, if that clipped
        self.consolidated: dict[str, Any] | None = None  # consolidate_state_dict()'s result
        self.units = GatherUnits(config.overlap_gather, self) if config.overlap_gather is not None else None

    @property
    def reads_on_host(self) -> bool:
        """Whether the host may wait for the agreement in the same step: on the CPU. Else one step later (CUDA)."""
        return self.registry.device.type == "cpu"

    @property
    def _can_look(self) -> bool:
        """Whether the host can read the device at all: not while a graph is captured, nor on the meta device."""
        return not self.skipped.is_meta and not is_capturing(self.skipped)

    # -- laying out ------------------------------------------------------------------------------------------------

    def _watch(self, params: list[torch.nn.Parameter]) -> None:
        """Hooks parameters. The hooks do not keep the optimizer alive."""
        me = weakref.ref(self)

        @_disable_dynamo
        def hook(param: torch.nn.Parameter) -> None:
            runner = me()
            if runner is not None:
                runner._grad_ready(param)

        for p in params:
            p.register_post_accumulate_grad_hook(hook)

    def adopt_group(self) -> bool:
        """Takes a process group that was made late; whether anything has been laid out."""
        if self.registry.adopt_group():
            self.grid = self.registry.grid
            self.reducer.use_grid(self.grid)
        return bool(self.registry.sets)

    def lay_out(self) -> None:
        """Lays out what is not, in the grid as it is now."""
        self.adopt_group()
        if self.registry.build():
            self._make_tables()

    def _make_tables(self) -> None:
        """Makes the tables anew; what they hold is kept."""
        registry, reducer, device = self.registry, self.reducer, self.registry.device
        self.grid.use_device(device)
        rows, sets = len(registry.params), registry.sets
        steps = torch.zeros(rows, dtype=torch.int64, device=device)
        steps[: self.steps.numel()] = self.steps.to(device)
        buckets = sum(len(state.layout.buckets) for state in sets)
        norms = torch.zeros(buckets + len(sets), ops.NORM_WORDS, dtype=torch.int64, device=device)
        known = len(reducer.buckets)
        norms[:known] = self.norms[:known].to(device)
        self.steps, self.norms, self.skipped = steps, norms, self.skipped.to(device)
        self.scalars = torch.zeros(rows, ops.SCALAR_WORDS, dtype=torch.float32, device=device)
        exchange = self.config.reduce_in_fp32
        if exchange is None:
            exchange = self.grid.backend(device) == "gloo"
        reducer.set_buckets(sets, norms, exchange, sampled=self.reads_on_host)
        self.map_groups()
        self.expose_state()

    def map_groups(self) -> None:
        """Which group each parameter belongs to."""
        numbers = torch.tensor(self.registry.group_numbers(), dtype=torch.int32, device="cpu")
        self.param_group = numbers.to(self.registry.device)

    def prepare(self) -> None:
        """Before anything looks at parameters: they are complete, laid out, and the last step has been looked at."""
        self.wait_for(None)
        if not self.order.void:
            self._look_back()
        self.lay_out()

    def _look_back(self) -> None:
        """Raises on every rank what was wrong on any in the last step, where that was stopped."""
        if not self._can_look:
            return  # the last step stays to be looked at
        if self.last.stopped(self.grid, self.skipped):
            self.order.forget()
            self.maybe_scaled = self.was_scaled = True
            self.last.tell(self.grid, self.skipped)
        self.last.forget()

    def add_group(self, group: dict[str, Any], built: bool) -> None:
        """Collective: takes a new group in. built: whether any rank has laid out what came before; then all do."""
        if built:
            self.lay_out()
        self.grid.broadcast_params(group["params"])
        self._watch(self.registry.register(group))
        self.consolidated = None
        self.map_groups()

    # -- hooks -----------------------------------------------------------------------------------------------------

    def _grad_ready(self, p: torch.nn.Parameter) -> None:
        """Autograd has finished a gradient."""
        if self.registry.pending:
            self.lay_out()
        if self.order.void == CLIP:  # its step() was left out
            self._end_cycle(Call(STEP, None, scaled=self.was_scaled), None)
        if self.clip is not None:
            self.clip = None
            text = "a backward after clip_grad_norm_() and before step() discards the clipping"
            warnings.warn(text, stacklevel=2)
        reducer = self.reducer
        if not reducer.take_grad(p) or self.no_sync_depth or self.grid.is_single:
            return
        if self.backward.enter(self._backward_ended):
            self.num_backwards += 1
            if self.num_backwards == 1:
                reducer.arm()
        reducer.grad_ready(p)

    @_disable_dynamo
    def _backward_ended(self) -> None:
        """While a loss scaler may be at work, ranks tell each other of non-finite gradients."""
        reducer = self.reducer
        if not self.reads_on_host:
            reducer.join()  # nobody waits for it: the stream does, also for a step that alone is captured in a graph
        if not self.maybe_scaled or reducer.displaced or self.order.void:
            return
        expected = self.order.expects(BACKWARD)
        if not expected:
            self._look_back()
        if self.num_backwards == 1:
            reducer.reduce_early()
        elif self.config.overlap_reduce or not (expected or self._all_look):
            reducer.reduce_all()  # as a rank does that is in step() already, and would wait for this one
        reducer.join()
        self._share_nonfinite(reducer.nonfinite(self.num_backwards), expected)

    def _share_nonfinite(self, nonfinite: Tensor | None, expected: bool) -> None:
        """A non-finite gradient of one rank becomes one on all, so that all loss scalers see it and stay equal.

        None: from a rank that had no backward.
        """
        agreement = self._say(Report(BACKWARD), nonfinite=nonfinite)
        self.reducer.spoil(agreement.spoiled)
        if not (expected or self._all_look):
            self._follow_others(agreement, BACKWARD)

    @property
    def _all_look(self) -> bool:
        """Whether the host of every rank looks at the agreement."""
        return self.reads_on_host or self.order.is_first

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.no_sync_depth += 1
        try:
            yield
        finally:
            self.no_sync_depth -= 1

    # -- a step ----------------------------------------------------------------------------------------------------

    def step(self, grad_scale: Tensor | None, found_inf: Any) -> None:
        """Collective: one step."""
        self.prepare()
        if is_capturing(self.skipped) and self.reducer.reduced_before_capture():
            raise RuntimeError(
                "step() is captured without the backward before it, which has reduced gradients already: replays would "
                "reduce no others. Capture the whole iteration, or step() alone with overlap_reduce=False"
            )
        call = Call(STEP, self.config.max_grad_norm, grad_scale)
        call.found_inf = found_inf if isinstance(found_inf, Tensor) else None
        call.scaled = grad_scale is not None or found_inf is not None
        # Without a scale handed over, a found_inf is what unscale_ left; a clip_grad_norm_ after it has reduced anew.
        call.maybe_unscaled = grad_scale is None and found_inf is not None
        call.maybe_unscaled &= self.clip is None or self.reads_on_host
        self.grad_norm = self.consolidated = None
        if self.order.void:  # the others have made this step already, and nothing came of it
            self._end_cycle(call, None)
            return
        self._reduce(call)
        agreement = self._agree(call)
        if self.registry.params:
            self._control(call, agreement)
            self._adam_step()
            self._gather()
            self._end_cycle(call, agreement)

    def clip_grad_norm(self, max_norm: float, scale: Tensor | float | None) -> Tensor:
        """Collective: the norm of the averaged gradients; the factor waits for the next step."""
        self.prepare()
        grad_scale = None
        if scale is not None:
            grad_scale = torch.empty((), dtype=torch.float32, device=self.registry.device)
            grad_scale.copy_(scale.detach().reshape(())) if isinstance(scale, Tensor) else grad_scale.fill_(scale)
        self.clip = None
        call = Call(CLIP, max_norm, grad_scale)
        call.maybe_unscaled = grad_scale is None and self.maybe_scaled
        if not self.order.void:
            self._reduce(call)
        if not self.order.void:
            agreement = self._agree(call)
        if self.order.void:
            return torch.full((), torch.nan, dtype=torch.float32, device=self.registry.device)
        clip = self._clip_factor(agreement, max_norm, grad_scale)
        self.clip = (clip, max_norm, grad_scale) if self.registry.params else None
        return clip[1].clone()

    # -- reduce ----------------------------------------------------------------------------------------------------

    def _reduce(self, call: Call) -> None:
        """Collects what is wrong on this rank, and takes the mean of every gradient that has not been taken."""
        reducer, registry = self.reducer, self.registry
        moved, followed = registry.track_moves()
        if followed:
            self._make_tables()
        call.faults, call.edited, call.new = moved + reducer.faults(), registry.edited(), registry.newly_trainable()
        try:
            self.hyperparams.update(registry.device)
        except (KeyError, TypeError, ValueError) as error:
            call.faults.append((type(error), f"group options: {error}"))
        if self.maybe_scaled and reducer.buckets and self.num_backwards == 0 and not self.grid.is_single:
            reducer.reduce_early()
            self._share_nonfinite(None, self.order.expects(BACKWARD))
        if self._reduces_first:
            reducer.reduce_all()
        else:
            reducer.pack_all()
        if call.scaled and not call.new and all(p.grad is None for p in registry.params):
            call.faults.append((RuntimeError, "a loss scaler is at work but no parameter has a gradient"))

    @property
    def _reduces_first(self) -> bool:
        """Whether reduction may begin before all ranks have agreed: in place it uses the gradients up."""
        return self.config.overlap_reduce or self.grid.is_single or not self._all_look

    # -- agree -----------------------------------------------------------------------------------------------------

    def _agree(self, call: Call) -> Agreement:
        """Until all ranks have said the same; what was modified is reduced again, what is new is laid out.

        Raises what is wrong on any rank, on every rank; where the others do not look, `call.void` says it.
        """
        num_ranks, reduced = self.grid.num_ranks, self._reduces_first
        expected = self.grid.is_single or self.order.expects(call.name)
        while True:
            report = self._report(call)
            agreement = self._say(report, call, norms=reduced)
            if not self._must_look(call, report, expected):
                return agreement
            if self._others_behind(agreement, call.name):
                self.reducer.spoil(agreement.spoiled)
                continue  # the message was for where they are
            call.void = not self._all_look and self._follow_others(agreement, call.name)
            again = agreement.modified_by()
            if agreement.faulty():
                self._fail(call, report)
            elif not self._all_look and any(count != num_ranks for count in again.values()):
                call.void = True  # changed on some ranks only; the others do not wait: none can reduce again
            elif again or call.new or not reduced:
                self._reduce_more(call, set(again))
                reduced = True
                continue
            return agreement

    def _must_look(self, call: Call, report: Report, expected: bool) -> bool:
        """Whether the host waits for the agreement."""
        if self.grid.is_single:
            return bool(call.new) or (self.reads_on_host and bool(report.faults))
        if not self._can_look:
            return False
        return self._all_look or not expected or bool(report.modified or call.new or call.edited)

    def _others_behind(self, agreement: Agreement, name: str) -> bool:
        """Whether others send from an earlier place of the cycle, and will come here."""
        where = agreement.where()
        return where[BACKWARD] > 0 or (name == STEP and where[CLIP] > 0 and not self._all_look)

    def _report(self, call: Call) -> Report:
        """What this rank brings to the agreement."""
        reducer, registry = self.reducer, self.registry
        modified = reducer.modified(call.maybe_unscaled)
        if modified and not call.scaled and not call.maybe_unscaled:
            self._warn_modified()
        sparse = [state.params[k] for state in registry.sets for k in sorted(state.buffers.sparse)]
        texts = [f"the gradient of parameter {registry.name_of(p)} is sparse; dense ones are wanted" for p in sparse]
        report = Report(call.name, [], modified, self.num_backwards)
        report.has_grad = [has for state in registry.sets for has in state.buffers.has_grad]
        report.faults = call.faults + [(ValueError, text) for text in texts]
        if not self.grid.is_single:
            report.facts = {
                "edited weights": registry.names_of(call.edited),
                "unfrozen parameters": [registry.name_of(p) for p in call.new],
                "steps made": 0 if self.config.capturable else self.steps_made,  # (equal words from step to step)
                "loss scaling": call.scaled,
                "clipping": (call.max_norm, self.clip and self.clip[1]),
                "group options": self.hyperparams.digest(),
            }
        return report

    def _say(
        self, report: Report, call: Call | None = None, norms: bool = False, nonfinite: Tensor | None = None
    ) -> Agreement:
        """Collective: sends this rank's words and hears the sum of all."""
        if norms and call is not None and (self.config.skip_nonfinite or call.scaled or call.max_norm is not None):
            self._add_norms()
        num_buckets = 0 if self.grid.is_single else len(self.reducer.buckets)
        report.has_grad = report.has_grad or [False] * len(self.registry.params)
        found_inf, grad_scale = (call.found_inf, self._scales(call.grad_scale)) if call else (None, None)
        return Agreement(self.grid, report, num_buckets, self.header, self.norms, found_inf, grad_scale, nonfinite)

    def _scales(self, grad_scale: Tensor | None) -> Tensor | None:
        """What must be equal on all ranks of a step's scale and of that of the clip_grad_norm_ before it."""
        of_clip = self.clip and self.clip[2]
        if of_clip is None or grad_scale is None:
            return of_clip if grad_scale is None else grad_scale
        bits = grad_scale.view(torch.int32) ^ 3 * of_clip.view(torch.int32)  # one number for two
        return bits.view(torch.float32)

    def _add_norms(self) -> None:
        """Sums of squares that the reduction itself has not taken."""
        if self.grid.is_single or not self.reducer.takes_norm:
            sets = self.registry.sets
            for row, state in zip(self.norms[self.norms.shape[0] - len(sets) :], sets, strict=True):
                row.zero_()
                state.add_norm(row)

    def _reduce_more(self, call: Call, modified: set[int]) -> None:
        """Modified buckets again; what is new or has waited for the agreement for the first time."""
        self.reducer.reduce_again(modified)
        if call.new:
            self._watch(self.registry.add_trainable(call.new))
            self.lay_out()
            call.new = []
        self.reducer.reduce_all()
        call.maybe_unscaled = False

    def _fail(self, call: Call, report: Report) -> None:
        """Something is wrong on some rank. Where all of them know, it is raised; else in the next step."""
        if not self._all_look:
            call.void = True
            return
        self.reducer.end_cycle(stepped=False)
        self._begin_cycle()
        self.order.forget()
        self.clip = None
        raise_together(self.grid, report)

    def _follow_others(self, agreement: Agreement, name: str) -> bool:
        """For a rank that is not where it was in the step before, while others are, and do not look.

        Sends what they send next, so that nobody waits for it. Whether it had to; the step is lost then.
        """
        rest = self.order.others_do(agreement.where(), name)
        if rest is None:
            return False
        for _ in rest:
            self._say(Report(STEP, faults=[(RuntimeError, f"{name} was called out of turn")]))
        self._gather()
        self.order.lose(name)
        self.last.failed(Report(name, num_backwards=self.num_backwards))
        return True

    # -- control, adam_step, gather ----------------------------------------------------------------------------------

    def _control(self, call: Call, agreement: Agreement) -> None:
        """From the agreement to a row of scalars per parameter, on the device; masters follow edited weights."""
        self._warn_idle(agreement)
        clip, self.clip = self.clip and self.clip[0], None
        if clip is None and call.max_norm is not None:
            clip = self._clip_factor(agreement, call.max_norm, call.grad_scale)
        self.grad_norm = None if clip is None else clip[1]
        if not call.void:
            self.registry.adopt_moved()
        self.ensure_state(create=True)
        if call.void:
            self.registry.undo_edits_of(call.edited)
        else:
            self.registry.refresh_masters_of(call.edited)
        self.registry.mark_versions(call.edited)
        summed = (agreement.control, self.grid.num_ranks, self.param_group, self.hyperparams.table)
        how = (call.grad_scale, clip, self.config.skip_nonfinite, call.scaled)
        ops.step_control(*summed, *how, self.steps, self.scalars, self.skipped)

    def _clip_factor(self, agreement: Agreement, max_norm: float, grad_scale: Tensor | None) -> Tensor:
        clip = torch.zeros(2, dtype=torch.float32, device=agreement.control.device)
        ops.clip_factor(agreement.control, grad_scale, max_norm, clip)
        return clip

    def _adam_step(self) -> None:
        for state in self.registry.sets:
            state.adam_step(self.scalars)

    def _gather(self) -> None:
        """In the order in which the next forward needs the buckets: the reverse of the order of their reductions."""
        if self.units is None:
            self.reducer.start_gathers(self.reducer.buckets[::-1])
            self.wait_for(None)
        else:
            self.reducer.start_gathers(self.units.order(self.reducer))

    def _end_cycle(self, call: Call, agreement: Agreement | None) -> None:
        """The step has been made, or the device has been told to."""
        self.maybe_scaled = call.scaled or (self.was_scaled and not self.reads_on_host)
        self.was_scaled = call.scaled
        self.reducer.end_cycle(stepped=not call.void and agreement is not None)
        self._begin_cycle()
        self.steps_made += 1
        if agreement is not None and not self.reads_on_host:
            self.last.remember(agreement)

    def _begin_cycle(self) -> None:
        self.num_backwards = 0
        self.backward.forget()
        self.order.begin_cycle()

    # -- warnings --------------------------------------------------------------------------------------------------

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self.warned:
            self.warned.add(what)
            warnings.warn(text, stacklevel=2)

    def _warn_modified(self) -> None:
        if self.num_backwards < 2:  # else another backward has added to them
            text = (
                "gradients were changed between backward and step(), and are reduced again. "
                "torch.nn.utils.clip_grad_norm_ clips by this rank's own norm: use opt.clip_grad_norm_. "
                "DistributedDataParallel around the model is not needed: with it every gradient is sent twice"
            )
            self._warn_once("modified", text)

    def _warn_idle(self, agreement: Agreement) -> None:
        """Once: a step that no gradient reached. (Where it may not wait, the host does not know of other ranks.)"""
        if "idle" in self.warned or any(agreement.report.has_grad):
            return
        if self.grid.is_single or (self.reads_on_host and not agreement.any_grad()):
            text = (
                "step() found no gradient on any rank. If there was a backward, the module's parameters are no longer "
                "the optimizer's: load_state_dict(assign=True) replaces them"
            )
            self._warn_once("idle", text)

    # -- state -----------------------------------------------------------------------------------------------------

    def ensure_state(self, create: bool = False) -> None:
        """Room for what groups ask for; create: state for the sets that have none."""
        if self.registry.ensure_state(create):
            self.expose_state()

    def expose_state(self) -> None:
        """Fills `opt.state` with views of this rank's part, for the sets that have state."""
        for state in self.registry.sets:
            if state.has_state:
                for k, p in enumerate(state.params):
                    self.state[p] = {"step": self.steps[state.first + k], **state.local_state(k)}

    def take_up_edits(self) -> None:
        """Masters follow weights that others have changed, before state is read."""
        registry = self.registry
        _, followed = registry.track_moves()
        if followed:
            self._make_tables()
        registry.refresh_masters_of(registry.edited())
        self.ensure_state()

    def with_edits(self) -> StepRunner:
        """The runner, when parameters are complete and laid out and masters have followed them."""
        self.prepare()
        self.take_up_edits()
        return self

    def refresh_masters(self) -> None:
        """Masters := weights wherever they differ, whether an edit was noticed or not."""
        self.with_edits()
        self.registry.refresh_masters_of(list(range(len(self.registry.params))))

    def loaded(self) -> None:
        """Collective: after a load every rank gathers the weights and takes them for seen."""
        self.reducer.end_cycle(stepped=False)
        self._begin_cycle()
        self.reducer.start_gathers(self.reducer.buckets)
        self.wait_for(None)
        self.expose_state()
        self.registry.mark_versions(list(range(len(self.registry.params))))
        self.clip = self.consolidated = None

    def wait_for(self, params: list[torch.nn.Parameter] | None) -> None:
        """Waits until these parameters (None: all) are complete."""
        for bucket in self.reducer.buckets if params is None else self.reducer.buckets_of(params):
            bucket.finish_gather(last=params is None)

    def synchronize(self) -> None:
        """Waits until all parameters are complete."""
        self.wait_for(None)
        if self._can_look and self.last.stopped(self.grid, self.skipped):
            raise RuntimeError("the last step was stopped on every rank and changed nothing; the next one says why")

    def consolidate(self, whole: dict[str, Any]) -> None:
        """state_dict() is this, where there is something in it, until something changes."""
        self.consolidated = whole or None

    def zeroed(self) -> None:
        """The gradients have been zeroed."""
        self.reducer.zeroed()

    def last_norm(self) -> Tensor | None:
        """The norm that a waiting clip_grad_norm_ has found, else that of the last step."""
        return self.clip[0][1].clone() if self.clip is not None else self.grad_norm

    def tables(self) -> list[Tensor]:
        """What the runner holds besides the sets."""
        return [self.steps, self.skipped, self.norms, self.scalars, self.param_group, self.hyperparams.table]
