"""A step sends 2Ψ(N-1)/N elements per rank: one reduce-scatter and one all-gather, never an all-reduce of gradients.

Counted twice: at the functions of torch.distributed, and by the machine's own counters of the loopback device.
"""

import functools
import inspect
import pathlib
import time
import types

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import backward_of, digest, run, weights
from torch.utils.checkpoint import checkpoint

from zero1_cuda import Zero1AdamW, ops

COUNTERS = pathlib.Path("/proc/net/dev")


# Bytes that a rank sends for a call, by function; a ring's where the function leaves the way open.
SENT = {
    "isend": lambda t, world, mine: t.nbytes,
    "irecv": lambda t, world, mine: 0,
    "broadcast": lambda t, world, mine: t.nbytes * (world - 1) if mine else 0,
    "all_gather": lambda t, world, mine: t[0].nbytes * (world - 1),
    "all_reduce": lambda t, world, mine: 2 * t.nbytes * (world - 1) // world,
    "all_to_all_single": lambda t, world, mine: t.nbytes * (world - 1) // world,
    "all_gather_into_tensor": lambda t, world, mine: t.nbytes * (world - 1) // world,
    "reduce_scatter_tensor": lambda t, world, mine: t.nbytes * (world - 1),
}
SENT |= {"all_gather_single": SENT["all_gather_into_tensor"], "reduce_scatter_single": SENT["reduce_scatter_tensor"]}
FREE = {"get_rank", "get_world_size", "get_backend", "is_initialized"}


class Meter:
    """Counts the bytes that this rank hands to the functions of torch.distributed."""

    def __init__(self, monkeypatch):
        self.sent = {}
        self.largest = {}
        for name, function in list(vars(dist).items()):
            is_collective = type(function) is types.FunctionType and "group" in inspect.signature(function).parameters
            if is_collective and name not in FREE:
                monkeypatch.setattr(dist, name, functools.partial(self.call, name, function))

    def call(self, name, function, *args, **kwargs):
        assert name in SENT, f"{name} in a step"
        group = kwargs.get("group")
        world, mine = dist.get_world_size(group), kwargs.get("group_src") == dist.get_rank(group)
        self.sent[name] = self.sent.get(name, 0) + SENT[name](args[0], world, mine)
        if torch.is_tensor(args[0]):
            self.largest[name] = max(self.largest.get(name, 0), args[0].nbytes)
        return function(*args, **kwargs)

    def take(self):
        """Bytes of the gradients and parameters since the last call."""
        sent, self.sent = self.sent, {}
        sent.pop("all_reduce", 0)
        return sum(sent.values())


def plain(opt, params, rank):
    backward_of(params, rank, 0)
    opt.step()
    opt.zero_grad()


def accumulating(opt, params, rank):
    with opt.no_sync():
        backward_of(params, rank, 0)
        backward_of(params, rank, 1)
    plain(opt, params, rank)


def clipping(opt, params, rank):
    backward_of(params, rank, 0)
    opt.clip_grad_norm_(1.0)
    opt.step()
    opt.zero_grad()


def scaled(opt, params, rank, scaler):
    scaler.scale((params[0] * 2).sum() + sum(p.sum() for p in params)).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()


WAYS = {"plain": plain, "no_sync": accumulating, "clip_grad_norm_": clipping, "scaler": scaled, "max_grad_norm": plain}


