"""Gradients may be accumulated, read, changed, replaced and left out as with torch.optim on plain data parallel.

A scenario is a training loop, written once. It runs with the package and with torch (`Plain`: AdamW on fp32 copies fed
the mean of the ranks' gradients), with early and late reduction, on one rank and on two; parameters, state and the
ranks' own `.grad` must be the same at the end.
"""

import contextlib
import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from helpers import ranks
from helpers.ranks import Plain, backward, backward_of, caught, equal_on_all_ranks, exact, run, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from zero1_cuda import Zero1AdamW

BF16 = torch.bfloat16
SHAPES = [(40, 30), (7,), (), (300,), (8, 4, 3, 3), (0, 3), (129,)]
OPTIONS = {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1}


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def some(params, rank, k, chosen):
    """A backward in which only the chosen parameters take part."""
    grads = [exact(p.shape, rank, k, i, ranks=world_size()) if i in chosen else None for i, p in enumerate(params)]
    backward(params, grads)


# -- scenarios: (params, opt, rank); with opt.step, opt.zero_grad, opt.no_sync -----------------------------------------


def six_lines(params, opt, rank):
    for k in range(3):
        backward_of(params, rank, k)
        opt.step()
        opt.zero_grad()


def accumulate(params, opt, rank):
    for k in range(0, 6, 3):
        for micro in range(3):
            backward_of(params, rank, k + micro)
        opt.step()
        opt.zero_grad()


def accumulate_with_no_sync(params, opt, rank):
    for k in range(0, 9, 3):
        with opt.no_sync():
            backward_of(params, rank, k)
            backward_of(params, rank, k + 1)
        backward_of(params, rank, k + 2)
        opt.step()
        opt.zero_grad()


def only_no_sync(params, opt, rank):
    for k in range(2):
        with opt.no_sync(), opt.no_sync():
            backward_of(params, rank, k)
        opt.step()
        opt.zero_grad()


def no_sync_last(params, opt, rank):
    for k in range(0, 4, 2):
        backward_of(params, rank, k)
        with opt.no_sync():
            backward_of(params, rank, k + 1)
        opt.step()
        opt.zero_grad()


def zero_in_place(params, opt, rank):
    for k in range(3):
        opt.zero_grad(set_to_none=False)
        backward_of(params, rank, k)
        opt.step()
    opt.zero_grad(set_to_none=False)
    opt.step()  # zeros are gradients


def model_zero_grad(params, opt, rank):
    holder = nn.ParameterList(params)
    for k in range(4):
        holder.zero_grad(set_to_none=k % 2 == 0)
        backward_of(params, rank, k)
        opt.step()


def none_by_hand(params, opt, rank):
    for k in range(3):
        backward_of(params, rank, k)
        opt.step()
        for p in params:
            p.grad = None
    opt.step()


def replaced(params, opt, rank):
    for k in range(3):
        backward_of(params, rank, k)
        for i, p in enumerate(params):
            p.grad = exact(p.shape, 7, rank, k, i, ranks=world_size()).to(p.dtype)
        opt.step()
        opt.zero_grad()
    backward_of(params, rank, 5)
    params[0].grad = params[0].grad.clone() * 2
    opt.step()


def assigned_without_backward(params, opt, rank):
    for k in range(2):
        for i, p in enumerate(params):
            p.grad = exact(p.shape, rank, k, i, ranks=world_size()).to(p.dtype)
        opt.step()
    opt.zero_grad()


def none_on_all(params, opt, rank):
    for k in range(3):
        backward_of(params, rank, k)
        params[0].grad = params[2].grad = None
        opt.step()
        opt.zero_grad()


def none_on_one(params, opt, rank):
    for k in range(3):
        backward_of(params, rank, k)
        if rank == k % 2:
            params[0].grad = params[3].grad = None
        opt.step()
        opt.zero_grad()


