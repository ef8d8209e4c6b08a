"""Communication overlaps backward, and is safe to overlap.

With four buckets or more the first reduction is issued before half the hooks have fired; with every collective slowed
by 50 ms a step takes clearly less than the sum of its parts; every rank makes the same collectives in the same order,
whatever the order of its gradients; backward waits for nothing at its end, and a write into a gradient that is still on
its way is honoured.
"""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Plain, backward, backward_of, equal_on_all_ranks, exact, run, weights
from torch import nn

from zero1_cuda import Zero1AdamW

DELAY = 0.05  # seconds


class Late:
    """A work that is started and done `DELAY` later than it was asked for: `start` is called by a thread."""

    alive = 0

    def __init__(self, start):
        self.work = None
        self.timer = threading.Timer(DELAY, self._start, [start])
        self.timer.start()
        Late.alive += 1

    def _start(self, start):
        self.work = start()

    def wait(self):
        if self.timer is not None:
            self.timer.join()
            self.timer = None
            self.work.wait()
            Late.alive -= 1


class Delayed:
    """A work whose result is used `DELAY` later."""

    def __init__(self, work):
        self.work, self.end = work, time.monotonic() + DELAY

    def wait(self):
        self.work.wait()
        time.sleep(max(0.0, self.end - time.monotonic()))


def slow_down(monkeypatch):
    """Every collective ends DELAY later. Sends read their tensor at the end of that time, not at its begin."""
    isend, broadcast, all_reduce = dist.isend, dist.broadcast, dist.all_reduce

    def late_send(*args, **kwargs):
        return Late(lambda: isend(*args, **kwargs))

    def slow_broadcast(*args, **kwargs):
        return Delayed(broadcast(*args, **kwargs))

    def slow_all_reduce(*args, **kwargs):
        time.sleep(DELAY)
        return all_reduce(*args, **kwargs)

    monkeypatch.setattr(dist, "isend", late_send)
    monkeypatch.setattr(dist, "broadcast", slow_broadcast)
    monkeypatch.setattr(dist, "all_reduce", slow_all_reduce)


class SlowBackward(torch.autograd.Function):
    """The identity, with a backward that takes DELAY."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(DELAY)
        return grad


class Deep(nn.Module):
    """Layers, a bucket each, whose backward takes its time."""

    def __init__(self, layers=6, width=64, slow=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.slow = slow

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self.slow:
                x = SlowBackward.apply(x)
        return x.square().mean()


def six_lines(model, opt, loader):
    """The loop of the README."""
    for x in loader:
        loss = model(x)
        loss.backward()
        opt.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()


# -- early ------------------------------------------------------------------------------------------------------------


def issue_times(rank, world, options):
    """Per step: how many hooks had fired when the first, second ... reduction was issued, and how many fired in all."""
    model = Deep()
    opt = Zero1AdamW(model.parameters(), bucket_cap_mb=0.02, **options)
    fired, steps = [], []

    def count(p):
        fired.append(p)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(count)
    with pytest.MonkeyPatch.context() as monkeypatch:
        isend = dist.isend

        def logged(*args, **kwargs):  # with two ranks, one send is one reduction
            steps[-1].append(len(fired))
            return isend(*args, **kwargs)

        monkeypatch.setattr(dist, "isend", logged)
        for k in range(3):
            fired.clear()
            steps.append([])
            six_lines(model, opt, [torch.randn(4, 64, generator=torch.Generator().manual_seed(k))])
    return steps, len(list(model.parameters()))


def test_the_first_reduction_is_issued_before_half_the_hooks_have_fired():
    for steps, hooks in run(2, issue_times, {}):
        assert hooks == 12
        for issued in steps:  # the very first step too
            assert len(issued) == 6
            assert issued[0] < hooks / 2
            assert issued[-2] < hooks


def test_without_overlap_nothing_is_issued_in_backward():
    for steps, hooks in run(2, issue_times, {"overlap_reduce": False}):
        assert steps == [[hooks] * 6] * 3


# -- slow collectives -------------------------------------------------------------------------------------------------


def timed(rank, world, options):
    """Seconds of a step; number of collectives that each took DELAY."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        model = Deep(slow=True)
        opt = Zero1AdamW(model.parameters(), bucket_cap_mb=0.02, **options)
        x = torch.randn(4, 64)
        six_lines(model, opt, [x] * 2)
        slow_down(monkeypatch)
        dist.barrier()
        begin = time.monotonic()
        six_lines(model, opt, [x])
        seconds = time.monotonic() - begin
        equal_on_all_ranks(model.parameters())
        return seconds, 6 + 6 + 2  # reductions, gathers, control of the clip and of the step


