"""`python -m zero1_cuda memory`: the table of 16 Psi against 4 Psi + 12 Psi / N, from a number or from real shapes.

The formula needs neither torch nor the compiled library; only `--shapes` does.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from typing import cast

from ..memory import model
from .info import one_line


def _planner(args: argparse.Namespace) -> tuple[str, str, Callable[[int], model.Footprint]]:
    """What is planned, its formula in words, and the footprint for a number of ranks."""
    split, overlap = args.master_weights == "split", not args.no_overlap
    if args.shapes is None:
        dtype = args.dtype or "bf16"
        size, split = model.DTYPE_BYTES[dtype], split and dtype == "bf16"  # other types keep whole masters
        title = f"{args.params:,} parameters in {dtype}"
        return title, model.formula(size, split), lambda n: model.footprint(args.params, n, size, split, overlap)
    planner = importlib.import_module("zero1_cuda.memory.planner")
    specs, left_out = planner.read_specs(args.shapes, args.dtype)
    dtypes = sorted({str(s.dtype).removeprefix("torch.") for s in specs})
    title = f"{sum(s.numel for s in specs):,} parameters in {len(specs)} tensors, {' and '.join(dtypes)}"
    if left_out:
        title += f"; {len(left_out)} left out: not floating-point"
    sizes = {(s.dtype.itemsize, split and "bfloat16" in str(s.dtype)) for s in specs}
    return (
        title,
        model.formula(*sizes.pop()) if len(sizes) == 1 else "4 to 8 Psi + share",
        lambda n: cast(model.Footprint, planner.plan(specs, n, split, overlap)),
    )


def run(args: argparse.Namespace) -> int:
    try:
        title, formula, footprint = _planner(args)
    except (OSError, ValueError) as error:  # not the file it should be
        print(f"zero1_cuda memory: --shapes: {_told(error)}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"zero1_cuda memory: --shapes needs torch and the compiled library: {one_line(error)}", file=sys.stderr)
        return 1
    rows = [footprint(world_size) for world_size in args.world_size]
    psi = formula.partition(" + ")[0]  # of the floor
    limit = args.gpu_memory
    fitting = model.smallest_world_size(limit, lambda n: footprint(n).total) if limit else None
    if args.json:
        fits = {"gpu_memory": limit, "smallest_world_size": fitting} if limit else {}
        print(json.dumps([row.as_dict() | fits for row in rows], indent=2))
    else:
        print(f"{title}\n\n{model.table(rows, formula)}")
        padded = [row.as_dict().get("padding") for row in rows]
        if None not in padded:
            print(
                f"with the layout's padding, at most {model.size_text(max(map(int, filter(None, padded)), default=0))}"
            )
        if limit:
            print(_fit(limit, fitting, footprint, psi))
    if args.plot:
        try:
            _plot(rows, footprint, args.plot, title, limit, psi)
        except ModuleNotFoundError as error:
            print(f"zero1_cuda memory: --plot needs matplotlib ({error})", file=sys.stderr)
            return 1
        except (OSError, ValueError) as error:  # a folder that is not there, a format that matplotlib does not know
            print(f"zero1_cuda memory: cannot write {args.plot}: {error}", file=sys.stderr)
            return 1
    return 0


def _told(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot read {error.filename}: {error.strerror}"
    return str(error)


def _fit(limit: int, fitting: int | None, footprint: Callable[[int], model.Footprint], psi: str) -> str:
    """The answer to --gpu-model."""
    room = model.size_text(limit)
    if fitting is not None:
        ranks = "1 rank" if fitting == 1 else f"{fitting} ranks"
        return (
            f"{room} per GPU: fits from {ranks} on ({model.size_text(footprint(fitting).total)}); "
            "activations come on top"
        )
    return (
        f"{room} per GPU: nothing fits, up to {model.MOST_RANKS} ranks: the floor of {psi} (params and grads, which "
        f"ranks do not share) is {model.size_text(footprint(1).floor)}"
    )


def _plot(
    rows: list[model.Footprint],
    footprint: Callable[[int], model.Footprint],
    path: str,
    title: str,
    limit: int | None,
    psi: str,
) -> None:
    """Bytes per rank against the number of ranks, by kind, and what bounds them from below and above."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")  # a file is written; no display is needed
    figure, axes = importlib.import_module("matplotlib.pyplot").subplots(figsize=(7, 4.2))
    given = sorted({row.world_size for row in rows})
    between = {2**k for k in range(given[-1].bit_length()) if 2**k >= given[0]}
    curve = [footprint(n) for n in sorted(between | set(given))]
    ranks = [row.world_size for row in curve]
    kinds = ("params", "grads", "state", "buffers")
    axes.stackplot(ranks, [[getattr(row, kind) / 1e9 for row in curve] for kind in kinds], labels=kinds, alpha=0.7)
    axes.plot(ranks, [row.total / 1e9 for row in curve], color="black", marker="o", markersize=3, label="total")
    floor = curve[0].floor
    axes.axhline(floor / 1e9, color="black", linestyle=":", linewidth=1, label=f"floor: {psi}")
    axes.axhline(curve[0].baseline / 1e9, color="black", linestyle="--", linewidth=1, label="plain data parallel")
    if limit:
        axes.axhline(limit / 1e9, color="red", linewidth=1, label="GPU memory")
    axes.set_xscale("log", base=2)
    axes.set_xticks(given, map(str, given))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set(xlabel="ranks", ylabel="GB per rank (1e9 bytes)", title=title)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
