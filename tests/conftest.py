"""Tests are deterministic: seeds are set, and hypothesis draws the same examples every time."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("steady", derandomize=True, deadline=None, database=None)
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
