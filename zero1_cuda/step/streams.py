"""Questions about the streams of a tensor's device, whichever device is the current one."""

from __future__ import annotations

import torch
from torch import Tensor


def is_capturing(t: Tensor) -> bool:
    """Whether what is done with this tensor now becomes part of a CUDA graph."""
    if not t.is_cuda:
        return False
    with torch.cuda.device(t.device):
        return torch.cuda.is_current_stream_capturing()


def stream_id(device: torch.device) -> int:
    """A number that tells the current stream of a CUDA device from its others; 0 on the CPU, which has none."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))
