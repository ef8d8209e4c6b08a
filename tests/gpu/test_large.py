"""The ops count more elements than 32 bits can."""

import math

import pytest
import torch

from zero1_cuda import ops
from zero1_cuda.cli import bench

pytestmark = pytest.mark.gpu


def test_more_than_two_to_the_31(device, record_property):
    n = 2**31 + 8 if device == "cuda" else 2**20 + 8
    needed = bench.memory_needed(n, "bf16", "plain") + 8 * n  # and fp32 random numbers on the way
    if needed > bench.memory_free(device):
        pytest.skip(f"needs {needed / 1e9:.0f} GB of memory, {bench.memory_free(device) / 1e9:.0f} GB are free")
    s = bench.Streams(n, "bf16", "plain", device)
    assert s.master is not None
    s.grad.fill_(1.0)
    s.param.zero_()
    s.master.zero_()
    norm, control = (torch.zeros(k, dtype=torch.int64, device=device) for k in (ops.NORM_WORDS, ops.CONTROL_FLAGS))
    clip = torch.zeros(2, device=device)
    ops.grad_norm(s.segments, s.chunk_segment, [s.grad], norm)
    control[: ops.NORM_WORDS] = norm
    ops.clip_factor(control, None, 1.0, clip)
    assert float(clip[1]) == float(torch.tensor(math.sqrt(n))), f"norm of {n} ones: {float(clip[1])}"
    s.ours()
    moved = [float(s.param[at]) for at in (0, n // 2, n - 1)]
    assert moved[0] != 0.0, moved
    assert bool((s.param == s.param[0]).all()), moved
    assert bool((s.master == s.master[0]).all())
    again = torch.zeros_like(norm)
    ops.sum_slices(s.grad[None], None, 0, 1.0, 1.0, s.param, again)
    assert torch.equal(again, norm)
    assert bool((s.param == 1.0).all())
    before = s.exp_avg[0].clone()
    s.limit()
    assert s.exp_avg[0] == before + 1.0
    assert bool((s.exp_avg[:n] == s.exp_avg[0]).all())
    record_property("numel", n)
    record_property("norm", float(clip[1]))
