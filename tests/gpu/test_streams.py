"""Ops run on the current stream: they see what was written before them there, without waiting for it."""

import contextlib

import pytest
import torch
from helpers.device import same
from helpers.ops_case import Case, Param

pytestmark = pytest.mark.gpu


def step(where, late):
    """A step whose gradient is written just before it; late: on a stream that is busy for tens of milliseconds, where
    an op on another stream would overtake."""
    fresh = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    case = Case([Param(fresh.numel(), torch.bfloat16)], device=where)
    case.set_group(0)
    control, grad = case.control(), fresh.to(where)
    if late:
        torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()) if late else contextlib.nullcontext():
        if late:
            torch.cuda._sleep(10**8)
        case.grad(0).copy_(grad)
        case.step_control(control)
        case.adam_step()
    if late:
        torch.cuda.synchronize()
    return [case.param(0).cpu(), case.get_master(0).cpu()]


def test_ops_follow_the_current_stream(device):
    assert same(step("cpu", False), step(device, device == "cuda"))
    if device != "cuda":
        pytest.skip("streams need CUDA; without one the same code agrees")
