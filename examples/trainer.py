"""transformers.Trainer whose optimizer state is split over the ranks, with checkpoints for any number of ranks.

torchrun --standalone --nproc-per-node 2 examples/trainer.py [--steps 20] [--out FOLDER] [--resume CHECKPOINT]

Model and data are tiny and made on the spot, so nothing is downloaded. Without torchrun: one rank.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
    set_seed,
)

from zero1_cuda import Zero1AdamW


class WholeStateTrainer(Trainer):
    """Trainer alone has rank 0 save what `state_dict()` gives it: here, that is one part of the state."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        whole = self.optimizer.optimizer.full_state_dict()  # takes every rank; accelerate's wrapper is around ours
        if self.args.should_save:
            torch.save(whole, Path(output_dir, "optimizer.pt"))


def sequences(count: int, length: int = 16, vocabulary: int = 32) -> list[dict[str, Tensor]]:
    """Tokens that count upwards by one, two or three, modulo the vocabulary."""
    first = torch.arange(count).unsqueeze(1)
    tokens = (first + (1 + first % 3) * torch.arange(length)) % vocabulary
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs/trainer")
    parser.add_argument("--resume", help="go on from this checkpoint, a folder")
    args = parser.parse_args()

    set_seed(1)
    training = TrainingArguments(  # joins the ranks, so it comes before the optimizer
        args.out,
        use_cpu=not torch.cuda.is_available(),  # else accelerate takes every CPU rank for a run of its own
        max_steps=args.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        save_steps=max(1, args.steps // 2),
        logging_steps=max(1, args.steps // 4),
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        report_to="none",
    )
    shape = {"vocab_size": 32, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    opt = Zero1AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1)
    schedule = get_linear_schedule_with_warmup(opt, 2, args.steps)
    trainer = WholeStateTrainer(model, training, train_dataset=sequences(96), optimizers=(opt, schedule))
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_model()


if __name__ == "__main__":
    main()