def zeroed(params, opt, rank):
    for k in range(3):
        backward_of(params, rank, k)
        params[1].grad.zero_()
        if rank == 0:
            params[3].grad.zero_()
        opt.step()
        opt.zero_grad(set_to_none=k == 1)


def scaled_in_place(params, opt, rank):
    for k in range(3):
        backward_of(params, rank, k)
        for p in params:
            p.grad.mul_(0.5)
        params[4].grad[2].fill_(0.25)
        torch._foreach_mul_([p.grad for p in params[:2]], 2.0)
        opt.step()
        opt.zero_grad()


def one_element(params, opt, rank):
    for k in range(3):
        backward_of(params, rank, k)
        params[0].grad[0, 1 + k] += 1.0 + rank
        opt.step()
        opt.zero_grad()


def changed_on_one(params, opt, rank):
    for k in range(3):
        backward_of(params, rank, k)
        if rank == 1:
            params[3].grad.neg_()
        opt.step()
        opt.zero_grad()


def changed_between_backwards(params, opt, rank):
    for k in range(0, 4, 2):
        backward_of(params, rank, k)
        params[0].grad.mul_(0.5)
        params[3].grad = None
        params[6].grad = torch.ones_like(params[6])
        backward_of(params, rank, k + 1)
        opt.step()
        opt.zero_grad()


def strange_strides(params, opt, rank):
    for k in range(2):
        backward_of(params, rank, k)
        a, b, c, d = (
            exact(s, 3, rank, k, ranks=world_size()).to(params[0].dtype) for s in [(30, 40), (600,), (), (9,)]
        )
        params[0].grad = a.t()
        params[3].grad = b[::2]
        params[6].grad = c.expand(129)
        params[4].grad = params[4].grad.to(memory_format=torch.channels_last)
        params[1].grad = d[2:]
        opt.step()
        opt.zero_grad(set_to_none=k == 0)


def all_reduced_by_hand(params, opt, rank):
    for k in range(3):
        backward_of(params, rank, k)
        for p in params:
            if dist.is_initialized():
                mean = p.grad.float()
                dist.all_reduce(mean)
                p.grad.copy_(mean / world_size())
        opt.step()
        opt.zero_grad()


def double_step(params, opt, rank):
    backward_of(params, rank, 0)
    opt.step()
    opt.step()
    opt.zero_grad()
    backward_of(params, rank, 1)
    opt.step()


def over_steps(params, opt, rank):
    for k in range(4):
        backward_of(params, rank, k)
        opt.step()
        if k == 2:
            opt.zero_grad(set_to_none=False)


def unused_on_some(params, opt, rank):
    for k in range(4):
        some(params, rank, k, {0, 1, 2} if rank == 0 else {2, 3, 4})
        opt.step()
        opt.zero_grad()


def unused_on_all(params, opt, rank):
    for k in range(4):
        some(params, rank, k, {1, 4, 5, 6} if k % 2 else {0, 1})
        opt.step()
        opt.zero_grad(set_to_none=k < 2)


def a_rank_without_backward(params, opt, rank):
    for k in range(4):
        if k % 2 or rank == 0:
            backward_of(params, rank, k)
        opt.step()
        opt.zero_grad()


def no_backward_at_all(params, opt, rank):
    opt.step()
    opt.zero_grad()
    opt.step()
    backward_of(params, rank, 0)
    opt.step()


def parts_of_a_backward(params, opt, rank):
    """autograd.grad fires no hook, backward(inputs=) some; a graph is walked twice; a weight is used twice."""
    for k in range(2):
        w = params[0]
        loss = (w * exact(w.shape, rank, k, 1, ranks=world_size()).to(w.dtype)).sum() + (w * 2).sum() + params[3].sum()
        torch.autograd.grad(loss, [w], retain_graph=True)
        loss.backward(inputs=[w], retain_graph=True)
        loss.backward()
        opt.step()
        opt.zero_grad()


