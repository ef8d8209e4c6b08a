"""Imports and includes go one way: every Python module imports from lower floors only, so there are no cycles; one
room alone calls collectives; kernels and the formula know nothing of Torch; and the package is light to import.
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
# Rooms, from the lowest up: a module imports from its own room and from lower ones; nowhere in a circle.
ROOMS = [
    {"ops", "config", "memory.model"},
    {"reference", "params", "comm"},
    {"step"},
    {"checkpoint", "memory"},
    {"optimizer"},
    {"__init__", "cli", "__main__"},
]
FLOOR = {name: number for number, room in enumerate(ROOMS) for name in room}
MODULES = sorted(".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py"))
COLLECTIVES = re.compile(
    r"(all_|reduce|broadcast|gather|scatter|send|recv|isend|irecv|barrier|batch_isend|monitored|new_group|new_subgroups)"
)


def floor(module):
    """The number of the room a module belongs to."""
    while module not in FLOOR:
        module = module.rpartition(".")[0]
    return FLOOR[module]


def tree(module):
    return ast.parse(PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_text())


def imported(module):
    """The package's own modules that a module imports, wherever in it."""
    known = {name.removesuffix(".__init__") for name in MODULES}
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "zero1_cuda"):
            base = module.split(".")[: -node.level] if node.level else []
            path = ".".join([*base, *filter(None, [(node.module or "").removeprefix("zero1_cuda").lstrip(".")])])
            for alias in node.names:
                inner = f"{path}.{alias.name}".lstrip(".")
                if alias.name != "_C":
                    yield inner if inner in known else path or "__init__"
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "zero1_cuda":
                    yield name.name.partition(".")[2] or "__init__"


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    for name in imported(module):
        assert floor(name) <= floor(module), f"{module} imports {name}"


def test_there_are_no_circles():
    below = {module.removesuffix(".__init__"): set(imported(module)) for module in MODULES}
    left = dict(below)
    while left:
        free = [m for m in left if not (left[m] & set(left)) - {m}]
        assert free, f"modules that import each other: {sorted(left)}"
        for m in free:
            del left[m]


@pytest.mark.parametrize("module", MODULES)
def test_one_room_calls_collectives(module):
    aliases = {"torch.distributed"}
    allowed = module.startswith("comm.")
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            aliases |= {a.asname for a in node.names if a.name.startswith("torch.distributed") and a.asname}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            bad = [a.name for a in node.names if COLLECTIVES.match(a.name)]
            assert allowed or not bad
    used = {
        node.attr
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases and COLLECTIVES.match(node.attr)
    }
    assert allowed or not used
    assert bool(used) == (module in ("comm.grid", "comm.collectives"))
    assert all(hasattr(dist, name) for name in used)


def test_layout_knows_nothing_of_ranks():
    for module in ("params.layout", "checkpoint.dcp_tensors", "params.buffers", "memory.model"):
        text = PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_text()
        assert "init_process_group" not in text
        assert not re.search(r"import torch\.distributed\b(?!\.checkpoint)", text)


# -- C++ --------------------------------------------------------------------------------------------------------------

FILES = [path for path in sorted(CSRC.rglob("*")) if path.suffix in (".h", ".cuh", ".cu", ".cpp", ".hpp", ".inl")]


# What each part of the sources may include.
BELOW = {
    "include": {"include"},
    "cpu": {"cpu", "include"},
    "cuda": {"cuda", "include"},
    "bench": {"bench", "cpu", "cuda", "include"},
}


def includes(path):
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def place(path):
    """Which part of the sources a file belongs to."""
    return path.relative_to(CSRC).parts[0] if path.parent != CSRC else "bindings"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(CSRC)))
def test_includes_go_one_way(path):
    own = {p.name: place(p) for p in FILES}
    for name in includes(path):
        if place(path) == "bindings":
            continue
        below = BELOW[place(path)]
        assert name.split("/")[0] not in ("torch", "ATen", "c10", "pybind11", "caffe2", "Python.h"), f"Torch: {name}"
        assert "torch" not in name.lower()
        assert own.get(Path(name).name, place(path)) in below, name


def test_there_are_sources():
    assert {place(p) for p in FILES} == {"bindings", *BELOW}


# -- light ------------------------------------------------------------------------------------------------------------


def test_importing_the_package_imports_no_torch():
    code = "import sys, zero1_cuda; zero1_cuda.__version__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert zero1_cuda.__all__ == ["Zero1Adam", "Zero1AdamW"]
    with pytest.raises(AttributeError, match="no_such_thing"):
        zero1_cuda.no_such_thing  # noqa: B018
