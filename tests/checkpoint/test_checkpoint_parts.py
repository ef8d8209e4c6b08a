"""A rank's part of the state, by torch.save: it comes back to the bit with weights_only=True, and knows whose part it
is. What does not fit or is damaged, on one rank alone too, is a ValueError on every rank that changes nothing. And
state_dict and load_state_dict keep torch's manners: live groups, unknown keys, hooks, nothing written to what is given.
"""

import copy
import math
import os

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import backward_of, caught, digest, equal_on_all_ranks, run, snapshot, weights
from helpers.states import bits, grid, made, train
from torch import nn

from zero1_cuda import Zero1Adam, Zero1AdamW

WAYS_OUT = ("full_state_dict()", "consolidate_state_dict()", "torch.distributed.checkpoint")
SHAPES = [(33, 7), (), (200,), (0,), (5,)]


def stepped(rank, steps=2, **options):
    """A small optimizer after a few steps."""
    params = weights(SHAPES)
    opt = Zero1AdamW(params, lr=0.01, eps=1e-3, **options)
    train(params, opt, rank, range(1, 1 + steps))
    return params, opt


def refused(opt, params, state_dict, *texts):
    """Collective: loading is a ValueError on every rank, and changes nothing."""
    before = digest(snapshot(opt, params)), options(opt)
    kind, text = caught(opt.load_state_dict, state_dict)
    assert kind == "ValueError", (kind, text)
    assert (digest(snapshot(opt, params)), options(opt)) == before, "something was changed"
    equal_on_all_ranks(params)
    for wanted in texts:
        assert wanted in text, text


def options(opt):
    return copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups])


# -- out and back -----------------------------------------------------------------------------------------------------


def save_part(rank, world, folder, kinds):
    out = []
    for i, kind in enumerate(kinds):
        params, opt = made(**(grid(rank, world, 2) if kind == "grid" else kind))
        train(params, opt, rank, range(3))
        torch.save(opt.state_dict(), f"{folder}/{i}-{rank}.pt")
        out.append(bits(params, opt))
    return out


def load_part(rank, world, folder, kinds):
    """In another process. Tensors in the file are plain."""
    out = []
    for i, kind in enumerate(kinds):
        params, opt = made(**(grid(rank, world, 2) if kind == "grid" else kind))
        state_dict = torch.load(f"{folder}/{i}-{rank}.pt", weights_only=True)
        for entry in state_dict["state"].values():
            assert all(type(t) is torch.Tensor and t.dim() == 1 for t in entry.values())
        opt.load_state_dict(state_dict)
        out.append(bits(params, opt))
        train(params, opt, rank, range(3, 4))
    return out


SPLIT, FLOWING = {"master_weights": "split", "bucket_cap_mb": 0.001}, {"skip_nonfinite": False, "overlap_reduce": False}


@pytest.mark.parametrize(
    ("world", "kinds"), [(1, [{}, SPLIT]), (2, [{}, SPLIT, FLOWING]), (3, [SPLIT]), (4, ["grid"])], ids=str
)
def test_a_part_comes_back_to_the_bit(tmp_path, world, kinds):
    assert run(world, save_part, tmp_path, kinds) == run(world, load_part, tmp_path, kinds)


def sizes(rank, world, path):
    params = weights([(3000, 50)])
    opt = Zero1AdamW(params)
    train(params, opt, rank, range(1))
    torch.save(opt.state_dict(), f"{path}-{rank}")
    return os.path.getsize(f"{path}-{rank}")


def test_a_file_holds_one_part(tmp_path):
    for size in run(2, sizes, tmp_path / "part"):
        assert size == pytest.approx(12 * 150_000 / 2, rel=0.01, abs=5000)


def alone(rank, world):
    """state_dict waits for nobody: rank 0 calls it, and nobody else."""
    params, opt = stepped(rank, overlap_gather=nn.Linear(1, 1))
    if rank == 0:
        opt.state_dict()
    train(params, opt, rank, range(5, 6))
    opt.synchronize()
    equal_on_all_ranks(params)


def test_state_dict_is_no_collective():
    run(2, alone)


# -- what does not fit ------------------------------------------------------------------------------------------------


