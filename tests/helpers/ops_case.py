"""A small shard with every kind of segment, as tensors that the ops take: for tests of the ops, on a GPU too."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero1_cuda import ops

POISON = float("nan")  # what padding holds: it must neither be read nor written
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass
class Param:
    numel: int
    dtype: torch.dtype = torch.float32
    group: int = 0
    amsgrad: bool = False


def offset_empty(numel: int, dtype: torch.dtype, offset: int, device: str) -> Tensor:
    """A flat tensor that starts `offset` elements into its storage, full of poison."""
    value = POISON if dtype.is_floating_point else -7
    return torch.full((numel + offset,), value, dtype=dtype, device=device)[offset:]


def fact(x: int) -> Tensor:
    """The words by which a number that must be equal on all ranks travels in the control vector."""
    low, high = x & 0xFFFF, x >> 16
    return torch.tensor([low, high, low * low, high * high])


def chunks(numel: int) -> int:
    return -(-numel // ops.CHUNK)


@dataclass
class Case:
    """Parameters side by side, in the order given, with a chunk of padding after each one."""

    specs: list[Param]
    split: bool = False
    offset: int = 0
    device: str = "cpu"
    seed: int = 0
    grads: list[Tensor] = field(init=False)
    params: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        dtypes = [d for d in DTYPES if any(p.dtype == d for p in self.specs)]
        sizes = dict.fromkeys(dtypes, 0)
        shard = masters = remainders = maxima = 0
        rows, chunk_segment = [], []
        for index, p in enumerate(self.specs):
            length = (chunks(p.numel) + 1) * ops.CHUNK
            split = self.split and p.dtype == torch.bfloat16
            place = 0 if p.dtype == torch.float32 else remainders if split else masters
            begin = sizes[p.dtype] + ops.CHUNK  # gradients and parameters lie at different places
            max_begin = maxima if p.amsgrad else -1
            rows.append([shard, p.numel, sizes[p.dtype], begin, place, max_begin, index, dtypes.index(p.dtype)])
            chunk_segment += [index if p.numel else -1] * chunks(p.numel) + [-1]
            sizes[p.dtype] += length
            shard += length
            remainders += length * split
            masters += length * (p.dtype != torch.float32 and not split)
            maxima += length * p.amsgrad

        def empty(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return offset_empty(numel, dtype, self.offset, self.device)

        self.rows = rows
        self.segments = torch.tensor(rows, dtype=torch.int64, device=self.device).view(-1, ops.SEGMENT_WORDS)
        self.chunk_segment = torch.tensor(chunk_segment, dtype=torch.int32, device=self.device)
        self.grads = [empty(sizes[d], d) for d in dtypes]
        self.params = [empty(sizes[d] + ops.CHUNK, d) for d in dtypes]
        self.master = empty(masters) if masters else None
        self.remainder = empty(remainders, torch.int16) if remainders else None
        self.exp_avg, self.exp_avg_sq = empty(shard), empty(shard)
        self.max_exp_avg_sq = empty(maxima) if maxima else None
        self.scalars = torch.zeros(len(rows), ops.SCALAR_WORDS, device=self.device)
        self.steps = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
        self.skipped = torch.zeros(ops.SKIPPED_WORDS, dtype=torch.int64, device=self.device)
        self.groups = torch.zeros(1 + max(p.group for p in self.specs), ops.GROUP_WORDS, dtype=torch.float64)
        self.param_group = torch.tensor([p.group for p in self.specs], dtype=torch.int32, device=self.device)
        for i in range(len(rows)):
            self.of(self.exp_avg, i).zero_()
            self.of(self.exp_avg_sq, i).zero_()
            self.set_param(i, torch.randn(self.specs[i].numel, generator=generator))
            self.grad(i).copy_(torch.randn(self.specs[i].numel, generator=generator))
            if (maximum := self.maximum(i)) is not None:
                maximum.zero_()

    def of(self, flat: Tensor, i: int, word: int = 0) -> Tensor:
        begin = self.rows[i][word]
        return flat[begin : begin + self.rows[i][1]]

    def grad(self, i: int) -> Tensor:
        return self.of(self.grads[self.rows[i][7]], i, 2)

    def param(self, i: int) -> Tensor:
        return self.of(self.params[self.rows[i][7]], i, 3)

    def is_split(self, i: int) -> bool:
        return self.split and self.specs[i].dtype == torch.bfloat16

    def maximum(self, i: int) -> Tensor | None:
        return None if self.max_exp_avg_sq is None or self.rows[i][5] < 0 else self.of(self.max_exp_avg_sq, i, 5)

    def get_master(self, i: int) -> Tensor:
        """The fp32 master, joined if it is split."""
        if self.specs[i].dtype == torch.float32:
            return self.param(i).clone()
        if not self.is_split(i):
            assert self.master is not None
            return self.of(self.master, i, 4).clone()
        assert self.remainder is not None
        low = self.of(self.remainder, i, 4).to(torch.int64) & 0xFFFF
        high = self.param(i).view(torch.int16).to(torch.int64) & 0xFFFF
        high = high - ((low > 0x8000) & ~self.param(i).isnan()).to(torch.int64)
        bits = (high << 16) | low
        return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)

    def set_param(self, i: int, value: Tensor) -> None:
        """The parameter is `value` rounded, and its master exactly the parameter."""
        self.param(i).copy_(value)
        if self.is_split(i):
            assert self.remainder is not None
            self.of(self.remainder, i, 4).zero_()
        elif self.specs[i].dtype != torch.float32:
            assert self.master is not None
            self.of(self.master, i, 4).copy_(self.param(i))

    def set_group(
        self,
        g: int,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        mode: int = ops.GROUP_DECOUPLED,
    ) -> None:
        self.groups[g, :5] = torch.tensor([lr, *betas, eps, weight_decay], dtype=torch.float64)
        self.groups[g].view(torch.int64)[ops.GROUP_MODE] = mode

    def control(self, had_grad: list[bool] | None = None) -> Tensor:
        """A control vector in which nothing is wrong and all parameters, or those named, had a gradient."""
        flags = torch.zeros(-(-len(self.rows) // 4) * 4, dtype=torch.int16)
        flags[: len(self.rows)] = torch.tensor(had_grad or [True] * len(self.rows), dtype=torch.int16)
        control = torch.zeros(ops.CONTROL_FLAGS + flags.numel() // 4, dtype=torch.int64)
        control[ops.CONTROL_FLAGS :] = flags.view(torch.int64)
        return control.to(self.device)

    def step_control(
        self,
        control: Tensor,
        world: int = 1,
        grad_scale: Tensor | None = None,
        clip: Tensor | None = None,
        skip_nonfinite: bool = True,
        scaled: bool = False,
    ) -> None:
        groups = self.groups.to(self.device)
        ops.step_control(
            control, world, self.param_group, groups, grad_scale, clip, skip_nonfinite, scaled,
            self.steps, self.scalars, self.skipped,
        )  # fmt: skip

    def adam_step(self) -> None:
        ops.adam_step(*self.adam_args())

    def adam_args(self):
        return (
            self.segments, self.chunk_segment, self.scalars, self.grads, self.params, self.master, self.remainder,
            self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq,
        )  # fmt: skip

    def tensors(self) -> list[Tensor]:
        """Everything that an op may write."""
        optional = [self.master, self.remainder, self.max_exp_avg_sq]
        return [*self.grads, *self.params, self.exp_avg, self.exp_avg_sq, *(t for t in optional if t is not None)]

    def bits(self) -> list[Tensor]:
        """Copies of all of `tensors()`, as integers, so that NaN compare equal."""
        views = {2: torch.int16, 4: torch.int32}
        return [t.clone().view(views[t.element_size()]) for t in self.tensors()]
