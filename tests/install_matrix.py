"""The install matrix: one row per way and place to install, each in a fresh virtual environment.

    make test-install [ARGS='--quick']          or: python tests/install_matrix.py [--list] [--quick] [ROW ...]

A row installs from a copy of the sources, so the working tree and what is built in it stay as they are, and then runs
`smoke` where the package was installed: import, ops, a step, a step of two gloo ranks. torch is downloaded once per
version and Python and seen by the rows' environments through a .pth file; pip's own cache keeps the downloads. Whatever
cannot be had here is skipped, with the reason. The rows `python-*`, `torch-*` and `cuda-torch` take whatever build of
torch pip gives, which may be several GB each.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]
IGNORED = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "runs", "*.egg-info", "*.so", "__pycache__", ".*_cache"
)
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.10", "2.11", "2.12", "2.13", "2.14")
SETUPTOOLS = "setuptools>=77"
TIME_LIMIT = 3600  # seconds a command
ADVICE = "--no-build-isolation"
LEFT_OVER = """
import pathlib, sys, sysconfig
suffix = sysconfig.get_config_var("EXT_SUFFIX")
path = pathlib.Path(f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}/zero1_cuda/_cuda{suffix}")
path.parent.mkdir(parents=True)
path.write_bytes(b"old")
print(path)
"""
USER_SCRIPT = """
import torch

from zero1_cuda import Zero1AdamW

model = torch.nn.Linear(3, 2)
opt = Zero1AdamW(model.named_parameters(), lr=1e-3, max_grad_norm=1.0, master_weights="split")
model(torch.ones(1, 3)).sum().backward()
norm: torch.Tensor = opt.clip_grad_norm_(1.0)
opt.step()
opt.zero_grad()
report: dict[str, int] = opt.memory_report()
state = opt.full_state_dict()
opt.load_state_dict(state)
with opt.no_sync():
    pass
