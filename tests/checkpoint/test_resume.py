"""A run that is broken off and resumed goes on as if nothing had happened: k steps, save, load in new processes and
n - k steps end with the bits of n steps, for every dtype and master mode, with accumulation, clipping, loss scaling and
a schedule in play. On another number of ranks too, where the mean gradients are the same. And after any load all ranks
hold the same parameters, the rounded masters, whatever they held before.
"""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.ranks import backward, digest, equal_on_all_ranks, exact, run, snapshot, weights
from torch import nn

from zero1_cuda import Zero1Adam, Zero1AdamW

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
STEPS, SAVED = 8, 5


class Net(nn.Module):
    """Its parts may have different dtypes."""

    def __init__(self, dtypes):
        super().__init__()
        torch.manual_seed(7)
        sizes = [(19, 40), (40, 40), (40, 11)]
        self.layers = nn.ModuleList(nn.Linear(a, b).to(dtypes[i % len(dtypes)]) for i, (a, b) in enumerate(sizes))
        self.spare = nn.Parameter(torch.ones(5))  # seldom used

    def forward(self, x, t):
        for layer in self.layers:
            x = torch.dropout(layer(x.to(layer.weight.dtype)).tanh(), 0.2, True)
        loss = x.float().square().sum()
        return loss + self.spare.sum() if t % 3 == 0 else loss


