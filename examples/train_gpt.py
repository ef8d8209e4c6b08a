"""A small GPT, trained on the source of Python's standard library with the optimizer state split over the ranks.

torchrun --standalone --nproc-per-node 2 examples/train_gpt.py [--steps 300] [--dtype bf16|fp16|fp32] [--resume]

Byte level, so there is nothing to download: every machine with Python has the text. Without torchrun: one rank.
With `torchrun --max-restarts 3` a run goes on from its last checkpoint when a rank has died; set
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 then, or the new ranks look for the addresses of the dead ones (pytorch #135712).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import sysconfig
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from zero1_cuda import Zero1AdamW

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# ---- model ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)). x: (batch, context, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.norm2(x))))


class GPT(nn.Module):
    """Returns the mean cross-entropy of the next byte. x, y: (batch, context) int64."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight
        for name, p in self.named_parameters():
            if (
                p.dim() == 2
            ):  # the branches that add into the residual stream start smaller, so that its size does not grow
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * layers) if name.endswith("out.weight") else 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.norm(self.blocks(h)))
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())  # 16 bits are too few for log-sum-exp


# ---- data ----------------------------------------------------------------------------------------


def load_text() -> Tensor:
    """All modules at the top of the standard library as one uint8 tensor, a few MB."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) < 100_000:
        raise SystemExit(f"{folder} holds no Python sources to train on")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def sample(text: Tensor, batch: int, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random windows and the same windows one byte later, from torch's default generator."""
    starts = torch.randint(len(text) - context, (batch, 1))
    window = text[starts + torch.arange(context + 1)].to(device, torch.int64)
    return window[:, :-1], window[:, 1:]


# ---- checkpoints ---------------------------------------------------------------------------------


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


class Counted:
    """A bar over the tensors that rank 0 writes or reads, where that takes more than a second."""

    desc: str

    def finish_plan(self, plan: Any) -> Any:
        plan = super().finish_plan(plan)  # type: ignore[misc]
        hidden = dist.is_initialized() and dist.get_rank() != 0
        self.bar = tqdm(total=len(plan.items), desc=self.desc, unit="tensor", delay=1, leave=False, disable=hidden)
        return plan


class CountedSave(Counted, dcp.DefaultSavePlanner):
    desc = "saving"

    def resolve_data(self, write_item: Any) -> Any:
        self.bar.update()
        return super().resolve_data(write_item)


class CountedLoad(Counted, dcp.DefaultLoadPlanner):
    desc = "loading"

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        self.bar.update()
        super().commit_tensor(read_item, tensor)


def save(folder: Path, parts: dict[str, Any], progress: dict[str, float], rank: int) -> None:
    """A checkpoint is whole or not there: written aside, renamed when all ranks are done, then made the latest."""
    whole = folder / f"step-{progress['step']}"
    partial = whole.with_suffix(".tmp")
    if rank == 0:
        for leftover in (whole, partial):  # of a run that died while it was saving
            shutil.rmtree(leftover, ignore_errors=True)
    barrier()
    state = {name: part.state_dict() for name, part in parts.items()} | {"progress": progress}
    dcp.save(state, checkpoint_id=partial, planner=CountedSave(), no_dist=not dist.is_initialized())
    barrier()
    if rank == 0:
        partial.rename(whole)
        pointer = folder / "latest.tmp"
        with pointer.open("w") as file:
            file.write(whole.name)
            file.flush()
            os.fsync(file.fileno())
        pointer.replace(folder / "latest")
        for old in folder.glob("step-*"):
            if old != whole:
                shutil.rmtree(old, ignore_errors=True)


def load(folder: Path, parts: dict[str, Any], progress: dict[str, float]) -> None:
    """Each rank reads its part, whatever the number of ranks that saved."""
    state = {name: part.state_dict() for name, part in parts.items()} | {"progress": progress}
    latest = folder / (folder / "latest").read_text()
    dcp.load(state, checkpoint_id=latest, planner=CountedLoad(), no_dist=not dist.is_initialized())
    for name, part in parts.items():
        part.load_state_dict(state[name])
    progress.update(state["progress"])


def clear(folder: Path, rank: int) -> None:
    """A new run must not resume from what an older one left here."""
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("latest", "summary.json"):
            (folder / name).unlink(missing_ok=True)
        for old in folder.glob("step-*"):
            shutil.rmtree(old)
    barrier()


# ---- training ------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of the whole run")
    parser.add_argument("--batch", type=int, default=16, help="windows per rank and backward")
    parser.add_argument("--context", type=int, default=128, help="bytes per window")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--accumulate", type=int, default=1, help="backwards per step")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=20, help="steps of linear warm-up before the cosine")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm; 0: no clipping")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints; 0: none")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--out", type=Path, default=Path("runs/last"), help="folder for checkpoints and summary.json")
    args = parser.parse_args()
    for name in ("steps", "batch", "context", "layers", "width", "heads", "accumulate"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.width % args.heads:
        parser.error(f"--width {args.width} must be a multiple of --heads {args.heads}")
    return args


def setup(choice: str) -> tuple[int, int, torch.device]:
    """Joins the ranks that torchrun started: NCCL where every rank has a GPU of its own, else gloo."""
    if choice == "auto":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        choice = "cuda" if gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) else "cpu"
    device = torch.device(choice)
    if choice == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return 0, 1, device
    dist.init_process_group("nccl" if choice == "cuda" else "gloo", device_id=device if choice == "cuda" else None)
    return dist.get_rank(), dist.get_world_size(), device


