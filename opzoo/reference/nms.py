"""``nms``, ``batched_nms``, ``nms_padded`` and ``nms_match`` in plain PyTorch."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def nms(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    *,
    score_threshold: float | None = None,
    max_output: int | None = None,
) -> Tensor:
    """Greedy non-maximum suppression of boxes that all compete.

    Args:
        boxes: ``Tensor[N, 4]`` of ``(x1, y1, x2, y2)``, float or integer.
        scores: ``Tensor[N]``, float or integer.
        iou_threshold: boxes that overlap a kept box by more than this are dropped.
        score_threshold: only boxes with a higher score take part.
        max_output: stop after this many kept boxes.

    Returns:
        ``Tensor[K]`` of int64: indices of the kept boxes, by score descending, then index ascending.
    """
    groups = _groups(boxes, scores, None, iou_threshold, score_threshold, max_output)
    return _leaders_of(groups, boxes)


def batched_nms(
    boxes: Tensor,
    scores: Tensor,
    idxs: Tensor,
    iou_threshold: float,
    *,
    score_threshold: float | None = None,
    max_output: int | None = None,
) -> Tensor:
    """Greedy non-maximum suppression in which only boxes of equal class compete.

    Args:
        boxes: ``Tensor[N, 4]`` of ``(x1, y1, x2, y2)``, float or integer.
        scores: ``Tensor[N]``, float or integer.
        idxs: ``Tensor[N]`` of any integer dtype, the class of each box.
        iou_threshold: boxes that overlap a kept box of their class by more than this are dropped.
        score_threshold: only boxes with a higher score take part.
        max_output: stop after this many kept boxes of all classes together.

    Returns:
        ``Tensor[K]`` of int64: indices of the kept boxes, by score descending, then index ascending.
    """
    groups = _groups(boxes, scores, idxs, iou_threshold, score_threshold, max_output)
    return _leaders_of(groups, boxes)


def nms_padded(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    max_output: int,
    *,
    idxs: Tensor | None = None,
    score_threshold: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Greedy non-maximum suppression of each image of a batch.

    Args:
        boxes: ``Tensor[..., N, 4]`` of ``(x1, y1, x2, y2)``, float or integer.
        scores: ``Tensor[..., N]``, float or integer.
        iou_threshold: boxes that overlap a kept box by more than this are dropped.
        max_output: kept boxes of an image at most.
        idxs: ``Tensor[..., N]`` of any integer dtype; only boxes of equal class compete.
        score_threshold: only boxes with a higher score take part.

    Returns:
        ``(indices, count)``: ``Tensor[..., max_output]`` of int64, filled up with -1, and ``Tensor[...]`` of int64.
    """
    batch = boxes.shape[:-2]
    indices = torch.full((*batch, max_output), -1, dtype=torch.int64, device=boxes.device)
    count = torch.zeros(batch, dtype=torch.int64, device=boxes.device)
    for image in itertools.product(*map(range, batch)):
        classes = None if idxs is None else idxs[image]
        groups = _groups(boxes[image], scores[image], classes, iou_threshold, score_threshold, max_output)
        indices[image][: len(groups)] = _leaders_of(groups, boxes)
        count[image] = len(groups)
    return indices, count


def nms_match(boxes: Tensor, scores: Tensor, iou_threshold: float) -> list[Tensor]:
    """Greedy non-maximum suppression that returns each kept box with those it dropped.

    Args:
        boxes: ``Tensor[N, 4]`` of ``(x1, y1, x2, y2)``, float or integer.
        scores: ``Tensor[N]``, float or integer.
        iou_threshold: boxes that overlap a kept box by more than this are dropped.

    Returns:
        One ``Tensor[M]`` of int64 per kept box: its index, then those of the boxes it was the first to drop.
    """
    return _groups(boxes, scores, None, iou_threshold, None, None)


def score_order(scores: Tensor) -> Tensor:
    """Indices by score descending, then index ascending, NaN last."""
    order = torch.argsort(scores.detach(), descending=True, stable=True)  # puts NaN first
    missing = scores[order].isnan()
    return torch.cat([order[~missing], order[missing]])


def _groups(
    boxes: Tensor,
    scores: Tensor,
    idxs: Tensor | None,
    iou_threshold: float,
    score_threshold: float | None,
    max_output: int | None,
) -> list[Tensor]:
    """The greedy loop: of each kept box its index and those of the boxes it drops, in score order."""
    wide = boxes.dtype in (torch.float64, torch.int64, torch.int32)
    boxes = boxes.detach().to(torch.float64 if wide else torch.float32)
    threshold = torch.tensor(iou_threshold, dtype=boxes.dtype, device=boxes.device)
    waiting = score_order(scores)
    if score_threshold is not None:
        waiting = waiting[_above(scores.detach()[waiting], score_threshold)]

    groups: list[Tensor] = []
    while len(waiting) and (max_output is None or len(groups) < max_output):
        best, others = waiting[0], waiting[1:]
        dropped = _iou(boxes[best], boxes[others]) > threshold  # a NaN IoU is not greater than anything
        if idxs is not None:
            dropped &= idxs[others] == idxs[best]
        groups.append(torch.cat([best[None], others[dropped]]))
        waiting = others[~dropped]
    return groups


def _leaders_of(groups: list[Tensor], boxes: Tensor) -> Tensor:
    first = [group[0] for group in groups]
    return torch.stack(first) if first else torch.empty(0, dtype=torch.int64, device=boxes.device)


def _above(scores: Tensor, score_threshold: float) -> Tensor:
    if scores.is_floating_point():
        return scores > torch.tensor(score_threshold, dtype=scores.dtype, device=scores.device)
    # Python compares an integer with a float exactly.
    return torch.tensor([score > score_threshold for score in scores.tolist()], dtype=torch.bool, device=scores.device)


def _iou(box: Tensor, others: Tensor) -> Tensor:
    """``Tensor[N]``: of one box with N others."""
    size = (torch.minimum(box[2:], others[:, 2:]) - torch.maximum(box[:2], others[:, :2])).clamp(min=0)
    inter = size[:, 0] * size[:, 1]
    area = (box[2] - box[0]) * (box[3] - box[1])
    areas = (others[:, 2] - others[:, 0]) * (others[:, 3] - others[:, 1])
    return inter / (area + areas - inter)
