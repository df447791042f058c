"""Matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opzoo._library import LIBRARY
from opzoo.ops._common import autocast_tensor, differentiable, move_batch_first, register_autocast
from opzoo.ops.add import add


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices, as :func:`torch.matmul` does.

    Args:
        a: ``Tensor[*, M, K]``, or a vector ``Tensor[K]`` standing for one row.
        b: ``Tensor[*, K, N]`` of the same dtype, or a vector ``Tensor[K]`` standing for one column.
            The batch axes ``*`` of the two broadcast. Transposed, sliced and expanded views are
            read where they lie.

    Returns:
        ``Tensor[*, M, N]``, new and contiguous, in the dtype of ``a`` and ``b``. The axis of a vector
        is left out: two vectors give a 0-d tensor. ``K = 0`` gives zeros.

    Raises:
        RuntimeError: shapes do not fit, dtypes or devices differ, a dtype is not float64, float32,
            float16 or bfloat16, or the batch has more than 16 axes that cannot be walked as one.
        TypeError: an operand is not a tensor.

    Sums are taken in float32 (float64 for float64) and rounded once. Under autocast both operands,
    float64 apart, are cast to autocast's dtype, which is also the result's. Differentiable any
    number of times, in both modes; vmap-able; deterministic on both devices, forward and backward.

    Example:
        >>> opzoo.matmul(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.eye(2).flip(0))
        tensor([[2., 1.],
                [4., 3.]])
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        raise TypeError(f"opzoo::matmul: a and b must be tensors, got {type(a).__name__} and {type(b).__name__}")
    if a.dim() == 2 and b.dim() == 2:
        return _matmul(a, b)
    return _broadcasting(a, b)


class MatMul(nn.Module):
    """:func:`matmul` as a module without parameters."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """``a @ b``; see :func:`matmul`."""
        return matmul(a, b)


def _broadcasting(a: Tensor, b: Tensor) -> Tensor:
    """Vectors to matrices, batch axes to their common shape, all by views; then the product."""
    if a.dim() == 0 or b.dim() == 0:
        name = "a" if a.dim() == 0 else "b"
        raise RuntimeError(f"opzoo::matmul: {name} must have at least 1 axis, got a 0-d tensor")
    row, column = a.dim() == 1, b.dim() == 1
    if row:
        a = a.unsqueeze(0)
    if column:
        b = b.unsqueeze(1)
    if a.shape[:-2] != b.shape[:-2]:
        batch = _broadcast_batch(a, b)
        a = a.expand(*batch, -1, -1)
        b = b.expand(*batch, -1, -1)
    out: Tensor = _matmul(a, b)
    if column:
        out = out.squeeze(-1)
    if row:
        out = out.squeeze(-1 if column else -2)
    return out


def _broadcast_batch(a: Tensor, b: Tensor) -> list[int]:
    left, right = list(a.shape[:-2]), list(b.shape[:-2])
    rank = max(len(left), len(right))
    left = [1] * (rank - len(left)) + left
    right = [1] * (rank - len(right)) + right
    for x, y in zip(left, right, strict=True):
        if x != y and x != 1 and y != 1:
            raise RuntimeError(
                f"opzoo::matmul: the batch axes of b must broadcast with those of a, "
                f"{list(a.shape[:-2])}, got {list(b.shape[:-2])}"
            )
    return [y if x == 1 else x for x, y in zip(left, right, strict=True)]


def _fake(a: Tensor, b: Tensor) -> Tensor:
    def shapes() -> str:
        return f"got shapes {list(a.shape)} and {list(b.shape)}"

    torch._check(
        a.device == b.device,
        lambda: f"opzoo::matmul: b must be on the device of a, {a.device}, got {b.device}",
    )
    torch._check(
        a.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16),
        lambda: f"opzoo::matmul: a must be float64, float32, float16 or bfloat16, got {_dtype_name(a)}",
    )
    torch._check(
        a.dtype == b.dtype,
        lambda: f"opzoo::matmul: b must have the dtype of a, {_dtype_name(a)}, got {_dtype_name(b)}",
    )
    torch._check(a.dim() >= 2, lambda: f"opzoo::matmul: a must have shape [*, M, K] with at least 2 axes, {shapes()}")
    torch._check(a.dim() == b.dim(), lambda: f"opzoo::matmul: b must have as many axes as a, {shapes()}")
    for x, y in zip((*a.shape[:-2], a.shape[-1]), b.shape[:-1], strict=True):
        torch._check(x == y, lambda: f"opzoo::matmul: b must have shape [*, K, N] for a of shape [*, M, K], {shapes()}")
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


def _dtype_name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _save(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
    a, b = args
    need_a, need_b = ctx.needs_input_grad
    ctx.save_for_backward(a if need_b else None, b if need_a else None)
    ctx.save_for_forward(a, b)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    grad_a = _matmul(grad, b.mT) if ctx.needs_input_grad[0] else None
    grad_b = _matmul(a.mT, grad) if ctx.needs_input_grad[1] else None
    return grad_a, grad_b


def _jvp(ctx: Any, tangent_a: Tensor | None, tangent_b: Tensor | None) -> Tensor:
    a, b = ctx.saved_tensors
    if tangent_a is None:
        return _matmul(a, tangent_b)
    if tangent_b is None:
        return _matmul(tangent_a, b)
    return add(_matmul(tangent_a, b), _matmul(a, tangent_b))


def _vmap(info: Any, in_dims: Any, a: Tensor, b: Tensor) -> tuple[Tensor, int]:
    def batched(t: Tensor, dim: int | None) -> Tensor:
        return t.expand(info.batch_size, *t.shape) if dim is None else move_batch_first(t, dim)

    return _matmul(batched(a, in_dims[0]), batched(b, in_dims[1])), 0


def _autocast(dtype: torch.dtype, a: Tensor, b: Tensor) -> tuple[Tensor | None, Tensor | None]:
    return autocast_tensor(a, dtype), autocast_tensor(b, dtype)


torch.library.register_fake("opzoo::matmul", _fake, lib=LIBRARY)
register_autocast(torch.ops.opzoo.matmul.default, _autocast)
_matmul = differentiable(
    torch.ops.opzoo.matmul.default,
    inputs=(0, 1),
    save=_save,
    backward=_backward,
    jvp=_jvp,
    vmap=_vmap,
    autocast=True,
)
