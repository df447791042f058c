"""``matmul`` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def matmul(a: Tensor, b: Tensor, *, precision: str | None = None) -> Tensor:
    """The matrix product as a sum of outer products, in float32 at least.

    Args:
        a: ``Tensor[*, M, K]`` or ``Tensor[K]``.
        b: ``Tensor[*, K, N]`` or ``Tensor[K]``; batch axes broadcast.
        precision: Taken for the operator's sake; float32 is always multiplied in float32 here.
    """
    row, column = a.dim() == 1, b.dim() == 1
    if row:
        a = a[None, :]
    if column:
        b = b[:, None]
    (M, K), N = a.shape[-2:], b.shape[-1]
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    acc = torch.promote_types(a.dtype, torch.float32)
    out = a.new_zeros((*batch, M, N), dtype=acc)
    for k in range(K):
        out = out + a[..., :, k, None].to(acc) * b[..., None, k, :].to(acc)
    out = out.to(a.dtype)
    if column:
        out = out[..., 0]
    if row:
        out = out[..., 0] if column else out[..., 0, :]
    return out
