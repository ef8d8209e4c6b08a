"""What the tests of a step share."""

import pytest
from helpers import ranks


@pytest.fixture(params=[False, True], ids=["at once", "deferred"])
def both_ways(request, monkeypatch):
    """The ranks that a test starts read each agreement at once, as on the CPU, and then one step later, as on CUDA."""
    monkeypatch.setattr(ranks, "deferred", request.param)
    return request.param