"""


class Skipped(Exception):
    """What the row needs cannot be had here."""


class Failed(Exception):
    """It does not install, or does not work."""


def need(condition: object, message: str) -> None:
    if not condition:
        raise Failed(message)


# -- smoke test: runs in the row's environment, far from the sources ---------------------------------------------------


def smoke() -> None:
    import torch

    import zero1_cuda
    from zero1_cuda import Zero1AdamW, ops

    assert Path(__file__).parent not in Path(zero1_cuda.__file__).parents
    assert ops.cpu_level() in ops.cpu_levels()
    assert torch.ops.zero1.adam_step is not None
    built, wanted = ops.build_info()["cuda"], torch.version.cuda is not None
    assert (ops.cuda_error() is None) == (built and wanted), ops.cuda_error()
    for dtype in (torch.float32, torch.bfloat16):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 1000).to(dtype))
        master = torch.nn.Parameter(p.detach().float().clone())
        (p.float() ** 2).sum().backward()
        assert p.grad is not None
        master.grad = p.grad.float().clone()
        Zero1AdamW([p], lr=0.1).step()
        torch.optim.AdamW([master], lr=0.1).step()
        torch.testing.assert_close(p, master.to(dtype))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--smoke-rank", folder]
        ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
        codes = [process.wait(120) for process in ranks]
    assert codes == [0, 0], f"exit status of the two ranks: {codes}"
    kernels = "with CUDA kernels" if ops.cuda_error() is None else "CPU kernels only"
    print(f"smoke test passed: zero1_cuda {zero1_cuda.__version__}, torch {torch.__version__}: {kernels}")


def smoke_rank(folder: str, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from zero1_cuda import Zero1AdamW

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    p, q = (torch.nn.Parameter(torch.ones(1000)) for _ in range(2))
    opt, plain = Zero1AdamW([p], lr=0.1), torch.optim.AdamW([q], lr=0.1)
    (p * (rank + 1)).sum().backward()
    (q * 1.5).sum().backward()  # the mean of 1 and 2
    opt.step()
    plain.step()
    torch.testing.assert_close(p, q)
    dist.barrier()
    dist.destroy_process_group()


# -- environments ------------------------------------------------------------------------------------------------------


class Matrix:
    """Folders, environments and wheels of one run."""

    def __init__(self, work: Path, torch: str) -> None:
        self.work, self.torch = work, torch
        self.log = work / "log"
        self.count = 0
        self.wheels: dict[str, Path] = {}
        for left in work.glob("[0-9][0-9][0-9]-*"):  # of a run that was stopped
            shutil.rmtree(left)

    def run(self, *command: object, cwd: Path | None = None, fails: bool = False, **env: str | None) -> str:
        """Runs it, in an empty folder; -> its output. fails: it must not succeed. env: None takes a variable away."""
        merged = {**os.environ, "ZERO1_CUDA": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **env}
        merged = {k: v for k, v in merged.items() if v is not None and k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        words = [str(word) for word in command]
        where = cwd or self.folder("cwd")
        try:
            done = subprocess.run(
                words, cwd=where, env=merged, text=True, timeout=TIME_LIMIT, stdout=-1, stderr=subprocess.STDOUT
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"{' '.join(words)}: more than {TIME_LIMIT} s") from None
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(words)}\n{done.stdout}\n")
        if (done.returncode != 0) != fails:
            raise Failed(f"exit status {done.returncode} of {' '.join(words)}")
        return done.stdout

    def folder(self, name: str) -> Path:
        self.count += 1
        path = self.work / f"{self.count:03}-{name}"
        path.mkdir()
        return path

    def sources(self, toolkit: bool = True) -> Path:
        """A copy of the sources. Without `toolkit` it does not look where a toolkit usually is."""
        path = self.folder("sources") / "zero1"
        shutil.copytree(SOURCE, path, ignore=IGNORED)
        if not toolkit and Path("/usr/local/cuda").exists():
            setup = path / "setup.py"
            text = setup.read_text()
            need('"/usr/local/cuda/bin"' in text, "setup.py does not name /usr/local/cuda/bin, which is to be hidden")
            setup.write_text(text.replace('"/usr/local/cuda/bin"', '"/nowhere"'))
        return path

    def venv(self, *packages: str, torch: str | None = "", python: str = sys.executable) -> Path:
        """A new environment's python. torch: "": that of the run; None: none."""
        root = self.folder("venv")
        self.run(python, "-m", "venv", root)
        new = root / "bin" / "python"
        if packages:
            self.fetch(new, *packages)
        if torch is not None:
            path = self.purelib(self.torch_env(torch or self.torch, python))
            (self.purelib(new) / "torch_from_elsewhere.pth").write_text(f"{path}\n")
        return new

    def torch_env(self, torch: str, python: str) -> Path:
        """The python of an environment with this torch and nothing else; made once."""
        number = self.run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
        root = self.work / f"torch-{torch.removesuffix('.*')}-python-{number}"
        new = root / "bin" / "python"
        if not (root / "complete").exists():
            shutil.rmtree(root, ignore_errors=True)
            self.run(python, "-m", "venv", root)
            self.fetch(new, f"torch=={torch}")
            self.run(new, "-m", "pip", "uninstall", "-q", "-y", "setuptools")  # a row has its own or none
            (root / "complete").touch()
        return new

    def fetch(self, python: Path, *packages: str) -> None:
        try:
            self.run(python, "-m", "pip", "install", *packages)
        except Failed:
            told = self.log.read_text().rpartition("\n$ ")[2].splitlines()
            reason = next((line for line in told if line.startswith("ERROR")), "see the log")
            raise Skipped(f"pip cannot get {' '.join(packages)}: {reason}") from None

    def purelib(self, python: Path) -> Path:
        return Path(self.run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())

    def wheel(self, torch: str = "", python: str = sys.executable, toolkit: bool = True, **env: str | None) -> Path:
        """A wheel built against this torch."""
        new, out, sources = (
            self.venv(SETUPTOOLS, torch=torch, python=python),
            self.folder("wheel"),
            self.sources(toolkit),
        )
        left = self.run(new, "-c", LEFT_OVER, cwd=sources).strip()  # what an earlier build with CUDA would have left
        told = self.run(new, "-m", "pip", "wheel", "-v", ADVICE, "--no-deps", "-w", out, sources, **env)
        need("CPU only" not in told or not (sources / left).exists(), "a library of an earlier build stays")
        (wheel,) = out.glob("*.whl")
        need("none-any" not in wheel.name, f"{wheel.name} is not a platform wheel")
        names = zipfile.ZipFile(wheel).namelist()
        need(any(re.match(r"zero1_cuda/_C\..*\.so$", name) for name in names), f"no extension module in {wheel.name}")
        return wheel

    def install_wheel(self, wheel: Path, torch: str = "", python: str = sys.executable) -> str:
        new = self.venv(torch=torch, python=python)
        self.run(new, "-m", "pip", "install", "--no-deps", wheel)
        return self.smoke(new)

    def smoke(self, python: Path) -> str:
        """Runs the smoke test and `info` there; -> what it says of torch."""
        folder = self.folder("smoke")
        script = shutil.copy(__file__, folder)
        self.run(python, "-m", "zero1_cuda", "info", "--json")
        told = self.run(python, script, "--smoke", cwd=folder)
        found = re.search(r"torch \S+: .* kernels.*", told)
        return found.group() if found else ""


