"""State that enters: a part, a whole state, or a state of torch's.

Everything is looked at first, and agreed on over the ranks; only then is anything written.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..config import check_options
from ..params.buffers import in_memory_order
from ..params.state import MOMENTS, ShardState
from ..step.agreement import Report, raise_together
from ..step.runner import StepRunner
from .dcp_tensors import MARK_WORDS, FlatShard, StepShard

HINT = (
    "Whole states for any number of ranks come from full_state_dict(), consolidate_state_dict() or "
    "torch.distributed.checkpoint"
)


def load(runner: StepRunner, state_dict: Mapping[str, Any], error: Exception | None = None) -> None:
    """Collective: takes a part, a whole state or a state of torch's; ValueError on every rank, or none.

    error: what has gone wrong on this rank before.
    """
    grid = runner.grid
    plan: _Loading | None = None
    empty = not state_dict
    if not empty and error is None:
        try:
            plan = _Loading(runner, state_dict)
        except Exception as e:
            error = e if isinstance(e, ValueError) else ValueError(f"not a state_dict of an optimizer: {e!r}")
    kind = 3 if error else 2 if empty else plan.kind if plan else 0
    rows = [row[0] for row in grid.gather_integers([kind])]
    sent = rows[0] == _WHOLE and set(rows) == {_WHOLE, 2}  # (in a grid the first rank of every replica has it)
    if not sent and len(set(rows)) > 1 and 3 not in rows:
        error = ValueError(
            f"load_state_dict: ranks were given different things ({', '.join(_KINDS[r] for r in rows)}). "
            f"A whole state is given to all, or to rank 0 with {{}} elsewhere. {HINT}"
        )
    elif not sent and set(rows) == {2}:
        error = ValueError(f"load_state_dict: an empty state_dict. {HINT}")
    if error is not None or 3 in rows:
        faults: list[tuple[type[Exception], str]] = [(ValueError, str(error))] if error else []
        raise_together(grid, Report("load_state_dict", faults=faults))
    if sent:
        plan = _receive(runner, plan)
    assert plan is not None
    plan.apply()


_PART, _WHOLE = 0, 1
_KINDS = ("a part", "a whole state", "nothing", "a damaged state")


class _Loading:
    """A state_dict that has been looked at and found to fit; `apply` writes it."""

    def __init__(self, runner: StepRunner, state_dict: Mapping[str, Any]) -> None:
        self.runner, self.registry, self.grid = runner, runner.registry, runner.grid
        for key in ("state", "param_groups"):
            if key not in state_dict:
                raise ValueError(f"load_state_dict: the state_dict has no {key!r}")
        groups, state = state_dict["param_groups"], state_dict["state"]
        self._check_groups(groups)
        self.groups = [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in groups]
        for group, new in zip(runner.groups, self.groups, strict=True):
            check_options({**group, **new}, "load_state_dict: ")
        self.entries: dict[int, dict[str, Any]] = {}  # by parameter number
        params = self.registry.numbered()
        key_of = self._keys(groups)
        keys = {key: number for number, key in enumerate(key_of)}
        surplus = [key for key in state if key not in keys and isinstance(state[key], Mapping)]
        if surplus:
            raise ValueError(f"load_state_dict: the state has entries that no parameter asks for: {surplus[:5]}")
        for number, key in enumerate(key_of):
            if key in state:
                self.entries[number] = dict(state[key])
        marked = [self._mark(entry) is not None for entry in self.entries.values()]
        if any(marked) and not all(marked):
            raise ValueError(f"load_state_dict: entries of a part and whole entries are mixed. {HINT}")
        self.kind = _PART if marked and marked[0] else _WHOLE
        ours = self.kind == _PART or any("master" in e for e in self.entries.values())
        places = self.registry.places
        for number, p in enumerate(params):
            if p not in places:
                if number in self.entries:
                    raise ValueError(f"load_state_dict: there is state for parameter {number}, which is frozen here")
                continue
            if number not in self.entries:
                if ours:
                    raise ValueError(f"load_state_dict: the state of parameter {number} is missing")
                continue
            self._check_entry(number, p, *places[p], ours)

    def _check_groups(self, groups: Any) -> None:
        have = [len(group["params"]) for group in self.runner.groups]
        came = [len(group["params"]) for group in groups]
        if have != came:
            raise ValueError(
                f"load_state_dict: the state has parameter groups of {came} parameters, this optimizer of {have}"
            )

    def _keys(self, groups: Any) -> list[Any]:
        """The file's key of every parameter here: by name where both know names, else by place."""
        keys = [key for group in groups for key in group["params"]]
        names = self.registry.names
        params = self.registry.numbered()
        if keys and all(isinstance(key, str) for key in keys) and all(p in names for p in params):
            if set(keys) != {names[p] for p in params}:
                strange = sorted(set(keys) ^ {names[p] for p in params})
                raise ValueError(f"load_state_dict: names of parameters differ: {strange[:5]}")
            return [names[p] for p in params]
        return keys

    @staticmethod
    def _mark(entry: Mapping[str, Any]) -> list[int] | None:
        step = entry.get("step")
        if isinstance(step, StepShard):
            return [int(step.item()), *step.mark]
        if torch.is_tensor(step) and step.dim() == 1 and step.numel() == MARK_WORDS:
            return [int(x) for x in step.tolist()]
        return None

    def _check_entry(self, number: int, p: torch.nn.Parameter, state: ShardState, k: int, ours: bool) -> None:
        entry, grid = self.entries[number], self.grid
        wanted = ["step", *MOMENTS[:2], *(["master"] if ours else [])]
        amsgrad = self.groups[self._group_of(number)].get("amsgrad", state.amsgrad[k])
        if amsgrad:
            wanted.append(MOMENTS[2])
        missing = [name for name in wanted if name not in entry]
        if missing:
            raise ValueError(f"load_state_dict: the state of parameter {number} lacks {missing}")
        mark = self._mark(entry)
        lo, hi = state.span(k)
        if mark is not None:
            _, rank, world, mlo, mhi, numel = mark
            if numel != p.numel():
                raise ValueError(
                    f"load_state_dict: parameter {number} has {p.numel()} elements here and {numel} in the state"
                )
            if (rank, world) != (grid.rank, grid.world_size):
                raise ValueError(
                    f"load_state_dict: this is the part of rank {rank} of {world}, given to rank "
                    f"{grid.rank} of {grid.world_size}. {HINT}"
                )
            if (mlo, mhi) != (lo, hi):
                raise ValueError(
                    f"load_state_dict: this part holds elements {mlo} to {mhi} of parameter {number}, this rank now "
                    f"owns {lo} to {hi} (another bucket_cap_mb or other groups). {HINT}"
                )
        for name in (*MOMENTS, "master"):
            if name not in entry:
                continue
            t = entry[name]
            if not torch.is_tensor(t) or not t.is_floating_point() or t.layout != torch.strided:
                raise ValueError(f"load_state_dict: {name} of parameter {number} is not a dense floating-point tensor")
            if t.device.type == "meta" and state.device.type != "meta":
                raise ValueError(f"load_state_dict: {name} of parameter {number} is on the meta device, without data")
            if isinstance(t, FlatShard) and (t.shape, t.dense_stride) != (p.shape, state.stride(k)):
                raise ValueError(
                    f"load_state_dict: {name} of parameter {number} has shape {tuple(t.shape)}, wanted {tuple(p.shape)}"
                )
            shape = (hi - lo,) if mark is not None else tuple(p.shape)
            came = tuple((t.local if isinstance(t, FlatShard) else t).shape)
            if came != shape:
                raise ValueError(f"load_state_dict: {name} of parameter {number} has shape {came}, wanted {shape}")
        if mark is None:
            step = entry["step"]
            if torch.is_tensor(step) and step.numel() != 1:
                raise ValueError(f"load_state_dict: step of parameter {number} has {step.numel()} elements, wanted one")
        count = float(mark[0] if mark is not None else entry["step"])
        if not 0 <= count < 2**62 or count != int(count):
            raise ValueError(f"load_state_dict: step of parameter {number}: a count wanted, got {count}")

    def _group_of(self, number: int) -> int:
        for g, group in enumerate(self.runner.groups):
            if number < len(group["params"]):
                return g
            number -= len(group["params"])
        raise AssertionError

    def apply(self) -> None:
        runner = self.runner
        config, places = runner.config, self.registry.places
        for group, new in zip(runner.groups, self.groups, strict=True):
            new["decoupled_weight_decay"] = config.decoupled  # as torch: the class says which, not the file
            for key, value in new.items():
                if key == "lr" and torch.is_tensor(group.get("lr")):
                    group["lr"].fill_(float(value))
                else:
                    group[key] = value
        runner.ensure_state(create=True)
        with torch.no_grad():
            for number, p in enumerate(self.registry.numbered()):
                if p in places:
                    self._write(self.entries.get(number), *places[p])
        runner.loaded()

    def _write(self, entry: dict[str, Any] | None, state: ShardState, k: int) -> None:
        mark = self._mark(entry) if entry else None
        self.runner.steps[state.first + k] = 0 if entry is None else mark[0] if mark else int(float(entry["step"]))
        lo, hi = state.span(k)

        def part(t: Tensor) -> Tensor:
            t = (t.local if isinstance(t, FlatShard) else t).to(state.device, torch.float32)
            return t if mark is not None else in_memory_order(t, state.stride(k))[lo:hi]

        if lo < hi:
            state.write(k, {n: part(entry[n]) for n in (*MOMENTS, "master") if n in entry} if entry else {})


