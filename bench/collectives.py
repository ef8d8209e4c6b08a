"""Our reduction and gather against torch.distributed's own, on gloo ranks of this machine, in one run.

    python bench/collectives.py [--ranks 2] [--numel 67108864] [--json FILE]

One line per collective: median milliseconds and the ratio to torch's. Every call starts with a barrier and ends when
all ranks have their result; the two ways alternate, so that both see the same machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import common
import torch
import torch.distributed as dist

from zero1_cuda.comm.collectives import Scratch, start_gather, start_reduction
from zero1_cuda.comm.grid import ProcessGrid

# torch 2.13 renamed them
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

REPEATS = 7


def measure(ways: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median milliseconds of each way, the slowest rank's."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(REPEATS + 1):
        for name, way in ways.items():
            took = common.slowest(way)
            if repeat:  # the first one warms up
                times[name].append(1e3 * took)
    return {name: statistics.median(t) for name, t in times.items()}


def worker(rank: int, world: int, numel: int, bucket: int) -> dict[str, float]:
    grid = ProcessGrid()
    grads = torch.randn(numel, dtype=torch.bfloat16)
    out = torch.empty(numel // world, dtype=torch.bfloat16)
    params = torch.randn(numel, dtype=torch.bfloat16)
    norm = torch.zeros(16, dtype=torch.int64)
    mine = numel // world
    buckets = [slice(at, min(at + bucket * world, numel)) for at in range(0, numel, bucket * world)]
    scratch = Scratch()

    def reduce_ours() -> None:
        flying = []
        for tag, piece in enumerate(buckets):
            if len(flying) >= 3:
                flying.pop(0).finish()
            own = out[piece.start // world : piece.stop // world]
            flying.append(start_reduction(grid, grads[piece], own, norm, scratch, tag + 1, True))
        for pending in flying:
            pending.finish()

    def gather_ours() -> None:
        for pending in [start_gather(grid, params[piece]) for piece in buckets]:
            pending.finish()

    return measure(
        {
            "reduce": reduce_ours,
            "reduce_scatter_tensor": lambda: reduce_scatter_tensor(out, grads, op=dist.ReduceOp.AVG),
            "gather": gather_ours,
            "all_gather_into_tensor": lambda: all_gather_into_tensor(
                params, params[rank * mine : (rank + 1) * mine].clone()
            ),
        }
    )


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--numel", type=int, default=2**26, help="bf16 elements")
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    args = parser.parse_args()
    bucket = max(128, int(args.bucket_mb * 2**20 / 2 / args.ranks) // 128 * 128)
    args.numel = args.numel // (128 * args.ranks) * 128 * args.ranks
    found = common.run_ranks(args.ranks, worker, args.numel, bucket)
    rows = [
        {
            "what": ours,
            "ms": found[ours],
            "torch": theirs,
            "torch_ms": found[theirs],
            "ratio": found[theirs] / found[ours],
        }
        for ours, theirs in (("reduce", "reduce_scatter_tensor"), ("gather", "all_gather_into_tensor"))
    ]
    print(f"{args.ranks} gloo ranks, {args.numel} bf16 elements, torch {torch.__version__}")
    for row in rows:
        print(
            f"{row['what']:>8} {row['ms']:8.1f} ms   "
            f"{row['torch']:>24} {row['torch_ms']:8.1f} ms   {row['ratio']:5.2f}x"
        )
    common.write(args.json, {"ranks": args.ranks, "numel": args.numel, "rows": rows})


if __name__ == "__main__":
    main()
