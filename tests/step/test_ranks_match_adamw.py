"""1, 2, 3 and 4 ranks train as one torch.optim.AdamW (or Adam) does on fp32 copies that are fed the mean gradient.

Where the mean is exact, 16-bit parameters are that reference rounded once; fp32 ones and norms agree to rounding; the
state agrees too; and after every step all ranks hold the same bits. Parameters keep their shape, strides and dtype.
eps has the gradients' size, since Adam hides a gradient that is wrong by a factor otherwise.
"""

import copy

import pytest
import torch
from helpers.ranks import Plain, backward_of, equal_on_all_ranks, run, weights
from torch import nn

from zero1_cuda import Zero1Adam, Zero1AdamW

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [(33, 17), (130,), (7,), (256, 3), (1,), (65, 2, 3)]
WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 4])


def odd_ones():
    """A scalar, empty ones, channels_last, transposed, with gaps, and an expanded one that torch lets us train."""
    return [
        nn.Parameter(torch.tensor(1.5)),
        nn.Parameter(torch.zeros(0)),
        nn.Parameter(torch.zeros(3, 0, dtype=BF16)),
        nn.Parameter(weights([(6, 4, 3, 3)])[0].detach().to(memory_format=torch.channels_last)),
        nn.Parameter(weights([(40, 24)], BF16)[0].detach().t()),
        nn.Parameter(weights([(20, 30)])[0].detach()[:, ::3]),
        nn.Parameter(weights([(5, 6, 7)], FP16)[0].detach().permute(2, 0, 1)),
    ]


def two_groups():
    a, b, c, d = weights([(40, 5), (300,), (40, 5), (64, 9)])
    c.data, d.data = c.data.bfloat16(), d.data.bfloat16()
    first = {"params": [a, c], "lr": 0.03, "betas": (0.8, 0.95), "weight_decay": 0.3}
    return [first, {"params": [b, d], "eps": 1e-3, "weight_decay": 0.0}, {"params": []}]


CASES = {
    "fp32": lambda: weights(SHAPES),
    "bf16": lambda: weights(SHAPES, BF16),
    "fp16": lambda: weights(SHAPES, FP16),
    "mixed": lambda: [p for d in (BF16, FP32, FP16) for p in weights(SHAPES[:3], d)],
    "one scalar": lambda: weights([()], BF16),
    "3 elements": lambda: weights([(3,)]),
    "7 elements": lambda: weights([(3,), (4,)], BF16),
    "13 elements": lambda: weights([(1,), (5,), (7,)]),
    "1025 elements": lambda: weights([(1025,)], FP16),
    "odd ones": odd_ones,
    "groups": two_groups,
}
VARIANTS = {
    "L2": (Zero1Adam, {"weight_decay": 0.1}),
    "adam": (Zero1Adam, {}),
    "amsgrad": (Zero1AdamW, {"amsgrad": True, "betas": (0.5, 0.6)}),
    "maximize": (Zero1AdamW, {"maximize": True}),
    "no decay": (Zero1AdamW, {"weight_decay": 0.0, "betas": (0.0, 0.5)}),
    "tensor lr": (Zero1AdamW, {"lr": torch.tensor(0.02)}),
    "L2 amsgrad maximize": (Zero1Adam, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
}
OF_TORCH = {Zero1Adam: torch.optim.Adam, Zero1AdamW: torch.optim.AdamW}


def train(rank, world, given, kind=Zero1AdamW, options=None, ours=None, steps=4):
    """Steps on exact gradients beside torch; compares after every one."""
    options = {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1, **(options or {})}
    groups = CASES[given]() if isinstance(given, str) else given
    params = [p for g in groups for p in g["params"]] if isinstance(groups[0], dict) else groups
    before = [(p.shape, p.stride(), p.dtype) for p in params]
    plain = Plain(groups, OF_TORCH[kind], **options)
    opt = kind(groups, **options, **(ours or {}))
    assert not opt.state
    for k in range(steps):
        backward_of(params, rank, k)
        backward_of(plain.params, rank, k)
        norm = opt.clip_grad_norm_(float("inf"))
        opt.step()
        plain.step()
        torch.testing.assert_close(norm, plain.norm, rtol=1e-6, atol=0.0)
        opt.zero_grad()
        plain.zero_grad()
        equal_on_all_ranks(params)
    plain.check(opt, params)
    for p, (shape, stride, dtype) in zip(params, before, strict=True):
        assert (p.shape, p.dtype) == (shape, dtype)
        assert p.stride() == stride or (p.is_contiguous() and torch.empty_like(p).stride() == p.stride())
        assert set(opt.state[p]) >= {"step", "exp_avg", "exp_avg_sq"}


@WORLDS
@pytest.mark.parametrize("given", CASES)
def test_as_torch(world, given):
    run(world, train, given)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(world, variant):
    run(world, train, "mixed", *VARIANTS[variant])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "options",
    [{"bucket_cap_mb": 0.001}, {"overlap_reduce": False}, {"skip_nonfinite": False}, {"master_weights": "split"}],
    ids=lambda o: next(iter(o)),
)
def test_options_change_no_number(world, options):
    run(world, train, "mixed", Zero1AdamW, None, options)
    run(world, train, "groups", Zero1AdamW, None, options)


