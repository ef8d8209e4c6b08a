"""ZeRO stage 1 for PyTorch: an Adam whose fp32 state is split over the ranks, and one fused kernel per step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .optimizer import Zero1Adam as Zero1Adam
    from .optimizer import Zero1AdamW as Zero1AdamW

__version__ = "0.1.0"
__all__ = ["Zero1Adam", "Zero1AdamW"]


def __getattr__(name: str) -> Any:
    # On demand, so that `python -m zero1_cuda info` can say what is wrong where the extension does not load.
    if name in __all__:
        from . import optimizer

        return getattr(optimizer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
