"""The step in plain torch, on whole fp32 tensors and in the kernels' order of operations: what tests compare with.

The results equal those of the compiled ops to the bit (NaN payloads aside), as long as torch's own kernels neither
contract nor approximate, which holds on the CPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .ops import CHUNK, NORM_LIMBS


def power(base: float, exponent: int) -> float:
    """base ** exponent in double by repeated squaring, so without libm: the bits of control_math.h."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def fp32(x: float) -> float:
    """The nearest fp32 value."""
    return float(torch.tensor(x, dtype=torch.float64).float())


def adam_reference(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    maximize: bool = False,
    grad_factor: float = 1.0,
) -> None:
    """One step of torch.optim.AdamW (`decoupled`) or Adam, in place; the formula and its order are in adam_math.h.

    master, exp_avg, exp_avg_sq, max_exp_avg_sq: fp32 tensors of one shape; grad: any dtype. `step` counts from 1.
    grad_factor: clip factor / loss scale.
    """
    beta1, beta2 = betas
    g = grad.float() * fp32(-grad_factor if maximize else grad_factor)
    p = master * fp32(1.0 - lr * weight_decay if decoupled else 1.0)
    if not decoupled and weight_decay != 0.0:
        g = g + p * fp32(weight_decay)
    d = g - exp_avg
    m = exp_avg + d * fp32(1.0 - beta1) if fp32(1.0 - beta1) < 0.5 else g - d * fp32(beta1)
    v = exp_avg_sq * fp32(beta2) + (g * fp32(1.0 - beta2)) * g
    if max_exp_avg_sq is not None:
        max_exp_avg_sq.copy_(torch.maximum(max_exp_avg_sq, v))
    # torch's fp32 square root on the CPU is MKL's, which is not always correctly rounded; by way of double it is
    root = (v if max_exp_avg_sq is None else max_exp_avg_sq).double().sqrt().float()
    denom = root * fp32(1.0 / math.sqrt(1.0 - power(beta2, step))) + fp32(eps)
    p = p - (m / denom) * fp32(lr / (1.0 - power(beta1, step)))
    master.copy_(p)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


def settle_tie(master: Tensor) -> Tensor:
    """A bf16 parameter's fp32 master as it is stored: exactly halfway below an even bf16 value, one unit up."""
    bits = master.view(torch.int32)
    return (bits + ((bits & 0x1FFFF) == 0x18000) * ~master.isnan()).to(torch.int32).view(torch.float32)


def chunk_sums(x: Tensor) -> Tensor:
    """fp32 sums of squares of the chunks of 128 elements of a flat tensor, by the tree of norm_math.h."""
    sums = torch.nn.functional.pad(x.float(), (0, -x.numel() % CHUNK)).square().view(-1, CHUNK)
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    return sums[:, 0]


def norm_integer(norm: Tensor) -> int:
    """The limbs of a norm as one integer, in units of 2^-149."""
    return sum(int(word) << (32 * i) for i, word in enumerate(norm[:NORM_LIMBS].tolist()))
