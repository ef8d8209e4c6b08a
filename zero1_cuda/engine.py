"""What happens in a step, from the gradients as the user left them to the gathered parameters.

The engine belongs to one optimizer. All that changes lives here and not in attributes of the optimizer: wrapper classes
copy those, and what a method rebinds on a copy is lost.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import ops
from .buffers import Arena, specs_of
from .collectives import Ranks
from .control import Agreement, Report, check_words
from .layout import Layout
from .memory import predicted_bytes
from .reducer import Reducer

MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """The constructor's arguments that are not group options."""

    decoupled: bool
    process_group: dist.ProcessGroup | None
    replicate_group: dist.ProcessGroup | None
    max_grad_norm: float | None
    skip_nonfinite: bool
    split: bool
    bucket_cap_bytes: int | None
    overlap_reduce: bool
    gather_early: bool
    reduce_in_fp32: bool | None
    capturable: bool


def _weights_digest(params: Iterable[Tensor]) -> int:
    """A number that depends on every bit of the parameters and on their order."""
    total = 0
    for p in params:
        if p.numel():
            kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[p.element_size()]
            for part in p.detach().contiguous().view(-1).view(kind).split(2**22):
                weights = torch.arange(1, part.numel() + 1, device=part.device, dtype=torch.int64)
                total = zlib.crc32(struct.pack("<q", int((part.to(torch.int64) * (weights * 2 + 1)).sum())), total)
    return total


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
        self.ranks = ranks
        self.reducer = Reducer(ranks, settings.overlap_reduce, self.build)
        self.reducer.name_of = self.name_of
        self.reducer.on_backward = self._on_backward
        self.arenas: list[Arena] = []
        self.pending: list[torch.nn.Parameter] = []  # trainable, not laid out yet
        self.params: list[torch.nn.Parameter] = []  # laid out, in the order of the arenas
        self.placed: set[torch.nn.Parameter] = set()
        self.names: dict[torch.nn.Parameter, str] = {}
        self.versions: list[int] = []
        self.version_at: dict[torch.nn.Parameter, int] = {}  # of parameters that are not laid out yet
        self.unseen_edits: set[int] = set()  # moved parameters, and those of refresh_masters()
        self.steps_made = 0
        self.clip: Tensor | None = None  # [factor, norm] of a clip_grad_norm_ that waits for its step
        self.last_norm: Tensor | None = None
        self.whole: dict[str, Any] | None = None  # consolidate_state_dict()'s result
        self.warned: set[str] = set()
        self._rows: list[tuple[Any, ...]] = []
        self._sticky: tuple[Tensor, Any, Report] | None = None
        self.reset_tables()

    # -- parameters ------------------------------------------------------------------------------------------------

    def name_of(self, p: Tensor) -> str:
        """How messages call a parameter."""
        for p_, name in self.names.items():
            if p_ is p:
                return f"{name!r}"
        for g, group in enumerate(self.groups):
            for i, q in enumerate(group["params"]):
                if q is p:
                    return f"{i} of group {g}, shape {tuple(p.shape)}"
        return f"of shape {tuple(p.shape)}"

    @property
    def device(self) -> torch.device:
        """Where the buffers are, or will be."""
        known = self.arenas[0].device if self.arenas else None
        return known or next((p.device for p in self.pending), torch.device("cpu"))

    def reset_tables(self) -> None:
        """Makes the tables that have a row per parameter, bucket or group; contents are kept."""
        device = self.device
        n, kinds = len(self.params), {"dtype": torch.int64, "device": device}
        old_steps = getattr(self, "steps", torch.zeros(0, dtype=torch.int64))
        self.steps = torch.zeros(n, **kinds)  # type: ignore[arg-type]
        self.steps[: old_steps.numel()] = old_steps
        self.skipped: Tensor = getattr(self, "skipped", torch.zeros(2, dtype=torch.int64)).to(device)
        self.scalars = torch.zeros(n, ops.SCALAR_WORDS, dtype=torch.float32, device=device)
        self.param_group = torch.zeros(n, dtype=torch.int32, device=device)
        buckets = [b for arena in self.arenas for b in arena.layout.buckets]
        old_norms = getattr(self, "norms", torch.zeros(0, ops.NORM_WORDS, dtype=torch.int64))
        self.norms = torch.zeros(len(buckets) + len(self.arenas), ops.NORM_WORDS, **kinds)  # type: ignore[arg-type]
        if self.reducer.runs:
            self.norms[: len(self.reducer.runs)] = old_norms[: len(self.reducer.runs)]
        self.reducer.set_arenas(self.arenas, self.norms)
        self.group_table = torch.zeros(len(self.groups), ops.GROUP_WORDS, dtype=torch.float64, device=device)
        self._rows = []
        self._map_groups()

    def _map_groups(self) -> None:
        group_of = {p: g for g, group in enumerate(self.groups) for p in group["params"]}
        self.param_group = torch.tensor([group_of[p] for p in self.params], dtype=torch.int32).to(self.device)

    def adopt_group(self) -> None:
        """A default process group that was made after the optimizer is taken at first use."""
        if self.ranks.initialized or not (dist.is_available() and dist.is_initialized()):
            return
        ranks = Ranks(self.settings.process_group, self.settings.replicate_group)
        if self.arenas and not ranks.alone:
            raise RuntimeError(
                "torch.distributed was initialised after this optimizer had been used as a single rank; "
                "make the process group first, or make the optimizer anew"
            )
        self.ranks = self.reducer.ranks = ranks
        if ranks.alone:
            return
        params = [p for group in self.groups for p in group["params"]]
        shapes = zlib.crc32(repr([(tuple(p.shape), str(p.dtype), p.requires_grad) for p in params]).encode())
        rows = ranks.gather_integers([shapes, _weights_digest(params)])
        for what, column in (("parameters", 0), ("weights", 1)):
            if len({row[column] for row in rows}) > 1:
                raise ValueError(
                    f"the process group was made after the optimizer, and the {what} differ between ranks; make "
                    "the group first (then rank 0's weights are sent to all), or load the same weights everywhere"
                )

    def build(self) -> None:
        """Lays out the parameters that are not laid out yet. Makes no collective but for a late process group."""
        if not self.pending:
            return
        self.adopt_group()
        params, self.pending = self.pending, []
        devices = {p.device for p in params} | {arena.device for arena in self.arenas}
        if len(devices) > 1:
            self.pending = params
            raise RuntimeError(f"all parameters must be on one device; they are on {sorted(map(str, devices))}")
        s = self.settings
        layout = Layout(specs_of(params), self.ranks.world_size, s.bucket_cap_bytes)
        group_of = {p: group for group in self.groups for p in group["params"]}
        arena = Arena(
            params,
            layout,
            self.ranks.rank,
            first=len(self.params),
            apart=s.overlap_reduce and not self.ranks.alone,
            split=s.split,
            amsgrad=[bool(group_of[p].get("amsgrad", False)) for p in params],
        )
        self.arenas.append(arena)
        self.params += params
        self.placed.update(params)
        self.versions += [self.version_at.pop(p, p._version) for p in params]
        wanted = s.reduce_in_fp32
        gloo = self.ranks.backend(arena.device) == "gloo"
        self.reducer.exchange = not self.ranks.alone and (gloo if wanted is None else wanted)
        self.reset_tables()

    def thawed(self) -> list[torch.nn.Parameter]:
        """Parameters that were frozen when the optimizer got them and are trainable now."""
        waiting = set(self.pending)
        return [
            p
            for group in self.groups
            for p in group["params"]
            if p.requires_grad and p not in self.placed and p not in waiting
        ]

    def lay_out(self, params: list[torch.nn.Parameter]) -> None:
        """Takes newly trainable parameters in."""
        for p in params:
            self.reducer.watch(p)
        self.pending += params
        self.build()

    # -- what others did between two steps ---------------------------------------------------------------------------

    def follow(self, faults: list[tuple[type[Exception], str]]) -> list[int]:
        """Finds parameters that were moved, cast or edited; -> numbers of those whose weights may have changed."""
        for a, arena in enumerate(self.arenas):
            at, first = arena.param_at, arena.first
            moved = [k for k, p in enumerate(arena.params) if p.data_ptr() != at[k]]
            bad = [k for k in moved if self._misfit(arena, k, faults)]
            if any(arena.params[k].device != arena.device for k in moved) and not bad:
                devices = {p.device for p in arena.params}
                if len(devices) > 1:
                    faults.append((RuntimeError, f"parameters were moved to several devices: {sorted(map(str, devices))}"))
                    continue
                self._move(a)
                self.unseen_edits.update(first + k for k in moved)
            elif moved:
                for k in moved:
                    if k not in bad:
                        arena.adopt_param(k, arena.params[k])
                        self.unseen_edits.add(first + k)
        versions = self.versions
        edited = {k for k, p in enumerate(self.params) if p._version != versions[k]}
        return sorted(edited | self.unseen_edits)

    def _misfit(self, arena: Arena, k: int, faults: list[tuple[type[Exception], str]]) -> bool:
        p, spec = arena.params[k], arena.layout.specs[k]
        if p.dtype == spec.dtype and p.numel() == spec.numel and p.shape == arena.grad_views[k].shape:
            return False
        faults.append(
            (
                RuntimeError,
                f"parameter {self.name_of(p)} was {spec.dtype} of shape {tuple(arena.grad_views[k].shape)} and is now "
                f"{p.dtype} of shape {tuple(p.shape)}: cast the model before making the optimizer",
            )
        )
        return True

    def _move(self, a: int) -> None:
        old = self.arenas[a]
        new = Arena(old.params, old.layout, old.rank, old.first, old.apart, old.split, old.amsgrad)
        for name in ("exp_avg", "exp_avg_sq", "master", "remainder", "max_exp_avg_sq"):
            t = getattr(old, name)
            setattr(new, name, None if t is None else t.to(new.device))
        self.arenas[a] = new
        self.reducer.displaced = False
        self.reset_tables()
        if old.has_state:
            self.expose_state()

    def take_up_edits(self, edited: list[int]) -> None:
        """Masters := weights where they differ, for these parameters."""
        if edited:
            flags = torch.zeros(len(self.params), dtype=torch.uint8)
            flags[edited] = 1
            flags = flags.to(self.device)
            for arena in self.arenas:
                arena.refresh_masters(flags)

    def loaded(self) -> None:
        """Collective: after a load every rank gathers the weights and takes them for seen."""
        self.reducer.start_gathers()
        self.reducer.finish_gathers()
        self.expose_state()
        self.seen(list(range(len(self.params))))
        self.clip = None

    def seen(self, edited: list[int]) -> None:
        """These edits have been taken up, on all ranks."""
        for k in edited:
            self.versions[k] = self.params[k]._version
        self.unseen_edits.clear()

    # -- a step ----------------------------------------------------------------------------------------------------

    def _on_backward(self) -> None:
        if self.clip is not None:
            self.clip = None
            warnings.warn(
                "a backward after clip_grad_norm_() and before step() discards the clipping: call it after the last one",
                stacklevel=2,
            )
        if self.reducer.runs and self.reducer.runs[0].gather is not None and not self.settings.gather_early:
            self.reducer.finish_gathers()

    def settle(
        self, call: str, max_norm: float | None, grad_scale: Tensor | None, found_inf: Any, scaled: bool
    ) -> tuple[Agreement, list[int]]:
        """Collective: every gradient reduced as the user left it, and all ranks agreed. Raises on all ranks or none."""
        try:
            return self._settle(call, max_norm, grad_scale, found_inf, scaled)
        except Exception:
            self.reducer.end_cycle()
            self.clip = None
            raise

    def _settle(
        self, call: str, max_norm: float | None, grad_scale: Tensor | None, found_inf: Any, scaled: bool
    ) -> tuple[Agreement, list[int]]:
        r, ranks = self.reducer, self.ranks
        faults: list[tuple[type[Exception], str]] = [(kind, text) for text, kind in r.faults.items()]
        edited = self.follow(faults)
        thawed = self.thawed()
        suspicious = found_inf is not None and grad_scale is None
        if call == "clip_grad_norm_":
            suspicious = r.amp and grad_scale is None
        elif self.clip is not None and self.device.type != "cpu":
            suspicious = False  # the call that clipped has reduced what unscale_ had changed
        if not r.overlap:
            faults += self._used_up()
        if not torch.is_tensor(found_inf):
            found_inf = None
        cpu = self.device.type == "cpu"
        first = True
        while True:
            if ranks.alone:
                for run in r.runs:
                    run.fill()
            elif r.overlap or not first or not cpu:
                r.launch_all()
            if not ranks.alone and r.amp and r.runs:
                while (cpu or (first and r.syncs == 0)) and r.flag_round(in_backward=False):
                    pass
            had = [p.grad is not None for p in self.params]
            if scaled and first and not any(had):
                faults.append((RuntimeError, "a loss scaler is at work but no parameter has a gradient"))
            touched = r.touched(suspicious) if r.overlap and not ranks.alone else set()
            if r.runs and (ranks.alone or not r.exchange) and self._wants_norm(call, max_norm, scaled):
                for row, arena in zip(self.norms[len(r.runs) :], self.arenas, strict=True):
                    row.zero_()
                    arena.add_norm(row)
            report = Report(call, had, touched, r.syncs, self._facts(max_norm, scaled, edited, thawed), faults)
            agreement = Agreement(ranks, report, len(r.runs), self.norms, found_inf, grad_scale)
            if ranks.alone and not faults and not thawed:
                return agreement, edited
            if not (cpu or touched or thawed or faults):
                return agreement, edited
            again = agreement.read()
            if thawed:
                self.lay_out(thawed)
                thawed = []
            elif again:
                r.reduce_again(again)
            elif r.overlap or not first or ranks.alone:
                return agreement, edited
            first, suspicious = False, False

    def _wants_norm(self, call: str, max_norm: float | None, scaled: bool) -> bool:
        return self.settings.skip_nonfinite or scaled or max_norm is not None or call != "step"

    def _used_up(self) -> list[tuple[type[Exception], str]]:
        for run in self.reducer.runs:
            if run.used and not run.launched and run.grads._version == run.version:
                for k in run.used:
                    grad = run.arena.params[k].grad
                    if grad is not None and run.arena.is_home(k, grad):
                        text = "with overlap_reduce=False a step uses the gradients up, and there has been no backward since"
                        return [(RuntimeError, text)]
        return []

    def _facts(
        self, max_norm: float | None, scaled: bool, edited: list[int], thawed: list[torch.nn.Parameter]
    ) -> dict[str, Any]:
        if self.ranks.alone:
            return {}
        return {
            "edited weights": [self.name_of(self.params[k]) for k in edited],
            "unfrozen parameters": [self.name_of(p) for p in thawed],
            "steps": self.steps_made,
            "loss scaling": scaled,
            "clipping": max_norm,
            "group options": self._group_digest(),
        }

    def _group_digest(self) -> int:
        self.update_groups()
        return zlib.crc32(repr(self._rows).encode()) if not self.settings.capturable else 0

    def update_groups(self) -> None:
        """Writes the group options where step_control reads them, if they have changed."""
        rows = [self._row(group) for group in self.groups]
        if rows == self._rows:
            return
        self._rows = rows
        packed = b"".join(struct.pack("<5d3q", *row) for row in rows)
        table = torch.frombuffer(bytearray(packed), dtype=torch.float64).reshape(-1, ops.GROUP_WORDS)
        self.group_table = table.to(self.device)
        for arena in self.arenas:
            group_of = {p: group for group in self.groups for p in group["params"]}
            wanted = [bool(group_of[p].get("amsgrad", False)) for p in arena.params]
            if any(w and not a for w, a in zip(wanted, arena.amsgrad, strict=True)):
                arena.set_amsgrad(wanted)
                if arena.has_state:
                    self.expose_state()

    def _row(self, group: dict[str, Any]) -> tuple[Any, ...]:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        mode = (
            (ops.GROUP_AMSGRAD if group.get("amsgrad") else 0)
            | (ops.GROUP_MAXIMIZE if group.get("maximize") else 0)
            | (ops.GROUP_DECOUPLED if group.get("decoupled_weight_decay", self.settings.decoupled) else 0)
        )
        at, wide = 0, 0
        if self.settings.capturable and torch.is_tensor(lr) and lr.device == self.device:
            if lr.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"lr: a tensor of torch.float32 or torch.float64 wanted with capturable=True, got {lr.dtype}")
            at, wide, lr = lr.data_ptr(), int(lr.dtype == torch.float64), 0.0
        return (float(lr), float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]), mode, at, wide)

    def step(self, grad_scale: Tensor | None, found_inf: Any) -> None:
        """Collective: one step."""
        r, s = self.reducer, self.settings
        r.finish_gathers()
        self.raise_sticky()
        self.adopt_group()
        self.build()
        scaled = grad_scale is not None or found_inf is not None
        self.last_norm = None
        self.whole = None
        max_norm = s.max_grad_norm
        agreement, edited = self.settle("step", max_norm, grad_scale, found_inf, scaled)
        if not self.params:
            return
        clip, self.clip = self.clip, None
        if clip is None and max_norm is not None:
            clip = torch.zeros(2, dtype=torch.float32, device=self.device)
            ops.clip_factor(agreement.control, grad_scale, max_norm, clip)
        self.last_norm = None if clip is None else clip[1].clone()
        self.make_state()
        self.take_up_edits(edited)
        self.seen(edited)
        self.update_groups()
        ops.step_control(
            agreement.control,
            self.ranks.total,
            self.param_group,
            self.group_table,
            grad_scale,
            clip,
            s.skip_nonfinite,
            scaled,
            self.steps,
            self.scalars,
            self.skipped,
        )
        with torch.profiler.record_function("zero1.adam_step"):
            for arena in self.arenas:
                arena.step(self.scalars)
        r.start_gathers()
        if not s.gather_early:
            r.finish_gathers()
        r.amp = scaled
        r.end_cycle(used_up=True)
        self.steps_made += 1
        self._look_later(agreement)

    def clip_grad_norm(self, max_norm: float, grad_scale: Tensor | None) -> Tensor:
        """Collective: the norm of the averaged gradients; the factor waits for the next step."""
        self.reducer.finish_gathers()
        self.raise_sticky()
        self.adopt_group()
        self.build()
        self.clip = None
        agreement, _ = self.settle("clip_grad_norm_", max_norm, grad_scale, None, False)
        clip = torch.zeros(2, dtype=torch.float32, device=self.device)
        if self.params:
            ops.clip_factor(agreement.control, grad_scale, max_norm, clip)
            self.clip = clip
        return clip[1].clone()

    def make_state(self) -> None:
        """State at the first step; `opt.state` shows this rank's part of it."""
        fresh = [arena for arena in self.arenas if not arena.has_state]
        for arena in fresh:
            arena.make_state()
        if fresh:
            self.expose_state()

    def expose_state(self) -> None:
        """Fills `opt.state` with views of this rank's part."""
        for arena in self.arenas:
            if arena.has_state:
                for k, p in enumerate(arena.params):
                    self.state[p] = {"step": self.steps[arena.first + k], **arena.local_state(k)}

    # -- CUDA: conditions are looked at one step later ---------------------------------------------------------------

    def _look_later(self, agreement: Agreement) -> None:
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        words = torch.empty(agreement.control.numel(), dtype=torch.int64, pin_memory=True)
        words.copy_(agreement.control, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._sticky = (words, event, agreement.report)

    def raise_sticky(self) -> None:
        """Raises what the last step on CUDA found, if it found something."""
        if self._sticky is None:
            return
        words, event, report = self._sticky
        self._sticky = None
        event.synchronize()  # waits for the last step only
        check_words(self.ranks, words.tolist(), report)

    # -- bytes -----------------------------------------------------------------------------------------------------

    def memory_report(self) -> dict[str, int]:
        """Bytes on this rank by kind."""
        kinds: dict[str, list[Tensor]] = {"params": [], "grads": [], "state": [], "buffers": []}
        planned = dict.fromkeys(kinds, 0)
        padding = 0
        arenas = list(self.arenas)
        if self.pending:
            arenas.append(self.plan())
        for arena in arenas:
            for kind, tensors in arena.tensors().items():
                if arena.device.type == "meta":
                    planned[kind] += sum(t.nbytes for t in tensors)
                else:
                    kinds[kind] += tensors
            if not arena.has_state:
                planned["state"] += arena.planned_state_bytes()
            padding += arena.padding_bytes()
        kinds["buffers"] += [self.steps, self.scalars, self.param_group, self.norms, self.group_table, self.skipped]
        report = {kind: planned[kind] + _address_bytes(tensors) for kind, tensors in kinds.items()}
        report["total"] = sum(report.values())
        report["padding"] = padding
        trainable = [(p.numel(), p.dtype) for arena in arenas for p in arena.params]
        n = self.ranks.world_size
        report["predicted"] = sum(
            predicted_bytes(
                sum(m for m, d in trainable if d == dtype),
                n,
                dtype.itemsize,
                self.settings.split and dtype == torch.bfloat16,
            )
            for dtype in {d for _, d in trainable}
        )
        return report

    def plan(self) -> Arena:
        """The arena that `build` would make, without memory."""
        s = self.settings
        params = [torch.nn.Parameter(torch.empty_like(p, device="meta")) for p in self.pending]
        group_of = {p: group for group in self.groups for p in group["params"]}
        layout = Layout(specs_of(params), self.ranks.world_size, s.bucket_cap_bytes)
        amsgrad = [bool(group_of[p].get("amsgrad", False)) for p in self.pending]
        apart = s.overlap_reduce and not self.ranks.alone
        return Arena(params, layout, self.ranks.rank, len(self.params), apart, s.split, amsgrad)


def _address_bytes(tensors: list[Tensor]) -> int:
    """Bytes of memory under these tensors' storages, every address counted once."""
    spans = sorted((t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors)
    total = end = 0
    for begin, size in spans:
        total += max(0, begin + size - max(begin, end))
        end = max(end, begin + size)
    return total

