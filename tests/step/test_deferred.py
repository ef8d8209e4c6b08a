"""The way of CUDA, on gloo: the host reads no agreement in the same step (`reads_on_host` is off).

A step that is wrong on one rank changes nothing on any: no weight, master, moment or count. The next one raises on
every rank and names the reason; nothing hangs, and training goes on. The device stops the kernels, not the host.
"""

import time

import pytest
import torch
import torch.distributed as dist
from helpers import ranks
from helpers.faults import FAULTS, OPTIONS, SHAPES
from helpers.ranks import Plain, backward, backward_of, caught, equal_on_all_ranks, exact, run, weights
from torch.amp import GradScaler

from zero1_cuda import Zero1AdamW


@pytest.fixture(autouse=True)
def _deferred(monkeypatch):
    monkeypatch.setattr(ranks, "deferred", True)


def held(opt, params):
    """Copies of all that a step may change, without a collective, which would raise what the last step has found."""
    runner = opt._runner
    out = [p.detach().clone() for p in params]
    out += [t.clone() for state in runner.registry.sets for t in state.tensors()["state"]]
    return [*out, runner.steps.clone(), runner.skipped[:2].clone()]


def unchanged(before, after):
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


class Training:
    """Steps on exact gradients beside plain data parallel."""

    def __init__(self, rank, dtype, **options):
        self.rank, self.params = rank, weights(SHAPES, dtype)
        self.plain = Plain(self.params, **OPTIONS)
        named = [(f"w{i}", p) for i, p in enumerate(self.params)]
        self.opt = Zero1AdamW(named, **OPTIONS, bucket_cap_mb=0.002, **options)

    def good(self, k):
        for side, optimizer in ((self.params, self.opt), (self.plain.params, self.plain)):
            backward_of(side, self.rank, k)
            optimizer.step()
            optimizer.zero_grad()

    def check(self):
        self.plain.check(self.opt, self.params)
        equal_on_all_ranks(self.params)


def loop(rank, world, name, options, steps, dtype):
    """Good steps; then a cycle that goes wrong on rank 1; then the one that says so; then good steps."""
    t = Training(rank, dtype, **options)
    for k in range(steps):
        t.good(k)
    before = held(t.opt, t.params)
    begin = time.monotonic()
    repair = FAULTS[name][0](t.params, t.opt, rank)
    told = caught(t.opt.step)
    at_once = told[0] != ""
    if repair is not None:
        repair()
    if steps:
        assert unchanged(before, held(t.opt, t.params)), "something changed"
    t.opt.zero_grad()
    if not at_once:
        backward_of(t.params, rank, 9)
        told = caught(t.opt.step)
        if steps:
            assert unchanged(before, held(t.opt, t.params)), "something changed"
        t.opt.zero_grad()
    assert time.monotonic() - begin < 10
    for k in range(steps, steps + 4):
        t.good(k)
    t.check()
    return (*told, at_once)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("options", [{}, {"overlap_reduce": False}, {"reduce_in_fp32": False}], ids=str)
@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_step_changes_nothing_and_the_next_one_says_so(name, options, steps):
    _, kind, text = FAULTS[name]
    found = run(2, loop, name, options, steps, torch.bfloat16, timeout=30)
    for raised, told, _ in found:
        assert raised == kind
        assert text in told
    # nobody knows what to expect in a first cycle, so all look; later only the rank that is at fault may
    assert [at_once for *_, at_once in found] == [steps == 0] * 2


@pytest.mark.parametrize("name", ["sparse", "one backward more", "many backwards more", "other options", "clip on one"])
def test_it_is_so_on_three_ranks_and_for_fp32(name):
    for raised, told, _ in run(3, loop, name, {}, 3, torch.float32, timeout=30):
        assert raised == FAULTS[name][1]
        assert "rank 1" in told


# -- clipping on some ranks only --------------------------------------------------------------------------------------


def clip_differs(rank, world, clips, steps):
    """clips: [rank][cycle] how often clip_grad_norm_ is called before step()."""
    t = Training(rank, torch.bfloat16)
    for k in range(steps):
        t.good(k)
    told = []
    for calls in clips[rank]:
        backward_of(t.params, rank, 9)
        error = ("", "")
        for _ in range(calls):
            error = error if error[0] else caught(t.opt.clip_grad_norm_, 1.0)
        error = error if error[0] else caught(t.opt.step)
        t.opt.zero_grad()
        told.append(error)
    for k in range(steps, steps + 3):
        t.good(k)
    equal_on_all_ranks(t.params)
    return told


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("steps", [1, 3])
def test_clipping_on_one_rank_only(world, steps):
    """It begins on rank 1 alone, which then is the one that is elsewhere."""
    for told in run(world, clip_differs, [[0, 0], [1, 0], [0, 0]], steps):
        assert told[0] == ("", "")
        assert told[1][0] == "RuntimeError"
        assert "clip" in told[1][1]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("more", [1, 2])