def gradient_penalty(params, opt, rank):
    """A backward through gradients."""
    for _ in range(2):
        w = params[3]
        (g,) = torch.autograd.grad((w * w * (0.5 + rank)).sum(), [w], create_graph=True)
        (g * exact((300,), 9, ranks=world_size()).to(w.dtype)).sum().backward()
        opt.step()
        opt.zero_grad()


def died_half_way(params, opt, rank):
    """A backward that raises; the loop goes on with the next batch."""

    def die(grad):
        raise ValueError("out of memory, say")

    backward_of(params, rank, 0)
    opt.step()
    opt.zero_grad()
    h = params[0] * 2
    h.register_hook(die)
    with contextlib.suppress(ValueError):
        (h.sum() + params[6].sum()).backward()
    opt.zero_grad()
    if world_size() == 1:  # (with more, a rank cannot know how far the others came)
        backward_of(params, rank, 1)
        opt.step()


SCENARIOS = {f.__name__: f for f in [
    six_lines, accumulate, accumulate_with_no_sync, only_no_sync, no_sync_last, zero_in_place, model_zero_grad,
    none_by_hand, replaced, assigned_without_backward, none_on_all, none_on_one, zeroed, scaled_in_place,
    one_element, changed_on_one, changed_between_backwards, strange_strides, all_reduced_by_hand, unused_on_some,
    unused_on_all, a_rank_without_backward, no_backward_at_all, parts_of_a_backward, gradient_penalty, died_half_way,
]}  # fmt: skip
EARLY_ONLY = {f.__name__: f for f in [double_step, over_steps]}  # late reduction uses the gradients up


