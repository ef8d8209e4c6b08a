"""torch.amp.GradScaler: an overflow skips the step and halves the scale, and the rest is as on the CPU."""

import math

import pytest
import torch
from helpers.device import everything, loss_of, make_params, same

from zero1_cuda import Zero1AdamW

pytestmark = pytest.mark.gpu


def scaled_steps(where):
    params = make_params(where)
    opt = Zero1AdamW(params, lr=1e-2, weight_decay=0.1)
    scaler = torch.amp.GradScaler(where, init_scale=256.0, growth_interval=1000)
    for k in range(4):
        (scaler.scale(loss_of(params, k)) * (math.inf if k == 2 else 1.0)).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        assert bool(opt.step_skipped) == (k == 2), f"step {k}"
    assert scaler.get_scale() == 128.0
    assert int(opt.skipped_steps) == 1
    return everything(opt, params)


def test_overflow_and_the_rest(device):
    assert same(scaled_steps(device), scaled_steps("cpu"))
