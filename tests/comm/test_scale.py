"""Large worlds without large machines: the whole optimizer on the meta device, with a group that only pretends.

Construction and a step at N = 8 to 4096 for real shapes; padding stays below half a percent, there are no more
buckets than a network wants, what a rank holds follows the formula.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run
from torch.testing._internal.distributed.fake_pg import FakeStore

from zero1_cuda import Zero1AdamW

MIB = 2**20


def gpt2_xl() -> list[tuple[int, ...]]:
    h = 1600
    block = [(h,), (h,), (3 * h, h), (3 * h,), (h, h), (h,), (h,), (h,), (4 * h, h), (4 * h,), (h, 4 * h), (h,)]
    return [(50257, h), (1024, h), *(block * 48), (h,), (h,)]


def llama3_8b() -> list[tuple[int, ...]]:
    h, inner, vocabulary, kv = 4096, 14336, 128256, 1024
    block = [(h, h), (kv, h), (kv, h), (h, h), (inner, h), (inner, h), (h, inner), (h,), (h,)]
    return [(vocabulary, h), *(block * 32), (h,), (vocabulary, h)]


def moe_of_64_experts() -> list[tuple[int, ...]]:
    h = 1024
    block = [(h, h)] * 4 + [(h,)] * 2 + [(2048, h), (h, 2048), (2048, h)] * 64
    return [(32000, h), *(block * 104)]


SHAPES = {f.__name__: f for f in (gpt2_xl, llama3_8b, moe_of_64_experts)}


def pretended(rank, world, name, ranks):
    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=ranks - 1, world_size=ranks)
    params = [torch.nn.Parameter(torch.empty(s, dtype=torch.bfloat16, device="meta")) for s in SHAPES[name]()]
    begin = time.process_time()
    opt = Zero1AdamW(params)
    took = time.process_time() - begin
    for p in params:
        p.grad = torch.empty_like(p)
    opt.step()
    opt.step()
    layouts = [state.layout for state in opt._runner.registry.sets]
    slices = [b.slice_numel * b.dtype.itemsize for layout in layouts for b in layout.buckets]
    return sum(p.numel() for p in params), took, slices, opt.memory_report()


@pytest.mark.parametrize("ranks", [8, 64, 1024, 4096])
@pytest.mark.parametrize("name", ["gpt2_xl", "llama3_8b"])
def test_real_shapes(name, ranks):
    ((numel, took, slices, report),) = run(1, pretended, name, ranks, group=False)
    assert took < 3
    assert report["padding"] < 0.005 * report["total"]
    held = report["params"] + report["grads"] + report["state"]
    assert held == pytest.approx((4 + 12 / ranks) * numel, rel=0.005)
    assert report["predicted"] == pytest.approx((4 + 12 / ranks) * numel, rel=1e-6)
    # the first is small on purpose, the last is what is left; a slice of less than half a MiB is mostly latency
    enough = max(25 * MIB / ranks, MIB / 2)
    assert len(slices) <= 2 + 2 * numel / (ranks * 0.5 * enough)


def test_a_mixture_of_experts():
    ((numel, took, _, report),) = run(1, pretended, "moe_of_64_experts", 1024, group=False)
    assert took < 5
    assert report["padding"] < 0.005 * report["total"]
    held = report["params"] + report["grads"] + report["state"]
    assert held == pytest.approx((4 + 12 / 1024) * numel, rel=0.005)
