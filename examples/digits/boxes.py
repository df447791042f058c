"""Boxes ``(x1, y1, x2, y2)`` in pixels: overlap, the regression code, anchors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MAX_LOG_SCALE = math.log(4.0)  # one regression step changes a side by at most this factor


def box_area(boxes: Tensor) -> Tensor:
    """``Tensor[..., 4]`` to ``Tensor[...]``."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def box_iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of every pair: ``Tensor[A, 4]``, ``Tensor[B, 4]`` to ``Tensor[A, B]``."""
    top_left = torch.maximum(a[:, None, :2], b[None, :, :2])
    bottom_right = torch.minimum(a[:, None, 2:], b[None, :, 2:])
    intersection = (bottom_right - top_left).clamp(min=0).prod(-1)
    union = box_area(a)[:, None] + box_area(b)[None, :] - intersection
    return intersection / union.clamp(min=1e-6)


def _centre_and_size(boxes: Tensor) -> tuple[Tensor, Tensor]:
    size = boxes[..., 2:] - boxes[..., :2]
    return boxes[..., :2] + size / 2, size


def encode(boxes: Tensor, anchors: Tensor, scale: Tensor) -> Tensor:
    """The regression target that moves ``anchors`` onto ``boxes``, as in R-CNN.

    Args:
        boxes: ``Tensor[..., 4]``, of positive size.
        anchors: ``Tensor[..., 4]``, of positive size.
        scale: ``Tensor[4]`` that brings ``(dx, dy, dw, dh)`` to about unit variance.

    Returns:
        ``Tensor[..., 4]`` with ``(dx / w, dy / h, log dw, log dh) * scale``.
    """
    centre, size = _centre_and_size(boxes)
    anchor_centre, anchor_size = _centre_and_size(anchors)
    return torch.cat([(centre - anchor_centre) / anchor_size, (size / anchor_size).log()], -1) * scale


def decode(deltas: Tensor, anchors: Tensor, scale: Tensor) -> Tensor:
    """The inverse of :func:`encode`: ``Tensor[..., 4]`` deltas and anchors to ``Tensor[..., 4]`` boxes."""
    shift, log_scale = (deltas / scale).split(2, -1)
    anchor_centre, anchor_size = _centre_and_size(anchors)
    centre = anchor_centre + shift * anchor_size
    half = anchor_size * log_scale.clamp(max=MAX_LOG_SCALE).exp() / 2
    return torch.cat([centre - half, centre + half], -1)


def clip(boxes: Tensor, height: int, width: int) -> Tensor:
    """Cut ``Tensor[..., 4]`` to the image."""
    x, y = boxes[..., 0::2].clamp(0, width), boxes[..., 1::2].clamp(0, height)
    return torch.stack([x[..., 0], y[..., 0], x[..., 1], y[..., 1]], -1)


def anchor_grid(features: Tensor, stride: int, heights: Sequence[float], aspect: float) -> Tensor:
    """Anchors centred on every cell of a feature map.

    Args:
        features: ``Tensor[N, C, H, W]``; gives the grid, the dtype and the device.
        stride: pixels per cell.
        heights: anchor heights in pixels, ``A`` of them.
        aspect: width over height.

    Returns:
        ``Tensor[H * W * A, 4]``, the anchors of one cell side by side.
    """
    rows, columns = features.shape[-2:]
    y = (torch.arange(rows, device=features.device, dtype=features.dtype) + 0.5) * stride
    x = (torch.arange(columns, device=features.device, dtype=features.dtype) + 0.5) * stride
    height = torch.tensor(heights, device=features.device, dtype=features.dtype)
    half = torch.stack([height * aspect, height], -1) / 2
    centre = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)[:, :, None, :]
    return torch.cat([centre - half, centre + half], -1).reshape(-1, 4)
