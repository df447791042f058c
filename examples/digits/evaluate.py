"""Judging detections: mean average precision, and whether two runs found the same."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from digits.boxes import box_iou
from digits.model import Detections

IOU = 0.5


class Parity(NamedTuple):
    """How far two lists of detections agree."""

    agree: int  # detections with a partner in the other list
    total: int
    difference: float  # the largest between partners, over boxes (pixels) and scores

    @property
    def identical(self) -> bool:
        return self.agree == self.total


def match(found: Detections, truth: Tensor, labels: Tensor, iou: float = IOU) -> Tensor:
    """Which detections of one image are right.

    Best score first, each detection takes the ground truth of its class that it overlaps most among those
    still free, if by at least ``iou``. So each ground truth is found once, and repeats are wrong.

    Args:
        found: ``D`` detections, in any order.
        truth: ``Tensor[G, 4]``.
        labels: int64 ``Tensor[G]``.
        iou: the overlap that counts as found.

    Returns:
        int64 ``Tensor[D]``: the ground truth each detection found, or -1.
    """
    matched = torch.full((len(found.scores),), -1)
    overlap = box_iou(found.boxes, truth)
    overlap = torch.where(found.labels[:, None] == labels[None, :], overlap, -1.0)
    for row in found.scores.argsort(descending=True, stable=True).tolist() if len(labels) else []:
        best = int(overlap[row].argmax())
        if overlap[row, best] >= iou:
            matched[row] = best
            overlap[:, best] = -1.0
    return matched


def average_precision(right: Tensor, scores: Tensor, truths: int) -> float:
    """Area under the precision-recall curve of one class, all-point interpolation (Pascal VOC 2010 on).

    Args:
        right: bool ``Tensor[D]``.
        scores: ``Tensor[D]``.
        truths: how many there were to find, at least 1.
    """
    right = right[scores.argsort(descending=True, stable=True)].double()
    hits = right.cumsum(0)
    precision = hits / torch.arange(1, len(right) + 1)
    envelope = precision.flip(0).cummax(0).values.flip(0)  # the best precision at this recall or beyond
    return float((envelope * right).sum() / truths)


def mean_average_precision(
    found: list[Detections], truths: list[Tensor], labels: list[Tensor], classes: int, iou: float = IOU
) -> tuple[float, list[float]]:
    """mAP over all images.

    Args:
        found: the detections of each image.
        truths: ``Tensor[G, 4]`` per image.
        labels: int64 ``Tensor[G]`` per image.
        classes: number of classes; one without any ground truth is left out of the mean.
        iou: the overlap that counts as found.

    Returns:
        The mean, and the average precision of each class (NaN where it is left out).
    """
    right = torch.cat([match(f, t, label, iou) >= 0 for f, t, label in zip(found, truths, labels, strict=True)])
    scores, predicted = torch.cat([f.scores for f in found]), torch.cat([f.labels for f in found])
    totals = torch.cat(labels).bincount(minlength=classes).tolist()
    per_class = [
        average_precision(right[predicted == c], scores[predicted == c], total) if total else float("nan")
        for c, total in enumerate(totals)
    ]
    return float(torch.tensor(per_class, dtype=torch.float64).nanmean()), per_class


def compare(ours: list[Detections], theirs: list[Detections], tolerance: float) -> Parity:
    """Pair the detections of two models that saw the same images.

    Partners have the same label, and boxes and scores within ``tolerance``, each the other's nearest. The order
    within an image is not compared: two digits found with equal certainty come in any order.
    """
    agree, total, difference = 0, 0, 0.0
    for a, b in zip(ours, theirs, strict=True):
        total += max(len(a.scores), len(b.scores))
        if not len(a.scores) or not len(b.scores):
            continue
        rows_a, rows_b = (torch.cat([d.boxes, d.scores[:, None]], 1).double() for d in (a, b))
        distance = (rows_a[:, None] - rows_b[None]).abs().amax(-1)
        distance = distance.masked_fill(a.labels[:, None] != b.labels[None], float("inf"))
        smallest, nearest = distance.min(1)
        mutual = distance.argmin(0)[nearest] == torch.arange(len(nearest))
        partners = smallest[mutual & (smallest <= tolerance)]
        agree += len(partners)
        difference = max(difference, float(partners.max())) if len(partners) else difference
    return Parity(agree, total, difference)
