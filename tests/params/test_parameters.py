"""Parameters come late, are frozen and thawed, moved, edited and shared as with torch; whoever else walks over an
optimizer (schedulers, averagers, closures, hooks, two optimizers in a loop, a process group made late) finds it as
torch has it; copies are refused.
"""

import copy
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Plain, backward, backward_of, caught, digest, equal_on_all_ranks, exact, init, run, weights
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from zero1_cuda import Zero1Adam, Zero1AdamW

BF16 = torch.bfloat16
SHAPES = [(40, 30), (7,), (), (300,), (129,)]
OPTIONS = {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1}


def pair(dtype=torch.float32, **options):
    params = weights(SHAPES, dtype)
    return params, Plain(params, **OPTIONS), Zero1AdamW(params, **OPTIONS, bucket_cap_mb=0.002, **options)


def both(rank, k, *sides):
    """The same cycle on both sides."""
    for params, opt in sides:
        backward_of([p for p in params if p.requires_grad], rank, k)
        opt.step()
        opt.zero_grad()


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def scenario(fn):
    """A test of `fn(rank, world)`, in one process and on two ranks."""
    fn.__test__ = False

    def test():
        fn(0, 1)
        run(2, fn)

    test.__doc__ = fn.__doc__
    globals()[f"test_{fn.__name__}"] = test
    return fn


# -- groups -----------------------------------------------------------------------------------------------------------


def late_group(rank, world, at):
    """add_param_group before first use, after a backward, after steps; existing state does not move."""
    params = weights([*SHAPES, (11, 13), (50,)], BF16)
    old, new = params[:5], params[5:]
    plain = Plain(old, **OPTIONS)
    opt = Zero1AdamW(old, **OPTIONS, bucket_cap_mb=0.002)
    for k in range(at):
        both(rank, k, (old, opt), (plain.params, plain))
    state = {p: {name: t.clone() for name, t in opt.full_param_state(p).items()} for p in old}
    kept = opt.param_groups[0]
    for p in new:
        p.data.add_(rank)  # rank 0's are sent
    opt.add_param_group({"params": new, "lr": 0.1, "betas": (0.5, 0.9), "name": "late"})
    twins = [nn.Parameter(p.detach().float()) for p in new]
    plain.opt.add_param_group({"params": twins, "lr": 0.1, "betas": (0.5, 0.9)})
    plain.params += twins
    assert opt.param_groups[0] is kept
    assert opt.param_groups[1]["name"] == "late"
    for p in old:
        assert all(torch.equal(state[p][name], t) for name, t in opt.full_param_state(p).items())
    for k in range(3):
        both(rank, 10 + k, (params, opt), (plain.params, plain))
    plain.check(opt, params)
    opt.add_param_group({"params": []})
    both(rank, 20, (params, opt), (plain.params, plain))
    plain.check(opt, params)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_group_that_comes_later(at):
    late_group(0, 1, at)
    run(2, late_group, at)
    run(3, late_group, at)


@scenario
def groups_are_live(rank, world):
    """param_groups is what torch has: options are read at each step, unknown keys stay, objects live on."""
    a, b = weights([(50,)]), weights([(30, 3)])
    groups = [{"params": a, "lr_scale": 0.1}, {"params": (p for p in b), "weight_decay": 0.0}, {"params": []}]
    opt = Zero1AdamW(groups, **OPTIONS)
    plain = Plain([{"params": a}, {"params": b, "weight_decay": 0.0}], **OPTIONS)
    first, keys = opt.param_groups[0], set(torch.optim.AdamW(a).param_groups[0])
    assert keys <= set(first)
    assert [len(g["params"]) for g in opt.param_groups] == [1, 1, 0]
    both(rank, 0, ([*a, *b], opt), (plain.params, plain))
    for groups in (opt.param_groups, plain.param_groups):
        groups[0].update(lr=0.5, betas=(0.1, 0.2), weight_decay=0.7, eps=0.1)
        groups[1].update(maximize=True)
    both(rank, 1, ([*a, *b], opt), (plain.params, plain))
    first["lr"] = plain.param_groups[0]["lr"] = 0.0
    before = a[0].detach().clone()
    both(rank, 2, ([*a, *b], opt), (plain.params, plain))
    assert torch.equal(a[0], before)
    plain.check(opt, [*a, *b])
    assert opt.param_groups[0] is first
    assert first["lr_scale"] == 0.1


