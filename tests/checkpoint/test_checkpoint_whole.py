"""The whole state in torch's own format: full_state_dict and consolidate_state_dict give it, load_state_dict takes it
on all ranks or on rank 0 alone, and it goes into torch.optim.AdamW and Adam and comes from there: per-parameter steps,
groups, schedulers, names, tied, frozen and unused parameters. Other ranks need no more memory than a parameter.
"""

import copy
import ctypes
import pathlib

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Plain, backward, caught, digest, equal_on_all_ranks, exact, run, weights
from helpers.states import bits, grid, made, train
from torch import nn

from zero1_cuda import Zero1Adam, Zero1AdamW

STATUS, CLEAR_REFS = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")
SHAPES = [(33, 7), (), (200,), (0,), (5,)]


def same(a, b):
    """Whether two whole states are equal to the bit."""
    assert a["state"].keys() == b["state"].keys()
    for number, entry in a["state"].items():
        assert entry.keys() == b["state"][number].keys()
        assert all(torch.equal(t, b["state"][number][name]) for name, t in entry.items())
    return a["param_groups"] == b["param_groups"]


# -- out --------------------------------------------------------------------------------------------------------------


def format_of_torch(rank, world):
    params, opt = made()
    for steps in (0, 3):
        train(params, opt, rank, range(steps))
        everywhere, on_0 = opt.full_state_dict(rank0_only=False), opt.full_state_dict()
        assert on_0 == {} if rank else same(on_0, everywhere)
        like = torch.optim.AdamW([{"params": [p.detach().clone() for p in g["params"]]} for g in opt.param_groups])
        assert [g["params"] for g in everywhere["param_groups"]] == [
            g["params"] for g in like.state_dict()["param_groups"]
        ]
        assert set(everywhere["param_groups"][0]) == set(like.state_dict()["param_groups"][0])
        for number, p in enumerate(params):
            entry = everywhere["state"][number]
            names = {"step", "exp_avg", "exp_avg_sq", "master"} | ({"max_exp_avg_sq"} if number >= 8 else set())
            assert set(entry) == names
            for name, t in opt.full_param_state(p).items():
                assert torch.equal(entry[name], t)
                assert entry[name].dtype == torch.float32
                assert type(entry[name]) is torch.Tensor
                assert entry[name].device.type == "cpu"
                assert entry[name].shape == (() if name == "step" else p.shape)
            assert torch.equal(entry["master"].to(p.dtype), p)  # what is exported is what the model has


@pytest.mark.parametrize("world", [1, 2, 3])
def test_full_state_dict_has_torchs_format(world):
    run(world, format_of_torch)


def consolidated(rank, world, to, kind):
    params, opt = made(**(grid(rank, world, 2) if kind == "grid" else {}))
    place = rank % 2 if kind == "grid" else rank
    for end in ("step", "load", "add_param_group"):
        train(params, opt, rank, range(2))
        part = copy.deepcopy(opt.state_dict())
        whole = opt.full_state_dict(rank0_only=False)
        opt.consolidate_state_dict(to=to)
        assert same(opt.state_dict(), whole) if place == to else "step" in opt.state_dict()["state"][0]
        opt.state_dict().clear()  # a copy
        opt.zero_grad()
        assert (type(opt.state_dict()["state"][0]["exp_avg"]) is torch.Tensor) == (place == to)
        if end == "step":
            train(params, opt, rank, range(2, 3))
        elif end == "load":
            opt.load_state_dict(part)
        else:
            late = weights([(17,)])
            opt.add_param_group({"params": late})
            params += late
        assert type(opt.state_dict()["state"][0]["exp_avg"]) is not torch.Tensor, end
    assert caught(opt.consolidate_state_dict, to=-1)[0] == "ValueError"
    assert caught(opt.consolidate_state_dict, to=world)[0] == "ValueError"


@pytest.mark.parametrize(("world", "to", "kind"), [(2, 0, None), (2, 1, None), (3, 1, None), (4, 1, "grid")])
def test_consolidate_state_dict_holds_until_something_changes(world, to, kind):
    run(world, consolidated, to, kind)


# -- in ---------------------------------------------------------------------------------------------------------------


def give(rank, world, path, kind):
    params, opt = made(**(grid(rank, world, 2) if kind == "grid" else kind))
    train(params, opt, rank, range(3))
    if kind == {}:
        opt.consolidate_state_dict()
        state_dict = opt.state_dict()
    else:
        state_dict = opt.full_state_dict()
    if rank == 0:
        torch.save(state_dict, path)
    return bits(params, opt)