def test_clipping_on_all_but_one_rank(world, more):
    """All have clipped, then rank 1 does not: a cycle that is good, one that is not, one that says so."""
    for told in run(world, clip_differs, [[more, more, 0], [more, 0, 0], [more, more, 0]], 1):
        assert told[0] == ("", "")
        assert told[1] == ("", "")
        assert told[2][0] == "RuntimeError"
        assert "clip" in told[2][1]


def test_clipping_that_begins_on_all_ranks_is_no_fault():
    for told in run(2, clip_differs, [[0, 1, 1, 0, 2], [0, 1, 1, 0, 2]], 2):
        assert told == [("", "")] * 5


def clip_by(rank, world, differing, steps, scaler):
    """All clip, rank 1 by another bound or another scale; scaler: step() is handed a scale of its own, equal on all."""
    t = Training(rank, torch.bfloat16)
    given = torch.tensor([2.0]) if scaler else None

    def cycle(max_norm, scale):
        backward_of(t.params, rank, 9)
        t.opt.grad_scale = given
        error = caught(t.opt.clip_grad_norm_, max_norm, grad_scale=scale)
        error = error if error[0] else caught(t.opt.step)
        t.opt.zero_grad()
        return error

    for _ in range(steps):
        assert cycle(1.0, torch.tensor(2.0)) == ("", "")
    before = held(t.opt, t.params)
    max_norm, scale = differing if rank == 1 else (1.0, 2.0)
    told = [cycle(max_norm, torch.tensor(scale))]
    if steps:
        assert unchanged(before, held(t.opt, t.params)), "something changed"
    told.append(cycle(1.0, torch.tensor(2.0)))
    assert cycle(1.0, torch.tensor(2.0)) == ("", "")
    assert not unchanged(before, held(t.opt, t.params)), "nothing is stepped any more"
    equal_on_all_ranks(t.params)
    return told


@pytest.mark.parametrize("scaler", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("differing", [(1.5, 2.0), (1.0, 3.0)], ids=["max_norm", "grad_scale"])
def test_all_must_clip_by_the_same_numbers(differing, steps, scaler):
    for told in run(2, clip_by, differing, steps, scaler):
        assert told[steps > 0][0] == "RuntimeError"
        assert ("clipping" if differing[0] != 1.0 else "scale") in told[steps > 0][1]
        assert told[steps == 0] == ("", "")


# -- loss scaling -----------------------------------------------------------------------------------------------------


def scaler_loop(rank, world, name, steps, options):
    t = Training(rank, torch.float32, **options)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=10**9)

    def good(k):
        grads = [exact(p.shape, rank, k, i, ranks=world) for i, p in enumerate(t.params)]
        scaler.scale(sum((p * g).sum() for p, g in zip(t.params, grads, strict=True))).backward()
        scaler.step(t.opt)
        scaler.update()
        t.opt.zero_grad()
        backward(t.plain.params, grads)
        t.plain.step()
        t.plain.zero_grad()

    def loss():
        return sum(p.sum() for p in t.params)

    for k in range(steps):
        good(k)
    before = held(t.opt, t.params)
    used = scaler
    if name == "unequal scale":
        used = GradScaler("cpu", init_scale=4.0 + 4.0 * rank, growth_interval=10**9)
    for _ in range(1 + (rank if name == "one backward more" else 0)):
        (loss() if name == "a scaler on one rank" and not rank else used.scale(loss())).backward()
    told = caught(t.opt.step) if name == "a scaler on one rank" and not rank else caught(used.step, t.opt)
    at_once = told[0] != ""
    assert unchanged(before, held(t.opt, t.params)) or not steps
    t.opt.zero_grad()
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=10**9)
    if not at_once:
        told = caught(scaler.scale(loss()).backward)  # a rank that was elsewhere may find out here
        if not told[0]:
            told = caught(scaler.step, t.opt)
        assert unchanged(before, held(t.opt, t.params)) or not steps
        t.opt.zero_grad()
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=10**9)
    for k in range(steps, steps + 3):
        good(k)
    t.check()
    return (*told, at_once)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("options", [{}, {"overlap_reduce": False}], ids=str)
@pytest.mark.parametrize("name", ["unequal scale", "a scaler on one rank", "one backward more"])
def test_faults_under_a_scaler(name, options, steps):
    for kind, text, at_once in run(2, scaler_loop, name, steps, options, timeout=30):
        assert kind == "RuntimeError"
        assert ("backward" if name == "one backward more" else "scal") in text
        assert at_once == (steps == 0)


def overflow(rank, world):
    """An infinity on one rank: all scalers see it, all ranks skip, and scales stay equal."""
    t = Training(rank, torch.float32)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=10**9)
    scales = []
    for k in range(6):
        loss = sum(p.sum() for p in t.params)
        scaler.scale(loss * (float("inf") if rank == k % 2 and k in (1, 4) else 1.0)).backward()
        before = held(t.opt, t.params)
        scaler.step(t.opt)
        assert unchanged(before[:-1], held(t.opt, t.params)[:-1]) == (k in (1, 4))
        scaler.update()
        scales.append(scaler.get_scale())
        t.opt.zero_grad()
    return scales, int(t.opt.skipped_steps)