def count(rank, world, way, dtype, options):
    with pytest.MonkeyPatch.context() as monkeypatch:
        params = weights([(world, 128, 5), (world * 256,), (3 * world, 128), (world, 64, 2)], dtype)  # needs no padding
        numel = sum(p.numel() for p in params)
        limit = {"max_grad_norm": 1.0} if way == "max_grad_norm" else {}
        opt = Zero1AdamW(params, bucket_cap_mb=0.005, **limit, **options)
        step = WAYS[way]
        if way == "scaler":
            step = functools.partial(step, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
        meter = Meter(monkeypatch)
        for _ in range(3):
            step(opt, params, rank)
            sent, wanted = meter.take(), 2 * numel * (world - 1) // world * dtype.itemsize
            assert sent == wanted
        control = 8 * (ops.CONTROL_FLAGS + 2 * len(params))
        assert meter.largest["all_reduce"] <= control < numel


@pytest.mark.parametrize("way", WAYS)
def test_elements_sent(way):
    run(2, count, way, torch.bfloat16, {})
    run(3, count, way, torch.float32, {"overlap_reduce": False})


@pytest.mark.parametrize("world", [2, 4])
def test_elements_sent_by_the_native_way(world):
    run(world, count, "plain", torch.float32, {"reduce_in_fp32": False})


def count_replicas(rank, world):
    """Two by two: inside process_group as ever, and this rank's slice in fp32 to every replica."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with pytest.MonkeyPatch.context() as monkeypatch:
        params = weights([(2, 128, 5), (512,), (6, 128)], torch.bfloat16)  # needs no padding
        numel = sum(p.numel() for p in params)
        opt = Zero1AdamW(params, bucket_cap_mb=0.001, process_group=rows[rank // 2], replicate_group=columns[rank % 2])
        for way in (plain, accumulating, clipping):
            way(opt, params, rank)  # the first step makes the buffers
            meter = Meter(monkeypatch)
            way(opt, params, rank)
            replicas = meter.sent.pop("all_gather")
            assert replicas == 4 * (numel // 2) * (2 - 1)
            assert meter.take() == 2 * (2 * numel) // 2
            monkeypatch.undo()


def test_replicas_exchange_their_slices_only():
    run(4, count_replicas)


def more(rank, world):
    """What changes a gradient after its reduction costs one more reduction, of its own bucket."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        params = weights([(world, 1024)] * 4)
        opt = Zero1AdamW(params, bucket_cap_mb=0.001)
        meter = Meter(monkeypatch)
        one = params[0].nbytes * (world - 1) // world
        plain(opt, params, rank)
        assert meter.take() == 8 * one
        backward_of(params, rank, 0)
        params[2].grad.mul_(2.0)
        opt.step()
        assert meter.take() == 9 * one
        opt.zero_grad()
        opt.step()  # no gradient anywhere
        assert meter.take() <= 8 * one
        backward_of(params, rank, 0)
        params[2].grad.mul_(2.0)  # this bucket waits for the step now, ...
        opt.step()
        opt.zero_grad()
        assert meter.take() == 8 * one
        for k in range(3):  # ... the others do not: three backwards without no_sync are early, and again in the step
            backward_of(params, rank, k)
        opt.step()
        opt.zero_grad()
        assert meter.take() == 11 * one
        sent = []
        for _ in range(40):  # all gradients change before every step: early reduction is tried every 32 steps
            backward_of(params, rank, 0)
            for p in params:
                p.grad.mul_(0.5)
            opt.step()
            opt.zero_grad()
            sent.append(meter.take() // one)
        assert sorted(sent) == [8] * 38 + [9, 11]
        assert sent.index(9) == 32 - 3
        assert sent.index(11) == 32


def test_reducing_again_is_by_bucket():
    run(2, more)


class Blocks(torch.nn.Module):
    """Blocks under activation checkpoints, re-entrant ones or not."""

    def __init__(self, reentrant):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: torch.tanh(block(x)), x, use_reentrant=self.reentrant)
        return x.square().mean()


def checkpointed(rank, world, reentrant, accumulate):
    """Bytes of each of some steps."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        torch.manual_seed(0)
        model = Blocks(reentrant)
        opt = Zero1AdamW(model.parameters(), bucket_cap_mb=0.001)
        meter, sent = Meter(monkeypatch), []
        for k in range(5):
            for _ in range(accumulate):
                model(
                    torch.randn(
                        8, 64, generator=torch.Generator().manual_seed(10 * k + rank), requires_grad=True
                    ).clone()
                ).backward()
            opt.step()
            opt.zero_grad()
            sent.append(meter.take())
        return sent, digest(model.parameters())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_reentrant_checkpoints_send_no_more(accumulate):
    want = run(2, checkpointed, False, accumulate)
    assert want[0][0][-1] > 0
    assert run(2, checkpointed, True, accumulate) == want


# -- the machine's counters -------------------------------------------------------------------------------------------


def loopback():
    """Bytes received by the loopback device so far."""
    for line in COUNTERS.read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    raise AssertionError("no loopback device")


def growth(rank, world):
    """Loopback bytes of a step over the predicted ones; the best of a few tries, as others may use the device too."""
    steps, found = 4, []
    params = weights([(1024, 512)] * 8, torch.bfloat16)  # 8 MB
    opt = Zero1AdamW(params)
    grads = [torch.ones_like(p) for p in params]

    def step():
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        opt.step()

    step()
    for _ in range(5):
        dist.barrier()
        before = loopback()
        time.sleep(0.05)
        dist.barrier()
        noise = loopback() - before
        before = loopback()
        dist.barrier()
        for _ in range(steps):
            step()
        dist.barrier()
        time.sleep(0.02)
        numel = sum(p.numel() for p in params)
        predicted = steps * world * (2 * numel * (world - 1) // world) * 2
        found.append(((loopback() - before) / predicted, noise))
        dist.barrier()
    return min(found)


@pytest.mark.skipif(not COUNTERS.exists(), reason="no /proc/net/dev here")
@pytest.mark.parametrize("world", [2, 3])
def test_loopback_counters(world):
    ratio, noise = run(world, growth)[0]
    if ratio > 1.03 and noise > 100_000:
        pytest.skip(f"others use the loopback device: {noise} bytes in 50 ms")
    assert 0.99 < ratio < 1.03
