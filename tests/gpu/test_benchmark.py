"""The table of `python -m zero1_cuda bench` on the device, against torch.compile at the largest size: figures for the
report, not a verdict. Every row that fits into memory is there."""

import pytest

from zero1_cuda.cli import bench

pytestmark = pytest.mark.gpu


def test_benchmark(device, record_property):
    table = []
    record_property("table", table)
    if device == "cpu":  # only that it runs
        result = bench.run((20_000,), ["bf16"], ["plain"], device, 1, flush_bytes=2**20, show=table.append)
        assert len(result["rows"]) == 1
    else:
        result = bench.run(device=device, iterations=20, show=table.append)
        wanted = len(bench.SIZES) * len(bench.plan(tuple(bench.DTYPES), bench.VARIANTS))
        assert len(result["rows"]) + sum("GB are free" in reason for reason in result["left_out"].values()) == wanted
        compiled = bench.run(bench.SIZES[-1:], ["bf16"], ["plain"], device, 20, compiled=True, show=table.append)
        result["rows"] += compiled["rows"]
        result["left_out"].update(compiled["left_out"])
    for name, value in result.items():
        record_property(name, value)
