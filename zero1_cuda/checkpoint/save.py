"""State that leaves and enters: this rank's part, whole states in torch's format, single parameters.

Parts are addressed by parameter and element, never by a place in a padded buffer. Loading first looks at everything,
agrees over the ranks, and only then writes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import check_options
from ..params.buffers import Arena, view_of
from ..step.agreement import Report, raise_together
from ..step.runner import Engine
from .dcp_tensors import MARK_WORDS, FlatShard, StepShard

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
HINT = (
    "Whole states for any number of ranks come from full_state_dict(), consolidate_state_dict() or "
    "torch.distributed.checkpoint"
)


def _memory_order(t: Tensor, stride: Sequence[int]) -> Tensor:
    """1-D: the elements of `t` in the order in which a dense tensor of these strides holds them. Not always a copy."""
    if tuple(t.stride()) != tuple(stride) or not t.numel():
        dense = torch.empty_strided(t.shape, tuple(stride), dtype=t.dtype, device=t.device)
        dense.copy_(t)
        t = dense
    return t.as_strided((t.numel(),), (1,), t.storage_offset())


def pack_groups(engine: Engine) -> list[dict[str, Any]]:
    """`param_groups` with numbers for parameters, as torch packs them."""
    number = {p: i for i, p in enumerate(engine.roster.numbered())}
    return [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [number[p] for p in group["params"]]}
        for group in engine.groups
    ]


# -- out ------------------------------------------------------------------------------------------------------------


def local_state_dict(engine: Engine) -> dict[str, Any]:
    """This rank's part; no collective."""
    if engine.whole is not None:
        return copy.copy(engine.whole)
    roster = engine.roster
    roster.take_up(roster.follow([]))
    engine.make_room()
    places = engine.roster.places
    planned = {p: k for k, p in enumerate(roster.pending)}
    plan = roster.plan() if planned else None
    state = {}
    for number, p in enumerate(engine.roster.numbered()):
        if p in places:
            state[number] = _entry(engine, *places[p], p)
        elif p in planned:
            assert plan is not None
            state[number] = _entry(engine, plan, planned[p], p)
    return {"state": state, "param_groups": pack_groups(engine)}


def _entry(engine: Engine, arena: Arena, k: int, p: torch.nn.Parameter) -> dict[str, Tensor]:
    piece = arena.piece_of.get(k)
    lo, hi = (piece.lo, piece.hi) if piece else (0, 0)
    if arena.has_state and piece is not None:
        parts = {**arena.moments(piece), "master": arena.read_master(piece)}
        # pickled, or copied by DCP before it saves beside training, a view would take all of its buffer along
        parts = {name: view_of(t, 0, t.shape, t.stride(), own_storage=True) for name, t in parts.items()}
    else:  # what the first step would begin with
        names = [*MOMENTS[:2], *(MOMENTS[2:] if arena.amsgrad[k] else [])]
        parts = dict.fromkeys(names, torch.zeros(1, device=p.device).expand(hi - lo))
        parts["master"] = _memory_order(p.detach(), arena.strides[k])[lo:hi].to(torch.float32, copy=True)
    count = view_of(engine.steps, arena.first + k, (), (), own_storage=True) if arena.has_state else torch.zeros(())
    mark = [engine.ranks.rank, engine.ranks.world_size, lo, hi, p.numel()]
    shards = {name: FlatShard(t, p.shape, arena.strides[k], lo) for name, t in parts.items()}
    return {"step": StepShard(count, mark), **shards}


def _whole(engine: Engine, arena: Arena, k: int, part: Tensor, to: int | None) -> Tensor | None:
    """Collective: joins the parts of parameter k; to: the rank that gets it, None: all."""
    p, numels = arena.params[k], arena.piece_numels(k)
    if to is None:
        flat: Tensor | None = engine.ranks.gather_parts(part, numels)
    else:
        flat = engine.ranks.send_parts(part, numels, to, tag=2**20 + k)
    if flat is None:
        return None
    return flat.as_strided(tuple(p.shape), arena.strides[k]).contiguous()


def param_state(engine: Engine, p: Tensor, to: int | None = None) -> dict[str, Tensor] | None:
    """Collective: the whole state of one parameter, fp32, in its shape; on `to` only if given."""
    places = engine.roster.places
    if p not in places:
        raise ValueError(
            f"full_param_state: parameter {engine.roster.name_of(p)} is not one of this optimizer's, "
            "or has never been trainable"
        )
    arena, k = places[p]
    piece = arena.piece_of.get(k)
    names = [*MOMENTS[:2], *(MOMENTS[2:] if arena.amsgrad[k] else [])]
    mine = to is None or engine.ranks.rank == to
    if not arena.has_state:
        if not mine:
            return None
        zeros = {name: torch.zeros(p.shape, device=p.device) for name in names}
        master = p.detach().to(torch.float32, copy=True).contiguous()
        return {"step": torch.zeros(()), "master": master, **zeros}
    empty = torch.zeros(0, dtype=torch.float32, device=arena.device)
    parts = dict.fromkeys(names, empty)
    parts["master"] = empty
    if piece is not None:
        parts.update(arena.moments(piece))
        parts["master"] = arena.read_master(piece)
    out = {"step": engine.steps[arena.first + k].to(torch.float32)}
    for name, part in parts.items():
        whole = _whole(engine, arena, k, part, to)
        if whole is not None:
            out[name] = whole
    return out if mine else None