@scenario
def state_is_a_mapping_from_parameters(rank, world):
    params, _, opt = pair(BF16)
    assert len(opt.state) == 0
    backward_of(params, rank, 0)
    opt.step()
    assert set(opt.state) == set(params)
    for p in params:
        for name, t in opt.state[p].items():
            assert torch.is_tensor(t)
            opt.state[p][name] = t.to("cpu")
    held = torch.tensor(sum(s["exp_avg_sq"].numel() for s in opt.state.values() if "exp_avg_sq" in s))
    if world > 1:
        dist.all_reduce(held)
    assert held == sum(p.numel() for p in params)  # the ranks' parts make up the whole
    backward_of(params, rank, 1)
    opt.step()


# -- frozen, tied -----------------------------------------------------------------------------------------------------


@scenario
def frozen_and_thawed(rank, world):
    """Frozen ones stay as they are, in a group of their own too; thawed later they begin at step one."""
    params = weights(SHAPES, BF16)
    frozen = [params[0], params[3]]
    for p in frozen:
        p.requires_grad_(False)
    groups = [{"params": frozen}, {"params": [params[1], params[2], params[4]], "lr": 0.02}]
    order = [*frozen, *groups[1]["params"]]
    plain = Plain(groups, **OPTIONS)
    opt = Zero1AdamW(groups, **OPTIONS)
    before = [p.detach().clone() for p in frozen]
    for k in range(2):
        both(rank, k, (order, opt), (plain.params, plain))
    assert all(torch.equal(p, b) for p, b in zip(frozen, before, strict=True))
    for i in range(2):
        order[i].requires_grad_(True)
        plain.params[i].requires_grad_(True)
        for k in range(2):
            both(rank, 10 * i + 2 + k, (order, opt), (plain.params, plain))
        plain.check(opt, order)
    assert int(opt.full_param_state(order[0])["step"]) == 4
    assert int(opt.full_param_state(order[1])["step"]) == 2


@scenario
def frozen_later(rank, world):
    """Frozen while training: untouched, its state kept; then it goes on."""
    params, plain, opt = pair(BF16)
    for k in range(6):
        for side in (params, plain.params):
            side[3].requires_grad_(not 2 <= k < 4)
        both(rank, k, (params, opt), (plain.params, plain))
    plain.check(opt, params)
    assert int(opt.full_param_state(params[3])["step"]) == 4


@scenario
def all_frozen(rank, world):
    params = weights(SHAPES)
    for p in params:
        p.requires_grad_(False)
    opt = Zero1AdamW(params, **OPTIONS)
    opt.step()
    opt.zero_grad()
    assert float(opt.clip_grad_norm_(1.0)) == 0.0
    assert opt.memory_report()["predicted"] == 0
    params[1].requires_grad_(True)
    plain = Plain(params, **OPTIONS)
    both(rank, 0, (params, opt), (plain.params, plain))
    plain.check(opt, params)


@scenario
def tied(rank, world):
    """A weight with two uses, named twice: one parameter, one update of the summed gradient."""
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False))
    model[2].weight = model[0].weight
    twin = copy.deepcopy(model)
    reference = torch.optim.AdamW(twin.parameters(), **OPTIONS)
    opt = Zero1AdamW(model.parameters(), **OPTIONS)
    x = [torch.arange(10), torch.arange(8, 18)]
    for _ in range(3):
        model(x[rank]).square().mean().backward()
        sum(twin(x[r]).square().mean() / world for r in range(world)).backward()
        opt.step()
        reference.step()
        opt.zero_grad()
        reference.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
    assert model[2].weight.data_ptr() == model[0].weight.data_ptr()
    assert set(model.state_dict()) == set(twin.state_dict())


