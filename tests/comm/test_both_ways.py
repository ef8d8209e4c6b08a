"""All ways of dividing the work give the same bits where gradients are exact: the native reduce-scatter and all-gather,
the exchange, any bucket size, early or late reduction, sub-groups, and grids of replicas. So do the norms, whatever the
partition and the gradients. And no way overflows where the mean does not.
"""

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Plain, backward, digest, exact, rounded, run, weights
from torch import nn

from zero1_cuda import Zero1AdamW
from zero1_cuda.comm.grid import ProcessGrid

SHAPES = [(50, 30), (7,), (), (300,), (64, 5), (0,), (1025,)]
OPTIONS = {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1}
WAYS = {
    "default": {},
    "native": {"reduce_in_fp32": False},
    "exchange": {"reduce_in_fp32": True},
    "in step()": {"overlap_reduce": False},
    "native in step()": {"overlap_reduce": False, "reduce_in_fp32": False},
    "a bucket each": {"bucket_cap_mb": 1e-6},
    "small buckets": {"bucket_cap_mb": 0.004},
    "one bucket": {"bucket_cap_mb": 100},
    "native, small buckets": {"bucket_cap_mb": 0.004, "reduce_in_fp32": False},
    "split": {"master_weights": "split"},
}


def mixed():
    return [*weights(SHAPES, torch.bfloat16), *weights(SHAPES[:4]), *weights(SHAPES[3:], torch.float16)]


def trained(rank, world, ways):
    """{way: (hash of the parameters, norms)} after a few steps on exact gradients; compared with torch."""
    found = {}
    for way, options in ways.items():
        params = mixed()
        plain = Plain(params, **OPTIONS)
        opt = Zero1AdamW(params, **OPTIONS, **options)
        norms = []
        for k in range(3):
            for side, optimizer in ((params, opt), (plain.params, plain)):
                grads = [exact(p.shape, rank, k, i, ranks=world) for i, p in enumerate(side)]
                if k == 1:  # two backwards in a cycle
                    backward(side, grads)
                backward(side, grads)
                if optimizer is opt:
                    norms.append(float(opt.clip_grad_norm_(1e9)))
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(norms[-1], float(plain.norm), rtol=1e-6, atol=0.0)
        plain.check(opt, params, state=way == "default")
        found[way] = (digest(params), norms)
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_options_give_the_same_bits(world):
    for found in run(world, trained, WAYS):
        for way in WAYS:
            if way != "split":  # its masters are off by a bit where they are ties
                assert found[way] == found["default"], way
        assert found["split"][1] == found["default"][1]


