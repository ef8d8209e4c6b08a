"""Tests are deterministic: seeds are set, and hypothesis draws the same examples every time.

Options for those in tests/gpu: `--gpu-device cpu` runs them on the CPU, as far as that makes sense; `--gpu-report FILE`
writes down what each has found, a line of JSON as soon as it ends.
"""

import pytest
import torch

try:
    from hypothesis import settings
except ModuleNotFoundError:  # tests/gpu does without: it also runs where nothing can be installed
    pass
else:
    settings.register_profile("steady", derandomize=True, deadline=None, database=None)
    settings.load_profile("steady")


def pytest_addoption(parser):
    parser.addoption("--gpu-device", choices=("cuda", "cpu"), default="cuda", help="where the tests in tests/gpu run")
    parser.addoption("--gpu-report", metavar="FILE", help="what they have found, as lines of JSON")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
