"""The command line: `python -m zero1_cuda info | memory | bench`.

`info` must come out whatever is broken, so no module is imported before its command is known to need it, and the
package's `__init__` imports lazily.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from decimal import Decimal, InvalidOperation

from ..memory import model
from . import info, memory


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
        return model.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _run_bench(args: argparse.Namespace) -> int:
    try:
        bench = importlib.import_module("zero1_cuda.cli.bench")
    except ImportError as error:
        print(f"zero1_cuda bench: cannot start: {info.one_line(error)}", file=sys.stderr)
        return 1
    return int(bench.main(args) or 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zero1_cuda", description="ZeRO-1 fused optimizer for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("info", help="versions, what was built, what is usable here and why not")
    command.add_argument("--json", action="store_true", help="as JSON")
    command.set_defaults(run=info.run)

    command = commands.add_parser("memory", help="bytes per rank: 16 Psi against 4 Psi + 12 Psi / N")
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--params", type=_count, metavar="PSI", help="trainable parameters, such as 7.5e9")
    source.add_argument(
        "--shapes", metavar="FILE", help="a safetensors file or index (.json): its shapes, with the layout's padding"
    )
    command.add_argument(
        "--world-size", type=_counts, default=_counts("1,4,16,64,256,1024"), metavar="N,N,...", help="numbers of ranks"
    )
    command.add_argument(
        "--dtype", choices=tuple(model.DTYPE_BYTES), help="of the parameters; default: bf16, or as in FILE"
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
    command.set_defaults(run=memory.run)

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