class Run:
    """A training run whose chance depends on rank and step alone."""

    def __init__(
        self, rank, dtypes=(FP32,), kind=Zero1AdamW, accumulate=1, clip=None, scale=None, gather=False, **options
    ):
        self.rank, self.accumulate, self.clip = rank, accumulate, clip
        self.model = Net(dtypes)
        if gather:
            options["overlap_gather"] = self.model
        self.opt = kind(self.model.parameters(), lr=0.03, eps=1e-4, weight_decay=0.1, **options)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, STEPS)
        self.scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, init_scale=scale or 1.0, growth_interval=2)
        self.rates = []

    def train(self, steps):
        for t in steps:
            for micro in range(self.accumulate):
                torch.manual_seed(1000 * t + 10 * micro + self.rank)
                with nullcontext() if micro + 1 == self.accumulate else self.opt.no_sync():
                    loss = self.model(torch.randn(6, 19), t) * (1 + 1e6 * (self.scaler.is_enabled() and t == 1))
                    self.scaler.scale(loss).backward()
            if self.clip:
                self.opt.clip_grad_norm_(self.clip)
            self.scaler.step(self.opt)
            self.scaler.update()
            self.opt.zero_grad()
            self.rates.append(self.schedule.get_last_lr()[0])
            self.schedule.step()

    def parts(self):
        return {"model": self.model, "schedule": self.schedule, "scaler": self.scaler}

    def save(self, path, way):
        others = {name: part.state_dict() for name, part in self.parts().items()}
        if way == "dcp":
            dcp.save({"opt": self.opt.state_dict(), **others}, checkpoint_id=path)
            return
        state = self.opt.full_state_dict() if way == "whole" else self.opt.state_dict()
        torch.save({"opt": state, **others}, f"{path}-{self.rank}")

    def load(self, path, way):
        if way == "dcp":
            state = {name: part.state_dict() for name, part in self.parts().items()}
            state["opt"] = self.opt.state_dict()
            dcp.load(state, checkpoint_id=path)
        else:
            state = torch.load(f"{path}-{self.rank}", weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self.opt.load_state_dict(state["opt"])

    def ends_with(self):
        """Collective: everything that a run leaves."""
        self.opt.synchronize()
        params = list(self.model.parameters())
        equal_on_all_ranks(params)
        return digest(snapshot(self.opt, params)), self.scaler.state_dict(), self.schedule.state_dict()


CASES = {
    "fp32, clipped": ("dcp", {"max_grad_norm": 0.5}),
    "fp32, L2, amsgrad": ("part", {"kind": Zero1Adam, "amsgrad": True, "overlap_reduce": False}),
    "bf16, accumulation, clip_grad_norm_": ("dcp", {"dtypes": (BF16,), "accumulate": 3, "clip": 0.3}),
    "bf16, flowing, gather beside forward": ("whole", {"dtypes": (BF16,), "skip_nonfinite": False, "gather": True}),
    "bf16 split": ("part", {"dtypes": (BF16,), "master_weights": "split", "max_grad_norm": 2.0}),
    "fp16, scaler": ("dcp", {"dtypes": (FP16,), "scale": 2.0**10, "max_grad_norm": 1.0}),
    "mixed, scaler, accumulation": ("whole", {"dtypes": (BF16, FP32, FP16), "scale": 2.0**10, "accumulate": 2}),
    "mixed split, small buckets": ("dcp", {"dtypes": (BF16, FP32), "master_weights": "split", "bucket_cap_mb": 0.002}),
}


def unbroken(rank, world, folder):
    out = []
    for name, (way, options) in CASES.items():
        r = Run(rank, **options)
        r.train(range(SAVED))
        r.save(f"{folder}/{name}", way)
        r.train(range(SAVED, STEPS))
        out.append((r.ends_with(), r.rates[SAVED:]))
        assert bool(r.opt.skipped_steps) == ("scale" in options), name  # the scaler has been through an overflow
    return out


def resumed(rank, world, folder):
    out = []
    for name, (way, options) in CASES.items():
        r = Run(rank, **options)
        r.load(f"{folder}/{name}", way)
        r.train(range(SAVED, STEPS))
        out.append((r.ends_with(), r.rates))
    return out


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_ends_with_the_bits_of_the_unbroken_one(tmp_path, world):
    want, got = run(world, unbroken, tmp_path), run(world, resumed, tmp_path)
    for (a, rates), (b, rates_after), name in zip(want[0], got[0], CASES, strict=True):
        assert a == b, name
        assert rates == rates_after, name
    assert want == got


def in_place(rank, world):
    """Into an optimizer that has gone on meanwhile: nothing of that remains."""
    r = Run(rank, (BF16, FP32), max_grad_norm=1.0)
    r.train(range(SAVED))
    kept = copy.deepcopy(r.opt.state_dict()), r.schedule.state_dict()
    r.train(range(SAVED, STEPS))
    want = r.ends_with()
    r.opt.clip_grad_norm_(0.01)  # waits for a step that does not come
    r.opt.load_state_dict(kept[0])
    r.schedule.load_state_dict(kept[1])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*discards the clipping")  # there is none left to discard
        r.train(range(SAVED, STEPS))
    assert r.ends_with() == want


def test_back_to_an_earlier_state():
    run(2, in_place)


# -- other numbers of ranks -------------------------------------------------------------------------------------------

SHAPES = [(33, 17), (), (300,), (0,), (7, 2, 5), (129,)]
DTYPES = [FP32, BF16, FP16, FP32, BF16, FP32]


def mixed():
    return [w for s, d in zip(SHAPES, DTYPES, strict=True) for w in weights([s], d)]


def whole_numbers(params, opt, rank, world, steps):
    """Ranks differ, the mean does not depend on their number: all sums and quotients are exact."""
    for t in steps:
        grads = [exact(p.shape, t, i) + (2 * rank - world + 1) * exact(p.shape, t, i, 1) for i, p in enumerate(params)]
        backward(params, [None if i == 2 and t % 2 else g for i, g in enumerate(grads)])
        opt.step()
        opt.zero_grad()


def leg(rank, world, folder, options, first, save, last):
    params = mixed()
    opt = Zero1AdamW(params, lr=0.02, eps=1e-3, max_grad_norm=5.0, **options)
    if first:
        state = {"opt": opt.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/{first}")
        opt.load_state_dict(state["opt"])
    whole_numbers(params, opt, rank, world, range(first, save))
    if save < last:
        dcp.save({"opt": opt.state_dict()}, checkpoint_id=f"{folder}/{save}")
        whole_numbers(params, opt, rank, world, range(save, last))
    return digest(snapshot(opt, params)), float(opt.grad_norm)


def test_another_number_of_ranks_goes_on_with_the_same_bits(tmp_path):
    want = run(2, leg, tmp_path, {}, 0, 3, 9)[0]
    for world, options, first, last in (
        (3, {"bucket_cap_mb": 0.001}, 3, 5),
        (1, {"master_weights": "split"}, 5, 7),
        (4, {"overlap_reduce": False}, 7, 9),
    ):
        found = run(world, leg, tmp_path, options, first, last, last + (last < 9))
    assert found == [want] * 4


# -- one model on all ranks -------------------------------------------------------------------------------------------


def scramble(p, rank):
    """The weights of rank 0 stay as they are."""
    return p.detach().add(rank).mul(1.7) if rank else p.detach().clone()


def scrambled(rank, world):
    for split in ("fp32", "split"):
        params = mixed()
        opt = Zero1AdamW(params, lr=0.02, master_weights=split)
        whole_numbers(params, opt, rank, world, range(3))
        adamw = torch.optim.AdamW([p.detach().clone() for p in params])
        for p in adamw.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        adamw.step()
        want = digest(snapshot(opt, params))
        part, whole = copy.deepcopy(opt.state_dict()), opt.full_state_dict(rank0_only=False)
        kinds = {"part": part, "whole": whole, "whole on rank 0": {} if rank else whole, "torch": adamw.state_dict()}
        for kind, state in kinds.items():
            before = [p.detach().clone() for p in params]
            for p in params:
                p.data.copy_(scramble(p, rank))
            opt.load_state_dict(state)
            equal_on_all_ranks(params)
            for p in params:
                assert torch.equal(p.detach(), opt.full_param_state(p)["master"].to(p.dtype))
            if kind == "torch":  # no masters: each rank's part of the weights becomes its masters
                for p, q, old in zip(params, adamw.param_groups[0]["params"], before, strict=True):
                    entry = opt.full_param_state(p)
                    assert entry["step"] == 1
                    for name in ("exp_avg", "exp_avg_sq"):
                        assert torch.equal(entry[name], adamw.state[q][name].float())
                    ours = torch.stack([p.detach() == scramble(old, r) for r in range(world)])
                    assert bool(ours.any(0).all())
            else:
                assert digest(snapshot(opt, params)) == want, kind
            whole_numbers(params, opt, rank, world, range(3, 4))
            equal_on_all_ranks(params)
            assert digest(snapshot(opt, params)) != want  # the next load has something to undo


@pytest.mark.parametrize("world", [2, 3])
def test_a_load_ends_with_one_model_on_all_ranks(world):
    run(world, scrambled)


def hidden_edits(rank, world):
    """Edits through p.data are not seen, and refresh_masters takes them up."""
    params = mixed()
    opt = Zero1AdamW(params, lr=0.02)
    whole_numbers(params, opt, rank, world, range(2))
    before = opt.full_state_dict(rank0_only=False)
    for p in params:
        p.data.mul_(0.5)
    opt.refresh_masters()
    after = opt.full_state_dict(rank0_only=False)
    for i, p in enumerate(params):
        assert torch.equal(after["state"][i]["master"], p.detach().float())
        assert torch.equal(after["state"][i]["exp_avg"], before["state"][i]["exp_avg"])
    part = opt.state_dict()
    others = mixed()
    other = Zero1AdamW(others)
    other.load_state_dict(part)
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    dist.barrier()


def test_refresh_masters_before_a_save():
    run(2, hidden_edits)


def first_step(rank, world):
    params = [*weights([(40,)]), *weights([(5,)], BF16)]
    opt = Zero1AdamW(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(params, [torch.ones(40), None])
        opt.clip_grad_norm_(1.0)
        opt.step()


def test_the_first_step_of_a_run_warns_of_nothing():
    """A scaler may be at work until a step was made without one; a bucket without gradients then proves nothing."""
    run(2, first_step)