def take(rank, world, path, kinds):
    """The ways to hand a whole state over."""
    out = []
    state_dict = torch.load(path, weights_only=True)
    for kind in kinds:
        for given in (state_dict, {} if rank else state_dict):
            params, opt = made(**(grid(rank, world, 2) if kind == "grid" else kind))
            opt.load_state_dict(given)
            out.append(bits(params, opt))
            train(params, opt, rank, range(3, 4))
            equal_on_all_ranks(params)
    return out


@pytest.mark.parametrize("kind", [{}, {"master_weights": "split", "bucket_cap_mb": 0.001}, "grid"], ids=str)
def test_loads_on_all_ranks_or_on_rank_0(tmp_path, kind):
    path = tmp_path / "whole.pt"
    want = run(4 if kind == "grid" else 2, give, path, kind)[0]
    for world, kinds in ((1, [{}]), (3, [{"master_weights": "split"}]), (4, ["grid"])):
        for found in run(world, take, path, kinds):
            assert all(hashes == want for hashes in found), world


def back_in_a_grid(rank, world):
    """Rank 0 of every process_group gets the whole state, and may hand it back, the others {}."""
    params, opt = made(**grid(rank, world, 2))
    train(params, opt, rank, range(2))
    want, whole = bits(params, opt), opt.full_state_dict()
    assert bool(whole) == (rank in (0, 2))
    train(params, opt, rank, range(2, 4))
    opt.load_state_dict(whole)
    assert bits(params, opt) == want


def test_what_a_grid_gives_it_takes():
    run(4, back_in_a_grid)


# -- from and to torch's optimizers -----------------------------------------------------------------------------------

KINDS = {"AdamW": (Zero1AdamW, torch.optim.AdamW), "Adam": (Zero1Adam, torch.optim.Adam)}


def two_groups(params):
    return [
        {"params": [params[0], params[3], params[1]], "lr": 0.03, "betas": (0.8, 0.9), "tag": "matrices"},
        {"params": [params[2], params[4]], "weight_decay": 0.2, "amsgrad": True},
    ]


def in_order(params, plain):
    """The copies that `plain` trains, in the order of `params` and not of the groups."""
    flat = [p for g in two_groups(params) for p in g["params"]]
    copy_of = dict(zip(flat, [q for g in plain.param_groups for q in g["params"]], strict=True))
    return [copy_of[p] for p in params]


def one_step(params, opts, schedules, rank, t):
    """Parameter 2 takes part in every other step only, so step counts differ."""
    world = dist.get_world_size()
    grads = [exact(p.shape, rank, t, i, ranks=world) if i != 2 or t % 2 else None for i, p in enumerate(params[0])]
    for ps, opt, schedule in zip(params, opts, schedules, strict=True):
        backward(ps, grads)
        opt.step()
        opt.zero_grad()
        schedule.step()


def cosine(opt):
    return torch.optim.lr_scheduler.CosineAnnealingLR(getattr(opt, "opt", opt), 10)


