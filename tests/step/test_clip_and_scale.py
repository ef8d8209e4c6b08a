"""Clipping by the global norm of the averaged gradients, and loss scaling, as on plain data parallel.

Norms and clipped updates are torch's; a scaler changes no number; an overflow that one rank alone sees skips the step
on all, leaves moments, step counts and weights alone, is counted, and leaves the scales equal.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from helpers import ranks
from helpers.ranks import Plain, backward, backward_of, digest, equal_on_all_ranks, exact, run, snapshot, weights
from torch import nn
from torch.amp import GradScaler

from zero1_cuda import Zero1AdamW

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [(40, 30), (7,), (), (300,), (129,)]
OPTIONS = {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1}
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)


def pair(dtype=FP32, **options):
    params = weights(SHAPES, dtype)
    return params, Plain(params, **OPTIONS), Zero1AdamW(params, **OPTIONS, bucket_cap_mb=0.002, **options)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- clipping ---------------------------------------------------------------------------------------------------------


def clipped(rank, world, dtype, how, options):
    params, plain, opt = pair(dtype, **options, **({"max_grad_norm": 1.0} if how == "max_grad_norm" else {}))
    for k, bound in enumerate([1.0, 1e9, 1.0]):
        max_norm = 1.0 if how == "max_grad_norm" else bound
        backward_of(params, rank, k)
        before = [p.grad.clone() for p in params]
        if how == "clip_grad_norm_":
            norm = opt.clip_grad_norm_(max_norm)
            if opt._runner.config.overlap_reduce:
                assert same([p.grad for p in params], before)  # the kernel applies it
            assert norm.shape == ()
            assert float(opt.grad_norm) == float(norm)
        opt.step()
        backward_of(plain.params, rank, k)
        plain.step(max_norm)
        torch.testing.assert_close(opt.grad_norm, plain.norm, rtol=1e-6, atol=0.0)
        opt.zero_grad()
        plain.zero_grad()
        equal_on_all_ranks([opt.grad_norm, *params])
    plain.check(opt, params)


@pytest.mark.usefixtures("both_ways")
@DTYPES
@pytest.mark.parametrize("how", ["max_grad_norm", "clip_grad_norm_"])
def test_clipping_is_torch_s(dtype, how):
    run(2, clipped, dtype, how, {})
    clipped(0, 1, dtype, how, {})
    run(3, clipped, dtype, how, {"overlap_reduce": False})


def which_clip_counts(rank, world):
    """The last call wins and beats max_grad_norm for its step; a backward in between discards it."""
    params, plain, opt = pair(max_grad_norm=3.0)

    def both(k, calls, wanted):
        backward_of(params, rank, k)
        for max_norm in calls:
            opt.clip_grad_norm_(max_norm)
        opt.step()
        opt.zero_grad()
        backward_of(plain.params, rank, k)
        plain.step(wanted)
        plain.zero_grad()

    both(0, [], 3.0)
    both(1, [1.0, 100.0, 2.0], 2.0)
    both(2, [], 3.0)
    both(3, [float("inf")], float("inf"))
    plain.check(opt, params)
    backward_of(params, rank, 4)
    opt.clip_grad_norm_(0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backward_of(params, rank, 5)
    assert any("clip_grad_norm_" in str(w.message) for w in caught)
    opt.step()
    backward_of(plain.params, rank, 4)
    backward_of(plain.params, rank, 5)
    plain.step(3.0)
    plain.check(opt, params)


@pytest.mark.usefixtures("both_ways")
def test_which_clip_counts():
    run(2, which_clip_counts)
    which_clip_counts(0, 1)


def no_clipping(rank, world):
    params, _, opt = pair()
    backward_of(params, rank, 0)
    opt.step()
    assert opt.grad_norm is None
    opt.zero_grad()
    backward_of(params, rank, 0)
    opt.clip_grad_norm_(float("inf"))
    opt.step()
    assert opt.grad_norm is not None
    opt.step()
    assert opt.grad_norm is None
    opt.zero_grad()
    assert float(opt.clip_grad_norm_(1.0)) == 0.0  # no gradient at all


def test_norm_is_none_without_clipping():
    run(2, no_clipping)


def clipped_with_scale(rank, world, dtype):
    """grad_scale: the norm is that of the unscaled gradients."""
    params, plain, opt = pair(dtype)
    scaler = GradScaler("cpu", init_scale=8.0)
    for k in range(3):
        backward(params, [8 * exact(p.shape, rank, k, i, ranks=world) for i, p in enumerate(params)])
        scaler.scale(torch.zeros(()))
        norm = opt.clip_grad_norm_(1.0, grad_scale=scaler.get_scale())
        scaler.step(opt)
        scaler.update()
        backward_of(plain.params, rank, k)
        plain.step(1.0)
        torch.testing.assert_close(norm, plain.norm, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(opt.grad_norm, plain.norm, rtol=1e-6, atol=0.0)
        opt.zero_grad()
        plain.zero_grad()
    plain.check(opt, params)


@pytest.mark.usefixtures("both_ways")
@DTYPES
def test_clipping_of_scaled_gradients(dtype):
    run(2, clipped_with_scale, dtype)


def infinite_norm(rank, world):
    params, plain, opt = pair()
    backward_of(params, rank, 0)
    if rank == 1:
        params[3].grad[5] = float("inf")
    before = snapshot(opt, params)
    norm = opt.clip_grad_norm_(1.0)
    assert float(norm) == float("inf")
    opt.step()
    assert same(before, snapshot(opt, params))
    opt.zero_grad()
    backward_of(params, rank, 0)
    if rank == 0:
        params[0].grad[3, 3] = float("nan")
    assert bool(opt.clip_grad_norm_(1.0).isnan())
    opt.step()
    assert int(opt.skipped_steps) == 2
    opt.zero_grad()
    backward_of(params, rank, 1)
    backward_of(plain.params, rank, 1)
    opt.step()
    plain.step()
    plain.check(opt, params)


@pytest.mark.usefixtures("both_ways")
def test_an_infinite_norm_damages_nothing():
    run(2, infinite_norm)


def tied(rank, world):
    """A weight that a model uses twice counts once."""
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20, bias=False))
    model[1].weight = model[0].weight
    opt = Zero1AdamW(model.parameters())
    model(torch.arange(10)).square().mean().backward()
    norm = opt.clip_grad_norm_(1.0)
    torch.testing.assert_close(norm, nn.utils.get_total_norm([model[0].weight.grad]), rtol=1e-6, atol=0.0)


def test_a_tied_weight_counts_once():
    run(2, tied)


# -- non-finite gradients without a scaler ----------------------------------------------------------------------------


def overflow(rank, world, dtype, options, where, late):
    """A bad value on one rank, perhaps in the second micro-batch; then good steps as though it had not been."""
    params, plain, opt = pair(dtype, **options)

    def good(k):
        for side, optimizer in ((params, opt), (plain.params, plain)):
            backward_of(side, rank, k)
            optimizer.step()
            optimizer.zero_grad()

    good(0)
    before = snapshot(opt, params)
    backward_of(params, rank, 1)
    grads = [exact(p.shape, rank, 2, i, ranks=world) for i, p in enumerate(params)]
    if rank == where:
        grads[3][17] = float("inf")
    if late:
        backward(params, grads)
    elif rank == where:
        params[3].grad[17] = float("nan")
    opt.step()
    assert opt.step_skipped
    assert int(opt.skipped_steps) == 1
    assert same(before, snapshot(opt, params))
    opt.zero_grad()
    good(3)
    assert not opt.step_skipped
    assert opt.step_skipped.shape == opt.skipped_steps.shape == ()
    assert int(opt.skipped_steps) == 1
    plain.check(opt, params)


@pytest.mark.parametrize(("late", "deferred"), [(False, False), (True, False), (True, True)])
@DTYPES
def test_a_non_finite_gradient_of_one_rank_skips_the_step(dtype, late, deferred, monkeypatch):
    # (deferred, a change by hand on one rank only is an error: test_deferred.py)
    monkeypatch.setattr(ranks, "deferred", deferred)
    run(2, overflow, dtype, {}, 1, late)
    run(2, overflow, dtype, {"overlap_reduce": False}, 0, late)
    overflow(0, 1, dtype, {}, 0, late)
    run(2, overflow, dtype, {"reduce_in_fp32": False}, 1, late)


def not_skipped(rank, world):
    """skip_nonfinite=False: as torch, a bad value goes where it belongs, and nowhere else."""
    params, plain, opt = pair(skip_nonfinite=False)
    for side, optimizer in ((params, opt), (plain.params, plain)):
        backward_of(side, rank, 0)
        if rank == 1:
            side[3].grad[17] = float("inf")
        optimizer.step()
    assert not opt.step_skipped
    assert int(opt.skipped_steps) == 0
    for p, q in zip(params, plain.params, strict=True):
        torch.testing.assert_close(p, q, equal_nan=True)
    assert int(torch.cat([p.detach().view(-1) for p in params]).isnan().sum()) == 1


@pytest.mark.usefixtures("both_ways")
def test_skip_nonfinite_false_does_as_torch():
    run(2, not_skipped)


# -- GradScaler -------------------------------------------------------------------------------------------------------


def scaled(rank, world, dtype, scaler, options, unscale=False, max_norm=None, micro=1):
    """Losses times the scale; nothing overflows, so nothing may differ from a run without scaler."""
    params, plain, opt = pair(dtype, **options)
    scaler = GradScaler("cpu", **scaler)
    for k in range(3):
        for m in range(micro):
            grads = [exact(p.shape, rank, k, m, i, ranks=world) for i, p in enumerate(params)]
            loss = sum((p * g.to(p.dtype)).sum() for p, g in zip(params, grads, strict=True))
            scaler.scale(loss).backward()
            backward(plain.params, grads)
        if unscale:
            scaler.unscale_(opt)
            if opt._runner.config.overlap_reduce:
                for p, q in zip(params, plain.params, strict=True):
                    torch.testing.assert_close(p.grad.float(), q.grad, rtol=0.0, atol=0.0)
            if max_norm is not None:
                opt.clip_grad_norm_(max_norm)
        scaler.step(opt)
        scaler.update()
        plain.step(max_norm)
        if max_norm is not None:
            torch.testing.assert_close(opt.grad_norm, plain.norm, rtol=1e-6, atol=0.0)
        opt.zero_grad()
        plain.zero_grad()
    assert int(opt.skipped_steps) == 0
    plain.check(opt, params)


SCALERS = {
    "dynamic": {"init_scale": 4.0, "growth_interval": 1},
    "static": {"init_scale": 16.0, "growth_interval": 10**9},
    "disabled": {"enabled": False},
}


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("kind", SCALERS)
@DTYPES
def test_a_scaler_changes_no_number(kind, dtype):
    run(2, scaled, dtype, SCALERS[kind], {})
    run(2, scaled, dtype, SCALERS[kind], {"overlap_reduce": False}, False, None, 2)
    scaled(0, 1, dtype, SCALERS[kind], {})
    run(2, scaled, dtype, SCALERS[kind], {"max_grad_norm": 1.0}, False, 1.0)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("options", [{}, {"overlap_reduce": False}], ids=str)
def test_unscale_then_clip(dtype, options):
    run(2, scaled, dtype, SCALERS["dynamic"], options, True, 1.0, 2)
    run(2, scaled, dtype, SCALERS["static"], options, True)
    scaled(0, 1, dtype, SCALERS["dynamic"], options, True, 1.0)


def unscaled_zeros(rank, world):
    """unscale_ leaves no trace on a tensor: it is seen though nearly all gradients are zero."""
    params = weights([(5000,), (30,)])
    plain, opt = Plain(params, **OPTIONS), Zero1AdamW(params, **OPTIONS)
    scaler = GradScaler("cpu", init_scale=4.0)
    for k in range(3):
        grads = [torch.zeros(5000), exact((30,), rank, k, ranks=world)]
        grads[0][7] = 1.0 + rank
        if k == 1:
            grads[1].zero_()
        scaler.scale(sum((p * g).sum() for p, g in zip(params, grads, strict=True))).backward()
        backward(plain.params, grads)
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        plain.step()
        opt.zero_grad()
        plain.zero_grad()
    plain.check(opt, params)


def test_unscale_of_gradients_that_are_mostly_zero():
    run(2, unscaled_zeros)


def test_unscale_of_fp16_is_torch_s_own_error():
    params, _, opt = pair(FP16)
    scaler = GradScaler("cpu")
    scaler.scale(sum(p.sum() for p in params)).backward()
    with pytest.raises(ValueError, match="unscale FP16"):
        scaler.unscale_(opt)


def overflow_under_scaler(rank, world, dtype, options, unscale, micro, when):
    """One rank's gradient overflows in one backward of one cycle: all skip, and all halve the scale, once."""
    params, plain, opt = pair(dtype, **options)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=10**9)
    scales = []
    for k in range(4):
        before = snapshot(opt, params)
        for m in range(micro):
            grads = [exact(p.shape, rank, k, m, i, ranks=world) for i, p in enumerate(params)]
            if (k, rank, m) == (when, 1, micro - 1):
                grads[3][17] = float("inf")
            loss = sum((p * g.to(p.dtype)).sum() for p, g in zip(params, grads, strict=True))
            scaler.scale(loss).backward()
            if k != when:
                backward(plain.params, grads)
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        scales.append(scaler.get_scale())
        assert bool(opt.step_skipped) == (k == when)
        if k == when:
            assert same(before, snapshot(opt, params))
        else:
            plain.step()
        opt.zero_grad()
        plain.zero_grad()
    assert int(opt.skipped_steps) == 1
    plain.check(opt, params)
    return scales


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_on_one_rank_skips_all_and_scales_stay_equal(unscale, micro, when):
    wanted = [8.0 if k < when else 4.0 for k in range(4)]
    for options in ({}, {"overlap_reduce": False}, {"reduce_in_fp32": False}):
        dtype = BF16 if unscale else FP16
        assert run(2, overflow_under_scaler, dtype, options, unscale, micro, when) == [wanted] * 2
    assert run(3, overflow_under_scaler, FP32, {}, unscale, micro, when) == [wanted] * 3


