"""What group options and parameters may be; errors name the argument, what was wanted and what came."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_options(options: dict[str, Any], what: str = "") -> None:
    """ValueError / TypeError for an option outside its range, as torch.optim.AdamW checks them."""
    lr, betas = options["lr"], options["betas"]
    if torch.is_tensor(lr) and lr.numel() != 1:
        raise ValueError(f"{what}lr: a float or a tensor of one element wanted, got shape {tuple(lr.shape)}")
    if (not torch.is_tensor(lr) and isinstance(lr, (bool, str))) or not float(lr) >= 0.0:
        raise ValueError(f"{what}lr: at least 0 wanted, got {lr!r}")
    if len(betas) != 2:
        raise ValueError(f"{what}betas: two numbers wanted, got {betas!r}")
    for i, beta in enumerate(betas):
        if torch.is_tensor(beta) and beta.numel() != 1:
            raise ValueError(f"{what}betas[{i}]: a number wanted, got a tensor of shape {tuple(beta.shape)}")
        if not 0.0 <= float(beta) < 1.0:
            raise ValueError(f"{what}betas[{i}]: a number in [0, 1) wanted, got {beta!r}")
    for name in ("eps", "weight_decay"):
        if not float(options[name]) >= 0.0:
            raise ValueError(f"{what}{name}: at least 0 wanted, got {options[name]!r}")


def check_param(p: Tensor, what: str) -> None:
    """TypeError / ValueError for a tensor that cannot be a parameter here."""
    plain = type(p) in (torch.Tensor, torch.nn.Parameter) or (
        isinstance(p, torch.nn.Parameter)
        and type(p).__torch_dispatch__ is torch.nn.Parameter.__torch_dispatch__
        and not torch.nn.parameter.is_lazy(p)
    )
    if not plain:
        raise TypeError(f"{what} is a {type(p).__name__}; plain tensors wanted (no DTensor, no tensor subclass)")
    if p.layout != torch.strided or p.is_quantized:
        raise TypeError(f"{what} is sparse or quantised; dense tensors wanted")
    if p.dtype not in DTYPES:
        raise TypeError(f"{what} is {p.dtype}; torch.float16, torch.bfloat16 or torch.float32 wanted")
    if p.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{what} is on {p.device}; CPU or CUDA wanted")


def check_apart(params: list[Tensor]) -> None:
    """ValueError for two parameters over the same memory: as views of a flat buffer they would no longer be tied."""
    spans = [
        (p.data_ptr(), p.data_ptr() + p.nbytes, i)
        for i, p in enumerate(params)
        if p.numel() and p.device.type != "meta" and p.is_contiguous()
    ]
    for (_, end, i), (begin, _, j) in itertools.pairwise(sorted(spans)):
        if begin < end:
            shapes = [tuple(params[k].shape) for k in (i, j)]
            raise ValueError(
                f"parameters {i} and {j} (shapes {shapes[0]} and {shapes[1]}) share memory; tie weights by using one "
                "Parameter twice"
            )


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