def torch_to_ours_to_torch(rank, world, name):
    ours, theirs = KINDS[name]
    options = {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1}
    params = weights(SHAPES)
    plain = Plain(two_groups(params), theirs, **options)
    ordered = in_order(params, plain)
    schedule = cosine(plain)
    for t in range(5):
        one_step([ordered], [plain], [schedule], rank, t)

    # torch -> ours: the present weights become the masters
    with torch.no_grad():
        for p, q in zip(params, ordered, strict=True):
            p.copy_(q)
    opt = ours(two_groups(params), lr=0.5)
    mine = cosine(opt)
    opt.load_state_dict(copy.deepcopy(plain.opt.state_dict()))
    mine.load_state_dict(schedule.state_dict())
    for p, q in zip(params, ordered, strict=True):
        state = opt.full_param_state(p)
        assert all(torch.equal(state[key], t) for key, t in plain.opt.state[q].items())
        assert torch.equal(state["master"], q)
    assert opt.full_param_state(params[2])["step"] == 2
    for group, other in zip(opt.param_groups, plain.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}
    assert opt.param_groups[0]["tag"] == "matrices"
    for t in range(5, 8):
        one_step([params, ordered], [opt, plain], [mine, schedule], rank, t)
        assert [g["lr"] for g in opt.param_groups] == [g["lr"] for g in plain.param_groups]
        for p, q in zip(params, ordered, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)

    # ours -> torch
    whole = opt.full_state_dict(rank0_only=False)
    again = Plain(two_groups(params), theirs, lr=0.7)
    back = cosine(again)
    again.opt.load_state_dict(copy.deepcopy(whole))
    back.load_state_dict(mine.state_dict())
    ordered = in_order(params, again)
    for p, q in zip(params, ordered, strict=True):
        state = opt.full_param_state(p)
        assert all(torch.equal(t, state[key]) for key, t in again.opt.state[q].items())
    for t in range(8, 10):
        one_step([params, ordered], [opt, again], [mine, back], rank, t)
        assert [g["lr"] for g in opt.param_groups] == [g["lr"] for g in again.opt.param_groups]
        for p, q in zip(params, ordered, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_from_torch_and_back(name):
    run(2, torch_to_ours_to_torch, name)


def torch_on_rank_0(rank, world):
    """A state of torch's without an entry for one parameter, brought by rank 0; 16-bit weights."""
    params = weights([(40, 3), (300,), (7,)], torch.bfloat16)
    plain = torch.optim.AdamW([p.detach().float() for p in params], lr=0.02)
    for i, q in enumerate(plain.param_groups[0]["params"]):
        q.grad = exact(q.shape, 1, i) if i != 1 else None
    plain.step()
    state_dict = plain.state_dict()
    assert 1 not in state_dict["state"]
    for given in (state_dict, {} if rank else state_dict):
        params = weights([(40, 3), (300,), (7,)], torch.bfloat16)
        before = [p.detach().clone() for p in params]
        opt = Zero1AdamW(params, lr=0.5)
        train(params, opt, rank, range(1, 3))
        for p, b in zip(params, before, strict=True):
            p.data.copy_(b)
        opt.load_state_dict(given)
        assert opt.param_groups[0]["lr"] == 0.02
        for i, (p, b) in enumerate(zip(params, before, strict=True)):
            state = opt.full_param_state(p)
            assert torch.equal(p, b)
            assert torch.equal(state["master"], b.float())
            assert state["step"] == (0 if i == 1 else 1)
            for name in ("exp_avg", "exp_avg_sq"):
                want = torch.zeros(p.shape) if i == 1 else state_dict["state"][i][name]
                assert torch.equal(state[name], want)


def test_a_torch_state_without_an_entry():
    run(2, torch_on_rank_0)


def by_name(rank, world):
    """A file that has names finds its parameters whatever their order; equal shapes are not mixed up."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    named = list(model.named_parameters())
    opt = Zero1AdamW(named[:3] + named[3:], lr=0.02)
    params = [p for _, p in named]
    train(params, opt, rank, range(1, 4))
    whole = opt.full_state_dict(rank0_only=False)
    names = opt.param_groups[0]["param_names"]
    assert names == [name for name, _ in named]
    group = {**whole["param_groups"][0], "params": names}
    state_dict = {"state": {names[i]: entry for i, entry in whole["state"].items()}, "param_groups": [group]}

    shuffled = named[::2] + named[1::2]
    for options in ({}, {"bucket_cap_mb": 0.0001}):
        others = [(name, nn.Parameter(p.detach().clone() * 3)) for name, p in shuffled]
        other = Zero1AdamW(others, lr=0.5, **options)
        other.load_state_dict({} if rank and options else state_dict)
        for (name, p), (_, q) in zip(shuffled, others, strict=True):
            assert torch.equal(p, q), name
            ours, theirs = opt.full_param_state(p), other.full_param_state(q)
            assert all(torch.equal(ours[key], theirs[key]) for key in ours), name

    renamed = [(name.replace("0.", "first."), nn.Parameter(p.detach().clone())) for name, p in named]
    kind, text = caught(Zero1AdamW(renamed).load_state_dict, state_dict)
    assert kind == "ValueError"
    assert "first.weight" in text


def test_by_name_where_the_file_has_names():
    run(2, by_name)


class Tied(nn.Module):
    """A head that is the embedding, a frozen layer and one that is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.layer, self.head = nn.Embedding(11, 9), nn.Linear(9, 9), nn.Linear(9, 11, bias=False)
        self.frozen, self.unused = nn.Linear(9, 9).requires_grad_(False), nn.Linear(9, 9)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.frozen(self.layer(self.embedding(x)))).square().sum()


