"""Which parameters there are, where they lie, and what others have done to them since the last step.

Clients move a model after the optimizer was made, load weights into it, freeze and unfreeze layers, add groups, and
make the process group late. The registry notices, and follows or reports it. What has come is returned: whoever asked
tells the others.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..comm.grid import ProcessGrid
from ..config import Config
from .buffers import FlatBuffers
from .layout import Layout, ParamSpec
from .state import ShardState

_log = logging.getLogger("zero1_cuda")

Faults = list[tuple[type[Exception], str]]


def weights_digest(params: Iterable[Tensor]) -> int:
    """A number that depends on every bit of the parameters and on their order."""
    total = 0
    for p in params:
        if p.numel():
            kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[p.element_size()]
            flat = p.detach().contiguous().view(-1).view(kind)
            for at in range(0, flat.numel(), 2**22):
                part = flat[at : at + 2**22].to(torch.int64)
                weights = torch.arange(1, 2 * part.numel(), 2, device=part.device, dtype=torch.int64)
                total = zlib.crc32(struct.pack("<q", int((part * weights).sum())), total)
    return total


class ParamRegistry:
    """The parameters of one optimizer, in sets that are laid out together."""

    def __init__(self, groups: list[dict[str, Any]], config: Config, grid: ProcessGrid) -> None:
        self.groups, self.config, self.grid = groups, config, grid
        self.names: dict[Tensor, str] = {}
        self.sets: list[ShardState] = []
        self.pending: list[torch.nn.Parameter] = []  # trainable, not laid out yet
        self.frozen: list[torch.nn.Parameter] = []  # never been trainable
        self.params: list[torch.nn.Parameter] = []  # laid out, in the order of the sets
        self.places: dict[Tensor, tuple[ShardState, int]] = {}
        self._first_versions: dict[Tensor, int] = {}  # of pending ones
        self._versions: list[int] = []  # what p._version was when the weights were last taken up
        self._moved: set[int] = set()  # parameters given other storage since then

    def name_of(self, p: Tensor) -> str:
        """How messages call a parameter: by name where names were given, else by group, index and shape."""
        if p in self.names:
            return repr(self.names[p])
        for g, group in enumerate(self.groups):
            for i, q in enumerate(group["params"]):
                if q is p:
                    return f"{i} of group {g}, shape {tuple(p.shape)}"
        return f"of shape {tuple(p.shape)}"

    def names_of(self, numbers: Iterable[int]) -> list[str]:
        return [self.name_of(self.params[k]) for k in numbers]

    def numbered(self) -> list[torch.nn.Parameter]:
        """All parameters in the order of torch's state_dict keys."""
        return [p for group in self.groups for p in group["params"]]

    @property
    def device(self) -> torch.device:
        """Where the buffers are, or will be."""
        if self.sets:
            return self.sets[0].device
        return next((p.device for p in [*self.pending, *self.frozen]), torch.device("cpu"))

    # -- laying out ------------------------------------------------------------------------------------------------

    def register(self, group: dict[str, Any]) -> list[torch.nn.Parameter]:
        """Takes a group in; its trainable parameters, which are returned, are laid out at first use."""
        self.names.update(zip(group["params"], group.get("param_names") or (), strict=False))
        self.frozen += [p for p in group["params"] if not p.requires_grad]
        return self._take([p for p in group["params"] if p.requires_grad])

    def _take(self, params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        self._first_versions.update((p, p._version) for p in params)
        self.pending += params
        return params

    def build(self) -> bool:
        """Lays out what is pending, and makes no collective; whether there was any."""
        if not self.pending:
            return False
        devices = {p.device for p in self.pending} | {state.device for state in self.sets}
        if len(devices) > 1:
            raise RuntimeError(f"all parameters must be on one device; they are on {sorted(map(str, devices))}")
        params, self.pending = self.pending, []
        state = self._lay_out(params, params)
        self.sets.append(state)
        self.params += params
        self.places.update((p, (state, k)) for k, p in enumerate(params))
        self._versions += [self._first_versions.pop(p) for p in params]
        layout, grid = state.layout, self.grid
        _log.info(
            "rank %d of %d (x %d): %d parameters, %d elements on %s, %d buckets, %d bytes of state here, %s kernels",
            grid.rank,
            grid.world_size,
            grid.replicas,
            len(params),
            sum(s.numel for s in layout.specs),
            state.device,
            len(layout.buckets),
            state.planned_bytes(),
            ops.cpu_level() if state.device.type == "cpu" else state.device.type,
        )
        return True

    def plan(self) -> ShardState:
        """The set that `build` would make of what is pending, without memory."""
        return self._lay_out(
            [torch.nn.Parameter(torch.empty_like(p, device="meta")) for p in self.pending], self.pending
        )

    def _lay_out(self, params: list[torch.nn.Parameter], owners: list[torch.nn.Parameter]) -> ShardState:
        config, grid = self.config, self.grid
        specs = [ParamSpec(p.numel(), p.dtype) for p in params]
        layout = Layout(specs, grid.world_size, config.bucket_cap_bytes)
        buffers = FlatBuffers(params, layout, grid.rank, config.overlap_reduce and not grid.is_single)
        return ShardState(buffers, len(self.params), config.split, self.wants_amsgrad(owners))

    def wants_amsgrad(self, params: list[torch.nn.Parameter]) -> list[bool]:
        """Per parameter, whether its group asks for amsgrad."""
        group_of = {p: group for group in self.groups for p in group["params"]}
        return [bool(group_of[p].get("amsgrad", False)) for p in params]

    def group_numbers(self) -> list[int]:
        """The number of the group of every parameter that is laid out."""
        group_of = {p: g for g, group in enumerate(self.groups) for p in group["params"]}
        return [group_of[p] for p in self.params]

    def newly_trainable(self) -> list[torch.nn.Parameter]:
        """Parameters that were frozen when they came and are trainable now."""
        return [p for p in self.frozen if p.requires_grad]

    def add_trainable(self, params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Takes newly trainable parameters in; they are laid out next."""
        self.frozen = [p for p in self.frozen if not p.requires_grad]
        return self._take(params)

    def ensure_state(self, create: bool) -> bool:
        """Maxima where a group has turned amsgrad on; create: state for the sets that have none. Whether any came."""
        fresh = False
        amsgrad = any(group.get("amsgrad") for group in self.groups)
        for state in self.sets:
            if amsgrad:
                wanted = self.wants_amsgrad(state.params)
                if any(w and not a for w, a in zip(wanted, state.amsgrad, strict=True)):
                    state.set_amsgrad(wanted)
                    fresh = True
            if create and not state.has_state:
                state.make_state()
                fresh = True
        return fresh

    def adopt_group(self) -> bool:
        """Takes a default process group that was made after the optimizer; whether there was one. Collective then."""
        if self.grid.initialized or not (dist.is_available() and dist.is_initialized()):
            return False
        grid = ProcessGrid(self.config.process_group, self.config.replicate_group)
        grid.use_device(self.device)
        if self.sets and not grid.is_single:
            raise RuntimeError(
                "torch.distributed was initialised after this optimizer had been used as a single rank; "
                "make the process group first, or make the optimizer anew"
            )
        self.grid = grid
        if not grid.is_single:
            params = self.numbered()
            shapes = zlib.crc32(repr([(tuple(p.shape), str(p.dtype), p.requires_grad) for p in params]).encode())
            rows = grid.gather_integers([shapes, weights_digest(params)])
            for what, column in (("parameters", 0), ("weights", 1)):
                if len({row[column] for row in rows}) > 1:
                    raise ValueError(
                        f"the process group was made after the optimizer, and the {what} differ between ranks; make "
                        "the group first (then rank 0's weights are sent to all), or load the same weights everywhere"
                    )
        return True

    # -- what others did -------------------------------------------------------------------------------------------

    def track_moves(self) -> tuple[Faults, bool]:
        """Notices parameters that were given other storage; what is wrong with them, and whether buffers moved along.

        A set whose parameters all went to another device follows at once, since all that is agreed on next needs one
        device. What moved within the device is only noted: it comes back into the buffers when the edit is taken up.
        """
        faults: Faults = []
        followed = False
        for i, state in enumerate(self.sets):
            buffers = state.buffers
            moved = buffers.moved()
            if not moved:
                continue
            texts = {k: buffers.misfit(k) for k in moved}
            names = {k: self.name_of(state.params[k]) for k, text in texts.items() if text}
            faults += [(RuntimeError, f"parameter {name} {texts[k]}") for k, name in names.items()]
            devices = {p.device for p in state.params}
            if len(devices) > 1:
                faults.append((RuntimeError, f"parameters were moved to several devices: {sorted(map(str, devices))}"))
                continue
            if devices != {state.device} and not names:
                self.sets[i] = new = state.moved_to_params()
                self.places.update((p, (new, k)) for k, p in enumerate(new.params))
                followed = True
            self._moved.update(state.first + k for k in moved if k not in names)
        return faults, followed

    def edited(self) -> list[int]:
        """Numbers of the parameters whose weights others may have changed."""
        versions = [p._version for p in self.params]
        if versions == self._versions and not self._moved:
            return []
        changed = {k for k, (now, seen) in enumerate(zip(versions, self._versions, strict=True)) if now != seen}
        return sorted(self._moved | changed)

    def adopt_moved(self) -> None:
        """Brings parameters that were given other storage back into the buffers, with their values as they are now."""
        for state in self.sets if self._moved else ():
            buffers = state.buffers
            for k in buffers.moved():
                if buffers.misfit(k) is None:
                    buffers.adopt_param(k)

    def refresh_masters_of(self, edited: list[int]) -> None:
        """Masters := weights where they differ, for these parameters. Doing it twice does no harm."""
        if edited:
            self.adopt_moved()
            flags = torch.zeros(len(self.params), dtype=torch.uint8, device="cpu")
            flags[edited] = 1
            flags = flags.to(self.device, non_blocking=True)
            for state in self.sets:
                state.refresh_masters(flags)

    def undo_edits_of(self, edited: list[int]) -> None:
        """This rank's part of these weights becomes its rounded masters again, where there are masters that tell."""
        for k in edited:
            state, at = self.places[self.params[k]]
            state.undo_edit(at)

    def mark_versions(self, edited: list[int]) -> None:
        """All ranks have taken these edits up."""
        for k in edited:
            self._versions[k] = self.params[k]._version
        self._moved.clear()