def strangers(rank, world, path):
    params, opt = stepped(rank)
    mine = copy.deepcopy(opt.state_dict())
    parts = [None] * world
    dist.all_gather_object(parts, mine)
    torch.save(mine, f"{path}-{world}-{rank}")
    refused(opt, params, parts[(rank + 1) % world], f"the part of rank 1 of {world}, given to rank 0", *WAYS_OUT)
    refused(opt, params, parts[0], f"the part of rank 0 of {world}, given to rank 1", *WAYS_OUT)  # as the Trainer does
    refused(opt, params, mine if rank else {}, "ranks were given different things", *WAYS_OUT)
    refused(opt, params, {}, "an empty state_dict")
    whole = opt.full_state_dict(rank0_only=False)
    refused(opt, params, whole if rank else mine, "a part, a whole state", *WAYS_OUT)
    mixed = {"state": {**whole["state"], 0: mine["state"][0]}, "param_groups": whole["param_groups"]}
    refused(opt, params, mixed, "mixed", *WAYS_OUT)

    # other buckets: other borders between the ranks
    many = weights([(40, 10)] * 6)
    small = Zero1AdamW(many, bucket_cap_mb=0.001)
    big = Zero1AdamW(weights([(40, 10)] * 6))
    refused(small, many, big.state_dict(), "bucket_cap_mb", *WAYS_OUT)
    assert caught(big.load_state_dict, big.state_dict()) == ("", "")
    opt.load_state_dict(mine)


def other_world(rank, world, path):
    params, opt = stepped(rank)
    refused(opt, params, torch.load(f"{path}-2-{min(rank, 1)}", weights_only=True), "of 2, given to", *WAYS_OUT)


def test_a_part_of_another_rank_world_or_bucket_size_is_refused(tmp_path):
    run(2, strangers, tmp_path / "part")
    for world in (1, 3):
        run(world, other_world, tmp_path / "part")


def replace(state_dict, number, **entries):
    """The same state with other entries for one parameter; None takes one out."""
    entry = {k: v for k, v in {**state_dict["state"][number], **entries}.items() if v is not None}
    return {**state_dict, "state": {**state_dict["state"], number: entry}}


def regroup(state_dict, **options):
    """The same state with other options in its first group; None takes one out."""
    group = {k: v for k, v in {**state_dict["param_groups"][0], **options}.items() if v is not None}
    return {**state_dict, "param_groups": [group, *state_dict["param_groups"][1:]]}


def without(state_dict, number):
    return {**state_dict, "state": {k: v for k, v in state_dict["state"].items() if k != number}}


def damages(sd):
    """What may be wrong with a whole state or a part."""
    t = sd["state"][0]["exp_avg"]
    zeros = torch.zeros(t.shape)
    more = regroup(sd, params=[*range(len(SHAPES) + 1)])
    yield "entry missing", without(sd, 2)
    yield "moment missing", replace(sd, 0, exp_avg=None)
    yield "second moment missing", replace(sd, 4, exp_avg_sq=None)
    yield "master missing", replace(sd, 2, master=None)
    yield "step missing", replace(sd, 0, step=None)
    yield "maxima missing", regroup(sd, amsgrad=True)
    yield "surplus entry", {**sd, "state": {**sd["state"], 9: sd["state"][0]}}
    yield "surplus parameter", more
    yield "parameter missing", regroup(sd, params=[0, 1, 2, 3])
    yield "surplus group", {**sd, "param_groups": [*sd["param_groups"], {"params": []}]}
    yield "no groups", {"state": sd["state"]}
    yield "no state", {"param_groups": sd["param_groups"]}
    yield "another shape", replace(sd, 0, exp_avg=torch.zeros(7, 33))
    yield "scalar", replace(sd, 0, exp_avg_sq=torch.zeros(()))
    yield "one element too many", replace(sd, 4, master=torch.zeros(6))
    yield "integers", replace(sd, 0, exp_avg=zeros.long())
    yield "a list", replace(sd, 0, exp_avg=[0.0] * 231)
    yield "sparse", replace(sd, 0, exp_avg=zeros.to_sparse())
    yield "without data", replace(sd, 0, exp_avg=zeros.to("meta"))
    yield "step with two elements", replace(sd, 0, step=torch.zeros(2))
    yield "step that is text", replace(sd, 0, step="many")
    yield "step that is not a number", replace(sd, 0, step=math.nan)
    yield "infinite step", replace(sd, 0, step=torch.tensor(math.inf))
    yield "negative step", replace(sd, 0, step=-1)
    yield "entry that is a tensor", {**sd, "state": {**sd["state"], 0: zeros}}
    yield "entry that is nothing", {**sd, "state": {**sd["state"], 0: None}}
    yield "state that is a list", {**sd, "state": [1, 2]}
    yield "groups that are a number", {**sd, "param_groups": 3}
    yield "lr that is text", regroup(sd, lr="fast")
    yield "negative lr", regroup(sd, lr=-1.0)
    yield "one beta", regroup(sd, betas=(0.9,))
    yield "beta above 1", regroup(sd, betas=(0.9, 2.0))
    yield "eps that is nothing", regroup(sd, eps=[])
    yield "another file", {"model": {"weight": zeros}}
    yield "a list of things", [1, 2, 3]
    yield "nothing", None


