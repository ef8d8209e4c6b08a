"""What arguments, group options and parameters may be; errors name the argument, what was wanted and what came."""

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


def check_groups(groups: list[dict[str, Any]]) -> None:
    """All of the above, for all parameter groups of one optimizer."""
    devices = set()
    for g, group in enumerate(groups):
        check_options(group, f"parameter group {g}: ")
        names = group.get("param_names")
        for i, p in enumerate(group["params"]):
            what = f"parameter {names[i]!r}" if names else f"parameter {i} of group {g}, shape {tuple(p.shape)},"
            check_param(p, what)
            devices.add(p.device)
    if len(devices) > 1:
        raise ValueError(f"all parameters must be on one device; they are on {sorted(map(str, devices))}")
    check_apart([p for group in groups for p in group["params"]])


@dataclass(frozen=True)
class Config:
    """The constructor's arguments that are not group options. Making one checks them.

    Raises:
        ValueError, TypeError: naming the argument, what was wanted and what came.
    """

    #: whether weight decay is apart from the gradient (AdamW), or added to it (Adam); the class decides
    decoupled: bool
    #: nothing in a step depends on host values; a tensor lr is read on the device
    capturable: bool
    #: the ranks that share one state; None: all
    process_group: dist.ProcessGroup | None
    #: ranks that hold the same shard; gradients are averaged over both groups
    replicate_group: dist.ProcessGroup | None
    #: clip the global norm on every step
    max_grad_norm: float | None
    #: a step whose averaged, unscaled gradients are not all finite changes nothing, on any rank
    skip_nonfinite: bool
    #: "fp32", or "split": a bf16 parameter and a 16-bit remainder are the master
    master_weights: str
    #: MiB of gradient per bucket; None: chosen from the number of ranks, dtype and parameter sizes
    bucket_cap_mb: float | None
    #: reduce while backward runs; False: in place inside step()
    overlap_reduce: bool
    #: a module whose forward waits for each bucket's parameters just before it needs them
    overlap_gather: torch.nn.Module | None
    #: send 16-bit gradients and sum them in fp32 in rank order; None: where gloo serves the device
    reduce_in_fp32: bool | None

    def __post_init__(self) -> None:
        if self.master_weights not in ("fp32", "split"):
            raise ValueError(f"master_weights: 'fp32' or 'split' wanted, got {self.master_weights!r}")
        for name, value in (("max_grad_norm", self.max_grad_norm), ("bucket_cap_mb", self.bucket_cap_mb)):
            if value is not None and not float(value) > 0.0:
                raise ValueError(f"{name}: a number above 0 or None wanted, got {value!r}")
        module = self.overlap_gather
        if module is not None and not isinstance(module, torch.nn.Module):
            raise TypeError(f"overlap_gather: a torch.nn.Module or None wanted, got {type(module).__name__}")

    @property
    def split(self) -> bool:
        return self.master_weights == "split"

    @property
    def bucket_cap_bytes(self) -> int | None:
        return None if self.bucket_cap_mb is None else max(1, int(self.bucket_cap_mb * 2**20))
