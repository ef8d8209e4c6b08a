"""`make gpu-check` runs through on the CPU, so that on a GPU it fails for what is wrong there only: every test file is
run and reported, a file that dies or hangs is a failure of its own, and what is missing is told in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gpu_check
import pytest
import torch
from helpers.sanitizer import sanitize

ROOT = Path(__file__).parents[1]


def test_every_file_has_its_limit() -> None:
    files = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files == gpu_check.LIMITS.keys() - {"build"}


def test_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    command = [sys.executable, str(ROOT / "bench" / "gpu_check.py"), "--device", "cpu", "--skip", "build"]
    done = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    tests = result["checks"]["all"]["tests"]
    skipped = {test["test"]: test["reason"] for test in tests if test["status"] == "skip"}
    assert set(skipped) == {
        "test_ops_follow_the_current_stream",
        "test_replayed_steps_are_eager_steps",
        "test_sanitizer[memcheck]",
        "test_sanitizer[racecheck]",
    }
    assert all("CUDA" in reason for reason in skipped.values())
    assert {test["status"] for test in tests} == {"pass", "skip"}
    assert result["counts"] == {"pass": len(tests) - len(skipped), "fail": 0, "skip": len(skipped)}
    measured = {test["test"]: test["details"] for test in tests}
    assert measured["test_memory"]["predicted"] == 16 * 500_000
    assert len(measured["test_benchmark"]["rows"]) == 1
    assert all(test["seconds"] >= 0 for test in tests)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], list[str]]:
    """Puts a file in place of those in tests/gpu, beside their conftest."""
    folder = tmp_path / "gpu"
    folder.mkdir()
    monkeypatch.setattr(gpu_check, "TESTS", folder)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    for conftest in ("conftest.py", "gpu/conftest.py"):
        (tmp_path / conftest).write_text((ROOT / "tests" / conftest).read_text())

    def write(text: str) -> list[str]:
        (folder / "test_fake.py").write_text(f"import os, pytest, time\npytestmark = pytest.mark.gpu\n{text}")
        return ["fake"]

    return write


def test_a_file_that_fails(fake: Callable[[str], list[str]]) -> None:
    found = gpu_check.tests_in(fake("def test_a(): pass\ndef test_b(): assert 1 == 2\n"), "cpu", 60)
    assert [(f["test"], f["status"]) for f in found] == [("test_a", "pass"), ("test_b", "fail")]
    assert "assert 1 == 2" in found[1]["reason"]


def test_a_file_that_dies_keeps_what_it_has_found(fake: Callable[[str], list[str]]) -> None:
    text = "def test_a(record_property): record_property('size', 3)\ndef test_b(): os._exit(7)\n"
    first, last = gpu_check.tests_in(fake(text), "cpu", 60)
    assert (first["test"], first["status"], first["details"]) == ("test_a", "pass", {"size": 3})
    assert last["status"] == "fail"
    assert "the process died, exit status 7" in last["reason"]
    assert "test_b" in last["reason"]


def test_a_file_that_hangs_is_ended(fake: Callable[[str], list[str]]) -> None:
    (found,) = gpu_check.tests_in(fake("time.sleep(1000)\n"), "cpu", 4)
    assert found["status"] == "fail"
    assert "no result within 4 s" in found["reason"]


def test_a_file_without_tests_is_a_failure(fake: Callable[[str], list[str]]) -> None:
    (found,) = gpu_check.tests_in(fake(""), "cpu", 60)
    assert found["status"] == "fail"


def test_needs_pytest_and_torch_only() -> None:
    """Where nothing can be installed there may be no hypothesis and no numpy."""
    script = """
import sys
from importlib.machinery import PathFinder

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, *where):
        return None if name.partition(".")[0] in ("hypothesis", "numpy") else super().find_spec(name, *where)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
import pytest
sys.exit(pytest.main())
"""
    options = ["--gpu-device", "cpu", "-p", "no:hypothesispytest", "-p", "no:cacheprovider", "tests/gpu"]
    command = [sys.executable, "-c", script, *options, "-k", "optimizer or two_ranks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout.splitlines()[-1]


def test_without_pytest_is_one_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    assert gpu_check.main(["--device", "cpu"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "pytest is missing" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "there is no GPU" in line


def test_sanitizer_is_called_as_it_is_read(tmp_path: Path) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text('#!/bin/sh\nshift 4\necho "========= ERROR SUMMARY: 0 errors"\nexec "$@"\n')
    program.chmod(0o755)
    assert sanitize(str(program), "racecheck", "cpu") == "========= ERROR SUMMARY: 0 errors"
    program.write_text('#!/bin/sh\necho "========= Invalid __global__ write"\nexit 99\n')
    with pytest.raises(AssertionError, match="exit status 99\n========= Invalid"):
        sanitize(str(program), "memcheck", "cpu")
    program.write_text('#!/bin/sh\necho "========= Error: Device not supported"\nexit 1\n')
    with pytest.raises(pytest.skip.Exception, match="cannot work here"):
        sanitize(str(program), "memcheck", "cpu")
    program.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(AssertionError):  # a sanitizer that runs nothing has shown nothing
        sanitize(str(program), "memcheck", "cpu")