def one_without_gradient_after_overflow(rank, world, options):
    """A parameter's gradient overflows; in the next cycle that parameter takes no part."""
    params, plain, opt = pair(FP32, **options)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=10**9)
    for k in range(3):
        grads = [exact(p.shape, rank, k, i, ranks=world) for i, p in enumerate(params)]
        if k == 1:
            grads[3][17] = float("inf")
        elif k == 2:
            grads[3] = None
        loss = sum((p * g).sum() for p, g in zip(params, grads, strict=True) if g is not None)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        assert bool(opt.step_skipped) == (k == 1)
        if k != 1:
            backward(plain.params, grads)
            plain.step()
        opt.zero_grad()
        plain.zero_grad()
    plain.check(opt, params)
    return scaler.get_scale()


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("options", [{}, {"overlap_reduce": False}, {"reduce_in_fp32": False}], ids=str)
def test_an_overflow_does_not_outlive_its_cycle(options):
    assert run(2, one_without_gradient_after_overflow, options) == [4.0] * 2


def first_scale_is_too_large(rank, world):
    """The usual start: fp16 and a scale of 65536 that overflows a few times, on one rank only."""
    p = nn.Parameter(torch.zeros(500, dtype=FP16))
    opt = Zero1AdamW([p], **OPTIONS)
    scaler = GradScaler("cpu", init_scale=65536.0)
    for _ in range(6):
        scaler.scale((p * (4.0 if rank else 0.25)).sum()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert int(opt.full_param_state(p)["step"]) == 6 - int(opt.skipped_steps)
    return scaler.get_scale(), int(opt.skipped_steps), digest([p])


def test_the_usual_start_with_a_large_scale():
    found = run(2, first_scale_is_too_large)
    assert found[0] == found[1]
    assert found[0][:2] == (8192.0, 3)  # 4 * 8192 is the first that fp16 holds


def two_optimizers(rank, world):
    """Several optimizers under one scaler, each with steps of its own per update; an overflow in one skips that one."""
    a, b = weights([(50, 4)]), weights([(30,), (9, 9)])
    plain_a, plain_b = Plain(a, **OPTIONS), Plain(b, **OPTIONS)
    opt_a, opt_b = Zero1AdamW(a, **OPTIONS), Zero1AdamW(b, **OPTIONS)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=10**9)
    for k in range(4):
        for m, (side, plain, opt) in enumerate(((a, plain_a, opt_a), (b, plain_b, opt_b))):
            grads = [exact(p.shape, rank, k, m, i, ranks=world) for i, p in enumerate(side)]
            bad = k == 2 and m == 1
            if bad and rank == 0:
                grads[0][3] = float("inf")
            scaler.scale(sum((p * g).sum() for p, g in zip(side, grads, strict=True))).backward()
            scaler.step(opt)
            if not bad:
                backward(plain.params, grads)
                plain.step()
            opt.zero_grad()
            plain.zero_grad()
        scaler.update()
    assert scaler.get_scale() == 2.0
    assert (int(opt_a.skipped_steps), int(opt_b.skipped_steps)) == (0, 1)
    plain_a.check(opt_a, a)
    plain_b.check(opt_b, b)