def as_if_nccl(rank, world):
    """The functions that NCCL gets, on gloo: all_to_all_single, reduce_scatter and all_gather into one tensor."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ProcessGrid, "backend", lambda self, device: "nccl")
        calls = []
        for name, function in list(vars(dist).items()):
            if name.startswith(("all_to_all", "reduce_scatter", "all_gather_into", "all_gather_single", "broadcast")):

                def logged(*args, name=name, function=function, **kwargs):
                    calls.append(name.partition("_single")[0])
                    return function(*args, **kwargs)

                monkeypatch.setattr(dist, name, logged)
        ways = {"native": {}, "exchange": {"reduce_in_fp32": True}, "in step()": {"overlap_reduce": False}}
        return trained(rank, world, ways), calls


@pytest.mark.parametrize("world", [2, 4])
def test_the_functions_that_nccl_gets(world):
    want = run(world, trained, {"default": {}})[0]["default"]
    for found, calls in run(world, as_if_nccl):
        assert {"all_to_all"} < set(calls)
        assert any(name.startswith("reduce_scatter") for name in calls)
        assert any(name.startswith("all_gather") for name in calls)
        assert set(found) == {"native", "exchange", "in step()"}
        assert all(way == want for way in found.values())


def large(rank, world, options):
    """Means near the largest fp16 value, of sums that are far above it."""
    p = nn.Parameter(torch.zeros(1000, dtype=torch.float16))
    opt = Zero1AdamW([p], **OPTIONS, **options)
    backward([p], [torch.full((1000,), 60000.0)])
    norm = opt.clip_grad_norm_(float("inf"))
    opt.step()
    assert not opt.step_skipped
    torch.testing.assert_close(float(norm), 60000.0 * 1000**0.5, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(opt.full_param_state(p)["exp_avg"], torch.full((1000,), 6000.0), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"reduce_in_fp32": False}], ids=["exchange", "native"])
def test_no_overflow_that_the_mean_does_not_have(world, options):
    run(world, large, options)


# -- norms ------------------------------------------------------------------------------------------------------------


def norms_of(rank, world, options, reverse):
    params = weights([(50, 31), (7,), (300,), (2000,)])
    grads = [torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(params)]
    if reverse:
        params, grads = params[::-1], grads[::-1]
    opt = Zero1AdamW(params, **options)
    backward(params, grads)
    return float(opt.clip_grad_norm_(1.0)), float(torch.cat([g.view(-1) for g in grads]).double().norm())


def test_the_norm_does_not_depend_on_the_partition():
    found = set()
    for world in (1, 2, 4):
        for options in ({}, {"bucket_cap_mb": 0.001}, {"overlap_reduce": False}, {"reduce_in_fp32": False}):
            for reverse in (False, True):
                for norm, want in run(world, norms_of, options, reverse):
                    assert norm == pytest.approx(want, rel=1e-6)
                    found.add(norm)
    assert len(found) == 1


# -- groups of ranks --------------------------------------------------------------------------------------------------


def sub_groups(rank, world):
    """Ranks 1 and 3 train one model, ranks 0 and 2 another, at the same time; then rank 3 alone."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    torch.manual_seed(rank)
    params = [nn.Parameter(torch.randn(s)) for s in SHAPES]
    opt = Zero1AdamW(params, **OPTIONS, process_group=mine)
    torch.manual_seed(rank % 2)  # the weights of the group's first rank
    plain = Plain([nn.Parameter(torch.randn(s)) for s in SHAPES], group=mine, **OPTIONS)
    for k in range(3):
        for side, optimizer in ((params, opt), (plain.params, plain)):
            backward(side, [exact(p.shape, rank, k, i, ranks=2) for i, p in enumerate(side)])
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(params, plain.params, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(opt.full_param_state(p)["exp_avg"], plain.opt.state[q]["exp_avg"])
    own = sum(t.numel() for state in opt.state.values() for name, t in state.items() if name == "exp_avg")
    assert own < sum(p.numel() for p in params)
    opt.consolidate_state_dict(to=1)  # a rank of the group, not a global one
    assert torch.is_tensor(opt.state_dict()["state"][0]["exp_avg"])
    hashes = [None] * 2
    dist.all_gather_object(hashes, digest(params), group=mine)
    assert hashes[0] == hashes[1]
    with pytest.raises(ValueError, match="not a member of process_group"):
        Zero1AdamW(weights([(3,)]), process_group=groups[1 - rank % 2])


def test_process_group():
    run(4, sub_groups)


def last_rank_only(rank, world):
    group = dist.new_group([1])
    if rank == 1:
        p = nn.Parameter(torch.ones(10))
        opt = Zero1AdamW([p], **OPTIONS, process_group=group)
        p.sum().backward()
        opt.step()
        want = 1.0 * (1 - 0.01 * 0.1) - 0.01 * 1.0 / (1.0 + 1e-4)
        torch.testing.assert_close(p.detach(), torch.full((10,), want))
        assert opt.state_dict()["state"][0]["exp_avg"].shape == (10,)


def test_a_group_of_the_last_rank_only():
    run(2, last_rank_only)


def grid(rank, world, options):
    """Two shards by two replicas: the mean over all four, and half a state on every rank."""
    shard = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    params = mixed()
    for p in params:
        p.data += rank  # the first rank's are sent to all
    opt = Zero1AdamW(params, **OPTIONS, process_group=shard, replicate_group=replicas, **options)
    plain = Plain(mixed(), **OPTIONS)
    norms = []
    for k in range(3):
        for side, optimizer in ((params, opt), (plain.params, plain)):
            grads = [exact(p.shape, rank, k, i, ranks=world) for i, p in enumerate(side)]
            if k == 1:
                backward(side, grads)
            backward(side, grads)
            if optimizer is opt:
                norms.append(float(opt.clip_grad_norm_(1e9)))
            optimizer.step()
            optimizer.zero_grad()
        assert norms[-1] == pytest.approx(float(plain.norm), rel=1e-6)
    for p, q in zip(params, plain.params, strict=True):
        if p.dtype == torch.float32:
            torch.testing.assert_close(p, q, rtol=0.0, atol=1e-5 + 1e-6 * 4)
        else:
            assert rounded(p.detach(), q.detach())
    report = opt.memory_report()
    whole = sum(p.numel() * (12 if p.element_size() == 2 else 8) for p in params)
    assert whole / 2 <= report["state"] <= whole / 2 + report["padding"]
    return digest(params), norms, [digest([t for t in s.values() if t.dim() == 1]) for s in opt.state.values()]


@pytest.mark.parametrize("options", [{}, {"overlap_reduce": False}, {"reduce_in_fp32": False}], ids=str)
def test_a_grid_of_replicas(options):
    found = run(4, grid, options)
    want = run(4, trained, {"default": {}})[0]["default"]
    for hash_, norms, _ in found:
        assert (hash_, norms) == want  # the bits of four ranks that share one state
    assert found[0][2] == found[2][2]  # replicas hold the same shard
    assert found[1][2] == found[3][2]
    assert found[0][2] != found[1][2]
