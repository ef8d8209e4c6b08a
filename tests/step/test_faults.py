"""A rank dies, hangs or cannot write, and nothing is lost but the steps since the last checkpoint: the other ranks end
with an error within the timeout of their process group, no part of a checkpoint is taken for a whole one, and the run
resumes from the last one and ends with the bits of an unbroken run. So does the example, under torchrun too.
"""

import contextlib
import datetime
import importlib.util
import json
import multiprocessing.connection
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.ranks import _context, digest, equal_on_all_ranks, run, snapshot
from torch import nn

from zero1_cuda import Zero1AdamW
from zero1_cuda.step import bucket

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_gpt.py"
TIMEOUT = 6  # seconds, of the process group
STEPS, EVERY, AT = 8, 2, 5  # the fault strikes in the step after which the third checkpoint is made


def example():
    """The module, for its way to save and load."""
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- faults -----------------------------------------------------------------------------------------------------------


def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)
    time.sleep(60)


def die_at_a_folder(path, target, rename=pathlib.Path.rename):
    return die() if path.is_dir() else rename(path, target)


def replace(owner, name, new):
    """For the rest of this process."""
    setattr(owner, name, new)


def fill(folder):
    """No space is left afterwards."""
    for size in (2**16, 2**10, 1):
        with open(folder / "filler", "ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"0" * size)
    assert shutil.disk_usage(folder).free == 0


def no_large_files(folder):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))


def raise_in_forward(*_):
    raise ArithmeticError("a fault of the model")


# Called on one rank with the model and the checkpoints' folder, before a step.
FAULTS = {
    "killed in backward": lambda m, _: m[0].weight.register_hook(lambda g: die()),
    "terminated in backward": lambda m, _: m[0].weight.register_hook(lambda g: die(signal.SIGTERM)),
    "killed in the step": lambda m, _: replace(bucket, "start_gather", lambda *_: die()),
    "killed in save": lambda m, _: replace(os, "fsync", lambda *_: die()),
    "killed before the metadata": lambda m, _: replace(pathlib.Path, "rename", lambda *_: die()),  # DCP renames it
    "killed before the rename": lambda m, _: replace(pathlib.Path, "rename", die_at_a_folder),
    "killed before it is the latest": lambda m, _: replace(pathlib.Path, "replace", lambda *_: die()),
    "no large files": lambda m, folder: no_large_files(folder),
    "disk full": lambda m, folder: fill(folder),
    "late": lambda m, _: time.sleep(TIMEOUT + 4),
    "exception in forward": lambda m, _: m.register_forward_pre_hook(raise_in_forward),
}


