"""``roi_pool`` in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def roi_pool(input: Tensor, boxes: Tensor, output_size: tuple[int, int], spatial_scale: float = 1.0) -> Tensor:
    """The maximum of the whole pixels of each bin of each box; of equal ones the first, which gets the gradient.

    Args:
        input: ``Tensor[N, C, H, W]``.
        boxes: ``Tensor[K, 5]`` of ``(image index, x1, y1, x2, y2)``.
        output_size: ``(height, width)`` of the result.
        spatial_scale: map pixels per image pixel.
    """
    height, width = output_size
    out = input.new_zeros(len(boxes), input.shape[1], height, width)

    # Rounded as the operator rounds: halves away from zero, and everything in the dtype of the coordinates.
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32

    def bins(low: float, high: float, count: int, size: int) -> list[tuple[int, int]]:
        scaled = torch.tensor([low, high], dtype=dtype) * spatial_scale
        start, end = scaled.sign() * (scaled.abs() + 0.5).floor()
        edges = torch.arange(count + 1, dtype=dtype) * ((end - start + 1).clamp(min=1) / count)
        firsts, lasts = edges[:-1].floor() + start, edges[1:].ceil() + start
        return [(int(a), int(b)) for a, b in torch.stack([firsts, lasts], 1).clamp(0, size).tolist()]

    for k, (image, x1, y1, x2, y2) in enumerate(boxes.tolist()):
        if not all(map(math.isfinite, (x1, y1, x2, y2))):
            continue
        for i, (top, bottom) in enumerate(bins(y1, y2, height, input.shape[2])):
            for j, (left, right) in enumerate(bins(x1, x2, width, input.shape[3])):
                if top < bottom and left < right:
                    out[k, :, i, j] = input[int(image), :, top:bottom, left:right].flatten(1).max(1).values
    return out
