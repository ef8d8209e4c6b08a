"""The promises of docs/determinism.md. The same inputs on the same number of ranks give the same bits, run after run,
however the ranks' timing falls, with reduction overlapping backward. And the same reduced gradients give the same bits
for every number of ranks, bucket size, replicate x shard grid and mode, the norm and clipping included.
"""

import random
import time

import pytest
import torch
from helpers.ranks import digest, equal_on_all_ranks, run, snapshot, weights
from helpers.states import grid

from zero1_cuda import Zero1AdamW

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [(33, 17), (300,), (), (128, 9), (7, 2, 5), (0,), (1025,), (64, 40)]
MIXED = [FP32, BF16, FP16, BF16, FP32, FP32, FP16, FP32]


def parameters():
    return [w for s, d in zip(SHAPES, MIXED, strict=True) for w in weights([s], d)]


# -- run after run ----------------------------------------------------------------------------------------------------


def trained(rank, world, jitter, options):
    """Gradients that round when they are added, in an order and at times that `jitter` decides."""
    chance = random.Random(1000 * jitter + rank)
    params = parameters()
    opt = Zero1AdamW(params, lr=0.02, eps=1e-3, **{"bucket_cap_mb": 0.003, **options})
    for p in params:
        p.register_hook(lambda g: time.sleep(chance.choice([0, 0, 0.002])) if jitter else None)
    norms = []
    for t in range(4):
        generator = torch.Generator().manual_seed(100 * t + rank)
        grads = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]
        terms = [(p * g).sum().float() for p, g in zip(params, grads, strict=True)]
        chance.shuffle(terms)
        sum(terms).backward()
        time.sleep(chance.choice([0, 0.003]) if jitter else 0)
        opt.step()
        opt.zero_grad()
        norms.append(opt.grad_norm)
    opt.synchronize()
    equal_on_all_ranks(params)
    return digest(snapshot(opt, params)), [None if n is None else n.item() for n in norms]


OPTIONS = {
    "clipped": {"max_grad_norm": 3.0},
    "flowing": {"skip_nonfinite": False},
    "native": {"reduce_in_fp32": False, "max_grad_norm": 3.0},
}


def all_trained(rank, world, jitter):
    return [trained(rank, world, jitter, options) for options in OPTIONS.values()]


def all_buckets(rank, world):
    """Where slices are exchanged they are added in rank order, wherever a bucket begins and whoever adds."""
    small, big = {"bucket_cap_mb": 0.0001}, {"bucket_cap_mb": 100, "overlap_reduce": False}
    return [trained(rank, world, 0, {"max_grad_norm": 3.0, **options}) for options in ({}, small, big)]


def test_the_same_bits_for_every_bucket_size():
    found = [result for results in run(3, all_buckets) for result in results]
    assert all(result == found[0] for result in found)


@pytest.mark.parametrize("world", [2, 3])
def test_the_same_bits_run_after_run(world):
    want = run(world, all_trained, 0)
    assert all(found == want[0] for found in want)
    for jitter in (1, 2):
        assert run(world, all_trained, jitter) == want


# -- one result for all partitions ------------------------------------------------------------------------------------


def gradient(p, t, i):
    """Exact when 2, 3 or 4 of them are added and divided again; the squares round at every addition."""
    generator = torch.Generator().manual_seed(100 * t + i)
    bits = {FP32: 20, BF16: 6, FP16: 8}[p.dtype]
    whole = torch.randint(-(2**bits), 2**bits + 1, tuple(p.shape), generator=generator)
    return torch.ldexp(whole.float(), torch.randint(-bits - 4, 5 - bits, tuple(p.shape), generator=generator)).to(
        p.dtype
    )


def stepped(rank, world, options, max_norm):
    params = parameters()
    group = options.pop("group", None)
    shards = {"shards of 2": 2, "replicas only": 1, "shards only": 4}.get(group)
    opt = Zero1AdamW(params, lr=0.02, eps=1e-3, **options, **(grid(rank, world, shards) if shards else {}))
    norms = []
    for t in range(4):
        sum((p * gradient(p, t, i)).sum().float() for i, p in enumerate(params) if i != 1 or t % 2).backward()
        if max_norm:
            norms.append(opt.clip_grad_norm_(max_norm).item())
        opt.step()
        opt.zero_grad()
    return digest(snapshot(opt, params)), norms


PARTITIONS = [
    {},
    {"bucket_cap_mb": 0.001},
    {"bucket_cap_mb": 0.01, "overlap_reduce": False, "master_weights": "split"},
    {"bucket_cap_mb": 100, "skip_nonfinite": False},
]
GRIDS = [{"group": "shards of 2"}, {"group": "replicas only", "bucket_cap_mb": 0.002}, {"group": "shards only"}]


def partitions(rank, world, max_norm):
    kinds = PARTITIONS + (GRIDS if world == 4 else [])
    return [stepped(rank, world, dict(options), max_norm) for options in kinds]


@pytest.mark.parametrize("max_norm", [2.0, None], ids=["clipped", "not clipped"])
def test_the_same_reduced_gradients_give_the_same_bits(max_norm):
    ((want, *_),) = run(1, partitions, max_norm)
    assert all(norm > 10 for norm in want[1])
    for world in (1, 2, 3, 4) if max_norm else (3, 4):
        for found in run(world, partitions, max_norm):
            assert found == [want] * len(found), world
