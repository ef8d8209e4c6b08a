"""Saving and loading the state by torch.distributed.checkpoint, against plain torch.save and torch.load.

    python bench/checkpoint.py [--ranks 2] [--mb 1000] [--folder DIR] [--json FILE]

Gloo ranks of this machine; every rank saves and loads its part, --mb in all, so all ways move the same bytes. Times are
the slowest rank's, medians over rounds in which the ways alternate. Files are flushed to the disk with fsync; `load`
reads them from the disk (they are dropped from the page cache first), `again` from the page cache.

`plain` writes tensors that lie there already and reads tensors, and nothing else; `dcp plain` is DCP with such tensors.
The other ways begin at opt.state_dict() and end after opt.load_state_dict(): `part` is torch.save of a rank's part,
`dcp` is DCP.

Memory: by how much the highest resident memory of a load is above that before it, in units of the rank's own part; of a
run of its own, in which the allocator gives back at once what is freed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from zero1_cuda import Zero1AdamW

SHAPE = (1024, 1024)  # of a parameter
CLEAR_REFS = Path("/proc/self/clear_refs")


def measure(call: Callable[[], None]) -> tuple[float, float]:
    """Seconds, the slowest rank's, and bytes that this rank needed meanwhile (nan where that cannot be seen)."""
    gc.collect()
    visible = CLEAR_REFS.exists()
    before = common.process_bytes("VmRSS") if visible else 0
    if visible:
        CLEAR_REFS.write_text("5")  # the peak begins anew
    took = common.slowest(call)
    return took, common.process_bytes("VmHWM") - before if visible else float("nan")


def save(state: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def drop(path: Path) -> None:
    """Takes the files from the page cache."""
    for file in [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]:
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def worker(rank: int, world: int, mb: float, rounds: int, exact: bool, folder: Path) -> dict[str, Any]:
    if exact:
        ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed goes back at once
    count = max(world, round(mb * 1e6 / 12 / (SHAPE[0] * SHAPE[1])))
    params = [torch.nn.Parameter(torch.randn(SHAPE, dtype=torch.bfloat16)) for _ in range(count)]
    opt = Zero1AdamW(params)
    for p in params:
        p.grad = torch.randn_like(p)
    opt.step()
    opt.zero_grad()
    parts = {p: {k: t.clone() for k, t in entry.items()} for p, entry in opt.state.items()}
    plain = {number: parts[p] for number, p in enumerate(params)}
    size = sum(t.nbytes for entry in plain.values() for t in entry.values())

    tensors = {f"{rank}.{n}.{k}": t for n, entry in plain.items() for k, t in entry.items()}

    def dcp_save(path: Path) -> None:
        dcp.save({"opt": opt.state_dict()}, checkpoint_id=path)

    def dcp_load(path: Path) -> None:
        state = {"opt": opt.state_dict()}
        dcp.load(state, checkpoint_id=path)
        opt.load_state_dict(state["opt"])

    ways: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
        "plain": (lambda path: save(plain, path), lambda path: torch.load(path, weights_only=True)),
        "part": (
            lambda path: save(opt.state_dict(), path),
            lambda path: opt.load_state_dict(torch.load(path, weights_only=True)),
        ),
        "dcp plain": (
            lambda path: dcp.save(tensors, checkpoint_id=path),
            lambda path: dcp.load(tensors, checkpoint_id=path),
        ),
        "dcp": (dcp_save, dcp_load),
    }
    found: dict[str, dict[str, list[float]]] = {
        name: {k: [] for k in ("save", "load", "again", "memory")} for name in ways
    }
    for turn in range(rounds + 1):
        for name, (write, read) in ways.items():
            path = folder / (name if name.startswith("dcp") else f"{name}-{rank}")
            written, _ = measure(lambda write=write, path=path: write(path))
            dist.barrier()
            drop(path)
            loaded, needed = measure(lambda read=read, path=path: read(path))
            again, needed_again = measure(lambda read=read, path=path: read(path))
            if turn:  # the first one warms up
                found[name]["save"].append(written)
                found[name]["load"].append(loaded)
                found[name]["again"].append(again)
                found[name]["memory"].append(max(needed, needed_again) / size)
            dist.barrier()
            if not name.startswith("dcp"):
                path.unlink()
            elif rank == 0:
                shutil.rmtree(path)
            dist.barrier()
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, {name: max(f["memory"]) for name, f in found.items()})
    rows = []
    for name, times in found.items():
        row: dict[str, Any] = {"way": name, "memory": max(m[name] for m in everybody)}
        for what in ("save", "load", "again"):
            row[f"{what}_s"] = statistics.median(times[what])
            row[f"{what}_ratio"] = row[f"{what}_s"] / statistics.median(found["plain"][what])
        rows.append(row)
    return {"ranks": world, "state_bytes": 12 * count * SHAPE[0] * SHAPE[1], "rounds": rounds, "rows": rows}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mb", type=float, default=1000.0, help="10^6 bytes of state over all ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the system's temporary folder")
    args = parser.parse_args()
    runs = []
    for exact, rounds in ((False, args.rounds), (True, 1)):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            runs.append(common.run_ranks(args.ranks, worker, args.mb, rounds, exact, Path(folder)))
    result, memory = runs
    for row, exact_row in zip(result["rows"], memory["rows"], strict=True):
        row["memory"] = exact_row["memory"]
    print(f"{result['ranks']} gloo ranks, {result['state_bytes'] / 1e6:.0f} MB of state, torch {torch.__version__}")
    print("            save s  ratio   load s  ratio  again s  ratio  memory of a load / own part")
    for row in result["rows"]:
        times = "".join(f"{row[f'{k}_s']:9.3f}{row[f'{k}_ratio']:7.2f}" for k in ("save", "load", "again"))
        print(f"{row['way']:>9}{times}{row['memory']:29.2f}")
    common.write(args.json, result)


if __name__ == "__main__":
    main()
