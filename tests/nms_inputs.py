"""Boxes of every kind that NMS has to get right, and plain greedy loops to compare with."""

from __future__ import annotations

import torch
from helpers import detector_boxes
from peers import torchvision
from torch import Tensor

THRESHOLDS = (0, 0.3, 0.5, 0.7, 1)
EXACT_THRESHOLDS = (0, 0.5, 1)  # a float IoU on the threshold decides alike in float and in double
NAN, INF = float("nan"), float("inf")


def touching(n: int) -> Tensor:
    x = torch.arange(n, dtype=torch.float32) % 10 * 8
    y = torch.arange(n, dtype=torch.float32).div(10, rounding_mode="floor") % 7 * 8
    return torch.stack([x, y, x + 8, y + 8], 1)


def nested(n: int) -> Tensor:
    inset = torch.arange(n) % 50 * 0.9
    return torch.stack([inset, inset, 100 - inset, 100 - inset], 1)


def integer_grid(n: int) -> Tensor:
    corner, size = torch.randint(0, 12, (n, 2)), torch.randint(1, 9, (n, 2))
    return torch.cat([corner, corner + size], 1).float()


def _uniform(n: int) -> Tensor:
    corner = torch.rand(n, 2) * 200
    return torch.cat([corner, corner + torch.rand(n, 2) * 60], 1)


LAYOUTS = {
    "clustered": lambda n: detector_boxes(n, 800, 1333),
    "uniform": _uniform,
    "touching": touching,
    "nested": nested,
    "identical": lambda n: torch.tensor([3.0, 4.0, 9.0, 11.0]).repeat(n, 1),
    "negative": lambda n: detector_boxes(n, 800, 1333) - 900,
    "million-pixels": lambda n: detector_boxes(n, 1e6, 1e6),
    "sub-pixel": lambda n: detector_boxes(n, 1e-3, 1e-3),
    "integer-grid": integer_grid,
    "empty-and-inverted": lambda n: detector_boxes(n, 60, 60) + torch.randint(-9, 2, (n, 4)),
}


def per_class_torchvision(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    """One torchvision NMS per class, on the CPU; indices in score order, ties by index."""
    boxes, scores, idxs = boxes.cpu(), scores.cpu(), idxs.cpu()
    keep = torch.zeros(len(boxes), dtype=torch.bool)
    for c in idxs.unique():
        members = (idxs == c).nonzero().flatten()
        keep[members[torchvision.ops.nms(boxes[members], scores[members], iou_threshold)]] = True
    order = torch.argsort(scores, descending=True, stable=True)
    return order[keep[order]]


def greedy(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> list[Tensor]:
    """The definition, on many sets at once: ``boxes [C, N, 4]``, ``scores`` and ``idxs [C, N]``.

    All IoUs of a set form a matrix in score order; the loop over ranks is common to the sets.
    """
    order = torch.argsort(scores, dim=1, descending=True, stable=True)
    sets = torch.arange(len(boxes))[:, None]
    boxes, idxs = boxes[sets, order], idxs[sets, order]
    low = torch.maximum(boxes[:, :, None, :2], boxes[:, None, :, :2])
    high = torch.minimum(boxes[:, :, None, 2:], boxes[:, None, :, 2:])
    width, height = (high - low).clamp(min=0).unbind(-1)
    area = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
    union = area[:, :, None] + area[:, None, :] - width * height
    suppresses = width * height / union > torch.tensor(iou_threshold, dtype=boxes.dtype)
    suppresses &= idxs[:, :, None] == idxs[:, None, :]
    keep = torch.ones_like(order, dtype=torch.bool)
    for rank in range(order.shape[1]):
        keep[:, rank + 1 :] &= ~(suppresses[:, rank, rank + 1 :] & keep[:, rank, None])
    return [indices[kept] for indices, kept in zip(order, keep, strict=True)]
