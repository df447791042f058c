"""``add`` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def add(a: Tensor, b: Tensor, *, alpha: float = 1) -> Tensor:
    """``a + alpha * b`` with broadcasting and promotion written out.

    Args:
        a: ``Tensor[*]``.
        b: ``Tensor[*]`` that broadcasts with ``a``.
        alpha: multiplier of ``b``.
    """
    dtype = torch.result_type(a, b)
    a, b = torch.broadcast_tensors(a.to(dtype), b.to(dtype))
    return (a + b * alpha).to(dtype)
