"""A state saved through torch.distributed.checkpoint comes back to the bit: on any number of ranks, with other buckets,
overlap modes, master modes and replicate x shard grids, whatever the parameters look like. The files are those of plain
data parallel: AdamW's load here, ours load there. A rank writes its part and reads what it needs, no more.
"""

import pathlib
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.ranks import backward_of, caught, digest, mean_grad, run, snapshot, weights
from helpers.states import bits, grid, made, train
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from zero1_cuda import Zero1AdamW

IO = pathlib.Path("/proc/self/io")


def saved(rank, world, folder, options):
    params, opt = made(**(grid(rank, world, 2) if options == "grid" else options))
    train(params, opt, rank, range(3))
    dcp.save({"opt": opt.state_dict()}, checkpoint_id=folder, no_dist=not dist.is_initialized())
    return bits(params, opt)


def loaded(rank, world, folder, every_options):
    """What each kind of optimizer holds after the load, and whether a step after it works."""
    out = []
    for options in every_options:
        params, opt = made(**(grid(rank, world, 2) if options == "grid" else options))
        if options == {"bucket_cap_mb": 0.01}:  # state that is there already is overwritten
            train(params, opt, rank, range(5, 7))
        state = {"opt": opt.state_dict()}
        dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
        opt.load_state_dict(state["opt"])
        out.append(bits(params, opt))
        assert opt.param_groups[1]["amsgrad"]
        assert opt.param_groups[1]["betas"] == (0.5, 0.6)
        train(params, opt, rank, range(3, 4))
        assert opt.full_param_state(params[5])["step"] == 4
        assert opt.full_param_state(params[6])["step"] == 3
    return out


KINDS = [
    {"bucket_cap_mb": 0.0005, "overlap_reduce": False, "master_weights": "split"},
    {"bucket_cap_mb": 0.01},
    {"overlap_gather": nn.Linear(1, 1), "skip_nonfinite": False},
]


@pytest.mark.parametrize(
    ("world", "options", "worlds"),
    [
        (1, {"master_weights": "split"}, [3]),
        (2, {"bucket_cap_mb": 0.001}, [1, 2, 3, 4]),
        (3, {"overlap_reduce": False, "master_weights": "split"}, [2]),
        (4, "grid", [1, 4]),
    ],
    ids=str,
)
def test_loads_on_other_ranks_to_the_bit(tmp_path, world, options, worlds):
    want = run(world, saved, tmp_path, options)
    assert all(w == want[0] for w in want)
    for other in worlds:
        kinds = [*KINDS, "grid"] if other == 4 else KINDS
        for found in run(other, loaded, tmp_path, kinds):
            for options, hashes in zip(kinds, found, strict=True):
                assert hashes == want[0], f"{world} -> {other} ranks, {options}"


def test_without_a_process_group(tmp_path):
    (want,) = run(1, saved, tmp_path, {}, group=False)
    for found in [*run(2, loaded, tmp_path, [{}]), *run(1, loaded, tmp_path, [{}], group=False)]:
        assert found == [want]


def read_plainly(rank, world, folder):
    """The file's tensors as anybody reads them."""
    params, opt = made()
    train(params, opt, rank, range(2))
    dcp.save({"opt": opt.state_dict()}, checkpoint_id=folder)
    whole = opt.full_state_dict(rank0_only=False)
    zeros = {n: {k: torch.zeros(t.shape) for k, t in entry.items()} for n, entry in whole["state"].items()}
    dcp.load({"opt": {"state": zeros}}, checkpoint_id=folder)
    for number, entry in whole["state"].items():
        for name, t in entry.items():
            assert torch.equal(zeros[number][name], t), (number, name)


@pytest.mark.parametrize("world", [1, 3])
def test_the_file_is_that_of_an_unsharded_optimizer(tmp_path, world):
    run(world, read_plainly, tmp_path)


# -- a save while training goes on ------------------------------------------------------------------------------------