def _receive(runner: StepRunner, plan: _Loading | None) -> _Loading:
    """Collective: the whole state of rank 0, on every rank, one parameter after the other."""
    registry, grid = runner.registry, runner.grid
    head: Any = None
    if plan is not None:
        shapes = {
            number: {name: tuple(t.shape) if torch.is_tensor(t) else t for name, t in entry.items()}
            for number, entry in plan.entries.items()
        }
        steps = {number: float(entry["step"]) for number, entry in plan.entries.items()}
        head = (plan.groups, shapes, steps)
    groups, shapes, steps = grid.broadcast_object(head)
    sender = plan is not None and not grid.rank and not grid.replica
    mine = plan.entries if plan is not None and sender else {}
    entries: dict[int, dict[str, Any]] = {}
    params, places = registry.numbered(), registry.places
    for number, entry in shapes.items():
        p = params[number]
        state, k = places[p]
        lo, hi = state.span(k)
        step = torch.tensor(steps[number], dtype=torch.float32, device="cpu")
        entries[number] = {"step": StepShard(step, [grid.rank, grid.world_size, lo, hi, p.numel()])}
        for name in (*MOMENTS, "master"):
            if name not in entry:
                continue
            t = torch.empty(entry[name], dtype=torch.float32, device=state.device)
            if sender:
                t.copy_(mine[number][name])
            if t.numel():
                grid.broadcast_flat(t.view(-1))
            if lo < hi:  # keep only this rank's part
                entries[number][name] = in_memory_order(t, state.stride(k))[lo:hi].clone()
    new = _Loading.__new__(_Loading)
    new.runner, new.registry, new.grid = runner, registry, grid
    new.groups, new.kind, new.entries = groups, _WHOLE, entries
    return new