def average(value: Tensor) -> float:
    """The mean over ranks as a number; waits for the device."""
    value = value.clone()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


def train(args: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> None:
    text = load_text()
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.width, args.heads, args.context).to(device, DTYPES[args.dtype])
    opt = Zero1AdamW(
        model.named_parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=args.clip or None
    )

    def cosine(step: int) -> float:
        """Linear warm-up, then a half cosine from 1 down to 0.1."""
        if step < args.warmup:
            return (step + 1) / args.warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - args.warmup) / max(1, args.steps - args.warmup))

    schedule = torch.optim.lr_scheduler.LambdaLR(opt, cosine)
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")  # not enabled, it only passes step() on
    parts = {"model": model, "optimizer": opt, "schedule": schedule, "scaler": scaler}
    progress = {"step": 0, "loss_first": math.nan}

    # torchrun starts all ranks anew when one has died: that is a resume too
    if (args.resume or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0") and (args.out / "latest").exists():
        load(args.out, parts, progress)
    else:
        clear(args.out, rank)
    start = progress["step"]
    if start >= args.steps:
        if rank == 0:
            print(f"{args.out} is at step {start} of {args.steps} already: nothing is left to do")
        return

    tokens = world_size * args.accumulate * args.batch * args.context
    bar = tqdm(
        total=args.steps,
        initial=start,
        unit="step",
        dynamic_ncols=True,
        disable=rank != 0,
        mininterval=0.5 if sys.stderr.isatty() else 15,  # a log file wants few lines
    )
    began, timed_from, saving = time.perf_counter(), start, 0.0
    for step in range(start, args.steps):
        # Chance depends on seed, step and rank alone: a resumed run draws what the unbroken one would have drawn.
        torch.manual_seed((args.seed * 1_000_003 + step) * 65_536 + rank)
        losses = []
        for micro in range(args.accumulate):
            with opt.no_sync() if micro + 1 < args.accumulate else nullcontext():
                x, y = sample(text, args.batch, args.context, device)
                loss = model(x, y) / args.accumulate
                scaler.scale(loss).backward()  # buckets are reduce-scattered as they become ready
            losses.append(loss.detach())
        scaler.step(opt)  # opt.step(): clips, updates this rank's shard, gathers the parameters
        scaler.update()
        opt.zero_grad()
        schedule.step()

        done = step + 1
        if step == start or done % 10 == 0 or done == args.steps:  # seldom: reading the loss waits for the device
            loss_last = average(torch.stack(losses).sum())
            seconds = (time.perf_counter() - began - saving) / (done - timed_from)
            if step == 0:
                progress["loss_first"] = loss_last
            if step == start and done < args.steps:  # the first step makes the buffers: the clock starts after it
                began, timed_from = time.perf_counter(), done
            bar.set_postfix_str(
                f"loss {loss_last:.3f}, lr {schedule.get_last_lr()[0]:.1e}, {tokens / seconds:,.0f} tokens/s",
                refresh=False,
            )
        bar.update()
        if args.save_every and (done % args.save_every == 0 or done == args.steps):
            pause = time.perf_counter()
            progress["step"] = done
            save(args.out, parts, progress, rank)
            saving += time.perf_counter() - pause
    bar.close()

    if rank == 0:
        held = opt.memory_report()
        numel = sum(p.numel() for p in model.parameters())
        summary = {
            "loss_first": progress["loss_first"],
            "loss_last": loss_last,
            "steps": args.steps,
            "world_size": world_size,
            "numel": numel,
            "param_bytes": held["params"],
            "grad_bytes": held["grads"],
            "state_bytes": held["state"],
            "predicted_bytes": held["predicted"],
            "ddp_bytes": 16 * numel,
            "seconds_per_step": seconds,
        }
        (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        print_table(summary, held, args.dtype, tokens)


def print_table(summary: dict[str, Any], held: dict[str, int], dtype: str, tokens: int) -> None:
    numel, ranks, seconds = summary["numel"], summary["world_size"], summary["seconds_per_step"]
    size = DTYPES[dtype].itemsize
    state = 16 - 2 * size  # 16 bits: fp32 master, exp_avg, exp_avg_sq; fp32 parameters are their own masters
    print(f"\n{numel:,} parameters (Psi) in {dtype} on {ranks} rank{'s' * (ranks > 1)} (N)")
    print(f"loss, first -> last step  {summary['loss_first']:.3f} -> {summary['loss_last']:.3f}")
    print(f"time per step             {seconds:.3f} s, {tokens / seconds:,.0f} tokens/s\n")
    print(f"{'MB per rank':<26}{'measured':>10}{'formula':>20}{'gives':>10}")
    for name, measured, formula, expected in (
        ("parameters", held["params"], f"{size} Psi", size * numel),
        ("gradients", held["grads"], f"{size} Psi", size * numel),
        ("optimizer state", held["state"], f"{state} Psi/N", state * numel / ranks),
        ("together", held["total"] - held["buffers"], f"{2 * size} Psi + {state} Psi/N", held["predicted"]),
        ("buffers for overlap", held["buffers"], "", None),
        ("without sharding", None, "16 Psi", summary["ddp_bytes"]),
    ):
        left, right = ("" if value is None else f"{value / 1e6:.3f}" for value in (measured, expected))
        print(f"  {name:<24}{left:>10}{formula:>20}{right:>10}".rstrip())


def main() -> None:
    args = parse()
    rank, world_size, device = setup(args.device)
    train(args, rank, world_size, device)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
