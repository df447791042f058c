"""RoIPool: the maximum of whole pixels in each bin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import alert_not_deterministic

from opzoo.ops._common import differentiable, pair, register_fake, require_number, require_tensor
from opzoo.ops.roi_align import _concatenate


def roi_pool(
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | Sequence[int],
    spatial_scale: float = 1.0,
) -> Tensor:
    """Pool the window of each box to ``output_size``: the maximum of the whole pixels of each bin.

    Corners of boxes are rounded to pixels, and so are the edges of bins. :func:`roi_align`, which rounds
    nothing, has replaced it in detectors; this is for models that were trained with it.

    Args:
        input: feature map, ``Tensor[N, C, H, W]``, float64, float32, float16 or bfloat16.
        boxes: ``Tensor[K, 5]`` of ``(image index, x1, y1, x2, y2)``, or one ``Tensor[L, 4]`` of
            ``(x1, y1, x2, y2)`` per image, in image pixels. Any floating or integer dtype.
        output_size: ``(height, width)`` of the result, or one int for both. Positive.
        spatial_scale: map pixels per image pixel, 0.25 for a map of stride 4. Finite and positive.

    Returns:
        ``Tensor[K, C, height, width]`` of ``input``'s dtype, contiguous.

    Raises:
        TypeError: an argument is no tensor, no number, or no pair of ints.
        ValueError: an image index is no integer in ``[0, N)`` (on the CPU; on CUDA such a RoI gives
            zeros), ``boxes`` is a list of another length than N, or a number is out of its range.
        RuntimeError: a tensor has the wrong rank, shape, dtype or device, or there are boxes but the map
            has no pixels.

    A RoI is at least one pixel wide and high. A bin without pixels, and every bin of a box with a NaN or
    infinite coordinate, is 0; a NaN pixel wins its bin. Coordinates are float32 (float64 for float64),
    whatever the dtype of ``boxes``. Under autocast ``input``'s dtype is kept: pass ``input.float()`` for
    float32. Differentiable any number of times in ``input``, in reverse mode; forward mode and vmap raise.
    Deterministic but for the backward on CUDA, which raises under ``torch.use_deterministic_algorithms(True)``.

    Source: Girshick, "Fast R-CNN", ICCV 2015; rounding as in torchvision.

    Example:
        >>> image = torch.arange(16.0).reshape(1, 1, 4, 4)
        >>> opzoo.roi_pool(image, [torch.tensor([[0.0, 0.0, 3.0, 3.0]])], 2)
        tensor([[[[ 5.,  7.],
                  [13., 15.]]]])
    """
    require_tensor("roi_pool", "input", input)
    height, width = pair("roi_pool", "output_size", output_size)
    require_number("roi_pool", "spatial_scale", spatial_scale)
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    if not isinstance(boxes, Tensor):
        boxes, index = _concatenate("roi_pool", input, boxes)
        boxes = torch.cat([index[:, None].to(dtype), boxes.to(dtype)], 1)
    elif not boxes.is_complex():
        boxes = boxes.to(dtype)
    output: Tensor = _forward(input, boxes.detach(), height, width, spatial_scale, True)[0]
    return output


class RoIPool(nn.Module):
    """:func:`roi_pool` as a module.

    Args:
        output_size: ``(height, width)`` of the result, or one int for both.
        spatial_scale: map pixels per image pixel.
    """

    def __init__(self, output_size: int | Sequence[int], spatial_scale: float) -> None:
        super().__init__()
        self.output_size = output_size
        self.spatial_scale = spatial_scale

    def forward(self, input: Tensor, boxes: Tensor | Sequence[Tensor]) -> Tensor:
        """Pooled windows of ``input``; see :func:`roi_pool`."""
        return roi_pool(input, boxes, self.output_size, self.spatial_scale)

    def extra_repr(self) -> str:
        return f"output_size={self.output_size}, spatial_scale={self.spatial_scale}"


def _check_boxes(op: str, features: Tensor, boxes: Tensor, sizes: Sequence[Any]) -> None:
    dtype = torch.float64 if features.dtype == torch.float64 else torch.float32
    torch._check(
        features.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16),
        lambda: f"opzoo::{op}: features must be float64, float32, float16 or bfloat16, got {features.dtype}",
    )
    torch._check(
        boxes.device == features.device,
        lambda: f"opzoo::{op}: boxes must be on the device of the map, {features.device}, got {boxes.device}",
    )
    torch._check(boxes.dtype == dtype, lambda: f"opzoo::{op}: boxes must be {dtype}, got {boxes.dtype}")
    torch._check(
        boxes.dim() == 2 and boxes.shape[1] == 5,
        lambda: f"opzoo::{op}: boxes must have shape [K, 5], got {list(boxes.shape)}",
    )
    n, h, w = sizes
    if n == 0 or h == 0 or w == 0:
        torch._check(boxes.shape[0] == 0, lambda: f"opzoo::{op}: boxes must be empty for a map without pixels")


def _fake(input: Tensor, boxes: Tensor, height: Any, width: Any, scale: float, _: bool) -> tuple[Tensor, Tensor]:
    op = "roi_pool"
    torch._check(input.dim() == 4, lambda: f"opzoo::{op}: input must have 4 axes, got {input.dim()}")
    torch._check_value(
        height > 0 and width > 0, lambda: f"opzoo::{op}: output_size must be positive, got ({height}, {width})"
    )
    torch._check_value(
        math.isfinite(scale) and scale > 0,
        lambda: f"opzoo::{op}: spatial_scale must be finite and positive, got {scale}",
    )
    _check_boxes(op, input, boxes, (input.shape[0], *input.shape[2:]))
    shape = (boxes.shape[0], input.shape[1], height, width)
    return input.new_empty(shape), input.new_empty(shape, dtype=torch.int64)


def _fake_backward(grad: Tensor, argmax: Tensor, boxes: Tensor, n: Any, c: Any, h: Any, w: Any) -> Tensor:
    op = "_roi_pool_backward"
    torch._check(grad.dim() == 4, lambda: f"opzoo::{op}: grad must have 4 axes, got {grad.dim()}")
    torch._check(
        argmax.shape == grad.shape and argmax.dtype == torch.int64,
        lambda: f"opzoo::{op}: argmax must be int64 of shape {list(grad.shape)}, got {list(argmax.shape)}",
    )
    for size in (n, c, h, w):
        torch._check_value(size >= 0, lambda: f"opzoo::{op}: sizes must not be negative, got {[n, c, h, w]}")
    _check_boxes(op, grad, boxes, (n, h, w))
    torch._check(
        grad.shape[0] == boxes.shape[0] and grad.shape[1] == c,
        lambda: f"opzoo::{op}: grad must have shape [{boxes.shape[0]}, {c}, ...], got {list(grad.shape)}",
    )
    return grad.new_empty((n, c, h, w))


def _save(ctx: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.sizes = args[0].shape
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], args[1])


def _derive(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 6
    if grad.is_cuda:
        alert_not_deterministic("opzoo.roi_pool backward on CUDA")
    return _backward(grad, *ctx.saved_tensors, *ctx.sizes), *(None,) * 5


def _save_backward(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*args[1:3])


def _derive_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """The backward is linear: its derivative reads the pixels that won."""
    argmax, boxes = ctx.saved_tensors
    images = boxes[:, 0].long()
    known = (argmax >= 0) & ((images >= 0) & (images < grad.shape[0])).reshape(-1, 1, 1, 1)
    rows = grad.flatten(2).index_select(0, images.clamp(0, grad.shape[0] - 1)) if len(images) else grad.flatten(2)[:0]
    won = rows.gather(2, argmax.clamp(min=0).flatten(2)).reshape(argmax.shape)
    return torch.where(known, won, 0), *(None,) * 6


register_fake("roi_pool", _fake)
register_fake("_roi_pool_backward", _fake_backward)
_backward = differentiable(
    torch.ops.opzoo._roi_pool_backward.default, inputs=(0,), save=_save_backward, backward=_derive_backward
)
_forward = differentiable(torch.ops.opzoo.roi_pool.default, inputs=(0,), save=_save, backward=_derive)
