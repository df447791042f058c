"""Content-aware upsampling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opzoo.ops._common import (
    differentiable,
    move_batch_first,
    register_autocast,
    register_fake,
    require_number,
    require_tensor,
)


def carafe(features: Tensor, masks: Tensor, kernel_size: int, group_size: int = 1, scale_factor: int = 2) -> Tensor:
    """Upsample with a kernel per pixel of the result: content-aware reassembly of features.

    Pixel ``(i, j)`` of the result sums the ``kernel_size x kernel_size`` window around pixel
    ``(i // scale_factor, j // scale_factor)`` of ``features``, weighted by the numbers of ``masks`` at ``(i, j)``.

    Args:
        features: ``Tensor[N, C, H, W]``, float64, float32, float16 or bfloat16.
        masks: ``Tensor[N, group_size * kernel_size**2, scale_factor * H, scale_factor * W]`` of the dtype of
            ``features``: the kernels, row by row, one after the other for the groups.
        kernel_size: odd, at most 1023.
        group_size: number of groups of channels with kernels of their own; divides C.
        scale_factor: pixels of the result per pixel of ``features``, along both axes; at most 1024.

    Returns:
        ``Tensor[N, C, scale_factor * H, scale_factor * W]`` of the dtype of ``features``, contiguous.

    Raises:
        TypeError: an argument is no tensor or no int.
        ValueError: a number is out of its range.
        RuntimeError: a tensor has the wrong rank, shape, dtype or device.

    Features outside the map are 0. Sums are float32, float64 for float64. Under autocast the dtype of
    ``features`` is kept, and ``masks`` follow it: pass ``features.float()`` for float32. Differentiable once, in
    ``features`` and ``masks``; vmap-able.
    Deterministic, forward and backward.

    Source: Wang et al., "CARAFE: Content-Aware ReAssembly of FEatures", ICCV 2019.

    Example:
        >>> kernels = torch.full((1, 1, 4, 4), 0.5)  # 1 x 1 kernels: half of the nearest pixel
        >>> opzoo.carafe(torch.ones(1, 1, 2, 2), kernels, 1, 1, 2)[0, 0, 0]
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    require_tensor("carafe", "features", features)
    require_tensor("carafe", "masks", masks)
    for name, number in (("kernel_size", kernel_size), ("group_size", group_size), ("scale_factor", scale_factor)):
        require_number("carafe", name, number, "__index__")
    return _forward(features, masks, kernel_size, group_size, scale_factor)


def _check(op: str, features: Tensor, masks: Tensor, k: int, groups: int, s: int) -> list[Any]:
    torch._check(features.dim() == 4, lambda: f"opzoo::{op}: features must have 4 axes, got {features.dim()}")
    torch._check(
        features.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16),
        lambda: f"opzoo::{op}: features must be float64, float32, float16 or bfloat16, got {features.dtype}",
    )
    torch._check(
        masks.dtype == features.dtype,
        lambda: f"opzoo::{op}: masks must have the dtype of features, {features.dtype}, got {masks.dtype}",
    )
    torch._check_value(0 < k < 1024 and k % 2 == 1, lambda: f"opzoo::{op}: kernel_size must be odd, got {k}")
    torch._check_value(0 < s <= 1024, lambda: f"opzoo::{op}: scale_factor must be from 1 to 1024, got {s}")
    torch._check_value(
        groups > 0 and features.shape[1] % groups == 0,
        lambda: f"opzoo::{op}: group_size must divide the {features.shape[1]} channels of features, got {groups}",
    )
    N, C, H, W = features.shape
    expected = [N, groups * k * k, s * H, s * W]
    torch._check(masks.dim() == 4, lambda: f"opzoo::{op}: masks must have 4 axes, got {masks.dim()}")
    for size, wanted in zip(masks.shape, expected, strict=True):
        torch._check(size == wanted, lambda: f"opzoo::{op}: masks must have shape {expected}, got {list(masks.shape)}")
    return [N, C, s * H, s * W]


def _fake(features: Tensor, masks: Tensor, k: int, groups: int, s: int) -> Tensor:
    return features.new_empty(_check("carafe", features, masks, k, groups, s))


def _fake_backward(grad: Tensor, features: Tensor, masks: Tensor, k: int, groups: int, s: int) -> Any:
    op = "_carafe_backward"
    expected = _check(op, features, masks, k, groups, s)
    torch._check(
        grad.shape == torch.Size(expected),
        lambda: f"opzoo::{op}: grad must have shape {expected}, got {list(grad.shape)}",
    )
    return features.new_empty(features.shape), masks.new_empty(masks.shape)


def _save(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
    features, masks, *ctx.numbers = args
    ctx.save_for_backward(features, masks)


def _derive(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grads = _backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return *(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=False)), None, None, None


def _refuse_double_backward(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("opzoo.carafe has no second derivative; opzoo.reference.carafe has")


def _folded(info: Any, in_dims: Any, args: tuple[Any, ...]) -> list[Any]:
    """The mapped axis merged into N."""
    return [
        t
        if not isinstance(t, Tensor)
        else (t.expand(info.batch_size, *t.shape) if dim is None else move_batch_first(t, dim)).flatten(0, 1)
        for t, dim in zip(args, in_dims, strict=True)
    ]


def _vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    return _forward(*_folded(info, in_dims, args)).unflatten(0, (info.batch_size, -1)), 0


def _vmap_backward(info: Any, in_dims: Any, *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    grads = _backward(*_folded(info, in_dims, args))
    return tuple(g.unflatten(0, (info.batch_size, -1)) for g in grads), (0, 0)


register_fake("carafe", _fake)
register_fake("_carafe_backward", _fake_backward)
register_autocast(
    torch.ops.opzoo.carafe.default,
    lambda dtype, features, masks, *numbers: (features, masks.to(features.dtype), *numbers),
)
register_autocast(torch.ops.opzoo._carafe_backward.default, lambda dtype, *args: args)
_backward = differentiable(
    torch.ops.opzoo._carafe_backward.default,
    inputs=(0, 1, 2),
    save=lambda ctx, args, output: None,
    backward=_refuse_double_backward,
    vmap=_vmap_backward,
    autocast=True,
)
_forward = differentiable(
    torch.ops.opzoo.carafe.default, inputs=(0, 1), save=_save, backward=_derive, vmap=_vmap, autocast=True
)
