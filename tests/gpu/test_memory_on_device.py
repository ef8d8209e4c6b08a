"""One rank takes 4 Psi + 12 Psi / N bytes: by torch.cuda.memory_allocated, or memory_report() on the CPU."""

import pytest
from helpers.device import bytes_of_training

pytestmark = pytest.mark.gpu


def test_memory(device, record_property):
    found = bytes_of_training(device, 10_000_000 if device == "cuda" else 500_000, 1, False)
    for name, value in found.items():
        record_property(name, value)
