"""Every op gives the bits of the CPU op on the device: sizes, dtypes, variants, misaligned memory, special values."""

import pytest
from helpers.device import STREAMS, OnDevice, check_stream_limit
from shim import checks

pytestmark = pytest.mark.gpu


@pytest.fixture
def ran(device):
    return OnDevice(device)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(("dtype", "split"), checks.MASTERS)
def test_adam_step(ran, dtype, split, offset):
    checks.check_adam_step(ran, dtype, split, offset)


def test_adam_step_with_three_dtypes(ran):
    checks.check_mixed_dtypes(ran)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", checks.DTYPES)
def test_grad_norm(ran, dtype, offset):
    checks.check_grad_norm(ran, dtype, offset)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("kinds", checks.SUMS)
def test_sum_slices(ran, kinds, offset):
    checks.check_sum_slices(ran, *kinds, offset)


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("split", [False, True])
def test_refresh_masters(ran, split, offset):
    checks.check_refresh(ran, split, offset)


def test_control(ran):
    checks.check_control(ran)


@pytest.mark.parametrize("numel", [1, 129, 4097])
@pytest.mark.parametrize(("dtype", "variant"), STREAMS)
def test_stream_limit(ran, dtype, variant, numel):
    check_stream_limit(ran, numel, dtype, variant)
