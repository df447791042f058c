"""``nms`` and ``batched_nms`` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Greedy non-maximum suppression of boxes that all compete.

    Args:
        boxes: ``Tensor[N, 4]`` of ``(x1, y1, x2, y2)``, float or integer.
        scores: ``Tensor[N]``, float or integer.
        iou_threshold: boxes that overlap a kept box by more than this are dropped.

    Returns:
        ``Tensor[K]`` of int64: indices of the kept boxes, by score descending, then index ascending.
    """
    return batched_nms(boxes, scores, torch.zeros_like(scores, dtype=torch.int64), iou_threshold)


def batched_nms(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    """Greedy non-maximum suppression in which only boxes of equal class compete.

    Args:
        boxes: ``Tensor[N, 4]`` of ``(x1, y1, x2, y2)``, float or integer.
        scores: ``Tensor[N]``, float or integer.
        idxs: ``Tensor[N]`` of any integer dtype, the class of each box.
        iou_threshold: boxes that overlap a kept box of their class by more than this are dropped.

    Returns:
        ``Tensor[K]`` of int64: indices of the kept boxes, by score descending, then index ascending.
    """
    wide = boxes.dtype in (torch.float64, torch.int64, torch.int32)
    boxes = boxes.detach().to(torch.float64 if wide else torch.float32)
    threshold = torch.tensor(iou_threshold, dtype=boxes.dtype, device=boxes.device)
    x1, y1, x2, y2 = boxes.unbind(1)
    area = (x2 - x1) * (y2 - y1)

    kept = []
    suppressed = torch.zeros_like(scores, dtype=torch.bool)
    for i in _score_order(scores.detach()).tolist():
        if suppressed[i]:
            continue
        kept.append(i)
        width = (torch.minimum(x2[i], x2) - torch.maximum(x1[i], x1)).clamp(min=0)
        height = (torch.minimum(y2[i], y2) - torch.maximum(y1[i], y1)).clamp(min=0)
        inter = width * height
        iou = inter / (area[i] + area - inter)
        suppressed |= (iou > threshold) & (idxs == idxs[i])  # a NaN IoU is not greater than anything
    return torch.tensor(kept, dtype=torch.int64, device=boxes.device)


def _score_order(scores: Tensor) -> Tensor:
    """Indices by score descending, then index ascending, NaN last."""
    order = torch.argsort(scores, descending=True, stable=True)  # puts NaN first
    missing = scores[order].isnan()
    return torch.cat([order[~missing], order[missing]])
