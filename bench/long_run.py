"""A long run of the example's model on two gloo ranks: the loss against DDP + AdamW, and what the process holds.

    python bench/long_run.py [--steps 2000] [--ranks 2] [--json FILE] [--plot FILE.svg]

Both ways train examples/train_gpt.py's GPT in bf16 on the same bytes, with fp32 masters, the same schedule and the same
clipping. Every step's loss is the mean over ranks. Every 50 steps each rank counts its resident memory, open files and
threads; what is reported is the largest rank's.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import nn

from zero1_cuda import Zero1AdamW

sys.path.insert(0, str(common.ROOT / "examples"))
from train_gpt import GPT, load_text, sample

LR, BETAS, DECAY, CLIP, WARMUP = 2e-3, (0.9, 0.95), 0.1, 1.0, 20
BATCH, CONTEXT = 16, 128
EVERY = 50  # steps between two looks at the process
Step = Callable[[float], None]


def zero1(model: nn.Module) -> tuple[nn.Module, Step]:
    opt = Zero1AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY, max_grad_norm=CLIP)

    def step(lr: float) -> None:
        opt.param_groups[0]["lr"] = lr
        opt.step()
        opt.zero_grad()

    return model, step


def ddp(model: nn.Module) -> tuple[nn.Module, Step]:
    params = list(model.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in params]
    opt = torch.optim.AdamW(masters, lr=LR, betas=BETAS, weight_decay=DECAY, fused=True)

    def step(lr: float) -> None:
        opt.param_groups[0]["lr"] = lr
        with torch.no_grad():
            for p, m in zip(params, masters, strict=True):
                m.grad = p.grad.float()  # type: ignore[union-attr]
                p.grad = None
            nn.utils.clip_grad_norm_(masters, CLIP)
            opt.step()
            for p, m in zip(params, masters, strict=True):
                m.grad = None
                p.copy_(m)

    return nn.parallel.DistributedDataParallel(model), step


WAYS = {"Zero1AdamW": zero1, "DDP + AdamW": ddp}


def held() -> list[int]:
    """Resident bytes, open files, threads."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return [resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]


def worker(rank: int, world: int, name: str, steps: int) -> dict[str, Any]:
    text = load_text()
    torch.manual_seed(1)
    bare = GPT(layers=4, width=192, heads=6, context=CONTEXT).bfloat16()
    model, after = WAYS[name](bare)
    losses, looks, began = torch.zeros(steps), [], time.perf_counter()
    for step in range(steps):
        torch.manual_seed((1_000_003 + step) * 65_536 + rank)
        x, y = sample(text, BATCH, CONTEXT, torch.device("cpu"))
        loss = model(x, y)
        loss.backward()
        half = 0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP))
        after(LR * (min(1.0, (step + 1) / WARMUP) if step < WARMUP else half))
        losses[step] = loss.detach()
        if (step + 1) % min(EVERY, steps) == 0:
            now = torch.tensor(held())
            dist.all_reduce(now, op=dist.ReduceOp.MAX)
            looks.append([step + 1, *now.tolist()])
            if rank == 0:
                print(f"{name:>12} step {step + 1:>5} loss {losses[step]:.3f}", flush=True)
    seconds = time.perf_counter() - began
    dist.all_reduce(losses)
    return {
        "way": name,
        "seconds": seconds,
        "loss": [round(float(x), 5) for x in losses / world],
        "looks": [dict(zip(("step", "resident_bytes", "files", "threads"), look, strict=True)) for look in looks],
    }


def tail(row: dict[str, Any], count: int = 100) -> float:
    """Mean loss of the last steps."""
    last = row["loss"][-count:]
    return sum(last) / len(last)


def plot(rows: list[dict[str, Any]], path: str) -> None:
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6), height_ratios=(3, 1), layout="constrained")
    for row, style in zip(rows, ({"lw": 2.5, "alpha": 0.5}, {"lw": 0.8, "color": "black"}), strict=True):
        loss = torch.tensor(row["loss"])
        smooth = loss.unfold(0, min(20, len(loss)), 1).mean(1)
        above.plot(range(len(loss) - len(smooth), len(loss)), smooth, label=row["way"], **style)
    for row in rows:
        below.plot([look["step"] for look in row["looks"]], [look["resident_bytes"] / 1e6 for look in row["looks"]])
    above.set(ylabel="loss, mean of 20 steps")
    above.legend()
    below.set(xlabel="step", ylabel="resident MB")
    below.set_ylim(0, 1.2 * below.get_ylim()[1])
    pyplot.rcParams["svg.hashsalt"] = "zero1"  # the same file for the same figures
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--plot", help="an SVG; needs matplotlib")
    args = parser.parse_args()
    rows = [common.run_ranks(args.ranks, worker, name, args.steps) for name in WAYS]
    for row in rows:
        first, last = row["looks"][0], row["looks"][-1]
        grown = ", ".join(f"{key} {first[key]:,} -> {last[key]:,}" for key in ("resident_bytes", "files", "threads"))
        print(
            f"{row['way']:>12}: loss of the last 100 steps {tail(row):.4f}, step {first['step']} to the last: {grown}"
        )
    common.write(args.json, {"ranks": args.ranks, "steps": args.steps, "rows": rows}, indent=None)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
