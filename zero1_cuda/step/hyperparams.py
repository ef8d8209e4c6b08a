"""The options of all parameter groups, where the step's control reads them."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import torch
from torch import Tensor

from .. import ops

Row = tuple[float, float, float, float, float, int, int, int]


class Hyperparams:
    """A table [groups, 8 words] (struct GroupOptions), rewritten when an option has changed."""

    def __init__(self, groups: list[dict[str, Any]], decoupled: bool, capturable: bool) -> None:
        self.groups, self.decoupled, self.capturable = groups, decoupled, capturable
        self.rows: list[Row] = []
        self.table = torch.empty(0, ops.GROUP_WORDS, dtype=torch.float64, device="cpu")

    def update(self, device: torch.device) -> bool:
        """Reads the live groups; -> whether anything has changed."""
        rows = [self._row(group, device) for group in self.groups]
        if rows == self.rows and self.table.device == device:
            return False
        self.rows = rows
        packed = bytearray(b"".join(struct.pack("<5d3q", *row) for row in rows))
        table = torch.frombuffer(packed, dtype=torch.float64) if rows else self.table.new_empty(0, device="cpu")
        # A fresh pageable copy each time: a reused pinned one could be overwritten before it is read.
        self.table = table.reshape(-1, ops.GROUP_WORDS).to(device, non_blocking=True)
        return True

    def digest(self) -> int:
        """A number that is equal on ranks with equal options; what lies on the device is not looked at."""
        return zlib.crc32(repr([row[:6] for row in self.rows]).encode())

    def _row(self, group: dict[str, Any], device: torch.device) -> Row:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        mode = (
            (ops.GROUP_AMSGRAD if group.get("amsgrad") else 0)
            | (ops.GROUP_MAXIMIZE if group.get("maximize") else 0)
            | (ops.GROUP_DECOUPLED if group.get("decoupled_weight_decay", self.decoupled) else 0)
        )
        at, wide = 0, 0
        if self.capturable and isinstance(lr, Tensor) and lr.device == device:
            if lr.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"lr: with capturable=True a float32 or float64 tensor wanted, got {lr.dtype}")
            at, wide, lr = lr.data_ptr(), int(lr.dtype == torch.float64), 0.0
        options = (float(lr), float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]))
        return (*options, mode, at, wide)
