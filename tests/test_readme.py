"""The Python of the README and of docs/getting-started.md runs as it stands: every block in processes of its own. So do
the examples of the docstrings.
"""

import doctest
import importlib
import os
import re
from pathlib import Path

import pytest
import torch
from helpers.ranks import run

ROOT = Path(__file__).parents[1]
BLOCKS = [
    block
    for page in ("README.md", "docs/getting-started.md")
    for block in re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
]


def execute(rank, world, number, folder):
    os.chdir(folder)
    exec(compile(BLOCKS[number], f"Python block {number}", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(number, tmp_path):
    run(1, execute, number, str(tmp_path), group=False)
    run(2, execute, number, str(tmp_path))


def test_the_loop_is_there():
    lines = ["loss.backward()", "opt.clip_grad_norm_(1.0)", "opt.step()", "opt.zero_grad()"]
    assert any(all(line in block for line in lines) for block in BLOCKS)


@pytest.mark.parametrize(("module", "least"), [("optimizer", 8), ("memory.model", 2), ("checkpoint.dcp_tensors", 1)])
def test_examples_of_docstrings(module, least):
    """One rank, no process group."""
    module = importlib.import_module(f"zero1_cuda.{module}")
    found = [test for test in doctest.DocTestFinder().find(module, extraglobs={"torch": torch}) if test.examples]
    assert len(found) >= least
    for test in found:
        report = []
        assert doctest.DocTestRunner().run(test, out=report.append).failed == 0, "".join(report)
