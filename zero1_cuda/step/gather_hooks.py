"""`overlap_gather`: a module's forward waits for each bucket just before the first module that uses it runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .runner import Engine


def watch_module(root: torch.nn.Module, engine: Engine) -> None:
    """Hooks every module of `root` that has parameters, and state_dict() of the whole."""
    me = weakref.ref(engine)

    def wait(module: torch.nn.Module, *_: Any) -> None:
        engine = me()
        if engine is not None:
            place = engine.reducer.place
            runs = [place[p][0] for p in module.parameters(recurse=False) if p in place]
            engine.reducer.finish_gathers(runs)

    def wait_all(*_: Any) -> None:
        engine = me()
        if engine is not None:
            engine.reducer.finish_gathers()

    for module in root.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(wait)
    root.register_state_dict_pre_hook(wait_all)
