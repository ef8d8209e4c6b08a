"""Every kernel, once or twice, on memory that ends with the last element in use. Under compute-sanitizer, where
test_sanitizer.py runs this file, it shows that nothing beyond is touched."""

import pytest
import torch
from helpers.device import STREAMS, OnDevice, check_stream_limit
from shim import checks

pytestmark = pytest.mark.gpu


@pytest.fixture
def ran(device):
    return OnDevice(device)


@pytest.mark.parametrize(("dtype", "split"), checks.MASTERS)
def test_adam_step(ran, dtype, split):
    checks.check_adam_step_ends(ran, dtype, split, offset=int(split))


def test_grad_norm(ran):
    checks.check_grad_norm(ran, torch.bfloat16, 0)


def test_sum_slices(ran):
    checks.check_sum_slices(ran, torch.bfloat16, torch.bfloat16, 1)


@pytest.mark.parametrize("split", [False, True])
def test_refresh_masters(ran, split):
    checks.check_refresh(ran, split, 0)


def test_control(ran):
    checks.check_control(ran)


@pytest.mark.parametrize(("dtype", "variant"), STREAMS)
def test_stream_limit(ran, dtype, variant):
    check_stream_limit(ran, 129, dtype, variant)
