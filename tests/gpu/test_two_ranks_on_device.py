"""Two processes share the device: the optimizer over gloo ends with the bits of one rank that is fed the mean
gradients, however its reduction is made. What gloo does not do with tensors of this device is skipped, with its reason.
"""

import pytest
import torch
import torch.distributed as dist
from helpers.device import VARIANTS, bytes_of_training, trajectory
from helpers.ranks import digest, run

from zero1_cuda.comm import collectives

pytestmark = pytest.mark.gpu


def sums(rank, world, device):
    t = torch.full((64,), rank + 1, dtype=torch.int64, device=device)
    dist.all_reduce(t)
    assert t.tolist() == [3] * 64


def broadcasts(rank, world, device):
    t = torch.full((64,), rank + 1, dtype=torch.uint8, device=device)
    dist.broadcast(t, group_src=1, async_op=True).wait()
    assert t.tolist() == [2] * 64


def sends(rank, world, device):
    sent = torch.full((64,), rank + 1, dtype=torch.uint8, device=device)
    received = torch.zeros_like(sent)
    works = [dist.irecv(received, group_src=1 - rank, tag=1), dist.isend(sent, group_dst=1 - rank, tag=1)]
    for work in works:
        work.wait()
    assert received.tolist() == [2 - rank] * 64


def reduce_scatters(rank, world, device):
    out = torch.zeros(64, dtype=torch.bfloat16, device=device)
    bucket = torch.full((128,), 2.0 * rank, dtype=torch.bfloat16, device=device)
    getattr(dist, collectives._REDUCE_SCATTER)(out, bucket, op=dist.ReduceOp.AVG, async_op=True).wait()
    assert out.tolist() == [1.0] * 64


def why_not(probe, device):
    """Why gloo refuses this, in processes of its own since a refusal may end them; "": it does not."""
    try:
        run(2, probe, device, timeout=20, anew=device == "cuda")
    except AssertionError as error:
        lines = str(error).splitlines()
        return next((line for line in lines if "Error: " in line), lines[-1])
    return ""


@pytest.fixture(scope="module")
def refused(device):
    found = {probe.__name__: why_not(probe, device) for probe in (sums, broadcasts, sends, reduce_scatters)}
    assert device == "cuda" or not any(found.values()), found  # the CPU's does everything
    return {name: reason for name, reason in found.items() if reason}


def trains(rank, world, device, in_fp32):
    """Gradients of its own on each rank."""
    ours = range(rank, rank + 1)
    digests = {name: digest(trajectory(device, ours, reduce_in_fp32=in_fp32, **o)) for name, o in VARIANTS.items()}
    numel = 4_000_000 if device == "cuda" else 200_000
    return digests, [bytes_of_training(device, numel, world, overlap) for overlap in (False, True)]


@pytest.mark.parametrize(("in_fp32", "needed"), [(True, "sends"), (False, "reduce_scatters")])
def test_two_ranks_end_with_the_bits_of_one(device, refused, in_fp32, needed, record_property):
    record_property("refused", refused)
    if reasons := [refused[name] for name in ("sums", "broadcasts", needed) if name in refused]:
        pytest.skip(f"torch's gloo does not serve tensors of this device: {reasons[0]}")
    wanted = {name: digest(trajectory("cpu", range(2), **options)) for name, options in VARIANTS.items()}
    for digests, counted in run(2, trains, device, in_fp32, anew=device == "cuda"):
        assert digests == wanted
        record_property("bytes", counted)