def test_a_step_takes_less_than_the_sum_of_its_collectives():
    for seconds, collectives in run(2, timed, {}):
        backward = 6 * DELAY
        assert seconds < 0.75 * (backward + collectives * DELAY)
    assert min(seconds for seconds, _ in run(2, timed, {"overlap_reduce": False})) > seconds + DELAY


# -- order ------------------------------------------------------------------------------------------------------------


def any_order(rank, world):
    """Ranks use parameters in different orders, and not all of them; -> collectives, the order of the gradients."""
    params = weights([(50, 40), (30,), (70, 20), (9, 9), (200,), (64, 64)])
    plain = Plain(params, lr=0.01, eps=1e-4)
    opt = Zero1AdamW(params, lr=0.01, eps=1e-4, bucket_cap_mb=0.001)
    log, arrived = [], []
    for i, p in enumerate(params):
        p.register_post_accumulate_grad_hook(lambda _, i=i: arrived.append(i))
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, by in (("isend", "tag"), ("broadcast", "group_src"), ("all_reduce", "op")):
            function = getattr(dist, name)

            def logged(t, *args, function=function, name=name, by=by, **kwargs):
                log.append((name, t.numel(), kwargs.get(by)))
                return function(t, *args, **kwargs)

            monkeypatch.setattr(dist, name, logged)
        for k in range(4):
            order = torch.randperm(len(params), generator=torch.Generator().manual_seed(10 * rank + k)).tolist()
            if k >= 2:
                order = order[:3]
            for side, optimizer in ((params, opt), (plain.params, plain)):
                backward([side[i] for i in order], [exact(side[i].shape, rank, k, i, ranks=world) for i in order])
                optimizer.step()
                optimizer.zero_grad()
    plain.check(opt, params)
    return log, arrived


@pytest.mark.parametrize("world", [2, 3])
def test_the_order_of_collectives_is_the_same_on_every_rank(world):
    logs, orders = zip(*run(world, any_order), strict=True)
    assert orders[0] != orders[1]
    assert len(logs[0]) > 4 * 6
    assert all(log == logs[0] for log in logs)


# -- nothing is left in flight ----------------------------------------------------------------------------------------


def write_after_backward(rank, world, overlap):
    with pytest.MonkeyPatch.context() as monkeypatch:
        params = weights([(60, 50), (700,), (30, 30), (1000,)])
        plain = Plain(params, lr=0.01, eps=1e-4)
        opt = Zero1AdamW(params, lr=0.01, eps=1e-4, bucket_cap_mb=0.003, overlap_reduce=overlap)
        real = dist.all_reduce
        slow_down(monkeypatch)
        monkeypatch.setattr(dist, "all_reduce", real)
        in_flight = 0
        for k in range(3):
            for side, optimizer in ((params, opt), (plain.params, plain)):
                backward_of(side, rank, k)
                in_flight += Late.alive
                if k:  # in the first cycle a loss scaler might be at work, for which backward waits
                    side[0].grad.mul_(2.0)
                    side[1].grad.zero_()
                    side[3].grad = -side[3].grad
                optimizer.step()
                optimizer.zero_grad()
        plain.check(opt, params)
        assert (in_flight > 0) == overlap  # so there was something to damage


@pytest.mark.parametrize("overlap", [True, False])
def test_a_write_right_after_backward_is_honoured(overlap):
    run(2, write_after_backward, overlap)
    if overlap:
        run(3, write_after_backward, overlap)