def whole_state_dict(engine: Engine, to: int | None) -> dict[str, Any]:
    """Collective: everything in the format of torch.optim.AdamW's state_dict(), on the CPU; `{}` where not `to`."""
    places = engine.roster.places
    state: dict[int, Any] = {}
    for number, p in enumerate(engine.roster.numbered()):
        if p in places:
            entry = param_state(engine, p, to)
            if entry is not None:
                state[number] = {name: t.to("cpu", copy=True) for name, t in entry.items()}
    if to is not None and engine.ranks.rank != to:
        return {}
    return {"state": state, "param_groups": copy.deepcopy(pack_groups(engine))}


# -- in -------------------------------------------------------------------------------------------------------------


def load(engine: Engine, state_dict: Mapping[str, Any], error: Exception | None = None) -> None:
    """Collective: takes a part, a whole state or a state of torch's; ValueError on every rank, or none.

    error: what has gone wrong on this rank before.
    """
    ranks = engine.ranks
    plan: _Loading | None = None
    empty = not state_dict
    if not empty and error is None:
        try:
            plan = _Loading(engine, state_dict)
        except Exception as e:
            error = e if isinstance(e, ValueError) else ValueError(f"not a state_dict of an optimizer: {e!r}")
    kind = 3 if error else 2 if empty else plan.kind if plan else 0
    rows = [row[0] for row in ranks.gather_integers([kind])]
    sent = rows[0] == _WHOLE and set(rows) == {_WHOLE, 2}  # (in a grid the first rank of every replica has it)
    if not sent and len(set(rows)) > 1 and 3 not in rows:
        error = ValueError(
            f"load_state_dict: ranks were given different things ({', '.join(_KINDS[r] for r in rows)}). "
            f"A whole state is given to all, or to rank 0 with {{}} elsewhere. {HINT}"
        )
    elif not sent and set(rows) == {2}:
        error = ValueError(f"load_state_dict: an empty state_dict. {HINT}")
    if error is not None or 3 in rows:
        _refuse(engine, error)
    if sent:
        plan = _receive(engine, plan)
    assert plan is not None
    plan.apply()


def _refuse(engine: Engine, error: Exception | None) -> None:
    faults: list[tuple[type[Exception], str]] = [(ValueError, str(error))] if error else []
    raise_together(engine.ranks, Report("load_state_dict", faults=faults))


_PART, _WHOLE = 0, 1
_KINDS = ("a part", "a whole state", "nothing", "a damaged state")


