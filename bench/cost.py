"""The cost formula of docs/scaling.md against measured steps on gloo ranks of this machine.

    python bench/cost.py [--ranks 2 4 8] [--numel 33554432] [--json FILE]

First the constants, at each number of ranks, with all ranks at work: the latency and the bandwidth of a reduction and
of a gather (the line through a small and an 8 MiB bucket), the time of the control message, and the memory bandwidth
of the kernel's streams. Then steps of a bf16 model with nothing to hide behind (overlap_reduce=False, gradients that
lie in their buffers), with buckets of two sizes. Times are the slowest rank's, medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import common
import torch
from torch import Tensor, nn

from zero1_cuda import Zero1AdamW, ops
from zero1_cuda.comm.collectives import Scratch, start_gather, start_reduction
from zero1_cuda.comm.grid import ProcessGrid

REPEATS = 9
SMALL, LARGE = 2**12, 2**22  # elements of a bucket
CAPS_MB = (1.0, 8.0)
PARAM = 2**18  # elements


def clock(call: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Seconds of a call that all ranks make: the slowest rank's, the median of several."""
    call()
    return statistics.median(common.slowest(call) for _ in range(repeats))


def line(call: Callable[[Tensor], Any]) -> tuple[float, float]:
    """Seconds that a bucket takes whatever its size, and bytes of a bucket per second beyond that."""
    small, large = (torch.zeros(numel, dtype=torch.bfloat16) for numel in (SMALL, LARGE))
    a, b = clock(lambda: call(small)), clock(lambda: call(large))
    slope = (b - a) / (large.nbytes - small.nbytes)
    return max(0.0, a - slope * small.nbytes), 1 / slope


def constants(grid: ProcessGrid, words: int) -> dict[str, float]:
    world = grid.world_size
    scratch, norm = Scratch(), torch.zeros(ops.NORM_WORDS, dtype=torch.int64)

    def reduce(bucket: Tensor) -> None:
        out = bucket[: bucket.numel() // world]
        start_reduction(grid, bucket, out, norm, scratch, 1, exchange=True).finish()

    control = torch.zeros(words, dtype=torch.int64)
    numel = LARGE
    half, whole = torch.zeros(numel, dtype=torch.bfloat16), [torch.zeros(numel) for _ in range(3)]
    streams = clock(lambda: torch.ops.zero1.stream_limit(half, half.clone(), whole[0], None, whole[1], whole[2], None))
    copy = clock(half.clone)
    found: dict[str, float] = {}
    found["reduce_latency_s"], found["reduce_bytes_per_s"] = line(reduce)
    found["gather_latency_s"], found["gather_bytes_per_s"] = line(lambda bucket: start_gather(grid, bucket).finish())
    found["control_s"] = clock(lambda: grid.all_reduce_sum_(control))
    found["memory_bytes_per_s"] = 28 * numel / (streams - copy)
    return found


def predicted(c: dict[str, float], numel: int, buckets: int, world: int) -> dict[str, float]:
    """Seconds by part; docs/scaling.md has the formula."""
    return {
        "reduce": buckets * c["reduce_latency_s"] + 2 * numel / c["reduce_bytes_per_s"],
        "kernel": 28 * numel / world / c["memory_bytes_per_s"],
        "gather": buckets * c["gather_latency_s"] + 2 * numel / c["gather_bytes_per_s"],
        "control": c["control_s"],
    }


def worker(rank: int, world: int, numel: int) -> dict[str, Any]:
    count = numel // PARAM
    c = constants(ProcessGrid(), ops.CONTROL_FLAGS + count)
    steps = []
    for cap in CAPS_MB:
        params = [nn.Parameter(torch.zeros(PARAM, dtype=torch.bfloat16)) for _ in range(count)]
        opt = Zero1AdamW(params, bucket_cap_mb=cap, overlap_reduce=False)
        for p in params:
            p.grad = torch.zeros_like(p)
        opt.step()

        def step(opt: Zero1AdamW = opt) -> None:
            opt.zero_grad(set_to_none=False)
            opt.step()

        zero = clock(lambda opt=opt: opt.zero_grad(set_to_none=False))  # type: ignore[misc]
        measured = clock(step) - zero
        buckets = len(opt._runner.reducer.buckets)
        parts = predicted(c, numel, buckets, world)
        whole = sum(parts.values())
        steps.append({"buckets": buckets, "measured_s": measured, "predicted_s": whole, "parts_s": parts})
    return {"ranks": world, "constants": c, "steps": steps}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--numel", type=int, default=2**25, help=f"parameters; a multiple of {PARAM}")
    args = parser.parse_args()
    runs = []
    print("ranks  buckets  reduce us  GB/s  gather us  GB/s  memory GB/s  measured ms  formula ms  ratio")
    for world in args.ranks:
        found = common.run_ranks(world, worker, args.numel)
        runs.append(found)
        c = found["constants"]
        for step in found["steps"]:
            links = "".join(
                f"{1e6 * c[f'{way}_latency_s']:11.0f}{c[f'{way}_bytes_per_s'] / 1e9:6.2f}"
                for way in ("reduce", "gather")
            )
            measured, formula = step["measured_s"], step["predicted_s"]
            times = f"{1e3 * measured:13.1f}{1e3 * formula:12.1f}{measured / formula:7.2f}"
            print(f"{world:>5}{step['buckets']:>9}{links}{c['memory_bytes_per_s'] / 1e9:>13.1f}{times}", flush=True)
    common.write(args.json, {"numel": args.numel, "runs": runs})


if __name__ == "__main__":
    main()
