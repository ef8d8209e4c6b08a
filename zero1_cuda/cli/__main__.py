"""python -m zero1_cuda info | memory | bench

`info` must come out whatever is broken, so nothing here imports torch or the extension at the top, and the package's
`__init__` imports lazily.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, cast

import zero1_cuda
from zero1_cuda import memory

# ---- info ----------------------------------------------------------------------------------------


def _attempt(probe: Callable[[], Any]) -> Any:
    """What the probe finds, or in one line why it cannot: a report on a broken machine must not break itself."""
    try:
        return probe()
    except Exception as error:
        return f"not available: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    """The error and what caused it: the first cause is the one that names the file."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        text = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
        if text not in parts:
            parts.append(text)
        cause = cause.__cause__
    return " <- ".join(parts)


def _program_version(*program: str, pick: str = "") -> str:
    """`program --version`: its first line, or the first one that contains `pick`."""
    done = subprocess.run([*program, "--version"], check=False, capture_output=True, text=True, timeout=30)
    lines = [line.strip() for line in done.stdout.splitlines() if pick in line]
    return lines[0] if lines else f"{' '.join(program)} --version says nothing (exit status {done.returncode})"


def _compiler() -> str:
    """The one that the build would take."""
    words = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    return _program_version(*words) if shutil.which(words[0]) else f"{words[0]} not found"


def _nvcc() -> str:
    """As the build looks for it: CUDA_HOME or CUDA_PATH where one is set, else PATH, else the usual place."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = [f"{home}/bin"] if home else [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    return f"{found} ({_program_version(found, pick='release')})" if found else "not found"


def _torch() -> str:
    import torch

    return f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"


@functools.cache
def _fatal_signal() -> int:
    """The signal that loading the libraries ends with, 0: none. A file that was cut short can kill the process."""
    folder = str(Path(__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {folder!r}); import zero1_cuda.ops"
    return max(0, -subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode)


def _ops() -> Any:
    if _fatal_signal():
        raise ImportError(f"loading the compiled libraries ends with signal {_fatal_signal()}: install again")
    return importlib.import_module("zero1_cuda.ops")


def _built() -> dict[str, Any]:
    return dict(_ops().build_info())


def _cpu_level() -> str:
    ops = _ops()
    return f"{ops.cpu_level()} (of {', '.join(ops.cpu_levels())})"


def _cuda() -> str:
    error = _ops().cuda_error()
    return f"not usable: {error}" if error else "usable"


def _gpus() -> list[str]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        found.append(f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})")
    return found


def _backend(name: str) -> str:
    import torch.distributed as dist

    return "available" if dist.is_available() and dist.is_backend_available(name) else "not available"


def _version() -> str:
    return f"{zero1_cuda.__version__} ({Path(__file__).resolve().parent})"


def info() -> dict[str, Any]:
    """Versions, what was built, what is usable here and why not. Never raises."""
    return {
        "zero1_cuda": _attempt(_version),
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "torch": _attempt(_torch),
        "compiler": _attempt(_compiler),
        "nvcc": _attempt(_nvcc),
        "built": _attempt(_built),
        "cpu_level": _attempt(_cpu_level),
        "cuda": _attempt(_cuda),
        "gpus": _attempt(_gpus),
        "gloo": _attempt(lambda: _backend("gloo")),
        "nccl": _attempt(lambda: _backend("nccl")),
    }


def _print_info(args: argparse.Namespace) -> int:
    facts = info()
    if args.json:
        print(json.dumps(facts, indent=2, default=str))
        return 0
    lines = []
    for name, value in facts.items():
        if isinstance(value, dict):
            lines.append(f"{name}:")
            lines += [f"  {key}: {_plain(part)}" for key, part in value.items()]
        else:
            lines.append(f"{name}: {_plain(value)}")
    print("\n".join(lines))
    return 0


def _plain(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text or "none"


# ---- memory --------------------------------------------------------------------------------------


def _count(text: str) -> int:
    """A whole number of at least 1, also written as 7.5e9."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("NaN")
    # the upper bound is far above any model and keeps 1e999999 from being written out
    if not value.is_finite() or not 1 <= value <= 10**18 or value != value.to_integral_value():
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is wanted, such as 64 or 7.5e9, not {text!r}")
    return int(value)


