"""The planner: what `memory` reads from a safetensors header is what a real optimizer takes, within 1%."""

import json
import struct

import pytest
import torch
from helpers.ranks import run, weights

from zero1_cuda import Zero1AdamW, cli
from zero1_cuda.memory import model as memory
from zero1_cuda.memory import planner
from zero1_cuda.params.layout import ParamSpec

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "BF16", FP16: "F16", FP32: "F32"}
BLOCK = [(384, 128), (384,), (128, 128), (128,), (512, 128), (512,), (128, 512), (128,), (128,), (128,)]
MODELS = {
    "transformer": [(1000, 128), *BLOCK * 3],
    "one matrix": [(777, 1025)],
    "convolutions": [(64, 3, 7, 7), (64,), (128, 64, 3, 3), (128,), (256, 128, 3, 3), (256,), (10, 256), (10,)],
    "many small ones": [(1,), (3,), (), (130,)] * 60,
    "an empty one": [(300, 200), (0, 200), (200,), (200, 300)],
}
OPTIONS = {
    "16 bits": ([BF16], {}),
    "fp32": ([FP32], {}),
    "split, not overlapped": ([BF16], {"master_weights": "split", "overlap_reduce": False}),
    "mixed": ([BF16, FP32, FP16], {"master_weights": "split"}),
}