def path_without(matrix: Matrix, program: str) -> str:
    """PATH with this program hidden: a folder that has it is replaced by links to everything else in it."""
    folders = []
    for folder in map(Path, os.environ["PATH"].split(os.pathsep)):
        if (folder / program).exists():
            links = matrix.folder(f"without-{program}")
            for entry in folder.iterdir():
                if entry.name != program:
                    (links / entry.name).symlink_to(entry)
            folder = links
        folders.append(str(folder))
    return os.pathsep.join(folders)


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "")
    return shutil.which("nvcc", path=os.pathsep.join([f"{home}/bin", os.environ["PATH"], "/usr/local/cuda/bin"]))


def no_toolkit(matrix: Matrix) -> dict[str, str | None]:
    """An environment without nvcc; for sources(toolkit=False)."""
    return {"ZERO1_CUDA": None, "CUDA_HOME": None, "CUDA_PATH": None, "PATH": path_without(matrix, "nvcc")}


def interpreter(version: str) -> str:
    """python3.x: on PATH, or among pyenv's."""
    names = [shutil.which(f"python{version}"), *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for name in filter(None, names):
        probe = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([str(name), "-c", probe], capture_output=True, text=True)
        if done.stdout.strip() == version:
            return str(name)
    raise Skipped(f"no python{version} here that can make virtual environments")


# -- rows --------------------------------------------------------------------------------------------------------------


def metadata(m: Matrix) -> str:
    """metadata needs no torch"""
    python = m.venv(SETUPTOOLS, torch=None)
    out = m.folder("metadata")
    code = f"from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel({str(out)!r}))"
    m.run(python, "-c", code, cwd=m.sources())
    (found,) = out.glob("*.dist-info/METADATA")
    need("Requires-Dist: torch>=2.10" in found.read_text(), "torch>=2.10 is not required")
    told = m.run(python, "-m", "pip", "install", ADVICE, m.sources(), "--no-deps", fails=True)
    need("install torch >= 2.10" in told and "Traceback" not in told, "without torch, no line says what to do")
    return "and a build without it says what to do"


def isolated(m: Matrix) -> str:
    """pip wheel with build isolation: a wheel, or advice"""
    new, out = m.venv(), m.folder("wheel")
    command = (new, "-m", "pip", "wheel", "--no-deps", "-w", out, m.sources())
    try:
        m.run(*command)
    except Failed:
        told = m.log.read_text().rpartition("\n$ ")[2]
        if "No matching distribution found for setuptools" in told:
            raise Skipped("pip cannot get setuptools") from None
        need(ADVICE in "\n".join(told.splitlines()[-12:]), f"the last lines do not name {ADVICE}")
        need("Traceback" not in told, "a traceback")
        return f"says {ADVICE}"
    return m.install_wheel(next(out.glob("*.whl")))


def not_isolated(m: Matrix) -> str:
    """pip install --no-build-isolation, with torch and setuptools alone"""
    new = m.venv(SETUPTOOLS)
    m.run(new, "-m", "pip", "install", ADVICE, m.sources())
    return m.smoke(new)


def wheel(m: Matrix) -> str:
    """a wheel, installed in another environment"""
    return m.install_wheel(m.wheel())


def sdist(m: Matrix) -> str:
    """an sdist made without torch, installed away from the repository"""
    maker, out = m.venv(SETUPTOOLS, torch=None), m.folder("sdist")
    m.run(maker, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})", cwd=m.sources())
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        compiled = [name for name in tar.getnames() if name.endswith((".so", ".o", ".pyc"))]
    need(not compiled, f"compiled files in the sdist: {compiled}")
    new = m.venv(SETUPTOOLS)
    m.run(new, "-m", "pip", "install", ADVICE, archive)
    return m.smoke(new)