def _counts(text: str) -> list[int]:
    return [_count(part.strip()) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _size(text: str) -> int:
    try:
        return memory.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _planner(args: argparse.Namespace) -> tuple[str, str, Callable[[int], memory.Footprint]]:
    """What is planned, its formula in words, and the footprint for a number of ranks."""
    split, overlap = args.master_weights == "split", not args.no_overlap
    if args.shapes is None:
        dtype = args.dtype or "bf16"
        size, split = memory.DTYPE_BYTES[dtype], split and dtype == "bf16"  # other types keep whole masters
        title = f"{args.params:,} parameters in {dtype}"
        return title, memory.formula(size, split), lambda n: memory.footprint(args.params, n, size, split, overlap)
    planner = importlib.import_module("zero1_cuda.planner")
    specs, left_out = planner.read_specs(args.shapes, args.dtype)
    dtypes = sorted({str(s.dtype).removeprefix("torch.") for s in specs})
    title = f"{sum(s.numel for s in specs):,} parameters in {len(specs)} tensors, {' and '.join(dtypes)}"
    if left_out:
        title += f"; {len(left_out)} left out: not floating-point"
    sizes = {(s.dtype.itemsize, split and "bfloat16" in str(s.dtype)) for s in specs}
    return (
        title,
        memory.formula(*sizes.pop()) if len(sizes) == 1 else "4 to 8 Psi + share",
        lambda n: cast(memory.Footprint, planner.plan(specs, n, split, overlap)),
    )


def _print_memory(args: argparse.Namespace) -> int:
    try:
        title, formula, footprint = _planner(args)
    except (OSError, ValueError) as error:  # not the file it should be
        print(f"zero1_cuda memory: --shapes: {_told(error)}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"zero1_cuda memory: --shapes needs torch and the compiled library: {_one_line(error)}", file=sys.stderr)
        return 1
    rows = [footprint(world_size) for world_size in args.world_size]
    psi = formula.partition(" + ")[0]  # of the floor
    limit = args.gpu_memory
    fitting = memory.smallest_world_size(limit, lambda n: footprint(n).total) if limit else None
    if args.json:
        fits = {"gpu_memory": limit, "smallest_world_size": fitting} if limit else {}
        print(json.dumps([row.as_dict() | fits for row in rows], indent=2))
    else:
        print(f"{title}\n\n{memory.table(rows, formula)}")
        padded = [row.as_dict().get("padding") for row in rows]
        if None not in padded:
            print(
                f"with the layout's padding, at most {memory.size_text(max(map(int, filter(None, padded)), default=0))}"
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


def _fit(limit: int, fitting: int | None, footprint: Callable[[int], memory.Footprint], psi: str) -> str:
    """The answer to --gpu-memory."""
    room = memory.size_text(limit)
    if fitting is not None:
        ranks = "1 rank" if fitting == 1 else f"{fitting} ranks"
        return (
            f"{room} per GPU: fits from {ranks} on ({memory.size_text(footprint(fitting).total)}); "
            "activations come on top"
        )
    return (
        f"{room} per GPU: nothing fits, up to {memory.MOST_RANKS} ranks: the floor of {psi} (params and grads, which "
        f"ranks do not share) is {memory.size_text(footprint(1).floor)}"
    )


def _plot(
    rows: list[memory.Footprint],
    footprint: Callable[[int], memory.Footprint],
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


# ---- bench ---------------------------------------------------------------------------------------


def _run_bench(args: argparse.Namespace) -> int:
    try:
        bench = importlib.import_module("zero1_cuda.bench")
    except ImportError as error:
        print(f"zero1_cuda bench: cannot start: {_one_line(error)}", file=sys.stderr)
        return 1
    return int(bench.main(args) or 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zero1_cuda", description="ZeRO-1 fused optimizer for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("info", help="versions, what was built, what is usable here and why not")
    command.add_argument("--json", action="store_true", help="as JSON")
    command.set_defaults(run=_print_info)

    command = commands.add_parser("memory", help="bytes per rank: 16 Psi against 4 Psi + 12 Psi / N")
    model = command.add_mutually_exclusive_group(required=True)
    model.add_argument("--params", type=_count, metavar="PSI", help="trainable parameters, such as 7.5e9")
    model.add_argument(
        "--shapes", metavar="FILE", help="a safetensors file or index (.json): its shapes, with the layout's padding"
    )
    command.add_argument(
        "--world-size", type=_counts, default=_counts("1,4,16,64,256,1024"), metavar="N,N,...", help="numbers of ranks"
    )
    command.add_argument(
        "--dtype", choices=tuple(memory.DTYPE_BYTES), help="of the parameters; default: bf16, or as in FILE"
    )
    command.add_argument(
        "--master-weights", choices=("fp32", "split"), default="fp32", help="as the optimizer's argument"
    )
    command.add_argument(
        "--split-master", dest="master_weights", action="store_const", const="split", help="the same as 'split'"
    )
    command.add_argument("--no-overlap", action="store_true", help="overlap_reduce=False: no buffers")
    command.add_argument(
        "--gpu-memory", type=_size, metavar="SIZE", help="80GB (10^9) or 80GiB (2^30): the smallest N that fits"
    )
    command.add_argument("--json", action="store_true", help="as JSON, in bytes")
    command.add_argument("--plot", metavar="FILE.png", help="draw the curve against N (needs matplotlib)")
    command.set_defaults(run=_print_memory)

    command = commands.add_parser("bench", help="kernel throughput on this machine")
    command.add_argument("--json", metavar="FILE", help="write the figures there as well")
    command.add_argument("--plot", metavar="FILE.png", help="draw throughput against size (needs matplotlib)")
    command.add_argument("--quick", action="store_true", help="small sizes only")
    command.add_argument("--sizes", type=_counts, metavar="N,N,...", help="numbers of parameters")
    command.add_argument("--dtypes", type=_names, default=_names("bf16,fp16,fp32"), metavar="TYPE,...")
    command.add_argument(
        "--variants",
        type=_names,
        default=_names("plain,amsgrad,l2,split"),
        metavar="NAME,...",
        help="plain: with every dtype; the others: with the first dtype",
    )
    command.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where it can be used")
    command.add_argument(
        "--iterations", type=_count, default=10, metavar="N", help="timed calls per row and contestant"
    )
    command.add_argument("--compile", action="store_true", help="torch.compile takes part")
    command.add_argument("--cpu-level", metavar="NAME", help="instruction set of the CPU kernels; default: the widest")
    command.set_defaults(run=_run_bench)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
    except BrokenPipeError:  # a reader such as `head` has seen enough; what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    return code


if __name__ == "__main__":
    raise SystemExit(main())
