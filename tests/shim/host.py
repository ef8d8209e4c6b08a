"""Builds the CUDA kernels of csrc as C++ and calls their launchers with the arguments of the ops."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

TESTS = Path(__file__).parent.parent
CSRC = TESTS.parent / "csrc"
COMPILE = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-Wno-unknown-pragmas"]
COMPILE += ["-ffp-contract=off", "-fPIC", "-shared"]
# the shim's cuda_runtime.h comes first
COMPILE += [f"-I{folder}" for folder in (TESTS / "shim", CSRC / "cuda", CSRC / "include")]
SANITIZE = ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

ORDERS = ["forward", "reverse", "shuffled"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]  # enum DType
OWN, FP32, SPLIT = range(3)  # enum MasterMode


@functools.cache
def _compiled(flags: tuple[str, ...]) -> bytes:
    sources = [*sorted(CSRC.glob("*/*.cu")), TESTS / "shim" / "entry.cpp"]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        subprocess.run([*COMPILE, *flags, "-x", "c++", *map(str, sources), "-o", str(library)], check=True)
        return library.read_bytes()


def build(library: Path, flags: list[str]) -> None:
    """Writes the library; it is compiled once per process and set of flags."""
    library.write_bytes(_compiled(tuple(flags)))


# The structs of step_args.h.


class SegmentTable(Structure):
    _fields_ = [("segments", c_void_p), ("chunk_segment", c_void_p), ("chunks", c_int64)]


class FlatBuffer(Structure):
    _fields_ = [("param", c_void_p), ("grad", c_void_p), ("dtype", c_int32), ("master", c_int32)]


class AdamStepArgs(Structure):
    _fields_ = [("table", SegmentTable), ("buffers", FlatBuffer * 3)] + [
        (name, c_void_p) for name in ("master", "remainder", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "scalars")
    ]


class RefreshMastersArgs(Structure):
    _fields_ = [("table", SegmentTable), ("buffers", FlatBuffer * 3)] + [
        (name, c_void_p) for name in ("master", "remainder", "edited")
    ]


class GradNormArgs(Structure):
    _fields_ = [("table", SegmentTable), ("buffers", FlatBuffer * 3), ("norm", c_void_p)]


class SumSlicesArgs(Structure):
    _fields_ = [("received", c_void_p), ("own", c_void_p), ("out", c_void_p), ("numel", c_int64), ("rank", c_int64)]
    _fields_ += [("world", c_int64), ("scale", c_float), ("divisor", c_float), ("dtype_in", c_int32)]
    _fields_ += [("dtype_out", c_int32), ("norm", c_void_p)]


class PackControlArgs(Structure):
    _fields_ = [("norms", c_void_p), ("rows", c_int64), ("found_inf", c_void_p), ("grad_scale", c_void_p)]
    _fields_ += [("control", c_void_p)]


class ClipFactorArgs(Structure):
    _fields_ = [("control", c_void_p), ("grad_scale", c_void_p), ("max_norm", c_double), ("clip", c_void_p)]


class StepControlArgs(Structure):
    _fields_ = [("control", c_void_p), ("params", c_int64), ("world", c_int64), ("param_group", c_void_p)]
    _fields_ += [("groups", c_void_p), ("grad_scale", c_void_p), ("clip", c_void_p), ("skip_nonfinite", c_int32)]
    _fields_ += [("scaled", c_int32), ("steps", c_void_p), ("scalars", c_void_p), ("skipped", c_void_p)]
    _fields_ += [("stopped", c_void_p)]


def address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def table(segments: Tensor, chunk_segment: Tensor) -> SegmentTable:
    return SegmentTable(address(segments), address(chunk_segment), chunk_segment.numel())


def buffers(grads: list[Tensor] | None, params: list[Tensor] | None, split: bool):
    rows = []
    for k, t in enumerate(params or grads or []):
        master = OWN if t.dtype == torch.float32 else SPLIT if split and t.dtype == torch.bfloat16 else FP32
        param, grad = (None if list_ is None else address(list_[k]) for list_ in (params, grads))
        rows.append(FlatBuffer(param, grad, DTYPES.index(t.dtype), master))
    return (FlatBuffer * 3)(*rows)


class Shim:
    """The ops under their own names, with their own arguments, run by the kernels' sources."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.shim_set.argtypes = [c_int, c_int64, c_int64]
        self._library.shim_launches.restype = c_int64
        self.set("forward")

    def set(self, order: str, resident: int = 3, first_block: int = 0) -> None:
        self._library.shim_set(ORDERS.index(order), resident, first_block)

    def launches(self) -> int:
        return self._library.shim_launches()

    def fault(self, which: int) -> int:
        return self._library.shim_fault(which)

    def _call(self, name: str, args: Structure) -> None:
        function = getattr(self._library, f"shim_{name}")
        function.argtypes = [POINTER(type(args))]
        assert function(byref(args)) == 0

    def adam_step(self, segments, chunk_segment, scalars, grads, params, master, remainder, *state) -> None:
        flat = buffers(grads, params, remainder is not None)
        pointers = [address(t) for t in (master, remainder, *state, scalars)]
        self._call("adam_step", AdamStepArgs(table(segments, chunk_segment), flat, *pointers))

    def refresh_masters(self, segments, chunk_segment, params, master, remainder, edited) -> None:
        flat = buffers(None, params, remainder is not None)
        pointers = [address(t) for t in (master, remainder, edited)]
        self._call("refresh_masters", RefreshMastersArgs(table(segments, chunk_segment), flat, *pointers))

    def grad_norm(self, segments, chunk_segment, grads, norm) -> None:
        flat = buffers(grads, None, False)
        self._call("grad_norm", GradNormArgs(table(segments, chunk_segment), flat, address(norm)))

    def sum_slices(self, received, own, rank, scale, divisor, out, norm) -> None:
        world = received.shape[0] + (own is not None)
        kinds = [DTYPES.index(t.dtype) for t in (received, out)]
        pointers = [address(t) for t in (received, own, out)]
        args = SumSlicesArgs(*pointers, out.numel(), rank, world, scale, divisor, *kinds, address(norm))
        self._call("sum_slices", args)

    def pack_control(self, norms, found_inf, grad_scale, control) -> None:
        pointers = [address(t) for t in (found_inf, grad_scale, control)]
        self._call("pack_control", PackControlArgs(address(norms), norms.shape[0], *pointers))

    def clip_factor(self, control, grad_scale, max_norm, clip) -> None:
        self._call("clip_factor", ClipFactorArgs(address(control), address(grad_scale), max_norm, address(clip)))

    def step_control(
        self, control, world, param_group, groups, grad_scale, clip, skip_nonfinite, scaled, steps, scalars, skipped
    ) -> None:
        inputs = [address(t) for t in (param_group, groups, grad_scale, clip)]
        outputs = [*(address(t) for t in (steps, scalars, skipped)), address(skipped[2:]) if len(skipped) > 2 else None]
        args = StepControlArgs(
            address(control), param_group.numel(), world, *inputs, skip_nonfinite, scaled, *outputs
        )  # fmt: skip
        self._call("step_control", args)
