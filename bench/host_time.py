"""Host time of a step per parameter: many tiny parameters, so that next to nothing but the host's work is left.

    python bench/host_time.py [--params 2000] [--ranks 1 2] [--steps 30] [--json FILE]

Microseconds per parameter, median, of backward with its hooks, step() and zero_grad(); beside them the same of
torch.optim.AdamW in the same run, which adds the gradients' arrival and, on several ranks, sends nothing.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import common
import torch
from torch import nn

from zero1_cuda import Zero1AdamW

PARTS = ("backward", "step", "zero_grad")


def cycle(params: list[nn.Parameter], opt: Any) -> list[float]:
    """Seconds of each part of one step."""
    loss = torch.stack([p.sum() for p in params]).sum()
    at = [time.perf_counter()]
    for call in (loss.backward, opt.step, opt.zero_grad):
        call()
        at.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(at)]


def worker(rank: int, world: int, count: int, steps: int) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    sides = {}
    for name, make in (("Zero1AdamW", Zero1AdamW), ("torch.optim.AdamW", torch.optim.AdamW)):
        params = [nn.Parameter(torch.zeros(16)) for _ in range(count)]
        sides[name] = (params, make(params))
    times: dict[str, list[list[float]]] = {name: [] for name in sides}
    for k in range(steps + 3):
        for name, side in sides.items():
            took = cycle(*side)
            if k >= 3:  # the first ones lay out and warm up
                times[name].append(took)
    return {
        name: {
            part: 1e6 * statistics.median(column) / count
            for part, column in zip(PARTS, zip(*rows, strict=True), strict=True)
        }
        for name, rows in times.items()
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--params", type=int, default=2000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    found: dict[str, Any] = {"cpu": common.cpu_name(), "params": args.params, "microseconds_per_parameter": {}}
    for world in args.ranks:
        result = common.run_ranks(world, worker, args.params, args.steps)
        found["microseconds_per_parameter"][str(world)] = result
        for name, parts in result.items():
            told = ", ".join(f"{part} {value:.2f}" for part, value in parts.items())
            print(f"{world} ranks  {name:18} {sum(parts.values()):6.2f} us per parameter: {told}")
    common.write(args.json, found)


if __name__ == "__main__":
    main()