@scenario
def every_parameter_has_its_own_storage(rank, world):
    """Savers take two tensors over one storage object for tied weights."""
    params, _, opt = pair(BF16)
    both(rank, 0, (params, opt))
    pointers = {p.untyped_storage().data_ptr() for p in params}
    assert len(pointers) == len(params)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in params)
    assert all(p.is_leaf for p in params)
    assert all(type(p) is nn.Parameter for p in params)


# -- moved and edited -------------------------------------------------------------------------------------------------


def take_up(params, plain):
    """The rule, on the other side: where a weight is not its rounded master, the master becomes the weight."""
    with torch.no_grad():
        for p, q in zip(params, plain.params, strict=True):
            q.copy_(torch.where(p == q.to(p.dtype), q, p.float()))


def edited(rank, world, how, dtype, options):
    """Weights changed after construction, before the first step or later, count from the next step on."""
    params, plain, opt = pair(dtype, **options)
    for k in range(5):
        if k in (0, 3):
            EDITS[how](params, [exact(p.shape, 50 + k, i).to(dtype) for i, p in enumerate(params)])
            take_up(params, plain)
            if how == "data in place":
                opt.refresh_masters()
        both(rank, k, (params, opt), (plain.params, plain))
    plain.check(opt, params)


def load_state_dict(side, other):
    holder = nn.ParameterList(side)
    holder.load_state_dict({str(i): t for i, t in enumerate(other)})


def in_place(side, other):
    with torch.no_grad():
        side[0].copy_(other[0])
        side[3].mul_(0.5).add_(1.0)
        side[4][3:10] = 0.25


def new_storage(side, other):
    for p, t in zip(side, other, strict=True):
        p.data = t.clone()


def same_values_moved(side, other):
    for p in side:
        p.data = p.data.clone()


def one_moved(side, other):
    side[0].data = other[0].t().contiguous().t()


def data_in_place(side, other):
    for p, t in zip(side, other, strict=True):
        p.data.copy_(t)


def init_in_place(side, other):
    for p in side:
        nn.init.constant_(p, 0.75)


EDITS = {
    "load_state_dict": load_state_dict,
    "in place": in_place,
    "new storage": new_storage,
    "same values moved": same_values_moved,
    "one moved": one_moved,
    "data in place": data_in_place,
    "init": init_in_place,
}


@pytest.mark.parametrize("how", EDITS)
def test_edits_are_taken_up(how):
    for dtype in (torch.float32, BF16):
        edited(0, 1, how, dtype, {})
        run(2, edited, how, dtype, {})
    run(2, edited, how, torch.float32, {"overlap_reduce": False})


@pytest.mark.parametrize("master_weights", ["fp32", "split"])
def test_a_move_keeps_masters(master_weights):
    """Where a weight is its rounded master still, the master stays: a move loses no bit. Split ones restart at it."""
    run(2, moved, master_weights)


def moved(rank, world, master_weights):
    params, plain, opt = pair(BF16, master_weights=master_weights)
    for k in range(4):
        if k == 2:
            masters = [opt.full_param_state(p)["master"] for p in params]
            same_values_moved(params, None)
            for p, master in zip(params, masters, strict=True):
                now = opt.full_param_state(p)["master"]
                assert torch.equal(now, master if master_weights == "fp32" else p.detach().float())
            if master_weights == "split":
                return
        both(rank, k, (params, opt), (plain.params, plain))
    plain.check(opt, params)


@scenario
def a_moved_model_is_followed_before_backward(rank, world):
    """model.to() between construction and training, and between forward and backward of another model."""
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 3))
    twin = copy.deepcopy(model)
    opt = Zero1AdamW(model.parameters(), **OPTIONS)
    reference = torch.optim.AdamW(twin.parameters(), **OPTIONS)
    for k in range(4):
        if k % 2 == 0:
            model._apply(lambda t: t.clone())
        x = torch.ones(2, 10) * (k + 1)
        model(x).square().mean().backward()
        twin(x).square().mean().backward()
        opt.step()
        reference.step()
        opt.zero_grad()
        reference.zero_grad()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
        equal_on_all_ranks(model.parameters())


