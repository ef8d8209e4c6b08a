"""Loads the compiled libraries; typed wrappers of the ops `torch.ops.zero1.*`; what the compiler needs to trace them.

The structs behind the tables (rows of `segments`, `scalars`, `groups`, words of `norm` and `control`) are written down
in csrc/include/zero1/step_args.h; the constants below are what Python needs of it, as it was compiled.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def _library(name: str) -> Path:
    """The file of a compiled library, whether it is there or not."""
    folder = Path(__file__).parent
    names = [folder / f"{name}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((path for path in names if path.exists()), names[0])


def _why(error: BaseException) -> str:
    """What the loader said: the first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)


try:
    from . import _C
except ImportError as error:
    if not _library("_C").exists() and (Path(__file__).parents[1] / "setup.py").exists():
        raise ImportError(
            f"zero1_cuda: {Path(__file__).parent} are the sources, with no compiled library. An installed package is "
            "found from any other folder; pip install --no-build-isolation -e . builds in place"
        ) from error
    raise ImportError(f"zero1_cuda: the compiled library {_library('_C')} could not be loaded: {error}") from error

CHUNK = _C.CHUNK  # elements; parameters start at multiples of it and slices hold whole ones
MAX_BUFFERS = _C.MAX_BUFFERS
SEGMENT_WORDS = (
    _C.SEGMENT_WORDS
)  # int64: shard_begin, numel, grad_begin, param_begin, master_begin, max_begin, param, buffer
SCALAR_WORDS = _C.SCALAR_WORDS  # float32: struct AdamScalars
GROUP_WORDS = _C.GROUP_WORDS  # float64: struct GroupOptions; the last three are int64 bit patterns

SCALAR_FLAGS = _C.SCALAR_FLAGS  # word of a scalars row that holds, as an int32 bit pattern, the ...
FLAG_ACTIVE = _C.FLAG_ACTIVE
FLAG_AMSGRAD = _C.FLAG_AMSGRAD
FLAG_L2 = _C.FLAG_L2

NORM_WORDS = _C.NORM_WORDS  # int64
NORM_LIMBS = _C.NORM_LIMBS
NORM_NON_FINITE = _C.NORM_NON_FINITE
NORM_NAN = _C.NORM_NAN
NORM_OVERFLOW = _C.NORM_OVERFLOW

CONTROL_CONDITIONS = _C.CONTROL_CONDITIONS
CONTROL_FOUND_INF = _C.CONTROL_FOUND_INF
CONTROL_SCALE = _C.CONTROL_SCALE  # a fact: FACT_WORDS words, as are CONTROL_BACKWARDS and CONTROL_FACTS
CONTROL_MODIFIED = _C.CONTROL_MODIFIED
CONTROL_IN_BACKWARD = _C.CONTROL_IN_BACKWARD
CONTROL_IN_CLIP = _C.CONTROL_IN_CLIP
CONTROL_NON_FINITE_GRADS = _C.CONTROL_NON_FINITE_GRADS
CONTROL_BACKWARD_RANKS = _C.CONTROL_BACKWARD_RANKS
CONTROL_BACKWARDS = _C.CONTROL_BACKWARDS
CONTROL_FACTS = _C.CONTROL_FACTS
CONTROL_FLAGS = _C.CONTROL_FLAGS  # then one int16 per parameter, four to a word

FACT_WORDS = _C.FACT_WORDS  # the 16-bit halves of a number, low then high, and their squares
SKIPPED_WORDS = (
    _C.SKIPPED_WORDS
)  # int64: how many steps were skipped, whether the last one was, whether any was ever stopped

GROUP_MODE = _C.GROUP_MODE  # word of a groups row that holds, as an int64 bit pattern, the ...
GROUP_AMSGRAD = _C.GROUP_AMSGRAD
GROUP_MAXIMIZE = _C.GROUP_MAXIMIZE
GROUP_DECOUPLED = _C.GROUP_DECOUPLED
GROUP_LR_AT = _C.GROUP_LR_AT
GROUP_LR_IS_FP64 = _C.GROUP_LR_IS_FP64

_cuda_error: str | None = None
if torch.version.cuda is None:
    _cuda_error = f"torch {torch.__version__} is built without CUDA"
elif not _C.build_info()["cuda"]:
    _cuda_error = "zero1_cuda was built without nvcc, so it has no CUDA kernels"
