"""What goes wrong on rank 1 alone, for the tests that want an error on every rank."""

from __future__ import annotations

import functools

import torch
from helpers.ranks import backward, backward_of, exact
from torch import nn

SHAPES = [(40, 30), (7,), (300,), (129,)]
OPTIONS = {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1}

# Called in place of a backward with (parameters, optimizer, rank); what it gives back repairs what can be.


def sparse(params, opt, rank):
    if rank == 1:
        backward(params[1:], [exact(p.shape, 1) for p in params[1:]])
        params[0].grad = torch.zeros(40, 30, dtype=params[0].dtype).to_sparse()
    else:
        backward_of(params, rank, 9)


def sparse_in_backward(params, opt, rank):
    index = torch.tensor([1, 2])
    loss = nn.functional.embedding(index, params[0], sparse=rank == 1).sum()
    (loss + sum(p.sum() for p in params[1:])).backward()


def one_backward_more(params, opt, rank):
    for k in range(1 + rank):
        backward_of(params, rank, k)


def many_backwards_more(params, opt, rank):
    for k in range(2 + 3 * rank):
        backward_of(params, rank, k)


def an_edit(params, opt, rank):
    backward_of(params, rank, 9)
    kept = params[1].detach().clone()
    if rank == 1:
        with torch.no_grad():
            params[1].mul_(2.0)

    def repair():
        with torch.no_grad():
            params[1].copy_(kept)  # on all ranks, so that it is an edit on all

    return repair


def a_cast(params, opt, rank):
    return given_other_data(params, rank, params[2].data.double())


def another_shape(params, opt, rank):
    return given_other_data(params, rank, torch.zeros(299, dtype=params[2].dtype))


def given_other_data(params, rank, data):
    backward_of(params, rank, 9)
    kept = params[2].data
    if rank == 1:
        params[2].data = data

    def repair():
        params[2].grad = None
        params[2].data = kept.clone()  # on all ranks, so that it is a move on all

    return repair


def other_options(params, opt, rank):
    backward_of(params, rank, 9)
    opt.param_groups[0]["lr"] = 0.01 + rank

    def repair():
        opt.param_groups[0]["lr"] = 0.01

    return repair


def clip_on_one(params, opt, rank):
    backward_of(params, rank, 9)
    if rank == 1:
        opt.step = functools.partial(opt.clip_grad_norm_, 1.0)
    return lambda: opt.__dict__.pop("step", None)


FAULTS = {  # name: (what happens, type of error, in the message)
    "sparse": (sparse, "ValueError", "'w0'"),
    "sparse in backward": (sparse_in_backward, "ValueError", "'w0'"),
    "one backward more": (one_backward_more, "RuntimeError", "backward"),
    "many backwards more": (many_backwards_more, "RuntimeError", "backward"),
    "an edit": (an_edit, "RuntimeError", "'w1'"),
    "a cast": (a_cast, "RuntimeError", "'w2'"),
    "another shape": (another_shape, "RuntimeError", "'w2'"),
    "other options": (other_options, "RuntimeError", "options"),
    "clip on one": (clip_on_one, "RuntimeError", "clip_grad_norm_"),
}
