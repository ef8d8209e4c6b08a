"""A captured step, replayed 5 times with new gradients and a new learning rate, gives the bits of 5 eager steps."""

import contextlib

import pytest
import torch
from helpers.device import everything, make_params, same
from helpers.ranks import exact

from zero1_cuda import Zero1AdamW

pytestmark = pytest.mark.gpu


def steps(device, captured):
    params = make_params(device)
    lr = torch.tensor(1e-2, device=device)
    opt = Zero1AdamW(params, lr=lr, weight_decay=0.1, max_grad_norm=5.0, capturable=True)
    graph = torch.cuda.CUDAGraph() if captured else None
    for k in range(2 + 5):
        lr.fill_(1e-2 / (k + 1))
        for i, p in enumerate(params):
            g = exact(p.shape, k, i).to(p)
            p.grad = g if p.grad is None else p.grad.copy_(g)
        if k == 2 and graph is not None:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                opt.step()
        if k >= 2 and graph is not None:
            graph.replay()
        else:
            opt.step()
    return everything(opt, params)


def test_replayed_steps_are_eager_steps(device):
    on_cuda = device == "cuda"
    # capturing the default stream is not allowed
    with torch.cuda.stream(torch.cuda.Stream()) if on_cuda else contextlib.nullcontext():
        assert same(steps(device, False), steps(device, on_cuda))
    if not on_cuda:
        pytest.skip("CUDA graphs need CUDA; eager steps with capturable=True agree")
