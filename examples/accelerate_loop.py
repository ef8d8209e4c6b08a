"""A training loop with accelerate whose optimizer state is split over the ranks.

torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py [--steps 20] [--out FOLDER] [--resume CHECKPOINT]

`save_state()` has rank 0 write what `state_dict()` gives it; a hook makes that the whole state, which loads on any
number of ranks. Without torchrun: one rank.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zero1_cuda import Zero1AdamW

ACCUMULATE = 2


class Progress:
    """What accelerate's checkpoint does not hold by itself."""

    batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"))
    parser.add_argument("--resume", help="go on from this checkpoint, a folder")
    args = parser.parse_args()

    # Joins the ranks, so it comes first; without cpu=True accelerate takes every CPU rank for a run of its own.
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=ACCUMULATE)
    set_seed(1)
    count = 4 * ACCUMULATE * args.steps * accelerator.num_processes
    x = torch.randn(count, 8)
    loader = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=4)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 1))
    opt = Zero1AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps * accelerator.num_processes)
    progress = Progress()

    model, prepared, loader, schedule = accelerator.prepare(model, opt, loader, schedule)
    accelerator.register_for_checkpointing(progress)
    accelerator.register_save_state_pre_hook(lambda *_: opt.consolidate_state_dict())  # every rank takes part
    if args.resume:
        accelerator.load_state(args.resume)
        loader = accelerator.skip_first_batches(loader, progress.batches)

    for xb, yb in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(xb), yb)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            prepared.step()
            schedule.step()
            prepared.zero_grad()
        progress.batches += 1
        if progress.batches == args.steps // 2 * ACCUMULATE:
            accelerator.print(f"batch {progress.batches}: loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
            accelerator.save_state(args.out / "half")
    accelerator.print(f"batch {progress.batches}: loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
    accelerator.save_model(model, args.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
