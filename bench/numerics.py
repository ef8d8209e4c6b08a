"""How far the fp32 step is from its formula in double precision, beside torch's own AdamW.

    python bench/numerics.py [--elements 10000000] [--steps 1000] [--path-elements 100000]

Errors are counted in units in the last place: of the result, or of the largest term of the sums behind it where that
is larger (a result that nearly cancels has no digits of its own to lose). The reference takes the same fp32 inputs, and
the options as they are; or else rounded to fp32 as the step has them, which leaves the error of the arithmetic alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import torch
from torch import Tensor

from zero1_cuda import Zero1AdamW
from zero1_cuda.reference import fp32, power

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
NAMES = ("weight", "exp_avg", "exp_avg_sq")


@dataclass
class State:
    """fp32 or fp64 tensors of one shape, and how many steps were made."""

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.weight, self.exp_avg, self.exp_avg_sq


def random_state(numel: int, step: int, generator: torch.Generator) -> tuple[State, Tensor]:
    """Weights around 0.02, a gradient around 1e-3 and moments as such gradients leave them, over 13 binades."""

    def normal(scale: float) -> Tensor:
        return torch.randn(numel, generator=generator) * scale

    spread = torch.exp2(torch.randint(-6, 7, (numel,), generator=generator).float())
    exp_avg = normal(3e-4) * spread
    exp_avg_sq = exp_avg.square() + (normal(1e-3) * spread).square()  # no mean is larger than the root mean square
    return State(normal(0.02), exp_avg, exp_avg_sq, step), normal(1e-3) * spread


def exact_step(s: State, grad: Tensor, rounded: bool = False) -> tuple[State, list[Tensor]]:
    """AdamW in double; and for each result the magnitude of the largest term of the sums behind it.

    rounded: with the fp32 numbers that the options come to, as in csrc/include/zero1/control_math.h.
    """
    number = fp32 if rounded else float
    lr, (beta1, beta2), eps, decay = (OPTIONS[name] for name in ("lr", "betas", "eps", "weight_decay"))
    g, t = grad.double(), s.step + 1
    terms = [  # of m = lerp(m, g, 1 - beta1) and v = beta2 * v + (1 - beta2) * g * g
        ((1 - number(1 - beta1)) * s.exp_avg.double(), number(1 - beta1) * g),
        (number(beta2) * s.exp_avg_sq.double(), number(1 - beta2) * g * g),
    ]
    m, v = (a + b for a, b in terms)
    kept = s.weight.double() * number(1 - lr * decay)
    step_size, inverse_root = number(lr / (1 - power(beta1, t))), number(1 / math.sqrt(1 - power(beta2, t)))
    factor = step_size / (v.sqrt() * inverse_root + number(eps))
    new = State(kept - factor * m, m, v, t)
    moments = [torch.maximum(a.abs(), b.abs()) for a, b in terms]
    largest = [torch.maximum(kept.abs(), factor * moments[0]), *moments]
    return new, [torch.maximum(a, x.abs()) for a, x in zip(largest, new.tensors(), strict=True)]


def ulp(magnitude: Tensor) -> Tensor:
    """The distance of neighbouring fp32 values at this magnitude."""
    return torch.exp2(magnitude.clamp_min(2.0**-126).log2().floor() - 23)


def optimizer(make: Any, s: State) -> tuple[torch.nn.Parameter, Any]:
    """An optimizer whose one parameter is in this state."""
    p = torch.nn.Parameter(s.weight.clone())
    opt = make([p])
    p.grad = torch.zeros_like(p)
    opt.step()  # makes the state, which is then set
    p.data.copy_(s.weight)
    for name, value in (("exp_avg", s.exp_avg), ("exp_avg_sq", s.exp_avg_sq)):
        opt.state[p][name].copy_(value.view_as(opt.state[p][name]))
    opt.state[p]["step"].fill_(s.step)
    return p, opt


def one_step(
    make: Any, numel: int, rounded: bool = False, step: int = 9, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """{result: (max, mean) error} of one step from a random state."""
    s, grad = random_state(numel, step, torch.Generator().manual_seed(seed))
    p, opt = optimizer(make, s)
    p.grad = grad.clone()
    opt.step()
    got = (p.detach(), opt.state[p]["exp_avg"], opt.state[p]["exp_avg_sq"])
    wanted, largest = exact_step(s, grad, rounded)
    found = {}
    for name, a, b, magnitude in zip(NAMES, got, wanted.tensors(), largest, strict=True):
        error = (a.double().view(-1) - b).abs() / ulp(magnitude)
        found[name] = (float(error.max()), float(error.mean()))
    return found


def path(make: Any, numel: int, steps: int, rounded: bool = False, seed: int = 1) -> dict[str, tuple[float, float]]:
    """{result: (max, mean) error} after many steps with the same gradients, which have a mean and noise."""
    generator = torch.Generator().manual_seed(seed)
    s = State(torch.randn(numel, generator=generator) * 0.02, *(torch.zeros(numel) for _ in range(2)), 0)
    drift = torch.randn(numel, generator=generator) * 1e-3
    p, opt = optimizer(make, s)
    exact = State(*(t.double() for t in s.tensors()), 0)
    far = [t.abs() for t in exact.tensors()]  # the largest that each has been: roundings are made at that magnitude
    for _ in range(steps):
        grad = torch.randn(numel, generator=generator) * 2e-3 + drift
        p.grad = grad.clone()
        opt.step()
        exact, largest = exact_step(exact, grad, rounded)
        far = [torch.maximum(a, b) for a, b in zip(far, largest, strict=True)]
    got = (p.detach(), opt.state[p]["exp_avg"], opt.state[p]["exp_avg_sq"])
    found = {}
    for name, a, b, magnitude in zip(NAMES, got, exact.tensors(), far, strict=True):
        error = (a.double().view(-1) - b).abs() / ulp(magnitude)
        found[name] = (float(error.max()), float(error.mean()))
    return found


def ours(params: list[torch.nn.Parameter]) -> Zero1AdamW:
    return Zero1AdamW(params, **OPTIONS)


def torchs(params: list[torch.nn.Parameter], **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **OPTIONS, **how)


ROWS = [
    ("zero1_cuda", ours, False),
    ("zero1_cuda, rounded options", ours, True),
    ("torch", partial(torchs, foreach=False), False),
    ("torch, fused", partial(torchs, fused=True), False),
]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--elements", type=int, default=10_000_000, help="of the one step")
    parser.add_argument("--steps", type=int, default=1000, help="of the path")
    parser.add_argument("--path-elements", type=int, default=100_000)
    args = parser.parse_args()
    rows = []
    for title, measure in (
        (f"one step, {args.elements} elements", partial(one_step, numel=args.elements)),
        (
            f"{args.steps} steps, {args.path_elements} elements",
            partial(path, numel=args.path_elements, steps=args.steps),
        ),
    ):
        print(f"{title + ': ulp, max / mean':50}" + "".join(f"{name:>20}" for name in NAMES))
        for who, make, rounded in ROWS:
            errors = measure(make, rounded=rounded)
            rows.append({"what": title, "who": who, "ulp_max_mean": {n: list(errors[n]) for n in NAMES}})
            print(f"{who:50}" + "".join(f"{errors[n][0]:>11.2f} /{errors[n][1]:7.3f}" for n in NAMES), flush=True)
    common.write(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
