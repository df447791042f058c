"""Element-wise addition."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from opzoo.ops._common import differentiable, move_batch_first, register_fake, require_number

Number = int | float | bool
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DTYPES = (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def add(a: Tensor | Number, b: Tensor | Number, *, alpha: Number = 1) -> Tensor:
    """Compute ``a + alpha * b`` element by element, as :func:`torch.add` does.

    Args:
        a: ``Tensor[*]`` of a float dtype, int8 to int64, uint8 or bool; or a number.
        b: ``Tensor[*]`` that broadcasts with ``a``, or a number. At least one of the two is a tensor.
        alpha: multiplier of ``b``; an integer when the result is one.

    Returns:
        ``Tensor[*]`` of the broadcast shape, with the dtype of :func:`torch.result_type`. A dense
        operand of the full shape (channels_last, say) passes its strides on.

    Raises:
        TypeError: neither operand is a tensor, or one is neither tensor nor number.
        RuntimeError: shapes do not broadcast, devices differ, or a dtype is not a float, int8 to int64,
            uint8 or bool.
        ValueError: ``alpha`` is fractional for an integer result, or an integer beyond 2**53 that float64
            cannot hold.

    Under autocast the operator keeps the dtypes it is given and promotes, as torch does.
    Differentiable any number of times, in both modes; vmap-able; deterministic.

    Example:
        >>> opzoo.add(torch.ones(2, 3), torch.ones(3), alpha=2)
        tensor([[3., 3., 3.],
                [3., 3., 3.]])
    """
    if isinstance(alpha, Tensor):
        raise TypeError("opzoo::add: alpha must be a number, got a tensor; multiply b by it instead")
    require_number("add", "alpha", alpha)
    factor = float(alpha)
    if factor != alpha and alpha == alpha:
        raise ValueError(f"opzoo::add: alpha must be exact in float64, got {alpha}")
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _add(a, b, factor)
    if isinstance(a, Tensor):
        return _with_number(a, b, lambda t, number: _add(t, number, factor))
    return _with_number(b, a, lambda t, number: _add(number, t, factor))


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


def _with_number(t: Any, value: Any, add: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """``add(t, value)`` with ``value`` as a 0-d CPU tensor that promotes as torch lets a number promote.

    The widest dtype of its kind loses to any tensor with axes and keeps the number as it is.
    """
    if not isinstance(t, Tensor):
        raise TypeError(f"opzoo::add: a or b must be a tensor, got {type(t).__name__} and {type(value).__name__}")
    if isinstance(value, (bool, torch.SymBool)):
        dtype = torch.bool
    elif isinstance(value, (int, torch.SymInt)):
        dtype = torch.int64
        require_number("add", "a number", value, "__index__")
    elif isinstance(value, (float, torch.SymFloat)):
        dtype = torch.float64
    else:
        raise TypeError(f"opzoo::add: expected a tensor or a number, got {type(value).__name__}")
    number = torch.scalar_tensor(value, dtype=dtype)
    if dtype == torch.float64 and not t.dtype.is_floating_point:
        number = number.to(torch.get_default_dtype())
    if t.dim() == 0:
        return add(t.reshape(1), number).reshape(())
    return add(t, number)


def _common_shape(a: Tensor, b: Tensor) -> torch.Size:
    try:
        return torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError as error:
        raise RuntimeError(
            f"opzoo::add: a and b must broadcast, got shapes {list(a.shape)} and {list(b.shape)}"
        ) from error


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
    for name, t in (("a", a), ("b", b)):
        torch._check(
            t.dtype in _DTYPES,
            lambda: f"opzoo::add: {name} must have a floating, int8 to int64, uint8 or bool dtype, got {t.dtype}",  # noqa: B023
        )
    shape = _common_shape(a, b)
    dtype = torch.result_type(a, b)
    torch._check_value(
        dtype.is_floating_point or alpha == int(alpha) if math.isfinite(alpha) else dtype.is_floating_point,
        lambda: f"opzoo::add: alpha must be an integer for a result of dtype {dtype}, got {alpha}",
    )
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
    def tangent(given: Tensor | None, meta: tuple[torch.Size, torch.dtype, torch.device]) -> Tensor:
        shape, dtype, device = meta
        return torch.zeros(shape, dtype=dtype, device=device) if given is None else given

    return add(tangent(tangent_a, ctx.a_meta), tangent(tangent_b, ctx.b_meta), alpha=ctx.alpha)


def _vmap(info: Any, in_dims: Any, a: Tensor, b: Tensor, alpha: float) -> tuple[Tensor, int]:
    # Promotion looks at the tensors as the caller sees them: without the batch axis, some are 0-d.
    seen = [_without_axis(t, dim) for t, dim in ((a, in_dims[0]), (b, in_dims[1]))]
    dtype = torch.result_type(*seen)
    rank = max(t.dim() for t in seen)
    # A number on the CPU is not rounded to a half type before the sum: then the sum is taken in float32.
    number = any(t.dim() == 0 and operand.device.type == "cpu" for t, operand in zip(seen, (a, b), strict=True))
    half = dtype in (torch.float16, torch.bfloat16)
    wide = torch.float32 if number and half else dtype

    def align(t: Tensor, dim: int | None) -> Tensor:
        t = move_batch_first(t, dim).to(wide)
        if dim is None:
            return t
        return t.reshape(t.shape[0], *(1,) * (rank - t.dim() + 1), *t.shape[1:])

    return add(align(a, in_dims[0]), align(b, in_dims[1]), alpha=alpha).to(dtype), 0


def _without_axis(t: Tensor, dim: int | None) -> Tensor:
    shape = list(t.shape)
    if dim is not None:
        del shape[dim]
    return torch.empty(shape, dtype=t.dtype, device="meta")


register_fake("add", _fake)
_add = differentiable(torch.ops.opzoo.add.default, inputs=(0, 1), save=_save, backward=_backward, jvp=_jvp, vmap=_vmap)
