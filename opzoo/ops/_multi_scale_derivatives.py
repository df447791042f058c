"""multi_scale_roi_align while tracing, under autograd and vmap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opzoo.ops._common import differentiable, register_fake
from opzoo.ops._roi_align_derivatives import _boxes_backward, _fake_grad_input, _fake_output
from opzoo.ops._roi_checks import check_boxes, empty_map, is_channels_last
from opzoo.ops._roi_fold import Batched, Folded, axis_after

MAX_LEVELS = 8
_OP = "multi_scale_roi_align"

# Fake kernels. Their checks are those of multi_scale_roi_align.cpp, as far as a shape can tell.


def _check_pyramid(op: str, levels: int, scales: Sequence[float], options: Sequence[Any]) -> None:
    _, _, canonical_scale, canonical_level, _, _ = options
    torch._check(1 <= levels <= MAX_LEVELS, lambda: f"opzoo::{op}: inputs must hold 1 to 8 maps, got {levels}")
    torch._check_value(
        len(scales) == levels,
        lambda: f"opzoo::{op}: spatial_scales must hold one number per map, {levels}, got {len(scales)}",
    )
    for scale in scales:
        torch._check_value(
            math.isfinite(scale) and scale > 0,
            lambda: f"opzoo::{op}: spatial_scales must be finite and positive, got {scales}",
        )
    torch._check_value(
        math.isfinite(canonical_scale) and canonical_scale > 0,
        lambda: f"opzoo::{op}: canonical_scale must be finite and positive, got {canonical_scale}",
    )
    torch._check_value(
        math.isfinite(canonical_level),
        lambda: f"opzoo::{op}: canonical_level must be finite, got {canonical_level}",
    )


def _check_map(name: str, t: Tensor, first: Tensor) -> None:
    torch._check(t.dim() == 4, lambda: f"opzoo::{_OP}: {name} must have 4 axes, got {t.dim()}")
    torch._check(
        t.dtype == first.dtype and t.device == first.device,
        lambda: (
            f"opzoo::{_OP}: {name} must have the dtype and the device of inputs[0], "
            f"{first.dtype} on {first.device}, got {t.dtype} on {t.device}"
        ),
    )
    for axis in (0, 1):
        torch._check(
            t.shape[axis] == first.shape[axis],
            lambda: (
                f"opzoo::{_OP}: {name} must have the batch and the channels of inputs[0], "
                f"{list(first.shape)}, got {list(t.shape)}"
            ),
        )


def _fake_forward(
    inputs: Sequence[Tensor],
    boxes: Tensor,
    batch_index: Tensor | None,
    height: Any,
    width: Any,
    scales: Sequence[float],
    *options: Any,
) -> Tensor:
    _check_pyramid(_OP, len(inputs), scales, options)
    for i, t in enumerate(inputs):
        _check_map(f"inputs[{i}]", t, inputs[0])
        n, _, h, w = t.shape
        check_boxes(_OP, f"inputs[{i}]", t, boxes, batch_index, n, empty_map(n, h, w))
    return _fake_output(_OP, inputs[0], boxes, batch_index, height, width, scales[0], options[0])


def _fake_backward(
    grad: Tensor,
    boxes: Tensor,
    batch_index: Tensor | None,
    n: Any,
    c: Any,
    heights: Sequence[Any],
    widths: Sequence[Any],
    scales: Sequence[float],
    *options: Any,
) -> list[Tensor]:
    op = "_multi_scale_roi_align_backward"
    _check_pyramid(op, len(heights), scales, options[:-1])
    torch._check_value(
        len(widths) == len(heights),
        lambda: f"opzoo::{op}: widths must hold one number per map, {len(heights)}, got {len(widths)}",
    )
    return [
        _fake_grad_input(op, grad, boxes, batch_index, (n, c, h, w), (scale, *options[:2], options[-1]))
        for h, w, scale in zip(heights, widths, scales, strict=True)
    ]


# Derivatives. For given boxes the operator is linear in its maps, and the backward is its adjoint. Each
# box has its gradient from the map it takes, as roi_align gives it: with g of the pooled shape and m of
# the maps', both <g, average(m)> and <m, backward(g)> are the one sum that boxes_backward(g, m)
# differentiates.

_FORWARD_TAIL = 11  # arguments behind the maps
_BACKWARD_ARGUMENTS = 15


def _keep(ctx: Any, args: tuple[Any, ...], features: Sequence[Tensor], adjoint: Sequence[Any]) -> None:
    ctx.own, ctx.adjoint = args[3:], adjoint
    tensors = (*args[1:3], *features)
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


def _refuse_forward_mode() -> None:
    raise NotImplementedError(f"opzoo.{_OP} has no forward-mode derivative in boxes; detach them")


def _with_zeros(tensors: Sequence[Tensor | None], backward_numbers: Sequence[Any]) -> list[Tensor] | None:
    """A missing gradient or tangent of one map beside those of others; None where all are missing."""
    given = next((t for t in tensors if t is not None), None)
    if given is None:
        return None
    n, c, heights, widths, *_ = backward_numbers
    shapes = zip(heights, widths, strict=True)
    return [given.new_zeros((n, c, h, w)) if t is None else t for t, (h, w) in zip(tensors, shapes, strict=True)]


def _map_of_each(maps: Sequence[Tensor], boxes: Tensor, index: Tensor | None, bounds: Sequence[Any]) -> Tensor:
    """``Tensor[K]``: 1 for a box of the first map, 2 for one of the second, ..., 0 for one of none.

    The operator's own answer, pooled from maps of one pixel that hold their number. The scale is so small
    that every finite box lies on that pixel.
    """
    numbers = [t.new_full((t.shape[0], 1, 1, 1), i + 1) for i, t in enumerate(maps)]
    return _average(numbers, boxes.detach(), index, 1, 1, [1e-30] * len(maps), 1, False, *bounds).flatten()


def _to_boxes(
    grad: Tensor, maps: Sequence[Tensor], boxes: Tensor, index: Tensor | None, geometry: Sequence[Any]
) -> Tensor:
    scales, ratio, aligned, *bounds = geometry
    if len(maps) == 1:
        return _boxes_backward(grad, maps[0], boxes, index, scales[0], ratio, aligned)
    number = _map_of_each(maps, boxes, index, bounds)
    total = None
    for i, (t, scale) in enumerate(zip(maps, scales, strict=True)):
        # A box of NaN has no samples: its gradient is 0 and nothing is read for it.
        own = torch.where((number == i + 1).unsqueeze(1), boxes[:, -4:], math.nan)
        if index is None:
            own = torch.cat([boxes[:, :1], own], 1)
        part = _boxes_backward(grad, t, own, index, scale, ratio, aligned)
        total = part if total is None else total + part
    assert total is not None
    return total


def _save_forward(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
    maps = args[0]
    n, c, _, _ = maps[0].shape
    # Under vmap an axis of the map is hidden, and torch does not answer for its layout.
    channels_last = not torch._C._are_functorch_transforms_active() and is_channels_last(maps[0])
    sizes = [t.shape[2] for t in maps], [t.shape[3] for t in maps]
    features = maps if ctx.needs_input_grad[len(maps)] else ()  # kept for the boxes alone
    _keep(ctx, args, features, (n, c, *sizes, *args[5:], channels_last))


def _forward_grad(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    boxes, index, *maps = ctx.saved_tensors
    levels = len(ctx.adjoint[2])
    grads: list[Any] = [None] * levels
    grad_boxes = None
    if grad is not None and any(ctx.needs_input_grad[:levels]):
        grads = list(_backward(grad, boxes, index, *ctx.adjoint))
    if grad is not None and ctx.needs_input_grad[levels]:
        grad_boxes = _to_boxes(grad, maps, boxes, index, ctx.own[2:])
    return grads, grad_boxes, *(None,) * (_FORWARD_TAIL - 1)


def _forward_jvp(ctx: Any, tangents: list[Tensor | None], *others: Tensor | None) -> Tensor | None:
    if any(other is not None for other in others):
        _refuse_forward_mode()
    maps = _with_zeros(tangents, ctx.adjoint)
    return None if maps is None else _average(maps, *ctx.saved_tensors[:2], *ctx.own)


def _forward_vmap(
    info: Any, dims: Any, maps: list[Tensor], boxes: Tensor, index: Tensor | None, *rest: Any
) -> tuple[Tensor, int]:
    batched: list[Batched] = list(zip(maps, dims[0], strict=True))
    images = axis_after(maps[0], dims[0][0], 0)
    shared = all(dim is None for dim in dims[0])
    f = Folded(
        info.batch_size,
        images,
        (boxes, dims[1]),
        (index, dims[2]),
        () if shared else batched,
        (maps[0], None) if shared else (None, None),
        op=_OP,
    )
    return f.unfold(_average(maps if shared else f.pooled, f.boxes, f.batch_index, *rest)), f.axis


def _save_backward(ctx: Any, args: tuple[Any, ...], output: Any) -> None:
    features = (args[0],) if ctx.needs_input_grad[1] else ()
    _keep(ctx, args, features, (*args[0].shape[-2:], *args[7:14]))


def _backward_grad(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    boxes, index, *features = ctx.saved_tensors
    maps = _with_zeros(grads, ctx.own)
    grad = grad_boxes = None
    if maps is not None and ctx.needs_input_grad[0]:
        grad = _average(maps, boxes, index, *ctx.adjoint)
    if maps is not None and ctx.needs_input_grad[1]:
        grad_boxes = _to_boxes(features[0], maps, boxes, index, ctx.adjoint[2:])
    return grad, grad_boxes, *(None,) * (_BACKWARD_ARGUMENTS - 2)


def _backward_jvp(ctx: Any, tangent: Tensor | None, *others: Tensor | None) -> Any:
    if any(other is not None for other in others):
        _refuse_forward_mode()
    if tangent is None:
        return (None,) * len(ctx.own[2])
    return tuple(_backward(tangent, *ctx.saved_tensors[:2], *ctx.own))


def _backward_vmap(
    info: Any, dims: Any, grad: Tensor, boxes: Tensor, index: Tensor | None, n: Any, c: Any, *rest: Any
) -> tuple[Any, Any]:
    f = Folded(info.batch_size, n, (boxes, dims[1]), (index, dims[2]), ((grad, dims[0]),), (None, None), op=_OP)
    n, c = (n * info.batch_size, c) if f.axis == 0 else (n, c * info.batch_size)
    grads = tuple(f.unfold(t) for t in _backward(*f.pooled, f.boxes, f.batch_index, n, c, *rest))
    return grads, (f.axis,) * len(grads)


register_fake("multi_scale_roi_align", _fake_forward)
register_fake("_multi_scale_roi_align_backward", _fake_backward)

_average = differentiable(
    torch.ops.opzoo.multi_scale_roi_align.default,
    inputs=(0, 1),
    save=_save_forward,
    backward=_forward_grad,
    jvp=_forward_jvp,
    vmap=_forward_vmap,
)
_backward = differentiable(
    torch.ops.opzoo._multi_scale_roi_align_backward.default,
    inputs=(0, 1),
    save=_save_backward,
    backward=_backward_grad,
    jvp=_backward_jvp,
    vmap=_backward_vmap,
)
