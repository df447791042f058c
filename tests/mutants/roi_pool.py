"""``roi_pool``: rounding of the corners, the last pixel, and the maximum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import opzoo
from mutants import Mutant


def cuts_the_last_pixel(input: Tensor, boxes: Tensor, size: Any, scale: float = 1.0) -> Tensor:
    return opzoo.reference.roi_pool(input, boxes - torch.tensor([0, 0, 0, 1, 1]) / scale, size, scale)


def rounds_down(input: Tensor, boxes: Tensor, size: Any, scale: float = 1.0) -> Tensor:
    corners = (boxes[:, 1:] * scale).floor() / scale
    return opzoo.reference.roi_pool(input, torch.cat([boxes[:, :1], corners], 1), size, scale)


def takes_the_minimum(input: Tensor, boxes: Tensor, size: Any, scale: float = 1.0) -> Tensor:
    return -opzoo.reference.roi_pool(-input, boxes, size, scale)


def ignores_the_image(input: Tensor, boxes: Tensor, size: Any, scale: float = 1.0) -> Tensor:
    return opzoo.reference.roi_pool(input[:1], torch.cat([0 * boxes[:, :1], boxes[:, 1:]], 1), size, scale)


def _inputs() -> Any:
    boxes = torch.tensor([[0, 1.0, 2.0, 13.6, 11.4], [1, 3.4, 0.6, 12.0, 15.0]])
    return (torch.randn(2, 2, 9, 8), boxes, (2, 3), 0.5), {}


MUTANTS = [
    Mutant(f"roi_pool-{function.__name__.replace('_', '-')}", "roi_pool", function, _inputs)
    for function in (cuts_the_last_pixel, rounds_down, takes_the_minimum, ignores_the_image)
]
