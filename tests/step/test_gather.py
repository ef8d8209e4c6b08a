"""`overlap_gather`: gathers go in the order in which the next forward needs the buckets, and are waited for per unit.

On a line that sends one bucket after the other the first layer begins after one bucket, not after all. No forward sees
a stale weight, though a module reads the weight of a child without calling it, or is compiled.
"""

import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.ranks import equal_on_all_ranks, run
from torch import nn

from zero1_cuda import Zero1AdamW
from zero1_cuda.step.gather_hooks import units_of

DELAY = 0.06  # seconds a bucket


class Line:
    """Sends one message after the other; what is sent arrives in its tensor no sooner than its turn has come."""

    def __init__(self, monkeypatch):
        self.free = 0.0
        broadcast = dist.broadcast

        def late(*args, **kwargs):
            if not kwargs.get("async_op"):
                return broadcast(*args, **kwargs)
            self.free = max(self.free, time.monotonic()) + DELAY / dist.get_world_size()
            return Work(self.free, lambda: broadcast(*args, **kwargs))

        monkeypatch.setattr(dist, "broadcast", late)


class Work:
    def __init__(self, at, start):
        self.works = []
        self.timer = threading.Timer(max(0.0, at - time.monotonic()), lambda: self.works.append(start()))
        self.timer.start()

    def wait(self):
        self.timer.join()
        self.works[0].wait()


class Layers(nn.Module):
    def __init__(self, layers=8, width=32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Attention(nn.Module):
    """nn.MultiheadAttention reads out_proj.weight and does not call out_proj."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.MultiheadAttention(32, 2) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, x, x)[0]
        return x


class Head(nn.Module):
    """The root reads the weight of a child that it does not call, and one that is tied to a unit's."""

    def __init__(self):
        super().__init__()
        self.body = Layers(4)
        self.head = nn.Linear(32, 32)
        self.tied = nn.Linear(32, 32)
        self.tied.weight = self.body.layers[3].weight

    def forward(self, x):
        return F.linear(F.linear(self.body(x), self.head.weight), self.tied.weight)


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Layers(3)
        self.call = [torch.compile(self.body, backend="eager")]

    def forward(self, x):
        return self.call[0](x)


MODELS = {"sequential": lambda: nn.Sequential(*Layers().layers), "attention": Attention, "head": Head}
MODELS |= {"compiled": Compiled, "one module": lambda: nn.Linear(32, 32)}


def batch(rank, k):
    return torch.randn(5, 32, generator=torch.Generator().manual_seed(100 * rank + k))


def right_after(rank, world, name):
    """The output right after step() is the one after synchronize()."""
    torch.manual_seed(0)
    model = MODELS[name]()
    opt = Zero1AdamW(model.parameters(), lr=0.1, overlap_gather=model, bucket_cap_mb=0.001)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for k in range(3):
            model(batch(rank, k)).square().mean().backward()
            if k == 1:
                Line(monkeypatch)
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                got = model(batch(0, 9))
                opt.synchronize()
                assert torch.equal(got, model(batch(0, 9)))
        equal_on_all_ranks(model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_no_forward_sees_a_stale_weight(name):
    run(2, right_after, name)


def begun(rank, world, named):
    """Seconds after step() at which each layer's forward has begun, and at which all would have arrived."""
    model = Layers()
    times = []
    for layer in model.layers:
        layer.forward = lambda x, layer=layer: (times.append(time.monotonic()), nn.Linear.forward(layer, x))[1]
    params = model.named_parameters() if named else model.parameters()
    opt = Zero1AdamW(params, lr=0.1, overlap_gather=model, bucket_cap_mb=0.001)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for _ in range(2):
            model(batch(rank, 0)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        line = Line(monkeypatch)
        model(batch(rank, 0)).square().mean().backward()
        dist.barrier()
        begin = time.monotonic()
        opt.step()
        times.clear()
        model(batch(rank, 0))
    return [t - begin for t in times], line.free - begin


@pytest.mark.parametrize("named", [False, True])
def test_the_first_layer_begins_after_one_bucket(named):
    for times, arrived in run(2, begun, named):
        assert arrived > 7 * DELAY
        assert times[0] < 3 * DELAY
        assert times == sorted(times)
        assert times[-1] > 6 * DELAY


def test_units_are_the_elements_of_the_outermost_containers():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(1, 1), nn.ReLU()), "b": nn.ModuleList([Attention()])})
    assert list(units_of(model)) == [model["a"][0], model["a"][1], model["b"][0]]
    head = Head()
    assert list(units_of(head)) == list(head.body.layers)
