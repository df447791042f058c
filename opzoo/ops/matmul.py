"""Matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opzoo.ops._common import autocast_tensor, differentiable, move_batch_first, register_autocast, register_fake
from opzoo.ops.add import add

_PRECISIONS = {"ieee": 0, "tf32": 1, "tf32x3": 2}


def matmul(a: Tensor, b: Tensor, *, precision: str | None = None) -> Tensor:
    """Multiply matrices, as :func:`torch.matmul` does.

    Args:
        a: ``Tensor[*, M, K]``, or a vector ``Tensor[K]`` standing for one row.
        b: ``Tensor[*, K, N]`` of the same dtype, or a vector ``Tensor[K]`` standing for one column.
            The batch axes ``*`` of the two broadcast. Transposed, sliced and expanded views are
            read where they lie.
        precision: What float32 products on a GPU may cost in accuracy; other dtypes and the CPU
            ignore it. ``"ieee"``: float32 arithmetic. ``"tf32"``: tensor cores on operands rounded
            to 10 bits of fraction. ``"tf32x3"``: three such products for float32's accuracy.
            ``None``: "tf32" or "ieee" as ``torch.backends.cuda.matmul.fp32_precision`` says. Each
            is a permission: a GPU without a kernel for it computes "ieee". Gradients use the same.

    Returns:
        ``Tensor[*, M, N]``, new and contiguous, in the dtype of ``a`` and ``b``. The axis of a vector
        is left out: two vectors give a 0-d tensor. ``K = 0`` gives zeros.

    Raises:
        RuntimeError: shapes do not fit, dtypes or devices differ, a dtype is not float64, float32,
            float16 or bfloat16, or the batch has more than 16 axes that cannot be walked as one.
        TypeError: an operand is not a tensor.
        ValueError: an unknown precision.

    Sums are taken in float32 (float64 for float64) and rounded once. Under autocast both operands,
    float64 apart, are cast to autocast's dtype, which is also the result's; for float32 call it inside
    ``with torch.autocast(device_type, enabled=False)``, on float32 operands. Differentiable any
    number of times, in both modes; vmap-able; deterministic on both devices, forward and backward.

    Example:
        >>> opzoo.matmul(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.eye(2).flip(0))
        tensor([[2., 1.],
                [4., 3.]])
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        raise TypeError(f"opzoo::matmul: a and b must be tensors, got {type(a).__name__} and {type(b).__name__}")
    level = _precision_of(a, precision)
    if a.dim() == 2 and b.dim() == 2:
        return _matmul(a, b, level)
    return _broadcasting(a, b, level)


class MatMul(nn.Module):
    """:func:`matmul` as a module without parameters."""

    def __init__(self, *, precision: str | None = None) -> None:
        super().__init__()
        self.precision = precision

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """``a @ b``; see :func:`matmul`."""
        return matmul(a, b, precision=self.precision)

    def extra_repr(self) -> str:
        return f"precision={self.precision!r}"


def _precision_of(a: Tensor, precision: str | None) -> int:
    """The operator's number for a precision; torch's own switch is read only where it matters."""
    if precision is not None:
        if not isinstance(precision, str) or precision not in _PRECISIONS:
            raise ValueError(f"opzoo::matmul: precision must be None or one of {list(_PRECISIONS)}, got {precision!r}")
        return _PRECISIONS[precision]
    if a.is_cuda and a.dtype == torch.float32:
        return _torch_precision()
    return 0


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _torch_precision() -> int:
    # In a compiled graph a constant; Dynamo guards the switch itself and compiles anew when it changes.
    return int(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _broadcasting(a: Tensor, b: Tensor, level: int) -> Tensor:
    """Vectors to matrices, batch axes to their common shape, all by views; then the product."""
    if a.dim() == 0 or b.dim() == 0:
        name = "a" if a.dim() == 0 else "b"
        raise RuntimeError(f"opzoo::matmul: {name} must have at least 1 axis, got a 0-d tensor")
    for name, t in (("a", a), ("b", b)):
        if t.layout != torch.strided:
            raise RuntimeError(f"opzoo::matmul: {name} must be dense, got {t.layout}")
    row, column = a.dim() == 1, b.dim() == 1
    if row:
        a = a.unsqueeze(0)
    if column:
        b = b.unsqueeze(1)
    if a.shape[:-2] != b.shape[:-2]:
        batch = _broadcast_batch(a, b)
        a = a.expand(*batch, -1, -1)
        b = b.expand(*batch, -1, -1)
    out: Tensor = _matmul(a, b, level)
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


def _fake(a: Tensor, b: Tensor, precision: int = 0) -> Tensor:
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


# An argument at its default is left out when an op is called through the dispatcher.
def _save(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
    a, b = args[:2]
    need_a, need_b = ctx.needs_input_grad[:2]
    ctx.arguments = len(args)
    ctx.precision = args[2] if len(args) > 2 else 0
    ctx.save_for_backward(a if need_b else None, b if need_a else None)
    ctx.save_for_forward(a, b)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    grad_a = _matmul(grad, b.mT, ctx.precision) if ctx.needs_input_grad[0] else None
    grad_b = _matmul(a.mT, grad, ctx.precision) if ctx.needs_input_grad[1] else None
    return (grad_a, grad_b, None)[: ctx.arguments]


def _jvp(ctx: Any, tangent_a: Tensor | None, tangent_b: Tensor | None, *_: None) -> Tensor:
    a, b = ctx.saved_tensors
    if tangent_a is None:
        return _matmul(a, tangent_b, ctx.precision)
    if tangent_b is None:
        return _matmul(tangent_a, b, ctx.precision)
    return add(_matmul(tangent_a, b, ctx.precision), _matmul(a, tangent_b, ctx.precision))


def _vmap(info: Any, in_dims: Any, a: Tensor, b: Tensor, precision: int = 0) -> tuple[Tensor, int]:
    def batched(t: Tensor, dim: int | None) -> Tensor:
        return t.expand(info.batch_size, *t.shape) if dim is None else move_batch_first(t, dim)

    return _matmul(batched(a, in_dims[0]), batched(b, in_dims[1]), precision), 0


def _autocast(dtype: torch.dtype, a: Tensor, b: Tensor, precision: int = 0) -> tuple[Tensor | None, Tensor | None, int]:
    return autocast_tensor(a, dtype), autocast_tensor(b, dtype), precision


register_fake("matmul", _fake)
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