@scenario
def a_cast_is_refused_by_name(rank, world):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    opt = Zero1AdamW(model.named_parameters(), **OPTIONS)
    model(torch.ones(1, 4)).sum().backward()
    opt.step()
    opt.zero_grad()
    model[1].half()
    kind, text = caught(opt.step)
    assert kind == "RuntimeError"
    assert "1.weight" in text
    assert "float16" in text
    model[1].float()
    model(torch.ones(1, 4)).sum().backward()
    opt.step()


@scenario
def round_trip_before_the_first_step(rank, world):
    """load_state_dict(state_dict()) changes nothing, and writes no old masters over weights loaded since."""
    params, plain, opt = pair(BF16)
    opt.load_state_dict(opt.state_dict())
    in_place(params, [exact(p.shape, 1, i).to(p.dtype) for i, p in enumerate(params)])
    take_up(params, plain)
    before = digest(params)
    opt.load_state_dict(opt.state_dict())
    assert digest(params) == before
    for k in range(2):
        both(rank, k, (params, opt), (plain.params, plain))
    plain.check(opt, params)


# -- overlap_gather ---------------------------------------------------------------------------------------------------


def gathered(rank, world, options):
    """A slow gather is waited for by forward (in evaluation too), state_dict, synchronize, and the next step."""
    model = nn.Sequential(nn.Linear(16, 40), nn.Sequential(nn.Tanh(), nn.Linear(40, 40)), nn.Linear(40, 4))
    twin = copy.deepcopy(model)
    opt = Zero1AdamW(model.parameters(), **OPTIONS, bucket_cap_mb=0.002, overlap_gather=model, **options)
    reference = torch.optim.AdamW(twin.parameters(), **OPTIONS)
    waited = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        broadcast = dist.broadcast

        class Lazy:
            """Sends nothing before it is waited for; the other ranks' parts stay as they were."""

            def __init__(self, *args, **kwargs):
                self.call = args, kwargs

            def wait(self):
                waited.append(self.call[0][0].numel())
                broadcast(*self.call[0], **{**self.call[1], "async_op": False})

        def lazy(*args, **kwargs):
            return Lazy(*args, **kwargs) if kwargs.get("async_op") else broadcast(*args, **kwargs)

        for k in range(8):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(k))
            for m, o in ((model, opt), (twin, reference)):
                m(x).square().mean().backward()
                monkeypatch.setattr(dist, "broadcast", lazy)
                waited.clear()
                o.step()
                if o is opt:
                    assert not waited  # step() does not end with the gather
                o.zero_grad()
                monkeypatch.setattr(dist, "broadcast", broadcast)
            if k % 4 == 1:
                model.eval()
                with torch.no_grad():
                    torch.testing.assert_close(model(x), twin(x), rtol=1e-4, atol=1e-4)
                model.train()
            elif k % 4 == 2:
                for name, t in model.state_dict().items():
                    torch.testing.assert_close(t, twin.state_dict()[name], rtol=1e-5, atol=1e-5)
            elif k % 4 == 3:
                opt.synchronize()
                for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
            else:  # the first module alone: what it needs is there, no matter what else
                torch.testing.assert_close(model[0](x), twin[0](x), rtol=1e-4, atol=1e-4)
            assert bool(waited) == (world > 1)
    opt.synchronize()
    equal_on_all_ranks(model.parameters())


@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": False}, {"overlap_reduce": False}], ids=str)
def test_overlap_gather(options):
    run(2, gathered, options)
    run(3, gathered, options)
    gathered(0, 1, options)


# -- others -----------------------------------------------------------------------------------------------------------


@scenario
def two_optimizers(rank, world):
    """A GAN's loop: one loss runs through both models, each optimizer steps its own."""
    models = [
        nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6)),
        nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)),
    ]
    twins = copy.deepcopy(models)
    ours = [Zero1Adam(m.parameters(), lr=0.01, eps=1e-4) for m in models]
    theirs = [torch.optim.Adam(m.parameters(), lr=0.01, eps=1e-4) for m in twins]

    def losses(pair_, r, k):
        make, judge = pair_
        z = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * k + r))
        fake = make(z)
        return judge(z).mean() - judge(fake.detach()).mean(), judge(fake).mean()

    for k in range(10):
        for which in (1, 0):
            for o in (*ours, *theirs):
                o.zero_grad()
            losses(models, rank, k)[1 - which].backward()
            sum(losses(twins, r, k)[1 - which] / world for r in range(world)).backward()
            ours[which].step()
            theirs[which].step()
    for m, t in zip(models, twins, strict=True):
        for p, q in zip(m.parameters(), t.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=2e-5)
        equal_on_all_ranks(m.parameters())


