"""A whole training step on gloo ranks of this machine: this optimizer and its peers, one model, the same data.

    python bench/step.py [--ranks 2 [4 ...]] [--width 4096] [--layers 4] [--steps 6] [--json FILE] [--plot FILE.svg]

For each way: milliseconds of a whole iteration, from the forward to the end of the step; what of it is beyond forward
and backward (which are measured alone, in the same run); bytes of tensors that live between steps, the rise of resident
memory at its peak, megabytes sent by a rank, and the last loss.

Iterations follow each other without a pause: with overlap_gather, the gather of one runs into the forward of the next.
Every way runs in fresh processes. What is not installed is left out and said. The plot has the bytes against the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn

LR = 1e-3
WARM_UP = 2  # iterations
Step = Callable[[], None]
Way = tuple[nn.Module, Callable[[Tensor], Any], Step]  # what to call, the backward, what to do after it


def build(width: int, layers: int, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [m for _ in range(layers) for m in (nn.Linear(width, width, bias=False), nn.GELU())]
    return nn.Sequential(*blocks).to(dtype)


def live_bytes() -> int:
    """Bytes under all tensors that Python knows, every address once."""
    gc.collect()
    spans = {}
    for o in gc.get_objects():
        if issubclass(type(o), Tensor):
            with contextlib.suppress(Exception):
                for t in (o, o.grad):
                    if t is not None:
                        s = getattr(t, "_local_tensor", t).untyped_storage()
                        spans[s.data_ptr()] = max(s.nbytes(), spans.get(s.data_ptr(), 0))
    total = end = 0
    for begin, size in sorted(spans.items()):
        total += max(0, begin + size - max(begin, end))
        end = max(end, begin + size)
    return total


def sent_bytes() -> int:
    """Bytes that went over the loopback device."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[9])
    return 0


def forward_backward(model: nn.Module) -> Way:
    def after() -> None:
        for p in model.parameters():
            p.grad = None

    return model, Tensor.backward, after


def zero1(model: nn.Module, **options: Any) -> Way:
    from zero1_cuda import Zero1AdamW

    opt = Zero1AdamW(model.parameters(), lr=LR, **options)

    def after() -> None:
        opt.step()
        opt.zero_grad()

    return model, Tensor.backward, after


def with_masters(model: nn.Module, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Way:
    """DDP, fp32 masters of the 16-bit parameters, and an optimizer over the masters."""
    params = list(model.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in params]
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    opt = make(masters)

    def after() -> None:
        with torch.no_grad():
            for p, m in zip(params, masters, strict=True):
                m.grad = p.grad.float()  # type: ignore[union-attr]
                p.grad = None
            opt.step()
            for p, m in zip(params, masters, strict=True):
                m.grad = None
                p.copy_(m)

    return ddp, Tensor.backward, after


def ddp_adamw(model: nn.Module) -> Way:
    return with_masters(model, lambda masters: torch.optim.AdamW(masters, lr=LR, fused=True))


def zero_redundancy(model: nn.Module) -> Way:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(masters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(masters, torch.optim.AdamW, lr=LR, fused=True)

    return with_masters(model, make)


def fsdp2(model: nn.Module) -> Way:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model.float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:  # type: ignore[attr-defined]
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    opt = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def after() -> None:
        opt.step()
        opt.zero_grad()

    return model, Tensor.backward, after


def deepspeed_zero1(model: nn.Module) -> Way:
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(LOCAL_SIZE=str(dist.get_world_size()), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 1e-2}},
    }
    engine = deepspeed.initialize(model=model, config=config, dist_init_required=False)[0]
    return engine, engine.backward, engine.step


WAYS: dict[str, Callable[[nn.Module], Way]] = {
    "forward + backward": forward_backward,
    "Zero1AdamW": zero1,
    "Zero1AdamW, overlap_gather": lambda model: zero1(model, overlap_gather=model),
    "Zero1AdamW, split": lambda model: zero1(model, master_weights="split"),
    "DDP + fused AdamW": ddp_adamw,
    "ZeroRedundancyOptimizer": zero_redundancy,
    "DeepSpeed ZeRO-1": deepspeed_zero1,
    "FSDP2": fsdp2,
}


