"""A LightningModule whose optimizer state is split over the ranks. Lightning needs to be told nothing.

torchrun --standalone --nproc-per-node 2 examples/lightning_module.py [--epochs 4] [--out FOLDER] [--resume CHECKPOINT]

To save, Lightning calls `consolidate_state_dict()` where an optimizer has it; so a checkpoint holds the whole state and
loads on any number of ranks. Without torchrun: one rank.
"""

from __future__ import annotations

import argparse
import os

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zero1_cuda import Zero1AdamW


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict:
        opt = Zero1AdamW(self.named_parameters(), lr=1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", default="runs/lightning")
    parser.add_argument("--resume", help="go on from this checkpoint, a file")
    args = parser.parse_args()

    L.seed_everything(1)
    x = torch.randn(128, 8)
    loader = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=8)
    trainer = L.Trainer(
        strategy="ddp" if "RANK" in os.environ else "auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_epochs=args.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        logger=False,
        callbacks=ModelCheckpoint(args.out, "{epoch}", save_top_k=-1),
    )
    trainer.fit(Regression(), loader, ckpt_path=args.resume)


if __name__ == "__main__":
    main()
