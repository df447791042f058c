"""``soft_nms`` and ``batched_soft_nms`` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

_WIDE = (torch.float64, torch.int64, torch.int32)


def soft_nms(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float = 0.3,
    sigma: float = 0.5,
    min_score: float = 1e-3,
    method: str = "linear",
) -> tuple[Tensor, Tensor]:
    """Soft-NMS of boxes that all compete.

    Args:
        boxes: ``Tensor[N, 4]`` of ``(x1, y1, x2, y2)``, float or integer.
        scores: ``Tensor[N]``, float or integer.
        iou_threshold: "naive" and "linear" lower the scores of boxes that overlap by at least this.
        sigma: "gaussian" multiplies scores by exp(-IoU^2 / sigma).
        min_score: a box whose score is not at least this is dropped.
        method: "naive", "linear" or "gaussian".

    Returns:
        ``Tensor[K]`` of scores as decayed and ``Tensor[K]`` of int64 indices, by that score descending,
        then index ascending.
    """
    one_class = torch.zeros_like(scores, dtype=torch.int64)
    return batched_soft_nms(boxes, scores, one_class, iou_threshold, sigma, min_score, method)


def batched_soft_nms(
    boxes: Tensor,
    scores: Tensor,
    idxs: Tensor,
    iou_threshold: float = 0.3,
    sigma: float = 0.5,
    min_score: float = 1e-3,
    method: str = "linear",
) -> tuple[Tensor, Tensor]:
    """Soft-NMS in which only boxes of equal class compete; arguments and results as :func:`soft_nms`."""
    wide = boxes.dtype in _WIDE or scores.dtype in _WIDE
    dtype = torch.float64 if wide else torch.float32
    result_dtype = scores.dtype
    if not scores.is_floating_point():
        result_dtype = torch.float64 if scores.dtype in _WIDE else torch.float32
    x1, y1, x2, y2 = boxes.detach().to(dtype).unbind(1)
    current = scores.detach().to(dtype) + 0.0  # a copy, without negative zeros
    threshold, least = (torch.tensor(value, dtype=dtype, device=boxes.device) for value in (iou_threshold, min_score))
    area = (x2 - x1) * (y2 - y1)

    left = current >= least  # false for NaN
    selected_scores, selected = [], []
    while left.any():
        best = current.where(left, -1).max()
        i = int(((current == best) & left).nonzero()[0, 0])  # of equal scores the smallest index
        selected_scores.append(best)
        selected.append(i)
        left[i] = False

        width = (torch.minimum(x2[i], x2) - torch.maximum(x1[i], x1)).clamp(min=0)
        height = (torch.minimum(y2[i], y2) - torch.maximum(y1[i], y1)).clamp(min=0)
        inter = width * height
        iou = inter / (area[i] + area - inter)
        if method == "gaussian":
            factor = torch.exp(-(iou.double() ** 2) / sigma).to(dtype)
            affected = iou > 0
        else:
            factor = 1 - iou if method == "linear" else torch.zeros_like(iou)
            affected = (iou >= threshold) & (iou > 0)  # false for NaN
        decayed = torch.where(factor > 0, current * factor, 0)  # infinity times 0 is 0 here
        current = torch.where(affected & (idxs == idxs[i]), decayed, current)
        left &= current >= least
    indices = torch.tensor(selected, dtype=torch.int64, device=boxes.device)
    return torch.stack(selected_scores).to(result_dtype) if selected else current[:0].to(result_dtype), indices