def test_several_optimizers_per_update():
    run(2, two_optimizers)


def with_and_without(rank, world):
    """A scaler that comes and goes; a new scale by hand."""
    params, plain, opt = pair()
    scaler = GradScaler("cpu", init_scale=2.0)
    for k in range(8):
        grads = [exact(p.shape, rank, k, i, ranks=world) for i, p in enumerate(params)]
        backward(plain.params, grads)
        if k % 4 < 2:
            backward(params, grads)
            opt.step()
        else:
            scaler.scale(sum((p * g).sum() for p, g in zip(params, grads, strict=True))).backward()
            scaler.step(opt)
            scaler.update(32.0 if k == 3 else None)
        plain.step()
        opt.zero_grad()
        plain.zero_grad()
    plain.check(opt, params)


@pytest.mark.usefixtures("both_ways")
def test_a_scaler_may_come_and_go():
    run(2, with_and_without)


def schedule(rank, world):
    """step() is called on skipped steps too: a loop that looks at step_skipped leaves the schedule where it is."""
    params, _, opt = pair()
    lr = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    for k in range(3):
        backward_of(params, rank, k)
        if k == 1 and rank == 0:
            params[0].grad.fill_(float("nan"))
        opt.step()
        if not opt.step_skipped:
            lr.step()
        opt.zero_grad()
    assert opt.param_groups[0]["lr"] == 0.0025
    dist.barrier()


def test_a_skip_can_be_told_to_a_scheduler():
    run(2, schedule)
