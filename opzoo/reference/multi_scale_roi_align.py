"""``multi_scale_roi_align`` in plain PyTorch: the level of each box, then RoIAlign level by level."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opzoo.reference.roi_align import roi_align


def multi_scale_roi_align(
    inputs: Sequence[Tensor],
    boxes: Tensor | list[Tensor],
    output_size: int | tuple[int, int],
    spatial_scales: Sequence[float],
    sampling_ratio: int = -1,
    aligned: bool = False,
    *,
    canonical_scale: float = 224,
    canonical_level: float = 4,
) -> Tensor:
    """The definition of :func:`opzoo.multi_scale_roi_align`, argument for argument.

    Args:
        inputs: ``Tensor[N, C, H, W]`` of each level, finest first.
        boxes: ``Tensor[K, 5]`` of ``(image index, x1, y1, x2, y2)``, or one ``Tensor[L, 4]`` per image.
        output_size: ``(height, width)`` of the result, or one int for both.
        spatial_scales: map pixels per image pixel, one number per map.
        sampling_ratio: samples per bin and axis; zero or negative for ``ceil(bin)``.
        aligned: shift by half a pixel, and let RoIs be smaller than one pixel.
        canonical_scale: side in image pixels of a square box that belongs to ``canonical_level``.
        canonical_level: number of the map for a box of that side, the image being number 0.
    """
    if not isinstance(boxes, Tensor):
        index = torch.cat([t.new_full((len(t), 1), i) for i, t in enumerate(boxes)])
        boxes = torch.cat([index, torch.cat(boxes)], 1)
    boxes = boxes.to(torch.float64 if inputs[0].dtype == torch.float64 else torch.float32)
    first = round(-torch.tensor(spatial_scales[0]).log2().item())
    levels = choose_levels(boxes[:, 1:], canonical_scale, canonical_level) - first
    levels = levels.clamp(0, len(inputs) - 1) if len(inputs) > 1 else torch.zeros_like(levels)

    pooled_height, pooled_width = (output_size, output_size) if isinstance(output_size, int) else output_size
    output = inputs[0].new_zeros((len(boxes), inputs[0].shape[1], pooled_height, pooled_width))
    for level, (input, scale) in enumerate(zip(inputs, spatial_scales, strict=True)):
        chosen = torch.where(levels == level)[0]
        pooled = roi_align(input, boxes[chosen], output_size, scale, sampling_ratio, aligned)
        output = output.index_copy(0, chosen, pooled)
    return output


def choose_levels(boxes: Tensor, canonical_scale: float = 224, canonical_level: float = 4) -> Tensor:
    """``Tensor[K]``, floating: equation 1 of the paper. NaN for a box whose area is negative or NaN."""
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    return (canonical_level + (area.sqrt() / canonical_scale).log2() + 1e-6).floor()