class _Loading:
    """A state_dict that has been looked at and found to fit; `apply` writes it."""

    def __init__(self, engine: Engine, state_dict: Mapping[str, Any]) -> None:
        self.engine = engine
        for key in ("state", "param_groups"):
            if key not in state_dict:
                raise ValueError(f"load_state_dict: the state_dict has no {key!r}")
        groups, state = state_dict["param_groups"], state_dict["state"]
        self._check_groups(groups)
        self.groups = [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in groups]
        for group, new in zip(engine.groups, self.groups, strict=True):
            check_options({**group, **new}, "load_state_dict: ")
        self.entries: dict[int, dict[str, Any]] = {}  # by parameter number
        params = engine.roster.numbered()
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
        places = engine.roster.places
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
        have = [len(group["params"]) for group in self.engine.groups]
        came = [len(group["params"]) for group in groups]
        if have != came:
            raise ValueError(
                f"load_state_dict: the state has parameter groups of {came} parameters, this optimizer of {have}"
            )

    def _keys(self, groups: Any) -> list[Any]:
        """The file's key of every parameter here: by name where both know names, else by place."""
        keys = [key for group in groups for key in group["params"]]
        names = self.engine.roster.names
        params = self.engine.roster.numbered()
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

    def _check_entry(self, number: int, p: torch.nn.Parameter, arena: Arena, k: int, ours: bool) -> None:
        entry, engine = self.entries[number], self.engine
        wanted = ["step", *MOMENTS[:2], *(["master"] if ours else [])]
        amsgrad = self.groups[self._group_of(number)].get("amsgrad", arena.amsgrad[k])
        if amsgrad:
            wanted.append(MOMENTS[2])
        missing = [name for name in wanted if name not in entry]
        if missing:
            raise ValueError(f"load_state_dict: the state of parameter {number} lacks {missing}")
        mark = self._mark(entry)
        piece = arena.piece_of.get(k)
        lo, hi = (piece.lo, piece.hi) if piece else (0, 0)
        if mark is not None:
            _, rank, world, mlo, mhi, numel = mark
            if numel != p.numel():
                raise ValueError(
                    f"load_state_dict: parameter {number} has {p.numel()} elements here and {numel} in the state"
                )
            if (rank, world) != (engine.ranks.rank, engine.ranks.world_size):
                raise ValueError(
                    f"load_state_dict: this is the part of rank {rank} of {world}, given to rank "
                    f"{engine.ranks.rank} of {engine.ranks.world_size}. {HINT}"
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
            if t.device.type == "meta" and arena.device.type != "meta":
                raise ValueError(f"load_state_dict: {name} of parameter {number} is on the meta device, without data")
            if isinstance(t, FlatShard) and (t.shape, t.dense_stride) != (p.shape, tuple(arena.strides[k])):
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
        for g, group in enumerate(self.engine.groups):
            if number < len(group["params"]):
                return g
            number -= len(group["params"])
        raise AssertionError

    def apply(self) -> None:
        engine = self.engine
        for group, new in zip(engine.groups, self.groups, strict=True):
            new["decoupled_weight_decay"] = engine.settings.decoupled  # as torch: the class says which, not the file
            for key, value in new.items():
                if key == "lr" and torch.is_tensor(group.get("lr")):
                    group["lr"].fill_(float(value))
                else:
                    group[key] = value
        engine.make_room(create=True)
        places = engine.roster.places
        with torch.no_grad():
            for number, p in enumerate(engine.roster.numbered()):
                if p in places:
                    self._write(self.entries.get(number), p, *places[p])
        engine.loaded()

    def _write(self, entry: dict[str, Any] | None, p: torch.nn.Parameter, arena: Arena, k: int) -> None:
        engine, piece = self.engine, arena.piece_of.get(k)
        mark = self._mark(entry) if entry else None
        step = 0 if entry is None else mark[0] if mark else int(float(entry["step"]))
        engine.steps[arena.first + k] = step
        if piece is None:
            return

        def part(t: Tensor) -> Tensor:
            t = (t.local if isinstance(t, FlatShard) else t).to(arena.device, torch.float32)
            return t if mark is not None else _memory_order(t, arena.strides[k])[piece.lo : piece.hi]

        for name, view in arena.moments(piece).items():
            if entry is not None and name in entry:
                view.copy_(part(entry[name]))
            else:
                view.zero_()
        if entry is not None and "master" in entry:
            arena.write_master(piece, part(entry["master"]))
        else:
            arena.write_master(piece, arena.param_piece(piece).float())


def _receive(engine: Engine, plan: _Loading | None) -> _Loading:
    """Collective: the whole state of rank 0, on every rank, one parameter after the other."""
    ranks = engine.ranks
    head: Any = None
    if plan is not None:
        shapes = {
            number: {name: tuple(t.shape) if torch.is_tensor(t) else t for name, t in entry.items()}
            for number, entry in plan.entries.items()
        }
        steps = {number: float(entry["step"]) for number, entry in plan.entries.items()}
        head = (plan.groups, shapes, steps)
    groups, shapes, steps = ranks.share_object(head)
    if plan is None:
        plan = _Loading.__new__(_Loading)
    plan.engine, plan.groups, plan.kind = engine, groups, _WHOLE
    if head is None or ranks.rank or ranks.replica:
        plan.entries = {number: {"step": steps[number]} for number in shapes}
    params, places = engine.roster.numbered(), engine.roster.places
    for number, entry in shapes.items():
        arena, k = places[params[number]]
        piece = arena.piece_of.get(k)
        for name in (*MOMENTS, "master"):
            if name not in entry:
                continue
            t = torch.empty(entry[name], dtype=torch.float32, device=arena.device)
            if name in plan.entries[number]:
                t.copy_(plan.entries[number][name])
            if t.numel():
                ranks.send_flat(t.view(-1))
            if piece is not None:  # keep only this rank's part
                part = _memory_order(t, arena.strides[k])[piece.lo : piece.hi].clone()
                plan.entries[number][name] = part
    for number, entry in plan.entries.items():
        arena, k = places[params[number]]
        piece = arena.piece_of.get(k)
        lo, hi = (piece.lo, piece.hi) if piece else (0, 0)
        mark = [ranks.rank, ranks.world_size, lo, hi, params[number].numel()]
        entry["step"] = StepShard(torch.tensor(steps[number]), mark)
    return plan