def rank_process(pipe, rank, world, rendezvous, folder, fault, faulty):
    """One rank of a training run. Tells: ("from", step), ("fault", time), then (how it ended, time, text)."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timeout)
    recipe = example()
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 10))
    opt = Zero1AdamW(model.parameters(), lr=0.02, max_grad_norm=1.0, bucket_cap_mb=0.002)
    parts = {"model": model, "optimizer": opt, "schedule": torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)}
    progress = {"step": 0}
    ended = ("done", "")
    try:
        if (folder / "latest").exists():
            recipe.load(folder, parts, progress)
        pipe.send(("from", progress["step"]))
        for t in range(progress["step"], STEPS):
            if fault and t == AT and rank == faulty:
                pipe.send(("fault", time.monotonic()))
                FAULTS[fault](model, folder)
            torch.manual_seed(100 * t + rank)
            model(torch.randn(4, 20)).square().sum().backward()
            opt.step()
            opt.zero_grad()
            parts["schedule"].step()
            progress["step"] = t + 1
            if (t + 1) % EVERY == 0:
                recipe.save(folder, parts, progress, rank)
        equal_on_all_ranks(model.parameters())
        ended = ("done", digest(snapshot(opt, list(model.parameters()))))
    except BaseException as error:
        ended = (type(error).__name__, str(error))
    pipe.send((ended[0], time.monotonic(), ended[1]))
    if ended[0] == "done":
        dist.barrier()
    os._exit(0)


def launch(world, folder, fault=None, faulty=1):
    """What every rank told, and its exit code."""
    rendezvous = folder.parent / f"rendezvous-{time.monotonic_ns()}"
    folder.mkdir(exist_ok=True)
    pipes, processes, told = [], [], []
    for rank in range(world):
        pipe, theirs = _context.Pipe()
        args = (theirs, rank, world, rendezvous, folder, fault, faulty)
        process = _context.Process(target=rank_process, args=args, daemon=True)
        process.start()
        theirs.close()
        pipes.append(pipe)
        processes.append(process)
        told.append([])
    end = time.monotonic() + 60
    reading = dict(zip(pipes, told, strict=True))
    while reading and time.monotonic() < end:
        for pipe in multiprocessing.connection.wait(list(reading), end - time.monotonic()):
            try:
                reading[pipe].append(pipe.recv())
            except (EOFError, ConnectionResetError):
                del reading[pipe]
    for process in processes:
        process.join(5)
        process.kill()
        process.join()
    assert not reading, f"ranks hang: {told}"
    return told, [process.exitcode for process in processes]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """What the ranks hold after a run without a fault, by number of ranks."""
    ends = {}
    for world in (2, 3):
        told, _ = launch(world, tmp_path_factory.mktemp("unbroken") / "checkpoints")
        assert all(t[0] == ("from", 0) and t[-1][0] == "done" for t in told), told
        ends[world] = told[0][-1][2]
    return ends


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB, where one can be made."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True
    )
    if not made or made.returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def check_checkpoints(folder):
    """Every folder that looks whole is whole, and the latest is that of step 4."""
    assert (folder / "latest").read_text() == "step-4"
    for whole in folder.glob("step-*"):
        if whole.suffix != ".tmp":
            state = {"progress": {"step": 0}}
            dcp.load(state, checkpoint_id=whole, no_dist=True)
            assert whole.name == f"step-{state['progress']['step']}"


def strike(folder, world, fault, faulty, unbroken):
    told, codes = launch(world, folder, fault, faulty)
    struck = next(t[1] for t in told[faulty] if t[0] == "fault")
    for rank, messages in enumerate(told):
        if rank != faulty:
            kind, when, _ = messages[-1]
            assert kind in ("RuntimeError", "DistBackendError", "CheckpointException"), messages
            assert when - struck < TIMEOUT + 3, f"rank {rank} ended {when - struck:.1f} s after the fault"
    if fault.startswith(("killed", "terminated")):
        assert codes[faulty] == -(signal.SIGTERM if fault.startswith("terminated") else signal.SIGKILL)
    elif fault == "exception in forward":
        assert told[faulty][-1][0] == "ArithmeticError"
    else:  # what only this rank sees is an error there too
        assert told[faulty][-1][0] in ("RuntimeError", "DistBackendError", "CheckpointException"), told[faulty]
    check_checkpoints(folder)

    (folder / "filler").unlink(missing_ok=True)
    told, _ = launch(world, folder)
    for messages in told:
        assert messages[0] == ("from", 4)
        assert messages[-1][0] == "done", messages
        assert messages[-1][2] == unbroken[world]
    assert (folder / "latest").read_text() == f"step-{STEPS}"
    assert [path.name for path in folder.glob("step-*")] == [f"step-{STEPS}"]  # leftovers are gone


@pytest.mark.parametrize(
    ("fault", "world", "faulty"),
    [
        ("killed in backward", 2, 1),
        ("killed in backward", 3, 0),
        ("terminated in backward", 2, 0),
        ("killed in the step", 3, 1),
        ("killed in save", 3, 2),
        ("killed before the metadata", 2, 0),
        ("killed before the rename", 2, 0),
        ("killed before it is the latest", 2, 0),
        ("no large files", 2, 1),
        ("late", 3, 1),
        ("exception in forward", 2, 1),
    ],
)
def test_the_others_end_and_the_run_resumes(tmp_path, unbroken, fault, world, faulty):
    strike(tmp_path / "checkpoints", world, fault, faulty, unbroken)


def test_a_full_disk(small_disk, unbroken):
    strike(small_disk / "checkpoints", 2, "disk full", 1, unbroken)


def collect_alone(rank, world):
    """full_state_dict is a collective: rank 0 alone waits no longer than its group does."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    model = nn.Linear(300, 10)
    opt = Zero1AdamW(model.parameters(), process_group=group)
    model(torch.ones(300)).sum().backward()
    opt.step()
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            opt.full_state_dict()
        assert time.monotonic() - began < 3 + 3
    else:
        time.sleep(6)


def test_one_rank_alone_collects_a_whole_state():
    run(2, collect_alone)


# -- the example ------------------------------------------------------------------------------------------------------

SMALL = "--steps 60 --save-every 10 --layers 1 --width 32 --heads 2 --context 16 --batch 2 --dtype fp32 --device cpu"


NEEDS_PROC = pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="no /proc here")


@contextlib.contextmanager
def torchrun(out, *more, restarts=0):
    """The example on two ranks, as a process that is gone afterwards."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--max-restarts={restarts}", str(EXAMPLE), *SMALL.split(), "--out", str(out), *more]
    # restarted ranks must not find the addresses of the dead ones
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            kill(process)


def kill(process):
    """torchrun and its ranks, if they are still there."""
    if process.poll() is None:
        for pid in (process.pid, *workers(process)):
            os.kill(pid, signal.SIGKILL)


def finish(process):
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def workers(process):
    """Process ids of the ranks. Each has a session of its own."""
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"train_gpt" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_for_checkpoint(process, out):
    end = time.monotonic() + 90
    while not (out / "latest").exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.01)


def summary(out):
    kept = json.loads((out / "summary.json").read_text())
    kept.pop("seconds_per_step")
    return kept


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The summary of the example's run without a fault."""
    out = tmp_path_factory.mktemp("example") / "out"
    with torchrun(out) as process:
        finish(process)
    return summary(out)


@NEEDS_PROC
def test_the_example_resumes(tmp_path, whole_run):
    with torchrun(tmp_path) as process:
        wait_for_checkpoint(process, tmp_path)
        kill(process)
    assert (tmp_path / "latest").read_text() != "step-60"
    with torchrun(tmp_path, "--resume") as process:
        finish(process)
    assert summary(tmp_path) == whole_run


@NEEDS_PROC
def test_the_example_survives_a_killed_worker(tmp_path, whole_run):
    with torchrun(tmp_path, restarts=1) as process:
        wait_for_checkpoint(process, tmp_path)
        os.kill(workers(process)[1], signal.SIGKILL)
        output = finish(process)
    assert "exitcode: -9" in output
    assert summary(tmp_path) == whole_run