def editable(m: Matrix) -> str:
    """pip install -e"""
    new, sources = m.venv(SETUPTOOLS), m.sources()
    m.run(new, "-m", "pip", "install", ADVICE, "-e", sources)
    where = m.run(new, "-c", "import zero1_cuda; print(zero1_cuda.__file__)").strip()
    need(Path(where).is_relative_to(sources), f"imported from {where}")
    return m.smoke(new)


def old_setuptools(m: Matrix) -> str:
    """with the setuptools that Python 3.11 brings along: one line"""
    new = m.venv("setuptools==65.5.0")
    told = m.run(new, "-m", "pip", "install", ADVICE, m.sources(), fails=True)
    need("needs setuptools >= 77, got 65.5.0" in told and "Traceback" not in told, "no line says what to do")
    return "says what to do"


def no_ninja(m: Matrix) -> str:
    """without ninja"""
    new = m.venv(SETUPTOOLS)
    told = m.run(new, "-m", "pip", "install", "-v", ADVICE, m.sources(), PATH=path_without(m, "ninja"))
    need("ninja not found" in told, "the build does not say that ninja is missing")
    return m.smoke(new)


def no_nvcc(m: Matrix) -> str:
    """without nvcc: CUDA left out, with one line"""
    env, new, sources = no_toolkit(m), m.venv(SETUPTOOLS), m.sources(toolkit=False)
    asked = {**env, "ZERO1_CUDA": "1"}
    told = m.run(new, "-m", "pip", "wheel", ADVICE, "--no-deps", sources, fails=True, **asked)
    need("ZERO1_CUDA=1, but nvcc" in told, "ZERO1_CUDA=1 without nvcc does not say what is missing")
    told = m.run(new, "-m", "pip", "install", "-v", ADVICE, sources, **env)
    need(told.count("CPU only, nvcc not found") == 1, "not one line says that nvcc was not found")
    told = m.run(new, "-m", "zero1_cuda", "info", **{**env, "CUDA_HOME": "/nowhere"})
    need("nvcc: not found" in told, "info does not say that nvcc is missing")
    return m.smoke(new)


def nvcc_without_gpu(m: Matrix) -> str:
    """nvcc, no GPU: CUDA kernels are built (for one architecture)"""
    if nvcc() is None:
        raise Skipped("no nvcc here")
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST", "9.0")
    built = m.wheel(ZERO1_CUDA="1", CUDA_VISIBLE_DEVICES="", TORCH_CUDA_ARCH_LIST=archs)
    names = zipfile.ZipFile(built).namelist()
    need(any(name.startswith("zero1_cuda/_cuda.") for name in names), f"no _cuda in {built.name}")
    return m.install_wheel(built)


