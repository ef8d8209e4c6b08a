"""What the tests of saved states share: an optimizer over parameters of every kind, some steps of it, and its bits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from helpers.ranks import backward, digest, exact, snapshot, weights
from torch import nn

from zero1_cuda import Zero1AdamW

BF16, FP16 = torch.bfloat16, torch.float16


def odd_groups():
    """Two groups, one with amsgrad: a scalar, empty ones, few elements, transposed, channels_last, mixed dtypes."""
    nhwc = weights([(3, 4, 5, 3)])[0].detach().to(memory_format=torch.channels_last)
    first = [
        nn.Parameter(torch.tensor(1.5)),
        nn.Parameter(torch.zeros(0, dtype=BF16)),
        nn.Parameter(torch.zeros(3, 0)),
        nn.Parameter(nhwc),
        *weights([(3,), (257,), (13, 31)], BF16),
        nn.Parameter(weights([(40, 24)], BF16)[0].detach().t()),
    ]
    second = [
        *weights([(1025,), (2, 1, 7, 1)]),
        nn.Parameter(weights([(5, 6, 7)], FP16)[0].detach().permute(2, 0, 1)),
        *weights([(33, 17)], FP16),
    ]
    return [{"params": first}, {"params": second, "amsgrad": True, "lr": 0.02, "betas": (0.5, 0.6)}]


def made(**options):
    """Parameters, and an optimizer that has not stepped."""
    groups = odd_groups()
    return [p for g in groups for p in g["params"]], Zero1AdamW(groups, lr=0.01, eps=1e-3, **options)


def train(params, opt, rank, steps):
    """The last parameter that is no scalar gets no gradient in step 0: step counts differ."""
    for t in steps:
        world = dist.get_world_size() if dist.is_initialized() else 1
        grads = [exact(p.shape, rank, t, i, ranks=world) for i, p in enumerate(params)]
        backward(params, [None if t == 0 and i == 6 else g for i, g in enumerate(grads)])
        opt.step()
        opt.zero_grad()


def bits(params, opt):
    """Collective: a hash of every parameter and of everything in its state."""
    return [digest([t]) for t in snapshot(opt, params)]


def grid(rank, world, shards):
    """Groups of `shards` neighbouring ranks that split a state; the ranks at the same place hold the same shard."""
    shard_groups = [dist.new_group(list(range(i, i + shards))) for i in range(0, world, shards)]
    replica_groups = [dist.new_group(list(range(i, world, shards))) for i in range(shards)]
    return {"process_group": shard_groups[rank // shards], "replicate_group": replica_groups[rank % shards]}
