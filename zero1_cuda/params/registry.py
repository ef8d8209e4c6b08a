"""Which parameters there are, where they lie, and what others have done to them since the last step.

Clients move a model after the optimizer was made, load weights into it, freeze and unfreeze layers, add groups, and
make the process group late. The roster notices, and follows or reports it.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..comm.collectives import Ranks
from ..config import Settings
from .buffers import Arena, specs_of
from .layout import Layout

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


class Roster:
    """The parameters of one optimizer."""

    def __init__(self, groups: list[dict[str, Any]], settings: Settings, ranks: Ranks) -> None:
        self.groups, self.settings, self.ranks = groups, settings, ranks
        self.names: dict[Tensor, str] = {}
        self.arenas: list[Arena] = []
        self.pending: list[torch.nn.Parameter] = []  # trainable, not laid out yet
        self.frozen: list[torch.nn.Parameter] = []  # never been trainable
        self.params: list[torch.nn.Parameter] = []  # laid out, in the order of the arenas
        self.places: dict[Tensor, tuple[Arena, int]] = {}
        self.first_versions: dict[Tensor, int] = {}  # of pending ones
        self.versions: list[int] = []  # what p._version was when the weights were last taken up
        self.moved: set[int] = set()  # parameters given other storage since then
        self.changed: Callable[[], None] = lambda: None  # called when arenas come or move
        self.adopted: Callable[[Ranks], None] = lambda ranks: None  # called when a late process group is taken
        self.watch: Callable[[torch.nn.Parameter], None] = lambda p: None  # called for every trainable parameter

    def name_of(self, p: Tensor) -> str:
        """How messages call a parameter: by name where names were given, else by group, index and shape."""
        if p in self.names:
            return repr(self.names[p])
        for g, group in enumerate(self.groups):
            for i, q in enumerate(group["params"]):
                if q is p:
                    return f"{i} of group {g}, shape {tuple(p.shape)}"
        return f"of shape {tuple(p.shape)}"

    def numbered(self) -> list[torch.nn.Parameter]:
        """All parameters in the order of torch's state_dict keys."""
        return [p for group in self.groups for p in group["params"]]

    @property
    def device(self) -> torch.device:
        """Where the buffers are, or will be."""
        if self.arenas:
            return self.arenas[0].device
        return next((p.device for p in self.pending), torch.device("cpu"))

    # -- laying out ------------------------------------------------------------------------------------------------

    def register(self, group: dict[str, Any]) -> None:
        """Takes a group's trainable parameters in; they are laid out at first use."""
        self.names.update(zip(group["params"], group.get("param_names") or (), strict=False))
        self._take([p for p in group["params"] if p.requires_grad])
        self.frozen += [p for p in group["params"] if not p.requires_grad]

    def _take(self, params: list[torch.nn.Parameter]) -> None:
        for p in params:
            self.watch(p)
            self.first_versions[p] = p._version
        self.pending += params

    def build(self) -> None:
        """Lays out what is pending. Makes no collective, but for a late process group."""
        if not self.pending:
            return
        self.adopt_group()
        devices = {p.device for p in self.pending} | {arena.device for arena in self.arenas}
        if len(devices) > 1:
            raise RuntimeError(f"all parameters must be on one device; they are on {sorted(map(str, devices))}")
        params, self.pending = self.pending, []
        arena = self._arena(params, params)
        self.arenas.append(arena)
        self.params += params
        self.places.update((p, (arena, k)) for k, p in enumerate(params))
        self.versions += [self.first_versions.pop(p) for p in params]
        self.changed()
        _log.info(
            "rank %d of %d (x %d): %d parameters, %d elements on %s, %d buckets, %d bytes of state here, %s kernels",
            self.ranks.rank,
            self.ranks.world_size,
            self.ranks.replicas,
            len(params),
            sum(s.numel for s in arena.layout.specs),
            arena.device,
            len(arena.layout.buckets),
            arena.planned_state_bytes(),
            ops.cpu_level() if arena.device.type == "cpu" else arena.device.type,
        )

    def plan(self) -> Arena:
        """The arena that `build` would make of what is pending, without memory."""
        return self._arena([torch.nn.Parameter(torch.empty_like(p, device="meta")) for p in self.pending], self.pending)

    def _arena(self, params: list[torch.nn.Parameter], owners: list[torch.nn.Parameter]) -> Arena:
        s, ranks = self.settings, self.ranks
        layout = Layout(specs_of(params), ranks.world_size, s.bucket_cap_bytes)
        apart = s.overlap_reduce and not ranks.alone
        return Arena(params, layout, ranks.rank, len(self.params), apart, s.split, self.wants_amsgrad(owners))

    def wants_amsgrad(self, params: list[torch.nn.Parameter]) -> list[bool]:
        """Per parameter, whether its group asks for amsgrad."""
        group_of = {p: group for group in self.groups for p in group["params"]}
        return [bool(group_of[p].get("amsgrad", False)) for p in params]

    def thawed(self) -> list[torch.nn.Parameter]:
        """Parameters that were frozen when they came and are trainable now."""
        return [p for p in self.frozen if p.requires_grad]

    def lay_out(self, params: list[torch.nn.Parameter]) -> None:
        """Takes thawed parameters in and lays them out."""
        self.frozen = [p for p in self.frozen if not p.requires_grad]
        self._take(params)
        self.build()

    def adopt_group(self) -> None:
        """Takes a default process group that was made after the optimizer. Collective where there is one to take."""
        if self.ranks.initialized or not (dist.is_available() and dist.is_initialized()):
            return
        ranks = Ranks(self.settings.process_group, self.settings.replicate_group)
        if self.arenas and not ranks.alone:
            raise RuntimeError(
                "torch.distributed was initialised after this optimizer had been used as a single rank; "
                "make the process group first, or make the optimizer anew"
            )
        self.ranks = ranks
        self.adopted(ranks)
        if ranks.alone:
            return
        params = self.numbered()
        shapes = zlib.crc32(repr([(tuple(p.shape), str(p.dtype), p.requires_grad) for p in params]).encode())
        rows = ranks.gather_integers([shapes, weights_digest(params)])
        for what, column in (("parameters", 0), ("weights", 1)):
            if len({row[column] for row in rows}) > 1:
                raise ValueError(
                    f"the process group was made after the optimizer, and the {what} differ between ranks; make "
                    "the group first (then rank 0's weights are sent to all), or load the same weights everywhere"
                )

    # -- what others did -------------------------------------------------------------------------------------------

    def follow(self, faults: Faults) -> list[int]:
        """Takes moved parameters back into the buffers, reports cast ones; -> numbers of those that may be edited."""
        for a, arena in enumerate(self.arenas):
            at, first = arena.param_at, arena.first
            if [p.data_ptr() for p in arena.params] == at:
                continue
            moved = [k for k, p in enumerate(arena.params) if p.data_ptr() != at[k]]
            fitting = [k for k in moved if not self._misfit(arena, k, faults)]
            devices = {p.device for p in arena.params}
            if devices == {arena.device}:
                for k in fitting:
                    arena.adopt_param(k, arena.params[k])
            elif len(devices) > 1:
                faults.append((RuntimeError, f"parameters were moved to several devices: {sorted(map(str, devices))}"))
                continue
            elif len(fitting) == len(moved):
                self._move(a)
            self.moved.update(first + k for k in fitting)
        versions = [p._version for p in self.params]
        if versions == self.versions and not self.moved:
            return []
        edited = {k for k, (now, seen) in enumerate(zip(versions, self.versions, strict=True)) if now != seen}
        return sorted(self.moved | edited)

    def _misfit(self, arena: Arena, k: int, faults: Faults) -> bool:
        p, dtype, shape = arena.params[k], arena.layout.specs[k].dtype, arena.grad_views[k].shape
        if p.dtype == dtype and p.shape == shape:
            return False
        text = (
            f"parameter {self.name_of(p)} was {dtype} of shape {tuple(shape)} and is now {p.dtype} of shape "
            f"{tuple(p.shape)}: cast the model before making the optimizer"
        )
        faults.append((RuntimeError, text))
        return True

    def _move(self, a: int) -> None:
        new = self.arenas[a].on_device_of_params()
        self.arenas[a] = new
        self.places.update((p, (new, k)) for k, p in enumerate(new.params))
        self.changed()

    def take_up(self, edited: list[int]) -> None:
        """Masters := weights where they differ, for these parameters. Doing it twice does no harm."""
        if edited:
            flags = torch.zeros(len(self.params), dtype=torch.uint8)
            flags[edited] = 1
            flags = flags.to(self.device, non_blocking=True)
            for arena in self.arenas:
                arena.refresh_masters(flags)

    def seen(self, edited: list[int]) -> None:
        """All ranks have taken these edits up."""
        for k in edited:
            self.versions[k] = self.params[k]._version
        self.moved.clear()
