"""Every mode of the optimizer ends with the bits of the CPU, with and without a process group of one rank; and the
collectives of NCCL are called as it takes them."""

import pytest
import torch
import torch.distributed as dist
from helpers.device import DTYPES, VARIANTS, same, trajectory

from zero1_cuda.comm import collectives

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def wanted():
    """Made before there is a group, which the CPU could not use."""
    return {name: trajectory("cpu", **options) for name, options in VARIANTS.items()}


@pytest.fixture
def one_rank(device, wanted, tmp_path, record_property):
    backend = "nccl" if device == "cuda" else "gloo"
    record_property("backend", backend)
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", VARIANTS)
def test_without_a_group(device, wanted, name):
    assert same(trajectory(device, **VARIANTS[name]), wanted[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_with_a_group_of_one(device, wanted, one_rank, name):
    assert same(trajectory(device, **VARIANTS[name]), wanted[name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives_take_what_they_are_given(device, dtype, one_rank):
    """As collectives.py calls them, which leaves them out for one rank: mean, out of place; gather, in place."""
    bucket = torch.randn(1024, device=device).to(dtype)
    out, kept = torch.empty_like(bucket), bucket.clone()
    reduce_scatter, all_gather = (getattr(dist, collectives.__dict__[n]) for n in ("_REDUCE_SCATTER", "_ALL_GATHER"))
    reduce_scatter(out, bucket, op=dist.ReduceOp.AVG, async_op=True).wait()
    all_gather(bucket, bucket[:1024], async_op=True).wait()
    assert same([out.cpu(), bucket.cpu()], [kept.cpu(), kept.cpu()])
