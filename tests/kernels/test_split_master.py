"""A bf16 parameter and a 16-bit remainder are the fp32 master, for every one of the 2^32 patterns.

65537 fp32 values round to an even bf16 value and 16 bits tell 65536 apart, so no pair can be exact for all. One value
gives way: a master exactly halfway below an even bf16 value is stored one unit higher (`settle_tie`), with split and
with fp32 masters alike. Shown here, of the header that all kernels compile and of its twin in Python:

* what was stored reads back to the bit: join(round(m), remainder(m)) = m for every m that `settle_tie` gives;
* `settle_tie` moves those ties, by one unit, and nothing else; the parameter is the same before and after;
* the parameter is always the master rounded to nearest even, as torch casts; infinities stay, a NaN stays a NaN;
* a whole optimizer goes the same way to the bit with split and with fp32 masters, in every variant."""

from __future__ import annotations

import copy
import ctypes
import itertools
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, byref, c_int64, c_uint64, c_void_p
from typing import Any

import pytest
import torch
from shim.host import CSRC, TESTS
from torch import Tensor

from zero1_cuda import Zero1Adam, Zero1AdamW, reference
from zero1_cuda.params.state import join_master, settle_tie

MOVED = 2 * 0x7F80 // 2  # odd bf16 values of both signs below infinity
UNUSED = MOVED + 2 * 0x8000 + 2 * 0x7FFF  # pairs that no master has: those ties, beyond infinity, rounded up to zero


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """convert.h, compiled with functions that look at every pattern."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    path = tmp_path_factory.mktemp("split") / "split_master.so"
    command = ["g++", "-std=c++17", "-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    source = str(TESTS / "shim" / "split_master.cpp")
    subprocess.run([*command, f"-I{CSRC / 'include'}", source, "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))
    for function in (library.broken_masters, library.broken_pairs):
        function.argtypes, function.restype = [c_uint64, c_uint64, POINTER(c_int64)], c_int64
    library.split_and_join.argtypes = [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p]
    return library


def signed(bits: Tensor) -> Tensor:
    """int64 in [0, 2^32) as the int32 of the same bits."""
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)


def sample() -> Tensor:
    """Every high half, so every exponent, infinity and kind of NaN, with the low halves that matter; and many more."""
    high = torch.arange(2**16, dtype=torch.int64)[:, None] << 16
    low = torch.tensor([0, 1, 2, 0x3FFF, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xC000, 0xFFFE, 0xFFFF])
    rest = torch.arange(0, 2**32, 4001, dtype=torch.int64)  # an odd stride: all low halves come up
    return torch.cat([signed((high | low).flatten()), signed(rest)])


def check(library: ctypes.CDLL, bits: Tensor) -> int:
    """Whatever this file claims of single values, of these; -> how many were moved."""
    settled, joined = torch.empty_like(bits), torch.empty_like(bits)
    params, remainders = torch.empty_like(bits, dtype=torch.int16), torch.empty_like(bits, dtype=torch.int16)
    outputs = [t.data_ptr() for t in (settled, params, remainders, joined)]
    library.split_and_join(bits.data_ptr(), bits.numel(), *outputs)
    master, param = bits.view(torch.float32), params.view(torch.bfloat16)
    nan = master.isnan()

    tie = ((bits & 0x1FFFF) == 0x18000) & ~nan
    assert torch.equal(settled, bits + tie.to(torch.int32))
    quiet = ((bits & 0x7F0000) == 0) & nan  # no room for its payload: still a NaN
    assert torch.equal(joined, settled | (quiet.to(torch.int32) << 22))
    assert torch.equal(remainders, (settled & 0xFFFF).to(torch.int16))

    assert torch.equal(param.isnan(), nan)
    for rounded in (master.bfloat16(), settled.view(torch.float32).bfloat16()):
        assert bool(((params == rounded.view(torch.int16)) | nan).all())

    assert torch.equal(settle_tie(master).view(torch.int32), settled)
    assert torch.equal(reference.settle_tie(master).view(torch.int32), settled)
    assert torch.equal(join_master(param, remainders).view(torch.int32), joined)
    return int((settled != bits).sum())


def in_parallel(function: Any) -> tuple[int, int]:
    """A function of the header over [0, 2^32), in 64 parts; -> (broken, counted)."""

    def part(k: int) -> tuple[int, int]:
        counted = c_int64()
        return function(k << 26, (k + 1) << 26, byref(counted)), counted.value

    with ThreadPoolExecutor() as pool:
        results = list(pool.map(part, range(64)))
    return sum(r[0] for r in results), sum(r[1] for r in results)


def test_a_sample_of_masters(header: ctypes.CDLL) -> None:
    bits = sample()
    check(header, bits)
    assert check(header, bits[: 2**16 * 12]) == MOVED, "the first part holds every tie"


def test_a_sample_of_pairs(header: ctypes.CDLL) -> None:
    """Of every parameter, the remainders around the tie and at both ends."""
    counted, unused = c_int64(), 0
    for begin, end in ((0, 2), (0x7FFF, 0x8002), (0xFFFF, 0x10000)):
        for param in range(2**16):
            assert header.broken_pairs((param << 16) + begin, (param << 16) + end, byref(counted)) == 0
            unused += counted.value
    # the ties; +-infinity with 1, 0x7fff, 0x8000; +-0 with 0x8001, 0xffff
    assert unused == MOVED + 2 * 3 + 2 * 2


@pytest.mark.slow
def test_all_masters(header: ctypes.CDLL) -> None:
    assert in_parallel(header.broken_masters) == (0, MOVED)


@pytest.mark.slow
def test_all_pairs(header: ctypes.CDLL) -> None:
    assert in_parallel(header.broken_pairs) == (0, UNUSED)


@pytest.mark.slow
def test_all_masters_with_torch_and_python(header: ctypes.CDLL) -> None:
    part = torch.arange(2**16, dtype=torch.int32)

    def some(k: int) -> int:
        return sum(check(header, part + ((high << 16) - 2**31)) for high in range(k << 10, (k + 1) << 10))

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a part fits into the cache of one core
    with ThreadPoolExecutor() as pool:
        assert sum(pool.map(some, range(64))) == MOVED
    torch.set_num_threads(before)


def test_one_bit_too_few(header: ctypes.CDLL) -> None:
    """Why a tie has to give way: without settling, the two ties of an even value would get the same pair."""
    even = 0x3F80
    below, above = (even << 16) - 0x8000, (even << 16) + 0x8000
    values = torch.tensor([below, above], dtype=torch.int32)
    assert values.view(torch.float32).bfloat16().view(torch.int16).tolist() == [even, even]
    assert (values & 0xFFFF).tolist() == [0x8000, 0x8000]
    assert settle_tie(values.view(torch.float32)).view(torch.int32).tolist() == [below + 1, above]


# ---- a whole optimizer

VARIANTS = [
    {"kind": kind, "amsgrad": amsgrad, "maximize": maximize, "capturable": capturable}
    for kind, amsgrad, maximize, capturable in itertools.product(
        (Zero1Adam, Zero1AdamW), (False, True), (False, True), (False, True)
    )
]
STEPS = 12


class Pair:
    """The same model, bf16 with some fp16 and fp32, under fp32 and under split masters."""

    def __init__(self, kind: Any, capturable: bool, **options: Any) -> None:
        torch.manual_seed(1)
        shapes = [((300, 7), torch.bfloat16), ((129,), torch.bfloat16), ((65,), torch.float32), ((33,), torch.float16)]
        params = [torch.nn.Parameter((torch.randn(shape) * 0.1).to(dtype)) for shape, dtype in shapes]
        self.params = [params, copy.deepcopy(params)]
        self.rates = [torch.tensor(1e-3) if capturable else 1e-3 for _ in range(2)]
        self.opts = [
            kind(ps, lr=rate, capturable=capturable, weight_decay=0.1, master_weights=mode, **options)
            for ps, rate, mode in zip(self.params, self.rates, ("fp32", "split"), strict=True)
        ]

    def gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(*self.params, strict=True):
            g = torch.randn(p.shape, generator=generator)
            p.grad, q.grad = g.to(p.dtype), g.to(q.dtype)

    def bits(self, k: int) -> list[Tensor]:
        """Everything that a step may change, of the k-th model."""
        out = []
        for p in self.params[k]:
            state = self.opts[k].full_param_state(p)
            rounded = state["master"].to(p.dtype)
            assert bool(((p == rounded) | (p.isnan() & rounded.isnan())).all()), "a parameter is its master rounded"
            out += [p.detach(), *(state[name] for name in sorted(state))]
        return [t.reshape(-1).view(torch.uint8) for t in out]

    def assert_equal(self) -> None:
        for a, b in zip(self.bits(0), self.bits(1), strict=True):
            assert torch.equal(a, b)


def name_of(variant: dict[str, Any]) -> str:
    return " ".join([variant["kind"].__name__, *(name for name, on in variant.items() if on is True)])


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_same_trajectory(variant: dict[str, Any], clip: float | None) -> None:
    """With changing rates, a step that is skipped and one that is clipped by hand."""
    pair = Pair(max_grad_norm=clip, **variant)
    for step in range(STEPS):
        pair.gradients(step)
        if step == 4:
            for params in pair.params:
                params[0].grad[5, 5] = float("inf")
        for opt, rate in zip(pair.opts, pair.rates, strict=True):
            if isinstance(rate, Tensor):
                rate.fill_(1e-3 * (1 + step % 3))
            else:
                opt.param_groups[0]["lr"] = 1e-3 * (1 + step % 3)
            if step == 7:
                opt.clip_grad_norm_(0.01)
            opt.step()
        pair.assert_equal()
    assert [int(opt.skipped_steps) for opt in pair.opts] == [1, 1]


def test_a_tie_on_the_way() -> None:
    """1 - 2^-9 lies halfway below 1: stored one unit up in both modes, and read back as that."""
    for mode, capturable in itertools.product(("fp32", "split"), (False, True)):
        p = torch.nn.Parameter(torch.ones(200, dtype=torch.bfloat16))
        lr = torch.tensor(2.0**-9) if capturable else 2.0**-9
        # without momentum and epsilon a step subtracts lr exactly
        opt = Zero1Adam([p], lr=lr, betas=(0.0, 0.0), eps=0.0, master_weights=mode, capturable=capturable)
        for bits in (0x3F7F8001, 0x3F7F0001):
            p.grad = torch.ones_like(p)
            opt.step()
            assert opt.full_param_state(p)["master"].view(torch.int32).unique().tolist() == [bits]
        assert p.unique().tolist() == [1.0 - 2.0**-8]


def test_not_finite_masters() -> None:
    """Infinities and NaN reach the masters of both modes alike, and stay."""
    pair = Pair(Zero1AdamW, False, skip_nonfinite=False)
    with torch.no_grad():
        for params in pair.params:
            params[1][:2] = torch.tensor([float("inf"), float("-inf")])
    for step in range(4):
        pair.gradients(step)
        if step == 1:
            for params in pair.params:
                params[0].grad[:, 0], params[0].grad[:, 1] = float("inf"), float("nan")
        for opt in pair.opts:
            opt.step()
        assert pair.params[1][0].isnan().sum() == (600 if step else 0)
        assert pair.params[1][1][:2].tolist() == [float("inf"), float("-inf")]
        pair.assert_equal()
