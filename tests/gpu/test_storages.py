"""Parameters lie in one buffer, each in a storage of its own, and outlive the optimizer."""

import gc

import pytest
import torch
from helpers.device import loss_of, make_params, same

from zero1_cuda import Zero1AdamW

pytestmark = pytest.mark.gpu


def test_storages(device):
    params = make_params(device)
    opt = Zero1AdamW(params, lr=1e-2)
    loss_of(params, 0).backward()
    opt.step()
    full = [p for p in params if p.numel()]
    for p in full:
        storage = p.untyped_storage()
        assert storage.data_ptr() == p.data_ptr(), tuple(p.shape)
        assert storage.nbytes() == p.nbytes, tuple(p.shape)
    assert len({p.untyped_storage().data_ptr() for p in full}) == len(full)
    kept = [p.detach().cpu().clone() for p in params]
    del opt
    gc.collect()
    noise = [torch.full((100_000,), 7.0, device=device) for _ in range(20)]  # takes whatever memory was given back
    assert same([p.detach().cpu() for p in params], kept)
    del noise
