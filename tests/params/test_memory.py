"""Memory is what the formula says, counted from real tensors: 4Ψ + 12Ψ/N bytes on a rank (2Ψ/N more to overlap), the
state alone 12Ψ/N, with split masters 10Ψ/N; memory_report() tells it truly, and before the first step already; and
backward and step need no more than two buckets besides.
"""

import ctypes
import gc
import pathlib

import pytest
import torch
from helpers.ranks import run, weights
from torch import nn

from zero1_cuda import Zero1AdamW

STATUS, CLEAR_REFS = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")
BF16 = torch.bfloat16


def union(tensors):
    """Bytes of memory under these tensors' storages, every address counted once."""
    total = end = 0
    for begin, size in sorted((t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors):
        total += max(0, begin + size - max(begin, end))
        end = max(end, begin + size)
    return total


def live():
    """All tensors that Python can reach."""
    gc.collect()
    return [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.layout == torch.strided]


class Model(nn.Module):
    """The shapes of a small transformer: about two million parameters."""

    def __init__(self, width=192, layers=4, vocabulary=2000):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        sizes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(s) * 0.02) for s in sizes * layers)
        self.small = nn.ParameterList(
            nn.Parameter(torch.zeros(n)) for n in (width, 3 * width, 4 * width, width) * layers
        )

    def loss(self):
        return sum(p.float().square().sum() + p.float().sum() for p in self.parameters())


def after_steps(model, opt, steps=2):
    for _ in range(steps):
        opt.zero_grad()
        model.loss().backward()
        opt.step()


def held(rank, world, dtype, options):
    """Bytes on this rank: all live tensors, the state, the number of parameters, reports before and after."""
    before = union(live())
    model = Model().to(dtype)
    numel = sum(p.numel() for p in model.parameters())
    opt = Zero1AdamW(model.parameters(), **options)
    planned = opt.memory_report()
    after_steps(model, opt)
    params = list(model.parameters())
    state = [t for entry in opt.state.values() for name, t in entry.items() if name != "step"]
    state = union([*state, *params]) - union(params)  # an fp32 parameter is its own master
    return union(live()) - before, state, numel, planned, opt.memory_report()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_bytes_are_those_of_the_formula(world, overlap):
    for total, state, numel, planned, report in run(world, held, BF16, {"overlap_reduce": overlap}):
        per_rank = (14 if overlap and world > 1 else 12) / world
        assert numel > 2e6
        assert state == pytest.approx(12 * numel / world, rel=0.02)
        assert total == pytest.approx((4 + per_rank) * numel, rel=0.02)
        assert report["params"] == pytest.approx(2 * numel, rel=0.02)
        assert report["grads"] == pytest.approx(2 * numel, rel=0.02)
        assert report["state"] == pytest.approx(state, rel=0.002)
        assert report["buffers"] == pytest.approx((per_rank - 12 / world) * numel, abs=0.05 * numel)
        assert report["total"] == pytest.approx(total, abs=50_000)
        assert report["total"] == report["params"] + report["grads"] + report["state"] + report["buffers"]
        assert report["predicted"] == 4 * numel + -(-12 * numel // world)
        assert planned == report


@pytest.mark.parametrize(
    ("dtype", "options", "fixed", "shared"),
    [(torch.float32, {}, 8, 8), (BF16, {"master_weights": "split"}, 4, 10), (BF16, {"amsgrad": True}, 4, 16),
     (torch.float16, {"master_weights": "split"}, 4, 12)],
    ids=["fp32", "split", "amsgrad", "split fp16"],
)  # fmt: skip
def test_bytes_of_other_kinds(dtype, options, fixed, shared):
    for world in (1, 2):
        for total, state, numel, planned, report in run(world, held, dtype, {"overlap_reduce": False, **options}):
            assert state == pytest.approx(shared * numel / world, rel=0.02)
            assert total == pytest.approx((fixed + shared / world) * numel, rel=0.02)
            assert planned == report
            if not options.get("amsgrad"):
                assert report["predicted"] == fixed * numel + -(-shared * numel // world)


def padding(rank, world):
    params = weights([(1000, 3), (7,), (129,), (), (5000,)], BF16)
    opt = Zero1AdamW(params, bucket_cap_mb=0.005, overlap_reduce=False)
    sum(p.sum() for p in params).backward()
    opt.step()
    report = opt.memory_report()
    return report["params"] + report["grads"] + report["state"] - report["padding"], sum(p.numel() for p in params)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_is_not_padding_is_exactly_the_formula(world):
    found = run(world, padding)
    numel = found[0][1]
    assert sum(own for own, _ in found) == world * 4 * numel + 12 * numel


def small(rank, world):
    model = nn.Linear(30, 30)
    opt = Zero1AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(2, 30)).sum().backward()
        opt.step()
        opt.zero_grad()
    return opt.memory_report()["buffers"], opt.memory_report()["total"]


def test_a_small_model_has_small_buffers():
    for buffers, total in run(2, small):
        assert buffers < 2**15
        assert total < 2**16


def test_frozen_parameters_cost_nothing():
    frozen = nn.Parameter(torch.zeros(10**6), requires_grad=False)
    opt = Zero1AdamW([frozen, nn.Parameter(torch.zeros(1000))])
    assert opt.memory_report()["total"] < 30_000
    assert opt.memory_report()["predicted"] == 16 * 1000


# -- resident memory --------------------------------------------------------------------------------------------------


class Ones(torch.autograd.Function):
    """A loss that depends on a parameter and whose backward allocates nothing."""

    @staticmethod
    def forward(ctx, p, loss):
        ctx.like = p
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.ones((), dtype=ctx.like.dtype).expand_as(ctx.like), grad


def status(field):
    """Bytes, from /proc/self/status."""
    return 1024 * int(STATUS.read_text().partition(field + ":")[2].split()[0])


def rise(rank, world, options):
    """MiB by which the highest resident memory of a backward and a step is above that before them."""
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed goes back at once
    params = [nn.Parameter(torch.zeros(2**18, dtype=BF16)) for _ in range(64)]  # 32 MiB
    opt = Zero1AdamW(params, bucket_cap_mb=4, **options)
    rises = []
    for k in range(6):
        loss = torch.zeros((), requires_grad=True)
        for p in params:
            loss = Ones.apply(p, loss)
        before = status("VmRSS")
        CLEAR_REFS.write_text("5")  # the peak begins anew
        loss.backward()
        opt.step()
        if k >= 2:
            rises.append((status("VmHWM") - before) / 2**20)
        opt.zero_grad(set_to_none=k % 2 == 0)
    return max(rises)


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="no /proc/self/clear_refs here")
@pytest.mark.parametrize("options", [{}, {"overlap_reduce": False}], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_backward_and_step_need_less_than_two_buckets(world, options):
    most = max(run(world, rise, options))
    assert 0 < most < 2 * 4 + 1  # MiB; one for the allocator