else:
    load_library: Callable[[str], None] = torch.ops.load_library
    try:
        load_library(str(_library("_cuda")))
    except OSError as error:
        _cuda_error = f"{_library('_cuda')} could not be loaded: {_why(error)}"


def cuda_error() -> str | None:
    """Why there are no CUDA kernels; None: there are."""
    return _cuda_error


def build_info() -> dict[str, Any]:
    """What was built: version, torch, compiler, cuda, cuda_archs, nvcc, cpu_levels."""
    return {**_C.build_info()}


def cpu_levels() -> list[str]:
    """The instruction sets of the CPU kernels that this machine can run, narrowest first."""
    return _C.cpu_levels()


def cpu_level() -> str:
    """The one in use: the widest, unless it was set."""
    return _C.cpu_level()


def set_cpu_level(name: str) -> None:
    """Uses another one of `cpu_levels()`, in the whole process. All give the same bits. ValueError for others."""
    _C.set_cpu_level(name)


def _need_cuda(tensor: Tensor) -> None:
    if _cuda_error is not None and tensor.is_cuda:
        raise RuntimeError(f"zero1_cuda: no kernel for tensors on {tensor.device}: {_cuda_error}")


def adam_step(
    segments: Tensor,
    chunk_segment: Tensor,
    scalars: Tensor,
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    master: Tensor | None,
    remainder: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
) -> None:
    """One Adam step of a whole shard, in place, for all elements of all segments:

        g = grad * grad_factor;  p = master * decay;  g += l2 * p  (L2 only)
        m = lerp(m, g, 1 - beta1);  v = beta2 * v + (1 - beta2) * g * g
        master = p - step_size * m / (sqrt(v) * inv_sqrt_bc2 + eps);  param = round(master)

    (amsgrad: the square root of max(v, max_exp_avg_sq)). All in fp32; the exact order is in adam_math.h.

    Args:
        segments: int64 [S, 8]; `chunk_segment`: int32 [C], the segment of each chunk of 128 elements, -1 for padding.
        scalars: float32 [P, 12], as `step_control` wrote them. A row that is not active leaves its segments alone.
        grads, params: 1 to 3 flat buffers of float32, float16 or bfloat16; the k-th of both have one dtype.
        master: float32 [*], for float16 parameters and bfloat16 ones without `remainder`.
        remainder: int16 [*]; if given, bfloat16 parameters keep the low half of their master there.
        exp_avg, exp_avg_sq: float32, at least C * 128 elements; `max_exp_avg_sq`: float32 [*].

    Raises:
        RuntimeError: a tensor has another dtype, shape or device than stated, or (CPU) a table points outside: rows are
            looked at as they come up, so other segments may have been updated by then.
    """
    _need_cuda(segments)
    torch.ops.zero1.adam_step(
        segments, chunk_segment, scalars, grads, params, master, remainder, exp_avg, exp_avg_sq, max_exp_avg_sq
    )


def refresh_masters(
    segments: Tensor,
    chunk_segment: Tensor,
    params: Sequence[Tensor],
    master: Tensor | None,
    remainder: Tensor | None,
    edited: Tensor,
) -> None:
    """master = param wherever round(master) != param, for the parameters p with edited[p] != 0 (uint8 [P]).

    Any two NaN count as equal. A split master's remainder becomes 0. Other arguments and errors as in `adam_step`.
    """
    _need_cuda(segments)
    torch.ops.zero1.refresh_masters(segments, chunk_segment, params, master, remainder, edited)


def grad_norm(segments: Tensor, chunk_segment: Tensor, grads: Sequence[Tensor], norm: Tensor) -> None:
    """norm += the sum of grad * grad over all segments, exactly and so independent of how the shard is divided.

    Chunks of 128 elements from each segment's start are summed in fp32 by a fixed tree, then added as integers:
    `norm`, int64 [16], holds 32-bit limbs in units of 2^-149 and counts of non-finite chunks (norm_math.h). Other
    arguments and errors as in `adam_step`.
    """
    _need_cuda(segments)
    torch.ops.zero1.grad_norm(segments, chunk_segment, grads, norm)


