"""One step of rank 0, from a profile: what runs when, on two gloo ranks of this machine.

    python bench/timeline.py [--ranks 2] [--width 2048] [--layers 8] [--json FILE] [--plot FILE.svg]

The ranges are the package's own (`zero1.reduce_scatter`, `zero1.adam_step`, `zero1.all_gather`: starting and awaiting
collectives), those of the script, and gloo's messages while they are under way. It prints milliseconds by range.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from zero1_cuda import Zero1AdamW

WARM_UP = 3
LANES = ("forward", "backward", "zero1.reduce_scatter", "zero1.adam_step", "zero1.all_gather", "messages")
COLORS = ("#9ecae1", "#6baed6", "#fd8d3c", "#31a354", "#fdd0a2", "#bdbdbd")


def worker(rank: int, world: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    torch.manual_seed(0)
    blocks = [m for _ in range(args.layers) for m in (nn.Linear(args.width, args.width, bias=False), nn.GELU())]
    model = nn.Sequential(*blocks).bfloat16()
    opt = Zero1AdamW(model.parameters())

    def step() -> None:
        x = torch.randn(args.batch, args.width).bfloat16()
        with record_function("forward"):
            loss = model(x).float().square().mean()
        with record_function("backward"):
            loss.backward()
        opt.step()
        opt.zero_grad()

    for _ in range(WARM_UP):
        step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    if rank == 0:
        spans: dict[str, list[list[float]]] = {lane: [] for lane in LANES}
        for event in found.events():
            lane = "messages" if event.name.startswith("gloo:") else event.name
            if lane in spans:
                spans[lane].append([event.time_range.start / 1e3, event.time_range.end / 1e3])
        zero = spans["forward"][0][0]
        spans = {lane: [[begin - zero, end - zero] for begin, end in sorted(lanes)] for lane, lanes in spans.items()}
        Path(folder, "result.json").write_text(json.dumps(spans))
    dist.barrier()
    dist.destroy_process_group()


def busy(spans: list[list[float]]) -> float:
    """Milliseconds that at least one of the spans covers."""
    total, end = 0.0, 0.0
    for a, b in spans:
        total += max(0.0, b - max(a, end))
        end = max(end, b)
    return total


def plot(spans: dict[str, list[list[float]]], path: str) -> None:
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "zero1"  # the same file for the same figures
    figure, ax = pyplot.subplots(figsize=(9, 2.6), layout="constrained")
    for y, (lane, color) in enumerate(zip(LANES, COLORS, strict=True)):
        ax.broken_barh([(a, b - a) for a, b in spans[lane]], (y - 0.4, 0.8), facecolors=color)
    ax.set(yticks=range(len(LANES)), yticklabels=LANES, xlabel="milliseconds", xlim=(0, None))
    ax.invert_yaxis()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json")
    parser.add_argument("--plot", help="an SVG; needs matplotlib")
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args.ranks, args, folder), nprocs=args.ranks)
        spans: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    for lane in LANES:
        print(f"{lane:>22} {busy(spans[lane]):8.1f} ms in {len(spans[lane])} spans")
    if args.json:
        numel = args.layers * args.width**2
        result = {"ranks": args.ranks, "numel": numel, "torch": torch.__version__, "ms": spans}
        Path(args.json).write_text(json.dumps(result) + "\n")
    if args.plot:
        plot(spans, args.plot)


if __name__ == "__main__":
    main()
