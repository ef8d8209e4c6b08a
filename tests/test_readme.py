"""The Python of the README runs as it stands: every block in a process of its own, alone and on two ranks."""

import os
import re
from pathlib import Path

import pytest
from ranks import run

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def execute(rank, world, number, folder):
    os.chdir(folder)
    exec(compile(BLOCKS[number], f"README.md, Python block {number}", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(number, tmp_path):
    run(1, execute, number, str(tmp_path), group=False)
    run(2, execute, number, str(tmp_path))


def test_the_loop_is_there():
    lines = ["loss.backward()", "opt.clip_grad_norm_(1.0)", "opt.step()", "opt.zero_grad()"]
    assert any(all(line in block for line in lines) for block in BLOCKS)
