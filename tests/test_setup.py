"""setup.py says in one line what a machine lacks: a newer setuptools, an nvcc that runs. It looks for nvcc and for the
compiler where `info` does, and one job is one compiler.
"""

import os
import runpy
import sys
from pathlib import Path

import pytest
import setuptools

from zero1_cuda.cli import info

SETUP = Path(__file__).parents[1] / "setup.py"


@pytest.fixture
def names(monkeypatch):
    """What setup.py defines, with nothing built; a function that reads it again."""
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    for name in ("ZERO1_CUDA", "CUDA_HOME", "CUDA_PATH", "MAX_JOBS", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(SETUP.parent)
    return lambda: runpy.run_path(str(SETUP))


def fake_nvcc(folder, text):
    (folder / "bin").mkdir()
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(text)
    nvcc.chmod(0o755)
    return nvcc


def test_an_old_setuptools_is_one_line(names, monkeypatch):
    for version in ("65.5.0", "76.1.0"):
        monkeypatch.setattr(setuptools, "__version__", version)
        with pytest.raises(SystemExit, match=rf"needs setuptools >= 77, got {version}"):
            names()
    monkeypatch.setattr(setuptools, "__version__", "77.0.3")
    names()


def test_nvcc_is_looked_for_as_info_looks_for_it(names, monkeypatch, tmp_path):
    nvcc = fake_nvcc(tmp_path, "#!/bin/sh\necho 'release 99.0, V99'\n")
    find = names()["find_nvcc"]
    monkeypatch.setenv("PATH", f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}")
    assert find() == str(nvcc)
    assert info._nvcc() == f"{nvcc} (release 99.0, V99)"
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "nowhere"))  # says where, even if PATH has another
    assert find() is None
    assert info._nvcc() == "not found"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find() == str(nvcc)
    monkeypatch.setenv("ZERO1_CUDA", "0")
    assert find() is None


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 3\n", "\x01garbage"])
def test_a_broken_nvcc_is_one_line(names, tmp_path, text):
    nvcc = fake_nvcc(tmp_path, text)
    with pytest.raises(SystemExit, match=r"nvcc does not run .*; ZERO1_CUDA=0 builds without CUDA"):
        names()["cuda_archs"](str(nvcc))


def test_architectures(names, monkeypatch, tmp_path):
    nvcc = fake_nvcc(tmp_path, "#!/bin/sh\necho compute_80 compute_90\n")
    archs = names()["cuda_archs"]
    assert archs(str(nvcc)) == ["8.0", "9.0+PTX"]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6;;9.0a+PTX;")
    assert archs(str(nvcc)) == ["8.6", "9.0a+PTX"]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(SystemExit, match=r"wanted versions such as '8\.0;9\.0\+PTX', got 'Hopper'"):
        archs(str(nvcc))


def test_one_job_is_one_compiler(names, monkeypatch):
    def threads():
        flags = names()["NVCC_FLAGS"]
        return flags[flags.index("--threads") + 1]

    assert threads() == "2"
    monkeypatch.setenv("MAX_JOBS", "1")
    assert threads() == "1"


@pytest.mark.parametrize("cxx", ["/nowhere/g++", "  "])
def test_the_compiler_that_info_shows_is_the_builds(monkeypatch, cxx):
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("PATH", "/nowhere")
    assert info._compiler() == f"{cxx.strip() or 'g++'} not found"
    monkeypatch.setenv("CXX", f"{sys.executable} -I")
    assert info._compiler().startswith("Python 3.")
