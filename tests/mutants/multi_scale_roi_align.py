"""``multi_scale_roi_align``: which map a box takes, and at what scale it is read there."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from mutants import Mutant
from opzoo.reference import roi_align


def multi_scale_roi_align_with(
    inputs: list[Tensor],
    boxes: Tensor,
    output_size: tuple[int, int],
    spatial_scales: list[float],
    sampling_ratio: int,
    aligned: bool,
    canonical_scale: float = 224,
    canonical_level: float = 4,
    *,
    defect: str = "",
) -> Tensor:
    rows = []
    for box in boxes.detach():
        x1, y1, x2, y2 = box[1:].tolist()
        area = (x2 - x1) * (y2 - y1)
        if defect == "inclusive-area":
            area = (x2 - x1 + 1) * (y2 - y1 + 1)
        side = area if defect == "area-for-side" else math.sqrt(area)
        if defect == "longer-side":
            side = max(x2 - x1, y2 - y1)
        exact = math.log2(side / canonical_scale)
        if defect == "natural-logarithm":
            exact = math.log(side / canonical_scale)
        exact += canonical_level + 1e-6
        rounding = {"round": round, "ceil": math.ceil}.get(defect, math.floor)
        level = rounding(exact)
        if defect != "counts-from-the-image":
            level -= round(-math.log2(spatial_scales[0]))
        last = len(inputs) - (2 if defect == "loses-last-map" else 1)
        level = level % len(inputs) if defect == "wraps-around" else min(max(level, 0), last)
        scale = spatial_scales[0] if defect == "first-scale" else spatial_scales[level]
        if defect == "scale-of-other-level":
            scale = spatial_scales[-1 - level]
        image = inputs[0 if defect == "first-map" else level]
        rows.append(roi_align(image, box[None], output_size, scale, sampling_ratio, aligned))
    if defect == "order-of-levels":
        rows.sort(key=lambda row: float(row.detach().abs().sum()))
    return torch.cat(rows)


def _inputs() -> Any:
    """Three maps; boxes of each, on a boundary, a long one, and ones beyond both ends."""
    sides = [(10, 9), (16, 16), (31, 31), (32, 32), (64, 7), (63, 64), (3, 4), (130, 140), (74, 74)]
    corners = [(i % 2, 3.0 * i - 4, 2.0 * i) for i in range(len(sides))]
    boxes = [[n, x, y, x + w, y + h] for (n, x, y), (w, h) in zip(corners, sides, strict=True)]
    maps = [torch.randn(2, 3, 24 >> level, 32 >> level) for level in range(3)]
    kwargs = {"canonical_scale": 32, "canonical_level": 2}
    return (maps, torch.tensor(boxes), (3, 2), [0.5, 0.25, 0.125], 2, False), kwargs


def _mutant(id: str, defect: str) -> Mutant:
    wrong = functools.partial(multi_scale_roi_align_with, defect=defect)
    return Mutant(id, "multi_scale_roi_align", wrong, _inputs, constant=(1,))


MUTANTS = [
    _mutant(f"multi-scale-{defect}", defect)
    for defect in (
        "inclusive-area",
        "area-for-side",
        "longer-side",
        "natural-logarithm",
        "round",
        "ceil",
        "counts-from-the-image",
        "loses-last-map",
        "wraps-around",
        "first-scale",
        "scale-of-other-level",
        "first-map",
        "order-of-levels",
    )
]
CORRECT = [_mutant("multi-scale", "")]
