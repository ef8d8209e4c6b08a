"""Bad input gives a clear error of the right type, on every rank though one alone may see it, within seconds; nothing
has changed then, and where that makes sense training goes on as though it had not happened.
"""

import time

import pytest
import torch
import torch.distributed as dist
from helpers.faults import FAULTS, OPTIONS, SHAPES
from helpers.ranks import Plain, backward, backward_of, caught, equal_on_all_ranks, exact, run, snapshot, weights
from torch import nn
from torch.amp import GradScaler

from zero1_cuda import Zero1Adam, Zero1AdamW


class Subclass(torch.Tensor):
    pass


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=True)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def one(dtype=torch.float32, shape=(5, 3), **kwargs):
    return [nn.Parameter(torch.zeros(shape, dtype=dtype, **kwargs), requires_grad=not kwargs.get("frozen", False))]


# -- one process: the constructor -------------------------------------------------------------------------------------

PARAMETERS = {  # name: (parameters, type of error, in the message)
    "none at all": (list, ValueError, "empty"),
    "a tensor": (lambda: torch.zeros(3, requires_grad=True), TypeError, "iterable"),
    "not tensors": (lambda: [1, 2], TypeError, "Tensor"),
    "not a leaf": (lambda: [one()[0] * 2], ValueError, "leaf"),
    "complex": (lambda: one(torch.complex64), TypeError, "torch.complex64"),
    "float64": (lambda: one(torch.float64), TypeError, "torch.float64"),
    "float8": (lambda: [nn.Parameter(torch.zeros(4).to(torch.float8_e5m2))], TypeError, "torch.float8_e5m2"),
    "integers": (lambda: [torch.zeros(4, dtype=torch.int64)], TypeError, "torch.int64"),
    "sparse": (lambda: [nn.Parameter(torch.zeros(3, 3).to_sparse())], TypeError, "sparse"),
    "quantised": (lambda: [torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8)], TypeError, "quantised"),
    "a subclass": (lambda: [torch.zeros(3).as_subclass(Subclass)], TypeError, "Subclass"),
    "a wrapper": (lambda: [Wrapper(torch.zeros(3))], TypeError, "Wrapper"),
    "two devices": (lambda: [*one(), *one(device="meta")], ValueError, "one device"),
    "twice in two groups": (lambda: [{"params": (p := one())}, {"params": p}], ValueError, "more than one"),
}
ARGUMENTS = {
    "lr": (-1.0, ValueError), "lr nan": (float("nan"), ValueError), "lr of two": (torch.ones(2), ValueError),
    "betas": ((1.0, 0.9), ValueError), "betas 2": ((0.9, -0.1), ValueError), "betas 3": ((0.9,), ValueError),
    "eps": (-1e-8, ValueError), "weight_decay": (-0.1, ValueError), "max_grad_norm": (0.0, ValueError),
    "max_grad_norm 2": (-1.0, ValueError), "bucket_cap_mb": (0, ValueError), "bucket_cap_mb 2": (-25, ValueError),
    "master_weights": ("bf16", ValueError), "overlap_gather": (True, TypeError), "differentiable": (True, ValueError),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_refused_by_name(name):
    make, kind, text = PARAMETERS[name]
    for cls in (Zero1AdamW, Zero1Adam):
        with pytest.raises(kind, match=text):
            cls(make())


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_refused_by_name(name):
    value, kind = ARGUMENTS[name]
    name = name.split()[0]
    for cls in (Zero1AdamW, Zero1Adam):
        with pytest.raises(kind, match=name):
            cls(one(), **{name: value})
    if name in ("lr", "betas", "eps", "weight_decay"):  # of a group, and of one that comes later
        with pytest.raises(kind, match=name):
            Zero1AdamW([{"params": one(), name: value}])
        opt = Zero1AdamW(one())
        with pytest.raises(kind, match=name):
            opt.add_param_group({"params": one(), name: value})
        assert len(opt.param_groups) == 1


def test_the_name_of_a_bad_parameter_is_told():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(TypeError, match=r"1\.weight.*float64"):
        Zero1AdamW(model.named_parameters())
    with pytest.raises(TypeError, match=r"2 of group 0.*\(2, 2\).*float64"):
        Zero1AdamW(model.parameters())


def test_dtensors_are_refused():
    assert run(1, dtensor) == [("TypeError", True)]


def dtensor(rank, world):
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    kind, text = caught(Zero1AdamW, [nn.Parameter(distribute_tensor(torch.zeros(4), mesh))])
    return kind, "DTensor" in text


def test_foreach_and_fused_are_ignored():
    found = []
    for options in ({}, {"foreach": True, "fused": True}, {"foreach": False, "fused": False}):
        p = one()[0]
        opt = Zero1AdamW([p], lr=0.1, **options)
        p.grad = torch.full_like(p, 2.0)
        opt.step()
        found.append(p.detach().clone())
    assert torch.equal(found[0], torch.full((5, 3), -0.1))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_calls_are_checked():
    p = one()[0]
    opt = Zero1AdamW([p])
    with pytest.raises(ValueError, match="max_norm"):
        opt.clip_grad_norm_(-1.0)
    with pytest.raises(ValueError, match="to"):
        opt.consolidate_state_dict(to=1)
    with pytest.raises(ValueError, match="full_param_state"):
        opt.full_param_state(one()[0])
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    opt = Zero1AdamW([p, frozen])
    with pytest.raises(ValueError, match="never been trainable"):
        opt.full_param_state(frozen)
    with pytest.raises((ValueError, TypeError)):
        opt.add_param_group({"params": one(torch.float64)})
    with pytest.raises(ValueError, match="more than one"):
        opt.add_param_group({"params": [p]})
    assert len(opt.param_groups) == 1
    p.sum().backward()
    opt.step()


# -- two ranks: the constructor ---------------------------------------------------------------------------------------


def shape_of(*shapes, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(s, dtype=dtype)) for s in shapes]