def safetensors(path, shapes, kinds=("BF16",), **extra):
    """A file with nothing but zeros in it; `extra`: more header entries."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for i, shape in enumerate(shapes):
        kind = kinds[i % len(kinds)]
        size = torch.Size(shape).numel() * (4 if kind == "F32" else 2)
        header[f"layer.{i}"] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header | extra).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    return str(path)


def real(rank, world, shapes, dtypes, options):
    """Reports of a real optimizer after a step."""
    params = [torch.nn.Parameter(p.to(dtypes[i % len(dtypes)])) for i, p in enumerate(weights(shapes))]
    opt = Zero1AdamW(params, **options)
    sum(p.float().sum() for p in params).backward()
    opt.step()
    report = opt.memory_report()
    held = {p.untyped_storage().data_ptr(): p for p in params if p.numel()}
    assert sum(p.numel() * p.element_size() for p in held.values()) <= report["params"]
    return report


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("model", MODELS)
def test_prediction_is_what_a_real_optimizer_takes(model, option, world, tmp_path):
    shapes, (dtypes, options) = MODELS[model], OPTIONS[option]
    path = safetensors(tmp_path / "model.safetensors", shapes, [NAMES[d] for d in dtypes])
    specs, left_out = planner.read_specs(path)
    assert left_out == []
    split, overlap = options.get("master_weights") == "split", options.get("overlap_reduce", True)
    planned = planner.plan(specs, world, split, overlap).as_dict()
    reports = run(world, real, shapes, dtypes, options)
    for kind in ("params", "grads", "state", "buffers", "total", "predicted"):
        fullest = max(report[kind] for report in reports)
        assert planned[kind] == pytest.approx(fullest, rel=0.01), kind
    padding = sum(report["padding"] for report in reports) / world
    assert planned["padding"] == pytest.approx(padding, rel=0.01, abs=16)


def test_big_models_need_little_padding():
    """Layers of a 7-billion model; the formula without padding is right within 1% there."""
    shapes = [4096 * 4096] * 4 + [4096 * 11008] * 3 + [4096] * 2
    specs = [ParamSpec(n, BF16) for n in [32000 * 4096, *shapes * 32, 32000 * 4096]]
    for world in (1, 3, 64, 1000):
        planned = planner.plan(specs, world)
        plain = memory.footprint(sum(s.numel for s in specs), world, overlap=True)
        assert planned.predicted == plain.predicted
        assert plain.total <= planned.total < 1.01 * plain.total


# -- files ------------------------------------------------------------------------------------------------------------


def planned(capsys, *args):
    code = cli.main(["memory", *map(str, args)])
    return code, *capsys.readouterr()


def rows(capsys, *args):
    code, out, _ = planned(capsys, *args, "--json", "--world-size", "1,4")
    assert code == 0
    return json.loads(out)


def test_an_index_is_the_sum_of_its_shards(tmp_path, capsys):
    safetensors(tmp_path / "a.safetensors", [(64, 64), (64,)])
    safetensors(tmp_path / "b.safetensors", [(1, 1), (1, 1), (32, 64)])
    where = {"layer.0": "a.safetensors", "layer.1": "a.safetensors", "layer.2": "b.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    whole = safetensors(tmp_path / "whole.safetensors", [(64, 64), (64,), (32, 64)])
    assert rows(capsys, "--shapes", index) == rows(capsys, "--shapes", whole)


def test_dtype_and_options(tmp_path, capsys):
    path = safetensors(tmp_path / "m.safetensors", [(1024, 1024)], ids={"dtype": "I64", "shape": [7]})
    numel = 2**20
    for args, whole, shared, apart in (
        ([], 2, 12, 2),
        (["--dtype", "fp32"], 4, 8, 4),
        (["--dtype", "fp16", "--split-master"], 2, 12, 2),
        (["--split-master"], 2, 10, 2),
        (["--no-overlap"], 2, 12, 0),
    ):
        alone, four = rows(capsys, "--shapes", path, *args)
        assert (alone["params"], four["grads"]) == (whole * numel, whole * numel)
        assert (alone["state"], four["state"]) == (shared * numel, shared * numel // 4)
        tables = four["buffers"] - apart * numel // 4
        assert 0 < tables < 0.01 * four["total"]
        assert four["total"] == sum(four[kind] for kind in ("params", "grads", "state", "buffers"))
    text = planned(capsys, "--shapes", path)[1]
    assert text.isascii()
    assert text.startswith("1,048,576 parameters in 1 tensors, bfloat16; 1 left out: not floating-point")


def bad_files(folder):
    good = json.dumps({"x": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}).encode()
    headers = {
        "no JSON": b"{{",
        "a list": b"[1]",
        "no shape": b'{"x": {"dtype": "BF16"}}',
        "an entry": b'{"x": 3}',
        "negative": b'{"x": {"dtype": "BF16", "shape": [-4]}}',
        "true": b'{"x": {"dtype": "BF16", "shape": [true]}}',
        "nothing": b"{}",
        "integers only": b'{"x": {"dtype": "I64", "shape": [4]}}',
        "unknown type": b'{"x": {"dtype": "F8_E4M3", "shape": [4]}}',
        "not UTF-8": b'{"\xff": 1}',
    }
    for name, text in headers.items():
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text)
    (folder / "empty").write_bytes(b"")
    (folder / "short").write_bytes(b"abc")
    (folder / "cut").write_bytes(struct.pack("<Q", len(good)) + good[:-1])
    (folder / "zeros").write_bytes(bytes(100))
    (folder / "huge").write_bytes(struct.pack("<Q", 2**63) + good)
    (folder / "ok").write_bytes(struct.pack("<Q", len(good)) + good)
    for name, value in {
        "list": [1],
        "no map": {"metadata": {}},
        "empty map": {"weight_map": {}},
        "number": {"weight_map": {"x": 3}},
        "missing shard": {"weight_map": {"x": "gone"}},
        "elsewhere": {"weight_map": {"x": "../ok"}},
        "bad shard": {"weight_map": {"x": "cut"}},
        "missing tensor": {"weight_map": {"y": "ok"}},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "broken.json").write_text("{")
    (folder / "deep.json").write_text("[" * 100_000)
    return [path for path in sorted(folder.iterdir()) if path.name != "ok"] + [folder / "absent", folder]


def test_bad_files_give_one_line(tmp_path, capsys):
    assert planned(capsys, "--shapes", tmp_path / "none", "--json")[0] == 2
    for path in bad_files(tmp_path):
        code, out, err = planned(capsys, "--shapes", path)
        assert (code, out, err.count("\n")) == (2, "", 1), f"{path.name}: {err}"
        assert err.startswith("zero1_cuda memory: --shapes: ")
        assert str(path) in err or path.name == "bad shard.json", err
    assert planned(capsys, "--shapes", tmp_path / "ok")[0] == 0
    assert planned(capsys, "--shapes", tmp_path / "unknown type", "--dtype", "bf16")[0] == 0


def test_a_library_that_does_not_load_is_one_line(monkeypatch, capsys, tmp_path):
    path = safetensors(tmp_path / "m", [(4,)])
    monkeypatch.setitem(cli.sys.modules, "zero1_cuda.memory.planner", None)
    code, _, err = planned(capsys, "--shapes", path)
    assert (code, err.count("\n")) == (1, 1)


# -- what fits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("80GiB", 80 * 2**30), ("1.5 gib", 3 * 2**29), ("24gb", 24 * 10**9), ("1TB", 10**12)],
)
def test_sizes(text, size):
    assert memory.parse_size(text) == size


@pytest.mark.parametrize("text", ["80", "GB", "-1GB", "0GB", "80GX", "nanGB", "1e3GB", ""])
def test_sizes_that_are_none(text, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["memory", "--params", "1e6", f"--gpu-memory={text}"])
    assert stop.value.code == 2
    assert "--gpu-memory" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("limit", range(41 * 10**8, 17 * 10**9, 7 * 10**8))
def test_smallest_number_of_ranks(limit, capsys):
    """The first number from below that fits is the one that is told."""
    first = next(n for n in range(1, 1000) if memory.footprint(10**9, n, overlap=True).total <= limit)
    code, out, _ = planned(capsys, "--params", "1e9", "--gpu-memory", f"{limit // 10**6}MB", "--json")
    assert code == 0
    assert {row["smallest_world_size"] for row in json.loads(out)} == {first}


def test_the_floor_is_named(capsys, tmp_path):
    code, out, _ = planned(capsys, "--params", "70e9", "--gpu-memory", "80GB")
    assert code == 0
    assert "nothing fits" in out
    assert "floor of 4 Psi" in out
    assert "280.00 GB" in out
    assert "fits from 3 ranks on" in planned(capsys, "--params", "7.5e9", "--gpu-memory", "80GB")[1]
    path = safetensors(tmp_path / "m.safetensors", [(1024, 1024)])
    assert "fits from 4 ranks on" in planned(capsys, "--shapes", path, "--gpu-memory", "8.2MB")[1]
    assert "nothing fits" in planned(capsys, "--shapes", path, "--gpu-memory", "4MB")[1]


def test_plot(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curve.png"
    assert planned(capsys, "--params", "7.5e9", "--gpu-memory", "80GB", "--plot", picture)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert planned(capsys, "--params", "7.5e9", "--plot", tmp_path / "no" / "folder.png")[0] == 1
