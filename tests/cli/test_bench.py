"""The kernel benchmark measures what it says: counted bytes, the limit's streams, contestants that make the same
update."""

from __future__ import annotations

import datetime
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from zero1_cuda import cli, ops
from zero1_cuda.cli import bench

STEP = 2.0**-20  # what stream_limit adds
KINDS = [*((d, v) for d in bench.DTYPES for v in ("plain", "amsgrad")), ("bf16", "l2"), ("bf16", "split")]


def streams(numel: int, dtype: str, variant: str) -> bench.Streams:
    torch.manual_seed(0)
    made = bench.Streams(numel, dtype, variant, "cpu")
    made.make_fp32()
    return made


def every(s: bench.Streams) -> list[torch.Tensor | None]:
    return [s.grad, s.param, s.master, s.remainder, s.exp_avg, s.exp_avg_sq, s.max_exp_avg_sq]


# -- the kernel benchmark --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "variant", "wanted"),
    [
        ("bf16", "plain", 2 + 4 + 4 + 4 + 4 + 4 + 4 + 2),
        ("fp16", "plain", 28),
        ("fp32", "plain", 4 + 3 * 4 + 3 * 4),
        ("bf16", "l2", 28),
        ("bf16", "amsgrad", 36),
        ("bf16", "split", 2 + 2 * (2 + 2 + 4 + 4)),
    ],
)
def test_counted_bytes(dtype: str, variant: str, wanted: int) -> None:
    assert bench.Streams(10, dtype, variant, "cpu").bytes_per_param == wanted


@pytest.mark.parametrize(("dtype", "variant"), KINDS)
def test_contestants_make_the_same_update(dtype: str, variant: str) -> None:
    ours, theirs = streams(5000, dtype, variant), streams(5000, dtype, variant)
    before = ours.param.clone()
    ours.ours()
    theirs.torch_fused()()
    assert not torch.equal(ours.param, before)
    torch.testing.assert_close(ours.param, theirs.param, rtol=1e-6, atol=1e-6)
    for a, b in zip(every(ours)[4:], every(theirs)[4:], strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_row_allocates_what_it_says() -> None:
    for dtype, variant in KINDS:
        s = streams(128_000, dtype, variant)
        tensors = {t.data_ptr(): t.nbytes for t in (*every(s), s.grad32, s.master32) if t is not None}
        assert sum(tensors.values()) == bench.memory_needed(128_000, dtype, variant), (dtype, variant)


def test_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "last_level_cache", lambda device: 2**20)  # the real one takes a while to overwrite
    path = tmp_path / "new" / "bench.json"
    level = ops.cpu_level()
    options = ["--device", "cpu", "--sizes", "3000,2e4", "--dtypes", "bf16,fp32", "--variants", "plain,split"]
    assert cli.main(["bench", *options, "--iterations", "2", "--cpu-level", "plain", "--json", str(path)]) == 0
    assert ops.cpu_level() == level
    result = json.loads(path.read_text())
    assert result["command"].startswith("python -m zero1_cuda")
    assert re.fullmatch(r"[0-9a-f]{40}|none", result["commit"])
    assert datetime.datetime.fromisoformat(result["date"]).tzinfo is not None
    assert result["cpu_level"] == "plain"
    assert result["device_type"] == "cpu"
    assert result["threads"] == torch.get_num_threads()
    assert result["iterations"] == 2
    assert result["versions"]["torch"] == torch.__version__
    kinds = [("bf16", "plain"), ("fp32", "plain"), ("bf16", "split")]
    found = [(row["numel"], row["dtype"], row["variant"]) for row in result["rows"]]
    assert found == [(numel, *kind) for numel in (3000, 20_000) for kind in kinds]
    for row in result["rows"]:
        counted = row["bytes_per_param"] * row["numel"]
        assert 0.0 < row["ms_p20"] <= row["ms"] <= row["ms_p80"]
        assert row["gb_s"] == pytest.approx(counted / 1e6 / row["ms"])
        assert row["limit_gb_s"] == pytest.approx(counted / 1e6 / row["limit_ms"])
        assert row["share_of_limit"] == pytest.approx(row["limit_ms"] / row["ms"])
        assert row["torch_ratio"] == pytest.approx(row["torch_ms"] / row["ms"])
        assert row["compile_ms"] is None