def frozen_second():
    params = shape_of((4, 3), (5,))
    params[1].requires_grad_(False)
    return params


DIFFERENT = {
    "count": lambda: shape_of((4, 3)),
    "count 2": lambda: shape_of((4, 3), (5,), (1,)),
    "shape": lambda: shape_of((3, 4), (5,)),
    "order": lambda: shape_of((5,), (4, 3)),
    "dtype": lambda: shape_of((4, 3), (5,), dtype=torch.bfloat16),
    "requires_grad": frozen_second,
    "groups": lambda: [{"params": shape_of((4, 3))}, {"params": shape_of((5,))}],
    "nothing": list,
    "float64": lambda: shape_of((4, 3), (5,), dtype=torch.float64),
    "complex": lambda: shape_of((4, 3), (5,), dtype=torch.complex64),
    "two devices": lambda: [*shape_of((4, 3)), nn.Parameter(torch.zeros(5, device="meta"))],
}


def trains(rank, world):
    """A good optimizer after all that."""
    params = weights(SHAPES)
    plain = Plain(params, **OPTIONS)
    opt = Zero1AdamW(params, **OPTIONS)
    for k in range(2):
        for side, optimizer in ((params, opt), (plain.params, plain)):
            backward_of(side, rank, k)
            optimizer.step()
            optimizer.zero_grad()
    plain.check(opt, params)


def constructed(rank, world, name):
    begin = time.monotonic()
    kind, text = caught(Zero1AdamW, DIFFERENT[name]() if rank == 1 else shape_of((4, 3), (5,)))
    assert time.monotonic() - begin < 10
    later, groups = "ValueError", 1
    if name in ("count", "shape", "order", "dtype", "requires_grad"):
        opt = Zero1AdamW(one())
        later, _ = caught(opt.add_param_group, {"params": DIFFERENT[name]() if rank == 1 else shape_of((4, 3), (5,))})
        groups = len(opt.param_groups)
        opt.step()
    trains(rank, world)
    return kind, text, later, groups


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_parameters_on_one_rank(name):
    found = run(2, constructed, name)
    own = TypeError.__name__ if name in ("float64", "complex") else ValueError.__name__
    assert found[0][0] == "ValueError"
    assert found[1][0] == own
    for _, _, later, groups in found:
        assert later == "ValueError"
        assert groups == 1
    if name == "shape":
        assert "(4, 3)" in found[0][1]
        assert "(3, 4)" in found[0][1]


def argument(rank, world):
    told = []
    for bad in ({"lr": -1.0}, {"betas": (2.0, 0.9)}, {"overlap_gather": 3}, {"bucket_cap_mb": -1}):
        told.append(caught(Zero1AdamW, one(), **(bad if rank == 1 else {}))[0])
    trains(rank, world)
    return told


def test_a_bad_argument_on_one_rank():
    good, bad = run(2, argument)
    assert good == ["ValueError"] * 4
    assert bad == ["ValueError", "ValueError", "TypeError", "ValueError"]


# -- two ranks: while training ----------------------------------------------------------------------------------------