def play(rank, world, name, options, dtype):
    scenario = {**SCENARIOS, **EARLY_ONLY}[name]
    params = weights(SHAPES, dtype)
    params[4].data = params[4].data.to(memory_format=torch.channels_last)
    plain = Plain(params, **OPTIONS)
    opt = Zero1AdamW(params, **OPTIONS, bucket_cap_mb=0.002, **options)
    scenario(params, opt, rank)
    scenario(plain.params, plain, rank)
    plain.check(opt, params)
    for p, q in zip(params, plain.params, strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and opt._runner.config.overlap_reduce:
            assert torch.equal(p.grad.float(), q.grad)


@pytest.mark.parametrize("name", [*SCENARIOS, *EARLY_ONLY])
def test_early(name):
    run(2, play, name, {}, BF16)


@pytest.mark.parametrize("name", SCENARIOS)
def test_late(name):
    run(2, play, name, {"overlap_reduce": False}, torch.float32)


# where the host does not read the agreement in the same step, a change on one rank only is an error: test_deferred.py
ONE_SIDED = {"none_on_one", "changed_on_one"}


@pytest.mark.parametrize("name", [n for n in (*SCENARIOS, *EARLY_ONLY) if n not in ONE_SIDED])
def test_one_step_later(name, monkeypatch):
    monkeypatch.setattr(ranks, "deferred", True)
    run(2, play, name, {}, BF16)
    if name in SCENARIOS:
        run(2, play, name, {"overlap_reduce": False}, torch.float32)


@pytest.mark.parametrize("name", [*SCENARIOS, *EARLY_ONLY])
def test_one_rank(name):
    play(0, 1, name, {}, torch.float16)


@pytest.mark.parametrize("name", ["accumulate", "unused_on_some", "none_on_one", "over_steps"])
def test_three_ranks_and_the_native_way(name):
    run(3, play, name, {}, torch.float32)
    run(2, play, name, {"reduce_in_fp32": False}, torch.float32)


# -- what is read -----------------------------------------------------------------------------------------------------


def readable(rank, world, options):
    """After backward `.grad` is this rank's own gradient, in the parameter's shape; a kept reference is overwritten."""
    params = weights(SHAPES, BF16)
    opt = Zero1AdamW(params, **options)
    for k in range(3):
        backward_of(params, rank, k)
        for i, p in enumerate(params):
            want = exact(p.shape, rank, k, i, ranks=world).to(BF16)
            assert p.grad.shape == p.shape
            assert torch.equal(p.grad, want)
        kept = params[0].grad
        opt.step()
        opt.zero_grad()
        assert params[0].grad is None
    backward_of(params, rank, 9)
    assert torch.equal(kept, params[0].grad)


@pytest.mark.parametrize("options", [{}, {"overlap_reduce": False}], ids=str)
def test_gradients_are_readable_after_backward(options):
    run(2, readable, options)
    readable(0, 1, options)


def through_data(rank, world):
    """Writes that autograd cannot see count with late reduction."""
    params = weights(SHAPES)
    plain = Plain(params, **OPTIONS)
    opt = Zero1AdamW(params, **OPTIONS, overlap_reduce=False)
    for k in range(3):
        for side, optimizer in ((params, opt), (plain.params, plain)):
            backward_of(side, rank, k)
            for p in side:
                p.grad.data.mul_(0.5)
            side[1].grad.detach().numpy()[:] = 2.0
            side[3].grad.data = side[3].grad.data * 2
            optimizer.step()
            optimizer.zero_grad()
    plain.check(opt, params)


def test_writes_through_data_count_with_late_reduction():
    run(2, through_data)


# -- torch's own clip_grad_norm_ --------------------------------------------------------------------------------------


def clip_of_torch(rank, world, options):
    params = weights(SHAPES)
    plain = Plain(params, **OPTIONS)
    opt = Zero1AdamW(params, **OPTIONS, bucket_cap_mb=0.002, **options)
    told = []
    for k in range(5):
        for side, optimizer in ((params, opt), (plain.params, plain)):
            backward_of(side, rank, k)
            norm = nn.utils.clip_grad_norm_(side, 0.5)  # this rank's own
            assert norm > 0.5
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            told += [str(w.message) for w in caught if "torch.distributed" not in str(w.message)]
            optimizer.zero_grad()
    for p, q in zip(params, plain.params, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
    equal_on_all_ranks(params)
    return told


@pytest.mark.usefixtures("both_ways")
def test_clip_grad_norm_of_torch_is_honoured_with_one_warning():
    for told in run(2, clip_of_torch, {}):
        assert len(told) == 1
        assert "opt.clip_grad_norm_" in told[0]
    run(2, clip_of_torch, {"overlap_reduce": False})


# -- models -----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(width, 40), nn.Linear(40, 40), nn.Linear(40, width)
        self.way = lambda f, x: f(x)

    def forward(self, x):
        x = torch.tanh(self.a(x))
        return self.c(self.way(lambda t: torch.tanh(self.b(t)), x))


def reentrant(f, x):
    return checkpoint(f, x, use_reentrant=True)


def not_reentrant(f, x):
    return checkpoint(f, x, use_reentrant=False)


def batch(rank, k):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + k))