def sum_slices(
    received: Tensor, own: Tensor | None, rank: int, scale: float, divisor: float, out: Tensor, norm: Tensor | None
) -> None:
    """out = round(sum over ranks r, in order, of slice_r * scale, / divisor); norm += the sum of squares
    of the fp32 means before they are rounded.

    Args:
        received: [N, n] float32, float16 or bfloat16, the slices of all ranks; without rank `rank`'s if `own` is given.
        own: [n] of the same dtype, or None. It may be `out` itself.
        scale: a power of two that keeps the fp32 sum from overflowing; `divisor` takes the mean and undoes it.
        out: [n], float32 or the dtype of `received` (any, if that is float32).
        norm: int64 [16], as in `grad_norm`, or None.

    Raises:
        RuntimeError: a tensor has another dtype, shape or device than stated, or there is no slice at all.
    """
    _need_cuda(received)
    torch.ops.zero1.sum_slices(received, own, rank, scale, divisor, out, norm)


def pack_control(norms: Tensor, found_inf: Tensor | None, grad_scale: Tensor | None, control: Tensor) -> None:
    """control[0:20] = the sum of the rows of `norms`, and this rank's found_inf and grad_scale, for the all-reduce.

    Args:
        norms: int64 [R, 16]; `control`: int64, at least 36 + P / 4 words, of which CONTROL_CONDITIONS is kept.
        found_inf, grad_scale: one float32 each, or None.
    """
    _need_cuda(control)
    torch.ops.zero1.pack_control(norms, found_inf, grad_scale, control)


def clip_factor(control: Tensor, grad_scale: Tensor | None, max_norm: float, clip: Tensor) -> None:
    """clip (float32 [2]) = min(1, max_norm / (norm + 1e-6)), norm; of the reduced gradients divided by grad_scale."""
    _need_cuda(control)
    torch.ops.zero1.clip_factor(control, grad_scale, max_norm, clip)


def step_control(
    control: Tensor,
    world: int,
    param_group: Tensor,
    groups: Tensor,
    grad_scale: Tensor | None,
    clip: Tensor | None,
    skip_nonfinite: bool,
    scaled: bool,
    steps: Tensor,
    scalars: Tensor,
    skipped: Tensor,
) -> None:
    """From the all-reduced control vector to what `adam_step` needs: skip or not, steps += 1, and each row of scalars.

    Args:
        control: int64, at least 36 + P / 4 words, summed over `world` ranks, 2^15 at most.
        param_group: int32 [P], rows of `groups`, float64 [G, 8] (struct GroupOptions).
        grad_scale: one float32 or None; `clip`: float32 [2] as `clip_factor` wrote it, or None.
        skip_nonfinite: skip where a gradient is not finite; `scaled`: a loss scaler is at work, so always do.
        steps: int64 [P]; `scalars`: float32 [P, 12]; `skipped`: int64 [2 or 3], how many steps, whether this one, and
            whether a step was ever stopped by what the control vector says of the ranks; then nothing else changes.
    """
    _need_cuda(control)
    torch.ops.zero1.step_control(
        control, world, param_group, groups, grad_scale, clip, skip_nonfinite, scaled, steps, scalars, skipped
    )


def stream_limit(
    grad: Tensor,
    param: Tensor,
    master: Tensor | None,
    remainder: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
) -> None:
    """Reads and writes the streams of `adam_step`, element 0 onwards, with next to no arithmetic: for benchmarks, what
    the machine could do.

        master += 2^-20;  exp_avg += grad;  exp_avg_sq += 2^-20;  max_exp_avg_sq += 2^-20;  param = master, truncated

    Args:
        grad: [n] float32, float16 or bfloat16. The others have n elements at least; their dtypes as in `adam_step`.
            float16 is taken for bfloat16: only the bits are moved.

    Raises:
        RuntimeError: a tensor has another dtype, shape or device than stated.
    """
    _need_cuda(grad)
    torch.ops.zero1.stream_limit(grad, param, master, remainder, exp_avg, exp_avg_sq, max_exp_avg_sq)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The fake implementation of all ops: they only write into their arguments."""


_register_fake: Callable[..., Any] = torch.library.register_fake
for _op in (
    "adam_step", "refresh_masters", "grad_norm", "sum_slices", "pack_control", "clip_factor", "step_control",
    "stream_limit",
):  # fmt: skip
    _register_fake(f"zero1::{_op}", _nothing)


def profiled(name: str) -> contextlib.AbstractContextManager[object]:
    """A named range that shows in a torch.profiler trace; costs nothing while none is running."""
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(name)
    return contextlib.nullcontext()