def release(m: Matrix) -> str:
    """twine check and auditwheel show accept what would be published"""
    tools, out = m.venv(SETUPTOOLS, "twine", "auditwheel"), m.folder("sdist")
    m.run(tools, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})", cwd=m.sources())
    built = m.wheel(ZERO1_CUDA=None, TORCH_CUDA_ARCH_LIST=os.environ.get("TORCH_CUDA_ARCH_LIST", "9.0"))
    told = m.run(tools, "-m", "twine", "check", "--strict", *out.glob("*.tar.gz"), built)
    need(told.count("PASSED") == 2, "twine has not passed both")
    need("LICENSE" in " ".join(zipfile.ZipFile(built).namelist()), "no licence in the wheel")
    shown = " ".join(m.run(tools, "-m", "auditwheel", "show", built).split())
    need("is consistent with the following platform tag" in shown, "auditwheel finds no platform tag")
    limit = re.search(r'constrains the platform tag to "(\w+)"', shown)
    return f"could be published as {limit.group(1)}" if limit else ""


def typed(m: Matrix) -> str:
    """mypy --strict passes for a script that uses the package"""
    new, folder = m.venv(SETUPTOOLS, "mypy"), m.folder("script")
    m.run(new, "-m", "pip", "install", ADVICE, "--no-deps", m.sources())
    (folder / "script.py").write_text(USER_SCRIPT)
    m.run(new, "-m", "mypy", "--strict", "script.py", cwd=folder)
    (folder / "script.py").write_text(USER_SCRIPT.replace("lr=1e-3", "lr='much'"))
    told = m.run(new, "-m", "mypy", "--strict", "script.py", cwd=folder, fails=True)
    need('Argument "lr" to "Zero1AdamW" has incompatible type "str"' in told, "mypy does not see a wrong argument")
    return ""


def cuda_torch(m: Matrix) -> str:
    """a CUDA build of torch without the toolkit"""
    env = no_toolkit(m)
    for version in (m.torch, f"{TORCHES[-1]}.*"):
        python = m.torch_env(version, sys.executable)
        if m.run(python, "-c", "import torch; print(torch.version.cuda)").split()[-1] != "None":
            return m.install_wheel(m.wheel(version, toolkit=False, **env), version)
    raise Skipped("pip gives CPU builds of torch only")


def one_job(m: Matrix) -> str:
    """MAX_JOBS=1: one compiler at a time"""
    new, folder = m.venv(SETUPTOOLS, "ninja"), m.folder("one-job")
    counting, seen = folder / "counting-g++", folder / "seen"
    compiler = os.environ.get("CXX") or "g++"
    counting.write_text(f'#!/bin/sh\necho +1 >>{seen}\n{compiler} "$@"\ncode=$?\necho -1 >>{seen}\nexit $code\n')
    counting.chmod(0o755)
    m.run(new, "-m", "pip", "install", ADVICE, m.sources(), MAX_JOBS="1", CXX=str(counting))
    running = most = 0
    for line in seen.read_text().split():
        running += int(line)
        most = max(most, running)
    need(most == 1, f"{most} compilers at a time")
    return m.smoke(new)


def python_row(version: str) -> Callable[[Matrix], str]:
    def row(m: Matrix) -> str:
        python = interpreter(version)
        return m.install_wheel(m.wheel(python=python), python=python)

    row.__doc__ = f"Python {version}: a wheel of its own"
    return row


def torch_row(version: str) -> Callable[[Matrix], str]:
    def row(m: Matrix) -> str:
        if "oldest" not in m.wheels:
            archs = os.environ.get("TORCH_CUDA_ARCH_LIST", "9.0")  # with CUDA kernels, if that is possible here
            m.wheels["oldest"] = m.wheel(f"{TORCHES[0]}.*", ZERO1_CUDA=None, TORCH_CUDA_ARCH_LIST=archs)
        return m.install_wheel(m.wheels["oldest"], f"{version}.*")

    row.__doc__ = f"torch {version}: the wheel built against {TORCHES[0]}"
    return row


