"""Imports and includes go one way: every Python module imports from lower floors only, so there are no cycles; one
module alone calls collectives; kernels and the formula know nothing of Torch; and the package is light to import.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import zero1_cuda

PACKAGE = Path(zero1_cuda.__file__).parent
CSRC = Path(__file__).parents[1] / "csrc"
FLOORS = [
    {"ops", "settings", "memory", "profile", "arguments"},
    {"layout", "shard", "group_options", "reference"},
    {"buffers", "collectives", "planner"},
    {"roster", "control", "bucket_run"},
    {"reducer", "accounting"},
    {"engine"},
    {"gather_hooks", "checkpoint"},
    {"optimizer"},
    {"__init__", "bench"},
    {"__main__"},
]
FLOOR = {name: number for number, floor in enumerate(FLOORS) for name in floor}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))
COLLECTIVES = re.compile(
    r"(all_|reduce|broadcast|gather|scatter|send|recv|isend|irecv|barrier|batch_isend|monitored|new_group|new_subgroups)"
)


def tree(module):
    return ast.parse((PACKAGE / f"{module}.py").read_text())


def imported(module):
    """The package's own modules that a module imports, wherever in it."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "zero1_cuda"):
            path = (node.module or "").removeprefix("zero1_cuda").lstrip(".")
            yield from [path.split(".")[0]] if path else [a.name for a in node.names]
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "zero1_cuda":
                    yield name.name.partition(".")[2] or "__init__"


def test_every_module_has_a_floor():
    assert sorted(FLOOR) == MODULES


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    for name in imported(module):
        if name != "_C":
            assert FLOOR[name] < FLOOR[module], f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_one_module_calls_collectives(module):
    aliases = {"torch.distributed"}
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            aliases |= {a.asname for a in node.names if a.name.startswith("torch.distributed") and a.asname}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            bad = [a.name for a in node.names if COLLECTIVES.match(a.name)]
            assert module == "collectives" or not bad
    used = {
        node.attr
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases and COLLECTIVES.match(node.attr)
    }
    assert bool(used) == (module == "collectives")
    assert all(hasattr(dist, name) for name in used)


def test_layout_knows_nothing_of_ranks():
    for module in ("layout", "shard", "buffers", "memory"):
        text = (PACKAGE / f"{module}.py").read_text()
        assert "init_process_group" not in text
        assert not re.search(r"import torch\.distributed\b(?!\.checkpoint)", text)


# -- C++ --------------------------------------------------------------------------------------------------------------

FILES = [path for path in sorted(CSRC.rglob("*")) if path.suffix in (".h", ".cuh", ".cu", ".cpp", ".hpp", ".inl")]


def includes(path):
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def place(path):
    """Which part of the sources a file belongs to."""
    return path.relative_to(CSRC).parts[0] if path.parent != CSRC else "bindings"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(CSRC)))
def test_includes_go_one_way(path):
    own = {p.name: place(p) for p in FILES}
    for name in includes(path):
        below = {"include": {"include"}, "cpu": {"cpu", "include"}, "cuda": {"cuda", "include"}}.get(place(path))
        if below is None:
            continue
        assert name.split("/")[0] not in ("torch", "ATen", "c10", "pybind11", "caffe2", "Python.h"), f"Torch: {name}"
        assert "torch" not in name.lower()
        if "/" not in name or name.startswith((".", "zero1/")):
            assert own.get(Path(name).name, place(path)) in below, name


def test_there_are_sources():
    assert {place(p) for p in FILES} == {"bindings", "cpu", "cuda", "include"}


# -- light ------------------------------------------------------------------------------------------------------------


def test_importing_the_package_imports_no_torch():
    code = "import sys, zero1_cuda; zero1_cuda.__version__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert zero1_cuda.__all__ == ["Zero1Adam", "Zero1AdamW"]
    with pytest.raises(AttributeError, match="no_such_thing"):
        zero1_cuda.no_such_thing  # noqa: B018
