"""`overlap_gather`: a module's forward waits for buckets just before it needs them.

Buckets are waited for per unit. A unit is an element of a container (ModuleList, ModuleDict, Sequential), as a rule a
block, with all of its children, since a block may read a child's weight without calling the child
(torch.nn.MultiheadAttention does so with out_proj). What lies in no unit belongs to the root, whose forward may read it
at any time (`F.linear(x, self.head.weight)`). Gathers are started in the same order: the root's, then unit by unit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor, nn
from torch._compile import _disable_dynamo

from .bucket import BucketState
from .reducer import Reducer

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def units_of(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost containers in `module`, in order; of containers in containers, the inner ones."""
    for child in module.children():
        if isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS):
            yield child
        else:
            yield from units_of(child)


class Waiter(Protocol):
    """Whoever knows what is on its way: the runner."""

    def wait_for(self, params: list[nn.Parameter] | None) -> None: ...


class GatherUnits:
    """The hooks of one module, and the order in which its forward needs the parameters."""

    def __init__(self, root: nn.Module, runner: Waiter) -> None:
        units = [unit for unit in units_of(root) if next(unit.parameters(), None) is not None]
        inside = {module for unit in units for module in unit.modules()}
        rest = [p for module in root.modules() if module not in inside for p in module.parameters(recurse=False)]
        self._needed = [rest, *(list(unit.parameters()) for unit in units)]
        me = weakref.ref(runner)
        for module, params in zip([root, *units], self._needed, strict=True):
            module.register_forward_pre_hook(_waiting_for(params, me))
        root.register_state_dict_pre_hook(_waiting_for(None, me))

    def order(self, reducer: Reducer) -> list[BucketState]:
        """All buckets, those first that are needed first."""
        params: list[Tensor] = [p for needed in self._needed for p in needed]
        return list(dict.fromkeys([*reducer.buckets_of(params), *reducer.buckets[::-1]]))


def _waiting_for(params: list[nn.Parameter] | None, me: weakref.ref[Waiter]) -> Callable[..., None]:
    @_disable_dynamo
    def wait(*_: Any) -> None:
        runner = me()
        if runner is not None:
            runner.wait_for(params)

    return wait