def tied(rank, world):
    model = Tied().bfloat16()
    opt = Zero1AdamW(model.parameters(), lr=0.02)
    params = list(model.parameters())
    for _ in range(2):
        model(torch.arange(5) + rank).backward()
        opt.step()
        opt.zero_grad()
    assert set(model.state_dict()) == set(Tied().state_dict())
    whole = opt.full_state_dict(rank0_only=False)
    unused = [i for i, p in enumerate(params) if any(p is q for q in model.unused.parameters())]
    assert set(whole["state"]) == {i for i, p in enumerate(params) if p.requires_grad}
    assert all(whole["state"][i]["step"] == 0 and not whole["state"][i]["exp_avg"].any() for i in unused)

    wanted = digest(model.state_dict().values())
    other = Tied().bfloat16()
    again = Zero1AdamW(other.parameters())
    other.load_state_dict(model.state_dict())  # (assigns nothing: all keys are there, tied ones too)
    again.load_state_dict(whole)
    assert digest(other.state_dict().values()) == wanted
    assert other.head.weight is other.embedding.weight
    for p, q in zip(params, other.parameters(), strict=True):
        if p.requires_grad:
            ours, theirs = opt.full_param_state(p), again.full_param_state(q)
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)

    # a parameter that was never used starts afterwards as it would have
    plain = Tied()
    adamw = torch.optim.AdamW(plain.parameters())
    adamw.load_state_dict(copy.deepcopy(whole))
    for i, p in enumerate(plain.parameters()):
        if p.requires_grad:
            p.data.copy_(whole["state"][i]["master"])
    for module, o in ((other, again), (plain, adamw)):
        sum(p.float().sum() for p in module.unused.parameters()).backward()
        o.step()
    for p, q in zip(other.unused.parameters(), plain.unused.parameters(), strict=True):
        torch.testing.assert_close(again.full_param_state(p)["master"], q.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("world", [1, 2])
def test_tied_frozen_and_unused_parameters(world):
    run(world, tied)


# -- memory -----------------------------------------------------------------------------------------------------------


def status(field):
    return 1024 * int(STATUS.read_text().partition(field + ":")[2].split()[0])


def rise_of(call):
    """MiB by which the highest resident memory of a call is above that before it."""
    before = status("VmRSS")
    CLEAR_REFS.write_text("5")  # the peak begins anew
    call()
    return (status("VmHWM") - before) / 2**20


def memory(rank, world, split):
    """MiB for giving and for taking a whole state; a parameter is 4 MiB in fp32, this rank's part 48 MiB."""
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed goes back at once
    params = [nn.Parameter(torch.zeros(2**20, dtype=torch.bfloat16)) for _ in range(8)]
    opt = Zero1AdamW(params, master_weights=split)
    backward(params[:1], [torch.ones(2**20)])
    opt.step()
    opt.zero_grad()
    whole = {}
    opt.full_param_state(params[0])
    gave = rise_of(lambda: whole.update(opt.full_state_dict()))
    took = rise_of(lambda: opt.load_state_dict(whole))
    return gave, took


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="no /proc/self/clear_refs here")
@pytest.mark.parametrize("split", ["fp32", "split"])
def test_other_ranks_need_no_more_than_a_parameter(split):
    (gave_0, took_0), (gave, took) = run(2, memory, split)
    assert 90 < gave_0 < 96 + 24  # the whole state, and what a parameter takes on its way
    assert gave < 4 + 1
    assert max(took, took_0) < 48 + 12 + 1


def test_maxima_are_not_made_up():
    """An amsgrad state of torch's that lacks its maxima is refused; taken for zeros they would change the run."""
    p, q = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5))
    theirs = torch.optim.AdamW([q], amsgrad=True)
    q.grad = torch.ones(5)
    theirs.step()
    state_dict = theirs.state_dict()
    opt = Zero1AdamW([p], amsgrad=True)
    opt.load_state_dict(state_dict)
    assert torch.equal(opt.full_param_state(p)["max_exp_avg_sq"], state_dict["state"][0]["max_exp_avg_sq"])
    del state_dict["state"][0]["max_exp_avg_sq"]
    with pytest.raises(ValueError, match="max_exp_avg_sq"):
        opt.load_state_dict(state_dict)