def damaged_parts(rank, world):
    """Marks of a part, as they are in a file."""
    params, opt = stepped(rank)
    sd = {**opt.state_dict()}
    sd["state"] = {k: {n: t.marked() if n == "step" else t.local for n, t in e.items()} for k, e in sd["state"].items()}
    for where in ({0, 1}, {1}):
        for name, bad in damages(sd):
            try:
                refused(opt, params, bad if rank in where else sd)
            except AssertionError as error:
                raise AssertionError(f"{name}, on ranks {where}") from error
    step = sd["state"][2]["step"]
    for word, value in ((0, -5), (1, 7), (2, 1), (3, 1), (4, 2), (5, 201)):
        other = step.clone()
        other[word] = value
        refused(opt, params, replace(sd, 2, step=other) if rank == 1 else sd)
    refused(opt, params, replace(sd, 2, step=step[:5]))
    opt.load_state_dict(sd)


def damaged_wholes(rank, world):
    params, opt = stepped(rank)
    sd = opt.full_state_dict(rank0_only=False)
    for where in ({0, 1}, {1}, {0}):
        for name, bad in damages(sd):
            other = {} if where == {0} else sd  # rank 0 alone brings it
            try:
                refused(opt, params, bad if rank in where else other)
            except AssertionError as error:
                raise AssertionError(f"{name}, on ranks {where}") from error
    opt.load_state_dict(sd)


@pytest.mark.parametrize("case", [damaged_parts, damaged_wholes])
def test_damage_on_any_rank_is_an_error_on_every_rank_and_changes_nothing(case):
    run(2, case)


def a_hook_raises(rank, world):
    params, opt = stepped(rank)

    def hook(optimizer, state_dict):
        if rank == 1:
            raise RuntimeError("the hook does not like it")

    handle = opt.register_load_state_dict_pre_hook(hook)
    refused(opt, params, opt.state_dict(), "rank 1", "the hook does not like it")
    handle.remove()
    opt.load_state_dict(opt.state_dict())


def test_a_hook_that_raises_on_one_rank():
    run(2, a_hook_raises)


def cut_short(rank, world, path):
    """torch.load finds a truncated file; a rank that has nothing to give passes {}, and all raise."""
    params, opt = stepped(rank)
    torch.save(opt.state_dict(), f"{path}-{rank}")
    if rank == 1:
        os.truncate(f"{path}-1", os.path.getsize(f"{path}-1") - 200)
    try:
        state_dict = torch.load(f"{path}-{rank}", weights_only=True)
    except (RuntimeError, OSError):
        state_dict = {}
    assert (rank == 1) == (not state_dict)
    refused(opt, params, state_dict, "a part, nothing")


def test_a_truncated_file(tmp_path):
    run(2, cut_short, tmp_path / "part")


def frozen_elsewhere(rank, world):
    """State for a parameter that is frozen here, and none for one that is trainable."""
    _, opt = stepped(rank)
    others = weights(SHAPES)
    others[2].requires_grad_(False)
    other = Zero1AdamW(others)
    for which, giver in ((opt, other), (other, opt)):
        assert caught(which.load_state_dict, giver.state_dict())[0] == "ValueError"
        kind, text = caught(which.load_state_dict, giver.full_state_dict(rank0_only=False))
        assert kind == "ValueError"
        assert "parameter 2" in text


def test_the_same_parameters_must_be_trainable():
    run(2, frozen_elsewhere)


# -- details of a state -----------------------------------------------------------------------------------------------


def kinds_of_step(rank, world):
    """Whatever the step is, ours is float32 and the next step works."""
    params, opt = stepped(rank)
    want = digest(snapshot(opt, params))
    whole = opt.full_state_dict(rank0_only=False)
    after = set()
    for step in (
        2,
        2.0,
        torch.tensor(2),
        torch.tensor([2.0]),
        torch.tensor(2, dtype=torch.float64),
        torch.tensor([[2]]),
    ):
        opt.load_state_dict(replace(whole, 0, step=step))
        assert digest(snapshot(opt, params)) == want
        assert opt.full_param_state(params[0])["step"].dtype == torch.float32
        assert opt.full_param_state(params[0])["step"].shape == ()
        train(params, opt, rank, range(5, 6))
        after.add(digest(snapshot(opt, params)))
    assert len(after) == 1


