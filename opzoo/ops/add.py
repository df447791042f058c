"""Element-wise addition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opzoo._library import LIBRARY
from opzoo.ops._common import differentiable, move_batch_first

Number = int | float | bool


def add(a: Tensor | Number, b: Tensor | Number, *, alpha: Number = 1) -> Tensor:
    """Compute ``a + alpha * b`` element by element, as :func:`torch.add` does.

    Args:
        a: ``Tensor[*]`` of any real dtype, or a number.
        b: ``Tensor[*]`` that broadcasts with ``a``, or a number. At least one of the two is a tensor.
        alpha: multiplier of ``b``; an integer when the result is one.

    Returns:
        ``Tensor[*]`` of the broadcast shape, with the dtype of :func:`torch.result_type`. A dense
        operand of the full shape (channels_last, say) passes its strides on.

    Raises:
        RuntimeError: shapes do not broadcast, devices differ, or a dtype is complex.
        ValueError: ``alpha`` is fractional for an integer result, or an integer beyond 2**53 that float64
            cannot hold.

    Under autocast the operator keeps the dtypes it is given and promotes, as torch does.
    Differentiable any number of times, in both modes; vmap-able; deterministic.

    Example:
        >>> opzoo.add(torch.ones(2, 3), torch.ones(3), alpha=2)
        tensor([[3., 3., 3.],
                [3., 3., 3.]])
    """
    if not isinstance(a, Tensor):
        a = _number_like(a, b)
    if not isinstance(b, Tensor):
        b = _number_like(b, a)
    factor = float(alpha)
    if factor != alpha and alpha == alpha:
        raise ValueError(f"opzoo::add: alpha must be exact in float64, got {alpha}")
    return _add(a, b, factor)


class Add(nn.Module):
    """:func:`add` as a module.

    Args:
        alpha: multiplier of the second operand.
    """

    def __init__(self, alpha: Number = 1) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """``a + alpha * b``; see :func:`add`."""
        return add(a, b, alpha=self.alpha)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"


def _number_like(value: Any, other: Any) -> Tensor:
    """A number as a 0-d CPU tensor that promotes as torch lets a number promote."""
    if not isinstance(other, Tensor):
        raise TypeError(f"opzoo::add: a or b must be a tensor, got {type(value).__name__} and {type(other).__name__}")
    if not isinstance(value, (int, float, bool)):
        raise TypeError(f"opzoo::add: expected a tensor or a number, got {type(value).__name__}")
    dtype = torch.result_type(other, value)
    if other.dim() > 0 and dtype.is_floating_point and other.dtype == dtype:
        dtype = torch.float64  # loses to any tensor with axes, and keeps the number's precision
    return torch.scalar_tensor(value, dtype=dtype)


def _is_dense(t: Tensor) -> bool:
    expected = 1
    for size, stride in sorted(zip(t.shape, t.stride(), strict=True), key=lambda axis: axis[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _fake(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    number_a = a.dim() == 0 and a.device.type == "cpu"
    number_b = b.dim() == 0 and b.device.type == "cpu"
    reference = b if number_a and not number_b else a
    torch._check(
        number_a or number_b or a.device == b.device,
        lambda: f"opzoo::add: b must be on the device of a, {a.device}, got {b.device}",
    )
    shape = torch.broadcast_shapes(a.shape, b.shape)
    dtype = torch.result_type(a, b)
    for t in (a, b):
        if t.dim() == len(shape) and t.shape == shape:  # rank first: tuples compare sizes, a guard each
            if t.is_contiguous():
                break
            if _is_dense(t):
                return torch.empty_strided(shape, t.stride(), dtype=dtype, device=reference.device)
    return torch.empty(shape, dtype=dtype, device=reference.device)


def _save(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
    a, b, ctx.alpha = args
    ctx.a_meta = a.shape, a.dtype, a.device
    ctx.b_meta = b.shape, b.dtype, b.device


def _reduce_to(grad: Tensor, meta: tuple[torch.Size, torch.dtype, torch.device]) -> Tensor:
    """Sum over the axes that broadcasting stretched, back to the operand's own dtype and device."""
    shape, dtype, device = meta
    return grad.sum_to_size(shape).to(device=device, dtype=dtype)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    need_a, need_b, _ = ctx.needs_input_grad
    grad_a = _reduce_to(grad, ctx.a_meta) if need_a else None
    grad_b = _reduce_to(grad * ctx.alpha if ctx.alpha != 1 else grad, ctx.b_meta) if need_b else None
    return grad_a, grad_b, None


def _jvp(ctx: Any, tangent_a: Tensor | None, tangent_b: Tensor | None, _: None) -> Tensor:
    shape = torch.broadcast_shapes(ctx.a_meta[0], ctx.b_meta[0])
    dtype = torch.promote_types(ctx.a_meta[1], ctx.b_meta[1])
    if tangent_a is None:
        assert tangent_b is not None
        return (tangent_b * ctx.alpha).to(dtype).expand(shape)
    if tangent_b is None:
        return tangent_a.to(dtype).expand(shape)
    return add(tangent_a, tangent_b, alpha=ctx.alpha)


def _vmap(info: Any, in_dims: Any, a: Tensor, b: Tensor, alpha: float) -> tuple[Tensor, int]:
    rank = max(t.dim() - (dim is not None) for t, dim in ((a, in_dims[0]), (b, in_dims[1])))

    def align(t: Tensor, dim: int | None) -> Tensor:
        t = move_batch_first(t, dim)
        if dim is None:
            return t
        return t.reshape(t.shape[0], *(1,) * (rank - t.dim() + 1), *t.shape[1:])

    return add(align(a, in_dims[0]), align(b, in_dims[1]), alpha=alpha), 0


torch.library.register_fake("opzoo::add", _fake, lib=LIBRARY)
_add = differentiable(torch.ops.opzoo.add.default, inputs=(0, 1), save=_save, backward=_backward, jvp=_jvp, vmap=_vmap)