def worker(rank: int, world: int, name: str, args: argparse.Namespace) -> dict[str, float]:
    warnings.simplefilter("ignore")
    dist.all_reduce(torch.zeros(1))
    before, resting = live_bytes(), common.process_bytes("VmRSS")
    model, backward, after = WAYS[name](build(args.width, args.layers, torch.bfloat16))
    count = WARM_UP + 1 + args.steps
    seeds = [torch.Generator().manual_seed(1000 * step + rank) for step in range(count)]
    batches = [torch.randn(args.batch, args.width, generator=seed).bfloat16() for seed in seeds]
    marks, loss, sent = [], torch.zeros(()), 0
    for step, x in enumerate(batches):
        if step == WARM_UP:  # waits for what is under way, so this iteration is not timed either
            dist.barrier()
            sent = sent_bytes()
        marks.append(time.perf_counter())
        loss = model(x).float().square().mean()
        backward(loss)
        after()
    marks.append(time.perf_counter())
    dist.barrier()
    sent = (sent_bytes() - sent) // (args.steps + 1) // world
    dist.all_reduce(mean := loss.detach().clone())
    del x, batches, loss
    return {
        "ms": 1e3 * statistics.median(end - begin for begin, end in itertools.pairwise(marks[WARM_UP + 1 :])),
        "live_bytes": live_bytes() - before,
        "peak_bytes": common.process_bytes("VmHWM") - resting,
        "sent_bytes": sent,
        "loss": float(mean) / world,
    }


def compare(ranks: int, numel: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every way, on so many ranks."""
    print(f"{ranks} gloo ranks, {numel:,} bf16 parameters, torch {torch.__version__}")
    print(f"{'':>26} {'ms':>8} {'beyond':>8} {'live MB':>9} {'peak MB':>9} {'sent MB':>9} {'loss':>12}")
    rows: list[dict[str, Any]] = []
    for name in WAYS:
        try:
            row = {"way": name, **common.run_ranks(ranks, worker, name, args)}
        except Exception as error:
            print(f"{name:>26} left out: {str(error).strip().splitlines()[-1]}")
            continue
        row["beyond_ms"] = row["ms"] - (rows[0]["ms"] if rows else row["ms"])
        rows.append(row)
        mb = " ".join(f"{row[key] / 1e6:9.1f}" for key in ("live_bytes", "peak_bytes", "sent_bytes"))
        print(f"{name:>26} {row['ms']:8.1f} {row['beyond_ms']:8.1f} {mb} {row['loss']:12.5g}", flush=True)
    return rows


def plot(runs: list[dict[str, Any]], path: str) -> None:
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "zero1"  # the same file for the same figures
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    for ax, key, title in zip(axes, ("live_bytes", "peak_bytes"), ("between steps", "at the peak"), strict=True):
        for name in list(WAYS)[1:]:
            found = [(run["ranks"], row[key]) for run in runs for row in run["rows"] if row["way"] == name]
            ax.plot([n for n, _ in found], [size / 1e6 for _, size in found], marker="o", label=name)
        ax.set(title=title, xlabel="ranks", xticks=[run["ranks"] for run in runs])
    axes[0].set(ylabel="MB per rank")
    axes[0].set_ylim(bottom=0)  # of both, once both are drawn
    axes[1].legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--plot", help="an SVG; needs matplotlib")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps: at least 1 wanted")
    numel = args.layers * args.width**2
    runs = [{"ranks": ranks, "rows": compare(ranks, numel, args)} for ranks in args.ranks]
    common.write(args.json, {"numel": numel, "runs": runs})
    if args.plot:
        plot(runs, args.plot)


if __name__ == "__main__":
    main()