def small_updates(rank, world, master_weights):
    p = nn.Parameter(torch.ones(300, dtype=BF16))
    plain = Plain([p], lr=1e-5, weight_decay=0.0)
    opt = Zero1AdamW([p], lr=1e-5, weight_decay=0.0, master_weights=master_weights)
    for _ in range(400):
        p.sum().backward()
        plain.params[0].sum().backward()
        opt.step()
        plain.step()
        opt.zero_grad()
        plain.zero_grad()
    assert float(p[0]) < 1.0
    assert torch.equal(p, plain.params[0].bfloat16())


@pytest.mark.parametrize("master_weights", ["fp32", "split"])
def test_small_updates_add_up_in_the_master(master_weights):
    run(2, small_updates, master_weights)


class Net(nn.Module):
    """Some of everything, with a tied weight and a parameter that is never used."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(50, 24)
        self.norm = nn.LayerNorm(24)
        self.layers = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))
        self.conv = nn.Conv1d(24, 24, 3, padding=1, bias=False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        h = self.norm(self.tokens(x))
        h = h + self.layers(h)
        return self.head(h + self.conv(h.transpose(1, 2)).transpose(1, 2))


def loss_of(model, rank, k):
    data = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(1000 * rank + k))
    return nn.functional.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())


def fifty_steps(rank, world, kind):
    model = Net()
    twin = copy.deepcopy(model)
    options = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.05}
    reference = OF_TORCH[kind](twin.parameters(), **options)
    opt = kind(model.parameters(), **options)
    for k in range(50):
        loss_of(model, rank, k).backward()
        sum(loss_of(twin, r, k) for r in range(world)).div(world).backward()
        norm = opt.clip_grad_norm_(1.0)
        want = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        torch.testing.assert_close(norm, want, rtol=1e-6, atol=0.0)
        opt.step()
        torch.testing.assert_close(opt.grad_norm, norm, rtol=0.0, atol=0.0)
        reference.step()
        opt.zero_grad()
        reference.zero_grad()
        equal_on_all_ranks(model.parameters())
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            bound = 1e-3 * options["lr"] + 1e-6 * float(q.detach().abs().max())
            torch.testing.assert_close(p.detach(), q.detach(), rtol=0.0, atol=bound)
    assert model.head.weight is model.tokens.weight
    assert torch.equal(model.unused.weight, twin.unused.weight)


@WORLDS
def test_fifty_steps_of_a_model(world):
    run(world, fifty_steps, Zero1AdamW)


def test_fifty_steps_of_a_model_with_adam():
    run(2, fifty_steps, Zero1Adam)


def rank_0_is_sent(rank, world):
    torch.manual_seed(rank)
    params = [nn.Parameter(torch.randn(3000)), nn.Parameter(torch.randn(70, 3).t()), nn.Parameter(torch.randn(()))]
    params.append(nn.Parameter(torch.randn(11), requires_grad=False))
    torch.manual_seed(0)
    want = [torch.randn(3000), torch.randn(70, 3).t(), torch.randn(()), torch.randn(11)]
    Zero1AdamW(params)
    assert all(torch.equal(p, w) for p, w in zip(params, want, strict=True))


@pytest.mark.parametrize("world", [2, 3])
def test_construction_sends_the_weights_of_rank_0(world):
    run(world, rank_0_is_sent)
