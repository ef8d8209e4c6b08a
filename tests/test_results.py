"""A measured figure can be traced: every result in bench/results says its command, commit and date, and every script in
bench/ writes its own that way. The scripts run, on sizes that say nothing."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
from pathlib import Path

import common
import pytest
import torch

BENCH = Path(__file__).parents[1] / "bench"
SCRIPTS = {
    "collectives": ["--numel", "65536"],
    "checkpoint": ["--mb", "26", "--rounds", "1"],
    "cost": ["--ranks", "2", "--numel", "1048576"],
    "host_time": ["--params", "20", "--steps", "3"],
    "long_run": ["--steps", "2"],
    "numerics": ["--elements", "1000", "--steps", "2", "--path-elements", "100"],
    "step": ["--width", "64", "--layers", "2", "--steps", "1"],
    "timeline": ["--width", "64", "--layers", "2"],
}


def check_origin(found: dict[str, str]) -> None:
    assert found["command"].startswith(("python ", "make "))
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", found["commit"])
    assert datetime.datetime.fromisoformat(found["date"]).tzinfo is not None


@pytest.mark.parametrize("path", sorted((BENCH / "results").glob("*.json")), ids=lambda path: path.stem)
def test_a_result_says_where_it_is_from(path: Path) -> None:
    check_origin(json.loads(path.read_text()))


def test_every_script_writes_by_common() -> None:
    scripts = {path.stem: path.read_text() for path in BENCH.glob("*.py") if path.stem != "common"}
    assert scripts.keys() == SCRIPTS.keys() | {"gpu_check"}
    for name, text in scripts.items():
        assert "common.write(" in text, name
        assert not re.search(r"json\.dump\(|ArgumentParser\(|mp\.spawn", text), name


def test_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(BENCH / "step.py"), "--ranks", "2", "--json", str(tmp_path), "--steps=3"])
    common.write(tmp_path / "new" / "a.json", {"rows": [1]})
    found = json.loads((tmp_path / "new" / "a.json").read_text())
    assert found["command"] == "python bench/step.py --ranks 2 --steps=3"
    assert found["rows"] == [1]
    assert found["versions"]["torch"] == torch.__version__
    assert found["commit"] == common.commit()
    common.write(None, {"rows": []})
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *names, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(common, "ROOT", tmp_path)
    assert common.commit() == "unknown"
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    git("init", "-q")
    for path in (tmp_path / "a", results / "b"):
        path.write_text("1")
    git("add", ".")
    git("commit", "-qm", "first")
    head = git("rev-parse", "HEAD").strip()
    (results / "b").write_text("2")
    assert common.commit() == head, "a result that was written before does not count"
    (tmp_path / "a").write_text("2")
    assert common.commit() == head + "-dirty"


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_and_writes_what_it_found(name: str, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    command = [sys.executable, str(BENCH / f"{name}.py"), *SCRIPTS[name], "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    check_origin(found)
    assert found["command"] == " ".join(["python", f"bench/{name}.py", *SCRIPTS[name]])
    if name == "step":
        ways = [row["way"] for row in found["runs"][0]["rows"]]
        assert ways[:6] == [
            "forward + backward",
            "Zero1AdamW",
            "Zero1AdamW, overlap_gather",
            "Zero1AdamW, split",
            "DDP + fused AdamW",
            "ZeroRedundancyOptimizer",
        ]
