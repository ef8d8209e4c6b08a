"""python -m zero1_cuda: `info` comes out on any machine, `memory` prints the table, a mistake gives one line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zero1_cuda import cli
from zero1_cuda.cli import info

PACKAGE = Path(cli.__file__).parents[1]


def sources_in(folder):
    """A copy of the package's Python, without the compiled libraries."""
    copy = folder / "zero1_cuda"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return copy


def run(*args, cwd=None, **env):
    command = [sys.executable, "-m", "zero1_cuda", *args]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120, cwd=cwd, env=os.environ | env
    )


def test_info_as_json_in_an_empty_folder(tmp_path):
    done = run("info", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert {"zero1_cuda", "torch", "python", "compiler", "nvcc", "built", "cuda", "gloo", "nccl"} <= set(facts)
    assert isinstance(facts["built"], dict), facts["built"]


def test_info_without_any_tool(tmp_path):
    done = run("info", cwd=tmp_path, PATH=str(tmp_path), CXX="", CUDA_HOME=str(tmp_path / "nowhere"))
    assert done.returncode == 0, done.stderr
    assert "nvcc: not found" in done.stdout.splitlines()
    assert "compiler: g++ not found" in done.stdout.splitlines()


def test_info_with_a_broken_library(tmp_path):
    """The report names the file that cannot be loaded; `memory`, which needs no library, goes on working."""
    copy = sources_in(tmp_path)
    for library in PACKAGE.glob("_C*.so"):
        (copy / library.name).write_bytes(os.urandom(100))
    done = run("info", "--json", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    built = json.loads(done.stdout)["built"]
    assert built.startswith("not available: ImportError"), built
    assert "_C" in built, built
    assert run("memory", "--params", "1e6", cwd=tmp_path, PYTHONPATH=str(tmp_path)).returncode == 0


def test_info_with_a_library_that_was_cut_short(tmp_path):
    """Loading it is a bus error, which no `except` catches."""
    copy = sources_in(tmp_path)
    library = next(PACKAGE.glob("_C*.so"))
    (copy / library.name).write_bytes(library.read_bytes()[: library.stat().st_size // 2])
    done = run("info", "--json", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    for name in ("built", "cpu_level", "cuda"):
        assert facts[name].startswith("not available: ImportError"), facts[name]


def test_info_survives_any_probe(monkeypatch, capsys):
    def broken():
        raise RuntimeError("first") from OSError("the\ncause")

    for probe in ("_version", "_torch", "_compiler", "_nvcc", "_built", "_cpu_level", "_cuda", "_gpus"):
        monkeypatch.setattr(info, probe, broken)
    assert cli.main(["info"]) == 0
    assert "torch: not available: RuntimeError: first <- OSError: the cause" in capsys.readouterr().out


def test_memory_as_json(capsys):
    assert cli.main(["memory", "--params", "7.5e9", "--world-size", "1,64", "--json"]) == 0
    alone, shared = json.loads(capsys.readouterr().out)
    assert alone["total"] == alone["predicted"] == alone["baseline"] == 120_000_000_000
    assert shared["world_size"] == 64
    assert shared["predicted"] == 31_406_250_000
    assert shared["total"] == shared["predicted"] + shared["buffers"]


def test_memory_as_a_table(capsys):
    assert cli.main(["memory", "--params", "7.5e9"]) == 0
    text = capsys.readouterr().out
    assert "4 Psi + 12 Psi/N" in text
    assert "31.41" in text
    assert text.isascii(), "a terminal that knows no Greek must not break it"


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (["--params", "-1"], "--params"),
        (["--params", "1.5"], "--params"),
        (["--params", "nan"], "--params"),
        (["--params", "1e999999999"], "--params"),
        (["--params", "many"], "--params"),
        (["--params", "7.5e9", "--world-size", "0"], "--world-size"),
        (["--params", "7.5e9", "--world-size", "1,,4"], "--world-size"),
        (["--params", "7.5e9", "--dtype", "fp8"], "--dtype"),
        (["--params", "7.5e9", "--gpu-memory", "80"], "--gpu-memory"),
        (["--params", "7.5e9", "--shapes", "model.safetensors"], "--params"),
        ([], "--params"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_memory_refuses(args, name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["memory", *args])
    assert stop.value.code == 2
    assert name in capsys.readouterr().err.splitlines()[-1]


def test_plot_without_matplotlib_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["memory", "--params", "1e6", "--plot", str(tmp_path / "table.png")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_bench_without_its_code_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "zero1_cuda.cli.bench", None)
    assert cli.main(["bench"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_no_command_prints_usage_and_no_traceback():
    done = run()
    assert done.returncode == 2
    assert "usage:" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_sources_say_that_they_are_not_the_installed_package(tmp_path):
    copy = sources_in(tmp_path)
    (tmp_path / "setup.py").touch()
    code = (  # without what an editable install adds, which would find the library
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]; import zero1_cuda.ops"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=60
    )
    assert done.returncode != 0
    assert f"{copy} are the sources, with no compiled library" in done.stderr
    assert "pip install --no-build-isolation -e ." in done.stderr


def test_why_the_cuda_library_did_not_load_is_told(tmp_path):
    copy = sources_in(tmp_path)
    for source in PACKAGE.glob("_C*.so"):
        (copy / source.name).symlink_to(source)
    library = copy / next(PACKAGE.glob("_C*.so")).name.replace("_C", "_cuda", 1)
    library.write_bytes(b"\x7fELF" + bytes(100))
    code = (
        "import torch, zero1_cuda._C as c; torch.version.cuda = '13.0'; known = c.build_info();"
        "c.build_info = lambda: {**known, 'cuda': True}; import zero1_cuda.ops as ops; print(ops.cuda_error())"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert str(library) in done.stdout
    assert "invalid ELF header" in done.stdout or "wrong ELF class" in done.stdout or "file too short" in done.stdout