def test_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "memory_free", lambda device: 10**6)
    result = bench.run((1000, 10**6), ["bf16"], ["plain"], "cpu", 1, flush_bytes=0, show=lambda text: None)
    assert [row["numel"] for row in result["rows"]] == [1000]
    assert "GB are free" in result["left_out"]["1000000 bf16 plain"]


def test_percentiles() -> None:
    assert [bench.percentile([1.0, 2.0, 4.0], q) for q in (0.0, 0.25, 0.5, 1.0)] == [1.0, 1.5, 2.0, 4.0]
    assert bench.percentile([3.0], 0.8) == 3.0


def test_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="iterations"):
        bench.run((1000,), iterations=0)
    with pytest.raises(ValueError, match="iterations"):
        bench.Clock("cpu", 0).race({}, 0, 1)
    with pytest.raises(SystemExit):
        cli.main(["bench", "--iterations", "0"])
    with pytest.raises(ValueError, match="split goes with bf16"):
        bench.run((1000,), ["fp32"], ["split"])
    capsys.readouterr()
    for options in (["--dtypes", "fp8"], ["--variants", "sgd"], ["--cpu-level", "abacus"]):
        assert cli.main(["bench", *options]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_plot_without_matplotlib_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", "--plot", "bench.png"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


# -- the limit -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ops.cpu_levels())
@pytest.mark.parametrize(("dtype", "variant"), KINDS)
def test_stream_limit_touches_every_stream_and_nothing_else(dtype: str, variant: str, level: str) -> None:
    numel, rest = 4001, 131
    kept = ops.cpu_level()
    try:
        ops.set_cpu_level(level)
        s = streams(numel + rest, dtype, variant)
        before = [None if t is None else t.clone() for t in every(s)]
        grad = s.grad[:numel].clone()
        ops.stream_limit(grad, *every(s)[1:])
    finally:
        ops.set_cpu_level(kept)
    for t, old in zip(every(s), before, strict=True):
        if t is not None and old is not None:
            assert torch.equal(t[numel:], old[numel:])
    n = slice(0, numel)
    _, param, master, remainder, exp_avg, exp_avg_sq, maximum = (None if t is None else t[n] for t in before)
    fp32 = grad if dtype == "fp32" else grad.view(torch.bfloat16).float()
    assert torch.equal(s.exp_avg[n], exp_avg + fp32)
    assert torch.equal(s.exp_avg_sq[n], exp_avg_sq + STEP)
    assert maximum is None or torch.equal(s.max_exp_avg_sq[n], maximum + STEP)
    wanted = (param.float() if master is None else master) + STEP
    assert master is None or torch.equal(s.master[n], wanted)
    bits = wanted.view(torch.int32)
    if remainder is not None:
        assert torch.equal(s.remainder[n], (bits & 0xFFFF).to(torch.int16))
    if dtype == "fp32":
        assert torch.equal(s.param[n], wanted)
    else:
        assert torch.equal(s.param[n].view(torch.int16), (bits >> 16).to(torch.int16))


def test_stream_limit_is_registered_as_torch_asks() -> None:
    torch.library.opcheck(torch.ops.zero1.stream_limit.default, tuple(every(streams(300, "bf16", "plain"))))


def test_stream_limit_refuses() -> None:
    args = every(streams(256, "bf16", "plain"))
    with pytest.raises(RuntimeError, match=r"exp_avg: wanted .* at least 256 elements"):
        ops.stream_limit(*args[:4], args[4][:255], *args[5:])
    with pytest.raises(RuntimeError, match="master: wanted"):
        ops.stream_limit(*args[:2], None, *args[3:])