QUICK: dict[str, Callable[[Matrix], str]] = {
    "metadata": metadata,
    "isolated": isolated,
    "not-isolated": not_isolated,
    "wheel": wheel,
    "sdist": sdist,
    "editable": editable,
    "old-setuptools": old_setuptools,
    "no-ninja": no_ninja,
    "no-nvcc": no_nvcc,
    "one-job": one_job,
}
ROWS: dict[str, Callable[[Matrix], str]] = {
    **QUICK,
    "typed": typed,
    "release": release,
    "nvcc-no-gpu": nvcc_without_gpu,
    "cuda-torch": cuda_torch,
    **{f"python-{version}": python_row(version) for version in PYTHONS},
    **{f"torch-{version}": torch_row(version) for version in TORCHES},
}


def run_row(name: str, m: Matrix) -> tuple[str, str, float]:
    """(result, note, seconds) of one row; its folders are removed."""
    m.log = m.work / f"{name}.log"
    m.log.write_text("")
    begin = time.monotonic()
    try:
        result, note = "ok", ROWS[name](m)
    except Skipped as reason:
        result, note = "skipped", str(reason)
    except Exception as error:  # one broken row must not hide the others
        result, note = "FAILED", f"{type(error).__name__}: {error}" if not isinstance(error, Failed) else str(error)
        print("\n".join(m.log.read_text().splitlines()[-40:]), flush=True)
    keep = {path.parent for path in m.wheels.values()}
    for folder in m.work.glob("[0-9][0-9][0-9]-*"):
        if folder not in keep:
            shutil.rmtree(folder)
    return result, note, time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description="Installs the package in every way there is and tries it.")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="default: all")
    parser.add_argument("--list", action="store_true", help="the rows there are")
    parser.add_argument("--quick", action="store_true", help="rows that need one torch and compile no CUDA")
    parser.add_argument("--torch", help="version for rows that want any; default: the one that is installed here")
    parser.add_argument("--work", type=Path, help="a folder for torch and logs that is kept; default: a temporary one")
    parser.add_argument("--smoke", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--smoke-rank", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        smoke()
        return 0
    if args.smoke_rank:
        smoke_rank(args.smoke_rank[0], int(args.smoke_rank[1]))
        return 0
    if args.list:
        for name, row in ROWS.items():
            print(f"{name:14} {'' if name in QUICK else '(long) '}{row.__doc__}")
        return 0
    unknown = sorted(set(args.rows) - set(ROWS))
    if unknown:
        parser.error(f"no such row: {', '.join(unknown)} (see --list)")
    names = args.rows or list(QUICK if args.quick else ROWS)
    torch = args.torch
    if torch is None:
        try:
            torch = importlib.metadata.version("torch").partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            torch = f"{TORCHES[-2]}.*"
    table = []
    with tempfile.TemporaryDirectory(prefix="zero1-install-") as temporary:
        work = (args.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        m = Matrix(work, torch)
        for name in names:
            print(f"{name}: {ROWS[name].__doc__} ...", flush=True)
            table.append((name, *run_row(name, m)))
            print(f"{name}: {table[-1][1]} ({table[-1][3]:.0f} s)", flush=True)
            if args.work is None and name.startswith(("python-", "torch-", "cuda-")):  # gigabytes
                for folder in m.work.glob("torch-*-python-*"):
                    shutil.rmtree(folder)
    print(f"\n{'row':14} {'result':8} {'seconds':>7}  note")
    for name, result, note, seconds in table:
        print(f"{name:14} {result:8} {seconds:7.0f}  {' '.join(note.split())[:200]}")
    failed = [name for name, result, *_ in table if result == "FAILED"]
    print(f"\n{len(table) - len(failed)} of {len(table)} rows passed or were skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
