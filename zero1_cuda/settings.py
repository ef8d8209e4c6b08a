"""The constructor's arguments that are not group options, once they have been checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Settings:
    """See the arguments of Zero1AdamW."""

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
