"""``soft_nms`` and ``batched_soft_nms``: factors, order of events, who decays whom."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mutants import Mutant


def _iou(a: list[float], b: list[float], pixel: int) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0]) + pixel
    height = min(a[3], b[3]) - max(a[1], b[1]) + pixel
    inter = max(width, 0) * max(height, 0)
    areas = [(box[2] - box[0] + pixel) * (box[3] - box[1] + pixel) for box in (a, b)]
    return inter / (areas[0] + areas[1] - inter)


def _factor(iou: float, iou_threshold: float, sigma: float, method: str, defect: str) -> float:
    if method == "gaussian":
        if defect == "gaussian-threshold" and iou < iou_threshold:
            return 1.0
        return math.exp(-(iou if defect == "not-squared" else iou**2) / (2 * sigma if defect == "two-sigma" else sigma))
    reached = iou > iou_threshold if defect == "strictly" else iou >= iou_threshold
    if not reached:
        return 1.0
    if method == "naive":
        return 0.0
    return iou_threshold if defect == "constant" else 1 - iou


def _soft(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: str,
    idxs: Tensor | None = None,
    *,
    defect: str = "",
) -> tuple[Tensor, Tensor]:
    rows, initial = boxes.tolist(), scores.tolist()
    current = list(initial)
    left = [i for i, score in enumerate(initial) if score >= min_score or defect == "late-threshold"]
    result: list[int] = []
    while left:
        by_initial = initial if defect == "initial-order" else current
        best = max(left, key=lambda i: (by_initial[i], i if defect == "ties" else -i))
        if defect == "late-threshold" and current[best] < min_score:
            break
        left.remove(best)
        result.append(best)
        for i in list(left):
            if idxs is not None and defect != "classes" and idxs[i] != idxs[best]:
                continue
            iou = _iou(rows[best], rows[i], 1 if defect == "pixel" else 0)
            factor = _factor(iou, iou_threshold, sigma, method, defect)
            current[i] = (initial[i] if defect == "last-factor-only" and factor != 1 else current[i]) * factor
            dropped = current[i] <= min_score if defect == "drops-at-equality" else current[i] < min_score
            if dropped and defect != "late-threshold":
                left.remove(i)
    if defect == "index-order":
        result.sort()
    shown = initial if defect == "initial-scores" else current
    return scores.new_tensor([shown[i] for i in result]), torch.tensor(result, dtype=torch.int64)


def soft_with(defect: str) -> Any:
    return lambda *arguments: _soft(*arguments, defect=defect)


def batched_with(defect: str) -> Any:
    return lambda boxes, scores, idxs, *numbers: _soft(boxes, scores, *numbers, idxs, defect=defect)


def by_coordinate_shift(boxes: Tensor, scores: Tensor, idxs: Tensor, *numbers: Any) -> tuple[Tensor, Tensor]:
    """Classes moved apart by the largest coordinate: wrong where coordinates are negative."""
    return _soft(boxes + (idxs.to(boxes) * (boxes.max() + 1))[:, None], scores, *numbers)


def _boxes(n: int) -> Tensor:
    corner = torch.rand(n, 2) * 20 - 10
    return torch.cat([corner, corner + 1 + torch.rand(n, 2) * 10], 1)


def _many(method: str) -> Any:
    return lambda: ((_boxes(40), torch.rand(40), 0.2, 0.5, 0.1, method), {})


def _many_classes() -> Any:
    return (_boxes(40), torch.rand(40), torch.randint(3, (40,)), 0.2, 0.5, 0.1, "linear"), {}


def _at_threshold() -> Any:
    return (torch.tensor([[0.0, 0, 2, 1], [0, 0, 1, 1]]), torch.tensor([0.5, 0.25]), 0.5, 0.5, 0.0, "linear"), {}


def _at_min_score() -> Any:
    return (torch.tensor([[0.0, 0, 2, 1], [0, 0, 1, 1]]), torch.tensor([0.5, 0.25]), 0.25, 0.5, 0.125, "linear"), {}


def _ties() -> Any:
    return (torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 8]]), torch.tensor([0.5, 0.5]), 0.3, 0.5, 0.0, "linear"), {}


def _negative_classes() -> Any:
    boxes = torch.tensor([[-11.0, -11, -1, -1], [-11, -11, -1, -1]])
    return (boxes, torch.tensor([0.9, 0.8]), torch.tensor([0, 1]), 0.3, 0.5, 0.0, "linear"), {}


MUTANTS = [
    Mutant("soft-nms-decays-above-threshold-only", "soft_nms", soft_with("strictly"), _at_threshold),
    Mutant("soft-nms-drops-at-min-score", "soft_nms", soft_with("drops-at-equality"), _at_min_score),
    Mutant("soft-nms-ties-to-the-later", "soft_nms", soft_with("ties"), _ties),
    Mutant("soft-nms-order-of-initial-scores", "soft_nms", soft_with("initial-order"), _many("linear")),
    Mutant("soft-nms-returns-initial-scores", "soft_nms", soft_with("initial-scores"), _many("linear")),
    Mutant("soft-nms-last-factor-only", "soft_nms", soft_with("last-factor-only"), _many("linear")),
    Mutant("soft-nms-constant-factor", "soft_nms", soft_with("constant"), _many("linear")),
    Mutant("soft-nms-counts-pixels", "soft_nms", soft_with("pixel"), _many("linear")),
    Mutant("soft-nms-index-order", "soft_nms", soft_with("index-order"), _many("linear")),
    Mutant("soft-nms-gaussian-from-threshold-on", "soft_nms", soft_with("gaussian-threshold"), _many("gaussian")),
    Mutant("soft-nms-gaussian-of-iou", "soft_nms", soft_with("not-squared"), _many("gaussian")),
    Mutant("soft-nms-gaussian-of-two-sigma", "soft_nms", soft_with("two-sigma"), _many("gaussian")),
    Mutant("batched-soft-nms-ignores-classes", "batched_soft_nms", batched_with("classes"), _many_classes),
    Mutant("batched-soft-nms-coordinate-shift", "batched_soft_nms", by_coordinate_shift, _negative_classes),
]
# The frame the mistakes are made in is itself right. Dropping boxes only when they would be selected
# is no mistake: a box below min_score is selected by no one.
CORRECT = [
    *(
        Mutant(f"soft-nms-{method}", "soft_nms", soft_with(""), _many(method))
        for method in ("naive", "linear", "gaussian")
    ),
    Mutant("soft-nms-late-threshold", "soft_nms", soft_with("late-threshold"), _many("linear")),
    Mutant("soft-nms-at-threshold", "soft_nms", soft_with(""), _at_threshold),
    Mutant("soft-nms-at-min-score", "soft_nms", soft_with(""), _at_min_score),
    Mutant("soft-nms-ties", "soft_nms", soft_with(""), _ties),
    Mutant("batched-soft-nms", "batched_soft_nms", batched_with(""), _many_classes),
]