def made_late(rank, world, folder, how):
    """A process group that comes after the optimizer is adopted at first use, or refused on every rank."""
    if how == "differ":
        torch.manual_seed(rank)
    params = weights(SHAPES)
    if how == "differ":
        params[3].data.normal_()
    opt = Zero1AdamW(params, **OPTIONS)
    if how == "used":
        backward_of(params, rank, 0)
        opt.step()
        opt.zero_grad()
    init(rank, world, f"{folder}/late")
    if how == "adopted":
        plain = Plain(params, **OPTIONS)
        for k in range(3):
            both(rank, k, (params, opt), (plain.params, plain))
        plain.check(opt, params)
        return opt.memory_report()["state"]
    return caught(backward_of, params, rank, 1)[0] or caught(opt.step)[0]


def test_a_process_group_made_after_the_optimizer(tmp_path):
    numel = sum(p.numel() for p in weights(SHAPES))
    for state in run(2, made_late, str(tmp_path), "adopted", group=False):
        assert state < 8 * numel * 0.75  # a share, not the whole


@pytest.mark.parametrize(("how", "kind"), [("differ", "ValueError"), ("used", "RuntimeError")])
def test_a_process_group_made_too_late(tmp_path, how, kind):
    assert run(2, made_late, str(tmp_path), how, group=False) == [kind, kind]


SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda k: 1 / (k + 1)),
    "StepLR": lambda o: schedulers.StepLR(o, 2, 0.5),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.001, 0.1, step_size_up=2, cycle_momentum=False),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, 1.0, 3),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1), schedulers.ExponentialLR(o, 0.9)], [2]
    ),
}


def scheduled(rank, world):
    for make in SCHEDULERS.values():
        params, plain, opt = pair()
        schedule, twin = make(opt), make(plain.opt)
        for k in range(6):
            both(rank, k, (params, opt), (plain.params, plain))
            for s in (schedule, twin):
                s.step(1.0) if isinstance(s, schedulers.ReduceLROnPlateau) else s.step()
            assert opt.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
            assert opt.param_groups[0]["betas"] == plain.param_groups[0]["betas"]
        plain.check(opt, params)


def test_schedulers():
    scheduled(0, 1)
    run(2, scheduled)


