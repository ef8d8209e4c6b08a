"""One step of rank 0, from a profile: what runs when, on two gloo ranks of this machine.

    python bench/timeline.py [--ranks 2] [--width 2048] [--layers 8] [--json FILE] [--plot FILE.svg]

The ranges are the package's own (`zero1.reduce_scatter`, `zero1.adam_step`, `zero1.all_gather`: starting and awaiting
collectives), those of the script, and gloo's messages while they are under way. It prints milliseconds by range.
"""

from __future__ import annotations

import argparse

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from zero1_cuda import Zero1AdamW

WARM_UP = 3
LANES = ("forward", "backward", "zero1.reduce_scatter", "zero1.adam_step", "zero1.all_gather", "messages")
Spans = dict[str, list[list[float]]]  # of each lane, milliseconds from the first to the last
COLORS = ("#9ecae1", "#6baed6", "#fd8d3c", "#31a354", "#fdd0a2", "#bdbdbd")


def worker(rank: int, world: int, args: argparse.Namespace) -> Spans:
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
    spans: Spans = {lane: [] for lane in LANES}
    for event in found.events():
        lane = "messages" if event.name.startswith("gloo:") else event.name
        if lane in spans:
            spans[lane].append([event.time_range.start / 1e3, event.time_range.end / 1e3])
    zero = spans["forward"][0][0]
    return {lane: [[begin - zero, end - zero] for begin, end in sorted(lanes)] for lane, lanes in spans.items()}


def busy(spans: list[list[float]]) -> float:
    """Milliseconds that at least one of the spans covers."""
    total, end = 0.0, 0.0
    for a, b in spans:
        total += max(0.0, b - max(a, end))
        end = max(end, b)
    return total


def plot(spans: Spans, path: str) -> None:
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "zero1"  # the same file for the same figures
    figure, ax = pyplot.subplots(figsize=(9, 2.6), layout="constrained")
    for y, (lane, color) in enumerate(zip(LANES, COLORS, strict=True)):
        ax.broken_barh([(a, b - a) for a, b in spans[lane]], (y - 0.4, 0.8), facecolors=color)
    ax.set(yticks=range(len(LANES)), yticklabels=LANES, xlabel="milliseconds", xlim=(0, None))
    ax.invert_yaxis()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--plot", help="an SVG; needs matplotlib")
    args = parser.parse_args()
    spans: Spans = common.run_ranks(args.ranks, worker, args)
    for lane in LANES:
        print(f"{lane:>22} {busy(spans[lane]):8.1f} ms in {len(spans[lane])} spans")
    numel = args.layers * args.width**2
    common.write(args.json, {"ranks": args.ranks, "numel": numel, "ms": spans}, indent=None)
    if args.plot:
        plot(spans, args.plot)


if __name__ == "__main__":
    main()