def loop(rank, world, name, options, first):
    """A good step, perhaps; then a cycle that goes wrong on rank 1; then good steps. -> what was raised."""
    params = weights(SHAPES)
    plain = Plain(params, **OPTIONS)
    opt = Zero1AdamW([(f"w{i}", p) for i, p in enumerate(params)], **OPTIONS, bucket_cap_mb=0.002, **options)

    def good(k):
        for side, optimizer in ((params, opt), (plain.params, plain)):
            backward_of(side, rank, k)
            optimizer.step()
            optimizer.zero_grad()

    if not first:
        good(0)
    before = snapshot(opt, params)
    begin = time.monotonic()
    repair = FAULTS[name][0](params, opt, rank)
    kind, text = caught(opt.step)
    assert time.monotonic() - begin < 10
    if repair is not None:
        repair()
    opt.zero_grad()
    after = snapshot(opt, params)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "something changed"
    for k in range(2, 5):
        good(k)
    plain.check(opt, params)
    equal_on_all_ranks(params)
    return kind, text


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("options", [{}, {"overlap_reduce": False}], ids=str)
@pytest.mark.parametrize("name", FAULTS)
def test_what_one_rank_alone_sees_is_an_error_on_all(name, options, first):
    _, kind, text = FAULTS[name]
    for raised, told in run(2, loop, name, options, first, timeout=20):
        assert raised == kind
        assert text in told


def test_it_is_so_on_three_ranks():
    for name in ("sparse in backward", "one backward more", "an edit"):
        for raised, told in run(3, loop, name, {}, True):
            assert raised == FAULTS[name][1]
            assert "rank 1" in told


def alone(name):
    """In one process only what is wrong in itself is an error."""
    params = weights(SHAPES)
    opt = Zero1AdamW([(f"w{i}", p) for i, p in enumerate(params)], **OPTIONS)
    backward_of(params, 1, 0)
    opt.step()
    opt.zero_grad()
    before = snapshot(opt, params)
    repair = FAULTS[name][0](params, opt, 1)
    raised = caught(opt.step)
    if repair is not None:
        repair()
    opt.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(opt, params), strict=True))
    backward_of(params, 1, 0)
    opt.step()
    return raised


@pytest.mark.parametrize("name", ["sparse", "sparse in backward", "a cast", "another shape"])
def test_in_one_process(name):
    kind, text = alone(name)
    assert kind == FAULTS[name][1]
    assert FAULTS[name][2] in text


# -- loss scaling -----------------------------------------------------------------------------------------------------


def scaler_loop(rank, world, name, first):
    params = weights(SHAPES)
    plain = Plain(params, **OPTIONS)
    opt = Zero1AdamW(params, **OPTIONS)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=10**9)

    def good(k):
        grads = [exact(p.shape, rank, k, i, ranks=world) for i, p in enumerate(params)]
        scaler.scale(sum((p * g).sum() for p, g in zip(params, grads, strict=True))).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        backward(plain.params, grads)
        plain.step()
        plain.zero_grad()

    if not first:
        good(0)
    before = snapshot(opt, params)
    if name == "unequal scale":
        used = GradScaler("cpu", init_scale=4.0 + 4.0 * rank)
        used.scale(sum(p.sum() for p in params)).backward()
        kind, text = caught(used.step, opt)
    elif name == "a scaler on one rank":
        (scaler.scale(sum(p.sum() for p in params)) if rank else sum(p.sum() for p in params)).backward()
        kind, text = caught(scaler.step, opt) if rank else caught(opt.step)
    else:  # no gradient on one rank, or on all
        scaler.scale(torch.zeros(()))
        if rank == 0 and name == "no gradient on one rank":
            scaler.scale(sum(p.sum() for p in params)).backward()
        kind, text = caught(scaler.step, opt)
    opt.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(opt, params), strict=True))
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=10**9)
    for k in range(2, 4):
        good(k)
    plain.check(opt, params)
    return kind, text


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "name", ["unequal scale", "a scaler on one rank", "no gradient on one rank", "no gradient on all"]
)
def test_faults_under_a_scaler(name, first):
    for kind, text in run(2, scaler_loop, name, first):
        assert kind == "RuntimeError"
        assert ("gradient" if name.startswith("no gradient") else "scal") in text


# -- groups of ranks --------------------------------------------------------------------------------------------------


def not_a_member(rank, world):
    group = dist.new_group([0])
    told = caught(Zero1AdamW, one(), process_group=group)
    trains(rank, world)
    return told


def test_a_process_group_of_others():
    (kind, _), (other, text) = run(2, not_a_member)
    assert kind == ""
    assert other == "ValueError"
    assert "process_group" in text