@scenario
def averaged_models(rank, world):
    """SWA and EMA read the weights after each step, and are independent of them."""
    for how in ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}):
        model = nn.Linear(30, 20)
        twin = copy.deepcopy(model)
        opt = Zero1AdamW(model.parameters(), **OPTIONS)
        reference = torch.optim.AdamW(twin.parameters(), **OPTIONS)
        average, expected = AveragedModel(model, **how), AveragedModel(twin, **how)
        for k in range(4):
            x = torch.randn(4, 30, generator=torch.Generator().manual_seed(k))
            for m, o, a in ((model, opt, average), (twin, reference, expected)):
                m(x).square().mean().backward()
                o.step()
                o.zero_grad()
                a.update_parameters(m)
        for p, q in zip(average.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


@scenario
def closures(rank, world):
    """step(closure) calls it once with gradients enabled and returns its loss."""
    params, plain, opt = pair()
    calls = []
    for k in range(3):

        def closure(k=k):
            calls.append(torch.is_grad_enabled())
            opt.zero_grad()
            backward_of(params, rank, k)
            return torch.tensor(float(k))

        with torch.no_grad():
            assert float(opt.step(closure)) == k
            assert opt.step.__func__ is not None
        plain.zero_grad()
        backward_of(plain.params, rank, k)
        plain.step()
    assert calls == [True] * 3
    assert opt.step() is None
    plain.step()
    plain.check(opt, params)


@scenario
def hooks_of_the_optimizer(rank, world):
    """All six kinds of hooks run, as often as torch runs them."""
    params, _, opt = pair()
    ran = []
    opt.register_step_pre_hook(lambda o, a, k: ran.append("pre"))
    opt.register_step_post_hook(lambda o, a, k: ran.append("post"))
    opt.register_state_dict_pre_hook(lambda o: ran.append("state pre"))
    opt.register_state_dict_post_hook(lambda o, s: ran.append("state post"))
    opt.register_load_state_dict_pre_hook(lambda o, s: ran.append("load pre"))
    opt.register_load_state_dict_post_hook(lambda o: ran.append("load post"))
    backward_of(params, rank, 0)
    opt.step()
    opt.load_state_dict(opt.state_dict())
    assert ran == ["pre", "post", "state pre", "state post", "load pre", "load post"]


@scenario
def fits_where_torch_s_does(rank, world):
    """A weak reference, a class made of a wrapper, a step that is replaced, arguments by keyword, capturable."""
    params = weights(SHAPES)
    opt = Zero1AdamW(iter(params), **OPTIONS, capturable=True)
    assert isinstance(opt, torch.optim.Optimizer)
    assert weakref.ref(opt)() is opt

    class Wrapper:
        def extra(self):
            return "extra"

    wrapped = type("Wrapped", (Wrapper, type(opt)), {})
    other = object.__new__(wrapped)
    other.__dict__ = opt.__dict__.copy()
    plain = Plain(params, **OPTIONS)
    for k, o in enumerate((opt, other, opt)):
        backward_of(params, rank, k)
        backward_of(plain.params, rank, k)
        o.clip_grad_norm_(1.0)
        o.step(closure=None)
        plain.step(1.0)
        o.zero_grad(set_to_none=True)
        plain.zero_grad()
        assert float(opt.grad_norm) == float(other.grad_norm)
    plain.check(opt, params)
    step = opt.step
    opt.step = lambda *args, **kwargs: step(*args, **kwargs)
    both(rank, 9, (params, opt))


def test_defaults_are_torch_s():
    p = weights([(3,)])
    for ours, theirs in ((Zero1AdamW, torch.optim.AdamW), (Zero1Adam, torch.optim.Adam)):
        a, b = ours(p).defaults, theirs(p).defaults
        assert {name: a[name] for name in b} == b


@scenario
def copies_are_refused(rank, world):
    _, _, opt = pair()
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"state_dict\(\)"):
            copied(opt)


@scenario
def an_optimizer_can_be_thrown_away(rank, world):
    """Its hooks do not keep it; the parameters go on without it, or with another one."""
    params, plain, opt = pair()
    both(rank, 0, (params, opt), (plain.params, plain))
    gone = weakref.ref(opt._runner)
    del opt
    import gc

    gc.collect()
    assert gone() is None
    backward_of(params, rank, 1)
    for p in params:
        p.grad = None
    again, fresh = Zero1AdamW(params, **OPTIONS), Plain(params, **OPTIONS)
    for k in range(2):
        both(rank, k, (params, again), (fresh.params, fresh))
    fresh.check(again, params)


@scenario
def new_parameters_of_an_assigning_load_are_not_ours(rank, world):
    """load_state_dict(assign=True) puts other Parameters into a model: its old ones get no gradients, nothing moves."""
    model = nn.Linear(4, 4)
    opt = Zero1AdamW(model.parameters(), **OPTIONS)
    old = list(model.parameters())
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    before = [p.detach().clone() for p in old]
    model(torch.ones(1, 4)).sum().backward()
    opt.step()
    assert all(p.grad is None for p in old)
    assert all(torch.equal(p, b) for p, b in zip(old, before, strict=True))


@scenario
def names_are_kept(rank, world):
    model = nn.Linear(4, 4)
    opt = Zero1AdamW(model.named_parameters(), **OPTIONS)
    assert opt.param_groups[0]["param_names"] == ["weight", "bias"]
    backward(list(model.parameters()), [exact(p.shape, rank, ranks=world) for p in model.parameters()])
    opt.step()
    assert opt.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