def trained(rank, world, wrap, options, clip=False):
    """A model behind a wrapper against torch's AdamW on the mean loss."""
    model = Net()
    twin = copy.deepcopy(model)
    reference = torch.optim.AdamW(twin.parameters(), **OPTIONS)
    opt = Zero1AdamW(model.parameters(), **OPTIONS, bucket_cap_mb=0.002, **options)
    call = model
    if wrap in ("reentrant", "not_reentrant"):
        model.way = globals()[wrap]
    elif wrap == "ddp":
        call = DDP(model)
    elif wrap == "ddp of views":
        call = DDP(model, gradient_as_bucket_view=True)
    elif wrap is not None:
        call = torch.compile(model, backend=wrap)
    told = []
    for k in range(6):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if wrap == "ddp" and k >= 3:  # as trainers accumulate
                with call.no_sync():
                    call(batch(rank, 50 + k)).square().mean().backward()
                call(batch(rank, k)).square().mean().backward()
            else:
                call(batch(rank, k)).square().mean().backward()
            if clip:
                opt.clip_grad_norm_(0.05)
            opt.step()
            opt.zero_grad()
        told += [str(w.message) for w in caught if "zero1" in str(w.filename).lower() or "Zero1" in str(w.message)]
        for r in range(world):
            (twin(batch(r, k)).square().mean() / world).backward()
            if wrap == "ddp" and k >= 3:
                (twin(batch(r, 50 + k)).square().mean() / world).backward()
        if clip:
            want = nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
            torch.testing.assert_close(opt.grad_norm, want, rtol=1e-5, atol=0.0)
        reference.step()
        reference.zero_grad()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
        equal_on_all_ranks(model.parameters())
    return told


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("options", [{}, {"overlap_reduce": False}], ids=str)
@pytest.mark.parametrize("wrap", ["ddp", "ddp of views"])
def test_ddp_around_the_model_changes_nothing(wrap, options):
    for told in run(2, trained, wrap, options):
        assert len(told) == (not options)  # that it is not needed
        assert all("DistributedDataParallel" in text for text in told)
    run(2, trained, wrap, options, True)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("wrap", ["reentrant", "not_reentrant"])
def test_activation_checkpointing(wrap):
    assert run(2, trained, wrap, {}) == [[], []]
    run(2, trained, wrap, {"overlap_reduce": False}, True)


def test_compiled_model():
    run(2, trained, "eager", {}, True)


@pytest.mark.slow
def test_model_compiled_by_inductor():
    run(2, trained, "inductor", {}, True, timeout=300)


def step_hooks(rank, world):
    """A pre-hook may change gradients: it runs before they are looked at."""
    params = weights(SHAPES)
    plain = Plain(params, **OPTIONS)
    opt = Zero1AdamW(params, **OPTIONS)
    seen = []

    def double(optimizer, args, kwargs):
        for p in params:
            p.grad.mul_(2.0)

    opt.register_step_pre_hook(double)
    opt.register_step_post_hook(lambda optimizer, args, kwargs: seen.append(params[0].detach().clone()))
    for k in range(2):
        backward_of(params, rank, k)
        opt.step()
        backward_of(plain.params, rank, k)
        for p in plain.params:
            p.grad.mul_(2.0)
        plain.step()
        opt.zero_grad()
        plain.zero_grad()
        torch.testing.assert_close(seen[k], plain.params[0].detach(), rtol=1e-6, atol=1e-6)
    plain.check(opt, params)


def test_step_hooks():
    run(2, step_hooks)


def halve(p):
    p.grad.mul_(0.5)


def hooks_of_gradients(rank, world):
    """Hooks on a tensor's gradient run before it counts, hooks after accumulation after it."""
    params = weights(SHAPES)
    plain = Plain(params, **OPTIONS)
    opt = Zero1AdamW(params, **OPTIONS)
    for side in (params, plain.params):
        side[0].register_hook(lambda grad: grad * 2)
        side[3].register_post_accumulate_grad_hook(halve)
    six_lines(params, opt, rank)
    six_lines(plain.params, plain, rank)
    plain.check(opt, params)


def test_hooks_of_gradients():
    run(2, hooks_of_gradients)


def test_a_used_up_gradient_is_an_error():
    run(2, used_up)


def used_up(rank, world):
    params = weights(SHAPES)
    opt = Zero1AdamW(params, overlap_reduce=False)
    backward_of(params, rank, 0)
    opt.step()
    kind, text = caught(opt.step)
    assert kind == "RuntimeError"
    assert "gradients" in text
    backward_of(params, rank, 1)
    kind, text = caught(opt.step)
    assert kind == "RuntimeError"
    assert "zero_grad" in text
    opt.zero_grad()
    backward_of(params, rank, 1)
    opt.step()