def test_step_may_be_any_kind_of_number():
    run(2, kinds_of_step)


def before_the_first_step(rank, world):
    params, opt = made()
    state_dict = copy.deepcopy(opt.state_dict())
    assert not opt.state
    assert set(state_dict["state"]) == set(range(len(params)))
    train(params, opt, rank, range(3))
    want = bits(params, opt)

    params, opt = made()
    opt.param_groups[0]["lr"] = 0.5
    for p in params:
        p.data.mul_(2)
    opt.load_state_dict(state_dict)
    train(params, opt, rank, range(3))
    assert bits(params, opt) == want


@pytest.mark.parametrize("world", [1, 2])
def test_a_fresh_state_is_a_valid_state(world):
    run(world, before_the_first_step)


def edited(rank, world, steps, split):
    """Weights that were changed since, before the first step or after, are in the state."""
    params, opt = made(master_weights=split)
    train(params, opt, rank, range(steps))
    with torch.no_grad():
        for i, p in enumerate(params):
            p.add_(0.5 + i)
    state_dict = opt.state_dict()
    want = [p.detach().clone() for p in params]
    _, other = made(master_weights=split)
    other.load_state_dict(state_dict)
    for p, q, w in zip(params, [q for g in other.param_groups for q in g["params"]], want, strict=True):
        assert torch.equal(q, w)
        assert torch.equal(p, w)
        assert torch.equal(other.full_param_state(q)["master"], w.float())


@pytest.mark.parametrize("split", ["fp32", "split"])
def test_edits_are_in_the_state(split):
    for steps in (0, 2):
        run(2, edited, steps, split)


def amsgrad_turned_on(rank, world):
    """Between a step and a save."""
    params, opt = stepped(rank)
    opt.param_groups[0]["amsgrad"] = True
    ours, whole = copy.deepcopy(opt.state_dict()), opt.full_state_dict(rank0_only=False)
    train(params, opt, rank, range(6, 8))
    want = digest(snapshot(opt, params))
    for state_dict in (ours, whole):
        opt.load_state_dict(state_dict)
        train(params, opt, rank, range(6, 8))
        assert digest(snapshot(opt, params)) == want
    theirs = torch.optim.AdamW(weights(SHAPES))
    theirs.load_state_dict(whole)
    backward_of(theirs.param_groups[0]["params"], rank, 0)
    theirs.step()


def test_amsgrad_turned_on_before_a_save():
    run(2, amsgrad_turned_on)


# -- manners ----------------------------------------------------------------------------------------------------------


def groups_live_on(rank, world):
    """The dict objects stay, unknown keys come and go with the state, names survive, old files are filled in."""
    named = [(f"layer.{i}", p) for i, p in enumerate(weights(SHAPES))]
    groups = [{"params": named[:2], "name": "head", "lr_scale": 0.1}, {"params": named[2:], "lr": 0.5, "fused": None}]
    opt = Zero1AdamW(groups, lr=0.02, amsgrad=True)
    params = [p for _, p in named]
    train(params, opt, rank, range(2))
    state_dict = copy.deepcopy(opt.state_dict())
    assert state_dict["param_groups"][0]["name"] == "head"
    assert state_dict["param_groups"][1]["param_names"] == ["layer.2", "layer.3", "layer.4"]
    assert [g["params"] for g in state_dict["param_groups"]] == [[0, 1], [2, 3, 4]]

    objects = [opt.param_groups, *opt.param_groups]
    ids = [id(p) for g in opt.param_groups for p in g["params"]]
    opt.param_groups[0]["lr"] = 7.0
    opt.param_groups[1]["name"] = "body"  # not in the file: stays
    state_dict["param_groups"][0]["seen"] = {"tokens": 12}
    given = copy.deepcopy(state_dict["param_groups"])
    opt.load_state_dict(state_dict)
    assert all(a is b for a, b in zip(objects, [opt.param_groups, *opt.param_groups], strict=True))
    assert ids == [id(p) for g in opt.param_groups for p in g["params"]]
    assert opt.param_groups[0]["lr"] == 0.02
    assert opt.param_groups[0]["lr_scale"] == 0.1
    assert opt.param_groups[0]["seen"] == {"tokens": 12}
    assert opt.param_groups[1]["name"] == "body"
    opt.param_groups[0]["seen"]["tokens"] = 13  # ours is a copy
    assert state_dict["param_groups"] == given

    # a file from before these flags, and without names
    for group in state_dict["param_groups"]:
        for key in ("maximize", "foreach", "capturable", "fused", "decoupled_weight_decay", "param_names"):
            group.pop(key, None)
    opt.load_state_dict(state_dict)
    assert opt.param_groups[0]["maximize"] is False
    assert opt.param_groups[0]["decoupled_weight_decay"] is True
    assert opt.param_groups[0]["param_names"] == ["layer.0", "layer.1"]
    train(params, opt, rank, range(2, 3))

    # the class says which decay, not the file
    adam = Zero1Adam([{"params": params[:2]}, {"params": params[2:]}], amsgrad=True)
    state_dict["param_groups"][0]["decoupled_weight_decay"] = True
    adam.load_state_dict(state_dict)
    assert adam.param_groups[0]["decoupled_weight_decay"] is False


