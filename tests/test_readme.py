"""The Python of the README and of docs/getting-started.md runs as it stands: every block in processes of its own."""

import os
import re
from pathlib import Path

import pytest
from ranks import run

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