def saved_beside(rank, world, folder):
    params, opt = made()
    train(params, opt, rank, range(3))
    want = bits(params, opt)
    beside = dist.new_group(backend="gloo")  # its messages must not mix with those of training
    future = dcp.async_save({"opt": opt.state_dict()}, checkpoint_id=folder, process_group=beside)
    train(params, opt, rank, range(3, 6))
    future.result()
    assert bits(params, opt) != want
    return want


def test_async_save_keeps_the_moment_of_the_call(tmp_path):
    want = run(2, saved_beside, tmp_path)[0]
    assert run(3, loaded, tmp_path, [{}]) == [[want]] * 3


# -- only what is needed ----------------------------------------------------------------------------------------------


def read_so_far():
    return int(IO.read_text().split()[1])


def bytes_moved(rank, world, folder):
    """Bytes that this rank wrote and read, and those of its part."""
    params = weights([(2000, 300), (700_001,), (3, 1000, 301)])
    opt = Zero1AdamW(params)
    backward_of(params, rank, 0)
    opt.step()
    small = {"x": torch.zeros(1)}
    dcp.save(small, checkpoint_id=f"{folder}/small")  # the first time Python reads a lot of its own
    dcp.load(small, checkpoint_id=f"{folder}/small")
    state = {"opt": opt.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    part = sum(t.nbytes for entry in opt.state.values() for t in entry.values())  # fp32 parameters are their masters
    written = sum(f.stat().st_size for f in pathlib.Path(folder).glob(f"__{rank}_*"))
    before = read_so_far()
    dcp.load(state, checkpoint_id=folder)
    return part, written, read_so_far() - before


@pytest.mark.skipif(not IO.exists(), reason="no /proc/self/io here")
@pytest.mark.parametrize("world", [1, 4])
def test_a_rank_writes_and_reads_its_part_only(tmp_path, world):
    for part, written, read in run(world, bytes_moved, tmp_path):
        assert part == pytest.approx(12 * (2000 * 300 + 700_001 + 3 * 1000 * 301) / world, rel=0.01)
        assert part * 0.98 < written < part * 1.05 + 30_000
        assert part * 0.98 < read < part * 1.05 + 600_000  # DCP looks around in a file for every tensor


# -- plain data parallel on the other side ----------------------------------------------------------------------------


def model():
    """The same on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(13, 31), nn.LayerNorm(31), nn.Linear(31, 7, bias=False))


class Adamw(torch.optim.AdamW):
    """Plain data parallel: takes the mean gradient of all ranks."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = mean_grad(p, p.grad)
        super().step()


def check_same(params, opt, plain_params, plain):
    """Collective: our state is that of torch's optimizer, to the bit."""
    for p, q in zip(params, plain_params, strict=True):
        ours, theirs = opt.full_param_state(p), plain.state[q]
        assert torch.equal(p, q)
        for name in ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            assert torch.equal(ours[name], theirs[name]), name


def step_both(sides, rank, t):
    for params, opt in sides:
        backward_of(params, rank, t)
        opt.step()
        opt.zero_grad()


def from_adamw(rank, world, folder):
    plain_model, m = model(), model()
    plain_params, params = list(plain_model.parameters()), list(m.parameters())
    plain = Adamw(plain_params, lr=0.02, amsgrad=True)
    for t in range(3):
        step_both([(plain_params, plain)], rank, t)
    dcp.save({"model": plain_model.state_dict(), "opt": plain.state_dict()}, checkpoint_id=f"{folder}/adamw")

    opt = Zero1AdamW(params, lr=0.5, amsgrad=True)
    state = {"model": m.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/adamw")  # the weights first: they become the masters
    m.load_state_dict(state["model"])
    state = {"opt": opt.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/adamw", planner=DefaultLoadPlanner(allow_partial_load=True))
    opt.load_state_dict(state["opt"])
    assert opt.param_groups[0]["lr"] == 0.02
    check_same(params, opt, plain_params, plain)

    for t in range(3, 6):
        step_both([(plain_params, plain), (params, opt)], rank, t)
    for p, q in zip(params, plain_params, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-5)
    dcp.save({"model": m.state_dict(), "opt": opt.state_dict()}, checkpoint_id=f"{folder}/ours")
    return digest(snapshot(opt, params))


def to_adamw(rank, world, folder):
    m = model()
    params = list(m.parameters())
    plain = Adamw(params, lr=0.5, amsgrad=True)
    for p in params:  # torch's optimizer has nothing that a load could fill before it has stepped
        p.grad = torch.zeros_like(p)
    plain.step()
    state = {"model": m.state_dict(), "opt": plain.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/ours")
    m.load_state_dict(state["model"])
    plain.load_state_dict(state["opt"])
    assert plain.param_groups[0]["lr"] == 0.02

    ours = weights([p.shape for p in params])
    opt = Zero1AdamW(ours, amsgrad=True)
    state = {"opt": opt.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/ours")
    opt.load_state_dict(state["opt"])
    check_same(ours, opt, params, plain)
    return digest(snapshot(opt, ours))


def test_files_of_plain_data_parallel_load_here_and_ours_there(tmp_path):
    want = run(2, from_adamw, tmp_path)
    assert run(3, to_adamw, tmp_path) == [want[0]] * 3


# -- torch's helpers --------------------------------------------------------------------------------------------------


def with_helpers(rank, world, folder):
    m = model().bfloat16()
    opt = Zero1AdamW(m.named_parameters(), lr=0.02)
    before = digest(m.parameters())
    get_optimizer_state_dict(m, opt)  # torch takes a step of its own first, with zero gradients and lr 0
    assert digest(m.parameters()) == before
    for t in range(2):
        step_both([(list(m.parameters()), opt)], rank, t)
    state = get_optimizer_state_dict(m, opt)
    assert set(state["state"]) == {name for name, _ in m.named_parameters()}
    dcp.save({"opt": state}, checkpoint_id=f"{folder}/names")
    flat = get_optimizer_state_dict(m, opt, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"opt": flat}, checkpoint_id=f"{folder}/flat")
    if rank == 0:
        plain = model()
        adamw = torch.optim.AdamW(plain.parameters(), lr=0.02)
        plain(torch.ones(2, 13)).sum().backward()
        adamw.step()
        torch.save(plain.state_dict(), f"{folder}/plain.pt")
        dcp.save({"opt": get_optimizer_state_dict(plain, adamw)}, checkpoint_id=f"{folder}/plain", no_dist=True)
    return digest(snapshot(opt, list(m.parameters())))


def back_with_helpers(rank, world, folder):
    out = []
    for name, flat in (("names", False), ("flat", True)):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        m = model().bfloat16()
        # what torch restores from flat keys is what opt.state names, which for split masters is not the master
        split = "fp32" if flat else "split"
        opt = Zero1AdamW(m.named_parameters(), lr=0.5, master_weights=split, bucket_cap_mb=0.001)
        state = {"opt": get_optimizer_state_dict(m, opt, options=options)}
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        set_optimizer_state_dict(m, opt, state["opt"], options=options)
        assert opt.param_groups[0]["lr"] == 0.02
        out.append(digest(snapshot(opt, list(m.parameters()))))

    opt = Zero1AdamW(m.named_parameters(), master_weights="split")
    state = {"opt": get_optimizer_state_dict(m, opt, options=options)}
    dcp.load(state, checkpoint_id=f"{folder}/flat")
    kind, text = caught(set_optimizer_state_dict, m, opt, state["opt"], options=options)
    assert kind == "ValueError"
    assert "lacks ['master']" in text

    m = model()
    m.load_state_dict(torch.load(f"{folder}/plain.pt"))
    opt = Zero1AdamW(m.parameters(), lr=0.02)
    state = {"opt": get_optimizer_state_dict(m, opt)}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=f"{folder}/plain", planner=planner)
    set_optimizer_state_dict(m, opt, state["opt"])

    plain = model()
    plain.load_state_dict(torch.load(f"{folder}/plain.pt"))
    adamw = torch.optim.AdamW(plain.parameters())
    theirs = {"opt": get_optimizer_state_dict(plain, adamw)}
    dcp.load(theirs, checkpoint_id=f"{folder}/plain")
    set_optimizer_state_dict(plain, adamw, theirs["opt"])
    for p, q in zip(m.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(opt.full_param_state(p)[name], adamw.state[q][name])
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_helpers_that_name_parameters(tmp_path, world):
    want = run(2, with_helpers, tmp_path)[0]
    assert run(world, back_with_helpers, tmp_path) == [[want, want]] * world


def whole_by_helper(rank, world, path):
    """torch joins DTensors only: it returns rank 0's part as though it were the whole."""
    m = model()
    params = list(m.parameters())
    opt = Zero1AdamW(params)
    step_both([(params, opt)], rank, 0)
    state = get_optimizer_state_dict(m, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(state, path)
    before = digest(snapshot(opt, params))
    told = [caught(opt.load_state_dict, state)]
    dist.barrier()
    told.append(caught(opt.load_state_dict, torch.load(path, weights_only=True)))
    assert digest(snapshot(opt, params)) == before
    return told


def rank_0_alone(rank, world, path):
    return caught(Zero1AdamW(model().parameters()).load_state_dict, torch.load(path, weights_only=True))


def test_torchs_full_state_dict_option_is_refused(tmp_path):
    path = tmp_path / "whole.pt"
    told = [t for told in run(2, whole_by_helper, path) for t in told]
    for kind, text in [*told, *run(1, rank_0_alone, path)]:
        assert kind == "ValueError"
        assert "full_state_dict()" in text


def damaged(rank, world, folder):
    """A file is cut short: an error on every rank, and the optimizer is as before."""
    params, opt = made()
    train(params, opt, rank, range(2))
    dcp.save({"opt": opt.state_dict()}, checkpoint_id=folder)
    train(params, opt, rank, range(2, 4))
    before = bits(params, opt)
    if rank == 0:
        file = next(pathlib.Path(folder).glob("__1_*"))
        file.write_bytes(file.read_bytes()[:-3000])
    dist.barrier()
    with pytest.raises(CheckpointException):
        dcp.load({"opt": opt.state_dict()}, checkpoint_id=folder)
    assert bits(params, opt) == before


def test_a_truncated_file_is_an_error_on_every_rank(tmp_path):
    run(2, damaged, tmp_path)


def lacking(rank, world, folder):
    """A file that knows nothing of a parameter, or has it in another shape."""
    params = weights([(20, 3), (7,)])
    dcp.save({"opt": Zero1AdamW(params).state_dict()}, checkpoint_id=folder)
    for shapes in ([(20, 3), (7,), (5,)], [(3, 20), (7,)]):
        opt = Zero1AdamW(weights(shapes))
        with pytest.raises(CheckpointException):
            dcp.load({"opt": opt.state_dict()}, checkpoint_id=folder)


def test_a_file_of_another_model_is_an_error_on_every_rank(tmp_path):
    run(2, lacking, tmp_path)


# -- the documentation ------------------------------------------------------------------------------------------------

RECIPES = re.findall(
    r"^```python\n(.*?)^```$",
    (pathlib.Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(),
    re.MULTILINE | re.DOTALL,
)


def follow_the_recipes(rank, world, folder):
    def make_model():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(16, 40), nn.Linear(40, 9, bias=False))

    m = make_model()
    opt = Zero1AdamW(m.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LinearLR(opt)
    names = {"make_model": make_model, "model": m, "opt": opt, "schedule": schedule, "folder": folder}
    for number, recipe in enumerate(RECIPES):
        step_both([(list(m.parameters()), opt)], rank, number)
        before = digest(snapshot(opt, list(m.parameters())))
        exec(compile(recipe, f"docs/checkpoints.md, block {number}", "exec"), names)
        if "adamw = " not in recipe:  # saved and loaded again: the same
            assert digest(snapshot(opt, list(m.parameters()))) == before, number
    assert names["step"] == 100
    dist.barrier()


def test_the_recipes_of_the_documentation_run(tmp_path):
    assert len(RECIPES) == 8
    run(2, follow_the_recipes, tmp_path)