def a_tensor_lr(rank, world):
    params = weights(SHAPES)
    lr = torch.tensor(0.02)
    opt = Zero1AdamW(params, lr=lr, capturable=True)
    state_dict = copy.deepcopy(opt.state_dict())
    lr.fill_(9.0)
    opt.load_state_dict(state_dict)
    assert opt.param_groups[0]["lr"] is lr  # whoever holds it goes on holding it
    assert float(lr) == pytest.approx(0.02)


def test_groups_keep_their_objects_keys_and_names():
    run(2, groups_live_on)
    run(2, a_tensor_lr)


def untouched(rank, world):
    """The given dict and its tensors are neither written to nor kept."""
    _, opt = stepped(rank)
    given = opt.state_dict(), opt.full_state_dict(rank0_only=False)
    kept = copy.deepcopy(given)
    for state_dict, keep in zip(given, kept, strict=True):
        fresh = weights(SHAPES)
        other = Zero1AdamW(fresh, lr=0.3)
        other.load_state_dict(state_dict)
        train(fresh, other, rank, range(5, 7))
        assert state_dict.keys() == keep.keys()
        assert state_dict["param_groups"] == keep["param_groups"]
        for number, entry in keep["state"].items():
            assert entry.keys() == state_dict["state"][number].keys()
            for name, t in entry.items():
                now = state_dict["state"][number][name]
                assert torch.equal(getattr(now, "local", now), getattr(t, "local", t))


def test_the_given_dict_is_never_written_to():
    run(2, untouched)


def referring(rank, world):
    """As in torch a state_dict refers to the state, and takes no memory; copy.deepcopy keeps a moment."""
    params, opt = stepped(rank)
    refers, keeps = opt.state_dict(), copy.deepcopy(opt.state_dict())
    before = bits(params, opt)
    for number, p in enumerate(params):
        for name in ("exp_avg", "exp_avg_sq", "master"):
            assert refers["state"][number][name].local.data_ptr() == opt.state[p][name].data_ptr()
    train(params, opt, rank, range(5, 7))
    after = bits(params, opt)
    opt.load_state_dict(refers)  # of now
    assert bits(params, opt) == after
    opt.load_state_dict(keeps)
    assert bits(params, opt) == before != after


def test_a_state_dict_refers_to_the_state():
    run(2, referring)


def hooks(rank, world):
    calls = []
    _, opt = stepped(rank)
    opt.register_state_dict_pre_hook(lambda o: calls.append("pre"))
    opt.register_state_dict_post_hook(lambda o, sd: {**sd, "extra": 5})
    opt.register_state_dict_post_hook(lambda o, sd: calls.append(sorted(sd)))
    opt.register_load_state_dict_pre_hook(lambda o, sd: calls.append(sorted(sd)))
    opt.register_load_state_dict_pre_hook(lambda o, sd: {k: v for k, v in sd.items() if k != "extra"})
    opt.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    state_dict = opt.state_dict()
    opt.load_state_dict(state_dict)
    keys = ["extra", "param_groups", "state"]
    assert calls == ["pre", keys, keys, "loaded"]
    assert "extra" in state_dict
    assert caught(copy.deepcopy, opt)[0] == "TypeError"


def test_hooks_of_torch_run():
    run(1, hooks)
