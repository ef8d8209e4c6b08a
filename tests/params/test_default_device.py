"""torch's default device changes nothing: what the host needs is made on the CPU, whatever is set.

With the default on the meta device a tensor made in the wrong place holds nothing, so each of these would fail.
"""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.ranks import backward_of, digest, run, snapshot, weights

from zero1_cuda import Zero1AdamW

SHAPES = [(40, 30), (7,), (300,), (129,)]


def life(rank, world, folder, options, default):
    """Most of what an optimizer can be asked to do; a hash of what comes of it."""
    torch.set_default_device(default)
    cpu = torch.device("cpu")

    def trained(params, opt, steps):
        for k in steps:
            with cpu:
                backward_of(params, rank, k)
            opt.clip_grad_norm_(2.0, grad_scale=1.0)
            opt.step()
            opt.zero_grad()

    with cpu:
        params, late = weights(SHAPES, torch.bfloat16), weights([(50,)], torch.bfloat16)
    params[1].requires_grad_(False)
    opt = Zero1AdamW(params, lr=0.01, bucket_cap_mb=0.002, **options)
    trained(params[:1] + params[2:], opt, range(2))
    params[1].requires_grad_(True)
    trained(params, opt, range(2, 3))
    opt.add_param_group({"params": late, "amsgrad": True})
    params += late
    trained(params, opt, range(3, 5))
    with torch.no_grad():
        params[2].mul_(2.0)
    params[3].data.mul_(2.0)
    opt.refresh_masters()
    whole = opt.full_state_dict(rank0_only=False)
    part = copy.deepcopy(opt.state_dict())
    dcp.save({"opt": opt.state_dict()}, checkpoint_id=folder)
    trained(params, opt, range(5, 6))
    found = []
    for state in (whole, part, None):
        if state is None:
            state = {"opt": opt.state_dict()}
            dcp.load(state, checkpoint_id=folder)
            state = state["opt"]
        opt.load_state_dict(state)
        found += snapshot(opt, params)
        trained(params, opt, range(6, 7))
        found += snapshot(opt, params)
    report = opt.memory_report()
    with cpu:
        assert {t.device for t in found} == {cpu}
        return digest(found), [int(opt.full_param_state(p)["step"]) for p in params], report


@pytest.mark.parametrize("options", [{}, {"master_weights": "split"}, {"overlap_reduce": False}], ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_a_default_device_changes_nothing(world, options, tmp_path):
    wanted, other = (run(world, life, str(tmp_path / default), options, default) for default in ("cpu", "meta"))
    assert wanted == other
    assert wanted[0][1] == [6, 4, 6, 6, 3]