def test_an_overflow_on_one_rank_is_one_on_all():
    assert run(2, overflow) == [([4.0, 2.0, 2.0, 2.0, 1.0, 1.0], 2)] * 2


def a_rank_without_backward(rank, world, scaled):
    """None at all is allowed, also where the others send a message at the end of theirs."""
    t = Training(rank, torch.float32)
    for k in range(5):
        for side, optimizer in ((t.params, t.opt), (t.plain.params, t.plain)):
            if rank == 0 or k % 2:
                backward_of(side, rank, k)
            optimizer.step()
            optimizer.zero_grad()
    t.check()


def test_a_rank_without_backward():
    run(2, a_rank_without_backward, False)
    run(3, a_rank_without_backward, False)


# -- gradients changed on some ranks only -----------------------------------------------------------------------------


def touched_on_one(rank, world):
    t = Training(rank, torch.bfloat16)
    for k in range(2):
        t.good(k)
    before = held(t.opt, t.params)
    backward_of(t.params, rank, 9)
    if rank:
        t.params[2].grad.mul_(2.0)
    t.opt.step()
    assert unchanged(before, held(t.opt, t.params))
    t.opt.zero_grad()
    backward_of(t.params, rank, 9)
    told = caught(t.opt.step)
    t.opt.zero_grad()
    for k in range(2, 5):
        t.good(k)
    t.check()
    return told


def test_gradients_changed_on_one_rank():
    for kind, text in run(2, touched_on_one):
        assert kind == "RuntimeError"
        assert "changed after backward" in text


# -- weights edited on one rank ----------------------------------------------------------------------------------------


def edited_on_one(rank, world, moved):
    """Edits of every weight on rank 1, in place or by other storage: not taken up, and sent to nobody."""
    t = Training(rank, torch.bfloat16)
    for k in range(2):
        t.good(k)
    before = held(t.opt, t.params)
    backward_of(t.params, rank, 9)
    kept = [p.detach().clone() for p in t.params]
    if rank == 1:
        for p in t.params:
            if moved:
                p.data = p.data * 2.0
            else:
                p.detach().mul_(2.0)
    t.opt.step()
    after = held(t.opt, t.params)
    assert rank == 1 or unchanged(before, after)
    assert unchanged(before[len(kept) :], after[len(kept) :])
    if moved:
        for p, old in zip(t.params, kept, strict=True):
            p.data = old.clone()  # on all ranks
    t.opt.zero_grad()
    backward_of(t.params, rank, 9)
    told = caught(t.opt.step)
    t.opt.zero_grad()
    assert all(torch.equal(p, old) for p, old in zip(t.params, kept, strict=True))
    for k in range(2, 5):
        t.good(k)
    t.check()
    return told


@pytest.mark.parametrize("moved", [False, True])
def test_weights_edited_on_one_rank(moved):
    for kind, text in run(2, edited_on_one, moved):
        assert kind == "RuntimeError"
        assert "edited weights (rank 0: []" in text
        assert "'w3'" in text


# -- the sticky word --------------------------------------------------------------------------------------------------


def looked_at(rank, world):
    """After a step that was stopped, synchronize() and state_dict() raise on the rank that asks, and send nothing."""
    t = Training(rank, torch.bfloat16)
    for k in range(2):
        t.good(k)
    repair = FAULTS["other options"][0](t.params, t.opt, rank)
    t.opt.step()
    repair()
    t.opt.zero_grad()
    assert t.opt._runner.skipped[2] == 1
    if rank == 0:
        for look in (t.opt.synchronize, t.opt.state_dict):
            with pytest.raises(RuntimeError, match="the last step was stopped"):
                look()
    dist.barrier()
    backward_of(t.params, rank, 9)
    with pytest.raises(RuntimeError, match="group options"):
        t.opt.step()
    t.opt.zero_grad()
    assert t.opt._runner.skipped[2] == 0
    t.opt.synchronize()
    t.good(2)
    t.check()


def test_a_stopped_step_shows_until_it_is_told():
    run(2, looked_at)


def replayed(rank, world):
    """A captured step makes no copy for the host. Here the copy is dropped, as though a graph had been replayed."""
    t = Training(rank, torch.bfloat16)
    for k in range(2):
        t.good(k)
    repair = FAULTS["other options"][0](t.params, t.opt, rank)
    t.opt.step()
    repair()
    t.opt.zero_grad()
    t.opt._runner.last.forget()
    t.opt._runner.last._captured = True
    with pytest.raises(RuntimeError, match="the last step was stopped"):
        t.opt.state_dict()
    with pytest.raises(RuntimeError, match="replay"):
        t.opt.step()
    t.good(2)
    t.check()


def test_a_replay_that_was_stopped_is_told():
    run(2, replayed)
