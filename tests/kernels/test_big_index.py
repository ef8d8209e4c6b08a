"""Nothing overflows 32 bits: element counts and offsets beyond 2^31 and 2^32 work in every op, on the CPU and in the
sources of the CUDA kernels, and no 32-bit variable of the C++ code holds one.

Tensors of that size are addresses only: memory comes with the first write to a page. A table with few segments makes an
op touch only those. The slow tests run over all 2^31 + 8 elements, through pages that are mapped again and again.
(`make gpu-check` does so for real on a GPU.)"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ops_case import DTYPES, Case, Param
from shim.host import COMPILE, CSRC, Shim, build
from torch import Tensor

from zero1_cuda import ops
from zero1_cuda.params.layout import Layout, ParamSpec
from zero1_cuda.reference import norm_integer

BIG = 2**31 + 8
PAGE = mmap.PAGESIZE
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
MASTERS = [*((dtype, False) for dtype in DTYPES), (torch.bfloat16, True)]


def addresses(numel: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of zeros that takes memory only where it is written to."""
    size = -(-numel * dtype.itemsize // PAGE) * PAGE
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    except OSError as error:
        pytest.skip(f"the system does not give {size} bytes of address space: {error}")
    return torch.frombuffer(memory, dtype=dtype, count=numel)


@pytest.fixture(scope="module")
def kernel_sources(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    path = tmp_path_factory.mktemp("shim") / "kernels.so"
    build(path, [])
    return Shim(path)


# ---- segments that lie beyond 2^31 and 2^32 elements

SMALL = 300  # elements of each segment: three chunks, the last one not full
SHARD = [2**32 - 128, 2**32 + 512, 2**32 + 2048]  # where they begin in the state; the first one reaches over 2^32
OTHERS = [2**31 + 1024, 2**32 + 128, 2**33 + 384]  # and elsewhere
BLOCK = 16 * ops.CHUNK  # elements of a block of threads


class Far:
    """The contents of a small case, moved: segment i begins at SHARD[i] in the state and at OTHERS[i] elsewhere."""

    def __init__(self, near: Case) -> None:
        dtype = near.specs[0].dtype
        chunks = SHARD[-1] // ops.CHUNK + 3
        self.chunk_segment = torch.full((chunks,), -1, dtype=torch.int32)
        rows = []
        for i, row in enumerate(near.rows):
            at = SHARD[i] // ops.CHUNK
            self.chunk_segment[at : at + 3] = i
            # gradients, parameters, masters and maxima each at a place of their own
            places = [OTHERS[i] + 1024 * k for k in range(4)]
            rows.append([SHARD[i], row[1], *places[:3], places[3] if row[5] >= 0 else -1, row[6], 0])
        self.segments = torch.tensor(rows)
        self.rows = rows
        numel = OTHERS[-1] + 8192
        self.grads, self.params = [addresses(numel, dtype)], [addresses(numel, dtype)]
        self.master = addresses(numel, torch.float32) if near.master is not None else None
        self.remainder = addresses(numel, torch.int16) if near.remainder is not None else None
        self.exp_avg, self.exp_avg_sq = (addresses(chunks * ops.CHUNK, torch.float32) for _ in range(2))
        self.max_exp_avg_sq = addresses(numel, torch.float32) if near.max_exp_avg_sq is not None else None
        for (mine, word), (theirs, _) in zip(self.streams(), self.streams(near), strict=True):
            for i in range(len(rows)):
                self.at(mine, rows[i], word).copy_(self.at(theirs, near.rows[i], word))

    def streams(self, case: Any = None) -> list[tuple[Tensor, int]]:
        """Every buffer, and which word of a row says where a segment lies in it."""
        c = case or self
        store = c.master if c.master is not None else c.remainder
        found = [
            (c.grads[0], 2),
            (c.params[0], 3),
            (c.exp_avg, 0),
            (c.exp_avg_sq, 0),
            (store, 4),
            (c.max_exp_avg_sq, 5),
        ]
        return [(t, word) for t, word in found if t is not None]

    @staticmethod
    def at(flat: Tensor, row: list[int], word: int) -> Tensor:
        return flat[row[word] : row[word] + row[1]]

    def assert_like(self, near: Case) -> None:
        for (mine, word), (theirs, _) in zip(self.streams(), self.streams(near), strict=True):
            for i in range(len(self.rows)):
                a, b = self.at(mine, self.rows[i], word), self.at(theirs, near.rows[i], word)
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"segment {i}, word {word}"
            # where an offset cut to 32 bits would point to
            low = mine[: 2**14]
            assert not bool(low.view(torch.uint8).any())


def small_case(dtype: torch.dtype, split: bool) -> Case:
    case = Case([Param(SMALL, dtype, 0, amsgrad=True) for _ in range(3)], split)
    case.set_group(0, mode=ops.GROUP_AMSGRAD | ops.GROUP_DECOUPLED)
    case.step_control(case.control())
    return case


def run_far(case: Case, far: Far, op: Any) -> list[Tensor]:
    """All ops with a table, near and far; the norm of each."""
    norms = [torch.zeros(ops.NORM_WORDS, dtype=torch.int64) for _ in range(2)]
    edited = torch.ones(3, dtype=torch.uint8)
    ops.grad_norm(case.segments, case.chunk_segment, case.grads, norms[0])
    ops.adam_step(*case.adam_args())
    op.grad_norm(far.segments, far.chunk_segment, far.grads, norms[1])
    op.adam_step(
        far.segments, far.chunk_segment, case.scalars, far.grads, far.params, far.master, far.remainder,
        far.exp_avg, far.exp_avg_sq, far.max_exp_avg_sq,
    )  # fmt: skip
    far.assert_like(case)
    if case.specs[0].dtype != torch.float32:
        for c in (case, far):
            store = c.master if c.master is not None else c.remainder
            for i in range(3):
                far.at(store, c.rows[i], 4).fill_(7)
        ops.refresh_masters(case.segments, case.chunk_segment, case.params, case.master, case.remainder, edited)
        op.refresh_masters(far.segments, far.chunk_segment, far.params, far.master, far.remainder, edited)
        far.assert_like(case)
    return norms


@pytest.mark.parametrize(("dtype", "split"), MASTERS)
def test_far_segments(dtype: torch.dtype, split: bool) -> None:
    case = small_case(dtype, split)
    norms = run_far(case, Far(case), ops)
    assert torch.equal(*norms)


@pytest.mark.parametrize(("dtype", "split"), MASTERS)
def test_far_segments_in_the_kernels_sources(kernel_sources: Shim, dtype: torch.dtype, split: bool) -> None:
    case = small_case(dtype, split)
    far = Far(case)
    # of a grid that covers the whole shard, the blocks that have something to do
    kernel_sources.set("forward", resident=2**30, first_block=SHARD[0] // BLOCK)
    norms = run_far(case, far, kernel_sources)
    kernel_sources.set("forward")
    assert torch.equal(*norms)


# ---- one segment of 2^31 + 8 elements, of which the table shows the end


def end_of_a_segment(op: Any) -> None:
    chunks = -(-BIG // ops.CHUNK)
    chunk_segment = torch.full((chunks,), -1, dtype=torch.int32)
    chunk_segment[-1] = 0
    begin = 2**31 + 256  # gradient and parameter; the end lies beyond 2^32
    segments = torch.tensor([[0, BIG, begin, begin + 128, 0, -1, 0, 0]])
    case = Case([Param(8, torch.float32)])
    case.set_group(0)
    case.step_control(case.control())
    grads, params = ([addresses(begin + 128 + BIG, torch.float32)] for _ in range(2))
    state = [addresses(chunks * ops.CHUNK, torch.float32) for _ in range(2)]
    far = [grads[0][begin + 2**31 :][:8], params[0][begin + 128 + 2**31 :][:8], *(t[2**31 : BIG] for t in state)]
    near = [case.grad(0), case.param(0), case.of(case.exp_avg, 0), case.of(case.exp_avg_sq, 0)]
    for a, b in zip(far, near, strict=True):
        a.copy_(b)
    norms = torch.zeros(2, ops.NORM_WORDS, dtype=torch.int64)
    ops.grad_norm(case.segments, case.chunk_segment, case.grads, norms[0])
    op.grad_norm(segments, chunk_segment, grads, norms[1])
    assert torch.equal(*norms)
    case.adam_step()
    op.adam_step(segments, chunk_segment, case.scalars, grads, params, None, None, *state, None)
    for a, b in zip(far, near, strict=True):
        assert torch.equal(a, b)
    assert state[0][2**31 + 8 :].any() == 0


def test_the_end_of_a_segment() -> None:
    end_of_a_segment(ops)


def test_the_end_of_a_segment_in_the_kernels_sources(kernel_sources: Shim) -> None:
    kernel_sources.set("forward", resident=2**30, first_block=2**31 // BLOCK)
    end_of_a_segment(kernel_sources)
    kernel_sources.set("forward")


@pytest.mark.parametrize(("kind_in", "kind_out"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)])
def test_the_end_of_slices_in_the_kernels_sources(
    kernel_sources: Shim, kind_in: torch.dtype, kind_out: torch.dtype
) -> None:
    """Rows of 2^31 + 8 elements: the third one begins beyond 2^32."""
    kernel_sources.set("forward", resident=2**30, first_block=2**31 // BLOCK)
    received, own = addresses(3 * BIG, kind_in).view(3, BIG), addresses(BIG, kind_in)
    out = addresses(BIG, kind_out)
    values = torch.arange(32, dtype=torch.float32).view(4, 8)
    for row, part in zip((received[0], own, received[1], received[2]), values, strict=True):
        row[-8:] = part
    norm = torch.zeros(ops.NORM_WORDS, dtype=torch.int64)
    kernel_sources.sum_slices(received, own, 1, 0.25, 1.0, out, norm)
    kernel_sources.set("forward")
    wanted = values.mean(0)
    assert torch.equal(out[-8:], wanted.to(kind_out))
    assert norm_integer(norm) == int(wanted.square().sum()) << 149


def test_the_layout() -> None:
    """Offsets of parameters and of pieces, and the table of chunks, of two parameters of 2^31 + 8 elements."""
    layout = Layout([ParamSpec(BIG, torch.bfloat16), ParamSpec(BIG, torch.bfloat16)], 3, bucket_cap_bytes=2**40)
    padded = 2**31 + ops.CHUNK
    assert layout.begin_of == [padded, 0]
    assert layout.flat_numel[torch.bfloat16] >= 2 * padded
    held = {0: 0, 1: 0}
    for rank in range(3):
        pieces = list(layout.segments(rank))
        table = layout.chunk_segments(pieces)
        assert table.numel() == layout.shard_numel // ops.CHUNK
        for s, piece in enumerate(pieces):
            assert piece.lo == held[piece.param], "ranks hold neighbouring parts"
            held[piece.param] = piece.hi
            assert piece.flat_begin == layout.begin_of[piece.param] + piece.lo
            first, last = piece.shard_begin // ops.CHUNK, (piece.shard_begin + piece.hi - piece.lo - 1) // ops.CHUNK
            assert table[first] == table[last] == s
    assert held == {0: BIG, 1: BIG}


# ---- all of it, through a few pages


@contextmanager
def through_few_pages(numel: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """A flat tensor whose pages are all the same 64 MiB of memory, but for the last 64 MiB, which are its own."""
    window = 2**26
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3
    libc.mmap.argtypes = [*libc.mmap.argtypes, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    windows = -(-numel * dtype.itemsize // window)
    file = os.memfd_create("zero1")
    os.ftruncate(file, 2 * window)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    base = libc.mmap(None, windows * window, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE, -1, 0)
    try:
        for k in range(windows):
            offset = window if k == windows - 1 else 0
            got = libc.mmap(base + k * window, window, access, mmap.MAP_SHARED | 0x10, file, offset)  # MAP_FIXED
            if got != base + k * window:
                pytest.skip(f"mmap: {os.strerror(ctypes.get_errno())}")
        memory = (ctypes.c_char * (windows * window)).from_address(base)
        yield torch.frombuffer(memory, dtype=dtype, count=numel)
    finally:
        libc.munmap(base, windows * window)
        os.close(file)


@pytest.mark.slow
def test_all_of_grad_norm_and_sum_slices() -> None:
    grad = addresses(BIG, torch.bfloat16)
    places = [0, 2**30, 2**31 - 1, 2**31, BIG - 1]
    for k, place in enumerate(places):
        grad[place] = 2.0**k
    chunks = -(-BIG // ops.CHUNK)
    segments = torch.tensor([[0, BIG, 0, 0, 0, -1, 0, 0]])
    norm = torch.zeros(ops.NORM_WORDS, dtype=torch.int64)
    ops.grad_norm(segments, torch.zeros(chunks, dtype=torch.int32), [grad], norm)
    assert norm_integer(norm) == sum(4**k for k in range(5)) << 149

    received = addresses(3 * BIG, torch.bfloat16).view(3, BIG)
    received[2, -8:] = 4.0
    with through_few_pages(BIG, torch.bfloat16) as out:
        norm.zero_()
        ops.sum_slices(received, grad, 1, 0.25, 1.0, out, norm)
        # only these have pages of their own; what is before them is written by several threads
        assert out[-8:].tolist() == [3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0]
    means = [1 / 4, 2 / 4, 4 / 4, 3.0, 5.0, *[1.0] * 6]
    assert norm_integer(norm) == int(sum(m * m for m in means) * 2.0**149)


@pytest.mark.slow
def test_all_of_adam_step() -> None:
    chunks = -(-BIG // ops.CHUNK)
    segments = torch.tensor([[0, BIG, 0, 0, 0, -1, 0, 0]])
    case = Case([Param(8, torch.bfloat16)])
    case.set_group(0)
    case.step_control(case.control())
    grad, numel = addresses(BIG, torch.bfloat16), chunks * ops.CHUNK
    with (
        through_few_pages(BIG, torch.bfloat16) as param,
        through_few_pages(BIG, torch.float32) as master,
        through_few_pages(numel, torch.float32) as exp_avg,
        through_few_pages(numel, torch.float32) as exp_avg_sq,
    ):
        far = [grad[-8:], param[-8:], master[-8:], exp_avg[2**31 : BIG], exp_avg_sq[2**31 : BIG]]
        assert case.master is not None
        near = [case.grad(0), case.param(0), case.of(case.master, 0, 4)]
        near += [case.of(case.exp_avg, 0), case.of(case.exp_avg_sq, 0)]
        for a, b in zip(far, near, strict=True):
            a.copy_(b)
        table = torch.zeros(chunks, dtype=torch.int32)
        ops.adam_step(segments, table, case.scalars, [grad], [param], master, None, exp_avg, exp_avg_sq, None)
        case.adam_step()
        for a, b in zip(far, near, strict=True):
            assert torch.equal(a, b)


# ---- the sources

# Every 32-bit integer that the sources declare, by name, and why it holds neither a count nor an offset of elements.
NARROW = {
    "bits of one number": "a b u h hi sign exponent mantissa position magnitude normal tiny finite rounded nan "
    "is_nan limb word float_to_bits flags unused differs",
    "one of a few": "master dtype dtype_in dtype_out in kFactWords kKnown kLevels kMaxBuffers kNormLimbs kNormWords "
    "kRows kSkippedWords w",
    "inside a vector, a warp, a block or a chunk": "i n at count count_of half lane lane_begin chunk_lanes distance "
    "kPerThread kThreads kThreadsPerChunk kChunksPerBlock kFullWarp kWords",
    "rows of a table of parameters": "row index",
    "flags": "skip_nonfinite scaled",
    "of the machine": "device multiprocessors",
}
# and every cast to one that is not of bits
CASTS = {
    ("vec.cuh", "left"): "below 8 there",
    ("launch.cuh", "std::min(blocks, resident)"): "at most as many as the device holds at once",
    ("norm_math.h", "position >> 5"): "below 8",
    ("module.cpp", "zero1::cpu::level()"): "one of three",
}


def sources() -> Iterator[tuple[str, str]]:
    """(name, text without comments and strings) of every file of csrc."""
    for path in sorted(CSRC.rglob("*.*")):
        text = re.sub(r"//[^\n]*", "", path.read_text())
        yield path.name, re.sub(r'"(\\.|[^"\\])*"', '""', text)


def test_no_narrow_variable_holds_a_count_or_an_offset() -> None:
    known = {name for names in NARROW.values() for name in names.split()}
    found = set()
    for file, text in sources():
        for name in re.findall(r"\b(?:unsigned(?!\s+long)|u?int32_t|int|short)\s+(\w+)", text):
            found.add(name)
            assert name in known, f"{file} declares {name} with 32 bits: int64_t, or say above what bounds it"
        for cast in re.findall(r"static_cast<(?:unsigned|u?int32_t|int)>\(((?:[^()]|\([^()]*\))*)\)", text):
            assert (file, cast) in CASTS or "bits" in cast, f"{file} casts {cast} to 32 bits"
    assert known == found, "names that are no longer there"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_no_conversion_narrows() -> None:
    """The compiler sees none of the kind that needs no cast. (The CUDA sources are compiled with the same warnings.)"""
    assert {"-Wconversion", "-Werror"} < set(COMPILE)
    for path in sorted(CSRC.glob("*/*.cpp")):
        run = subprocess.run([*COMPILE, "-fsyntax-only", f"-I{CSRC}", str(path)], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr


def test_the_compiler_would_see_it(tmp_path: Path) -> None:
    (tmp_path / "x.cpp").write_text("int f(long n) { int m = n; return m; }")
    assert subprocess.run([*COMPILE, "-fsyntax-only", str(tmp_path / "x.cpp")], capture_output=True).returncode != 0
