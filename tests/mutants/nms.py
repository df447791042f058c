"""``nms`` and its kin: ties, thresholds, classes, order, limits, padding, groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mutants import Mutant


def _greedy(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    idxs: Tensor | None = None,
    *,
    score_threshold: float | None = None,
    max_output: int | None = None,
    defect: str = "",
) -> Tensor:
    pixel = 1 if defect == "pixel" else 0  # the old convention: a box holds its last pixel

    def area(box: Tensor) -> Tensor:
        return (box[2] - box[0] + pixel) * (box[3] - box[1] + pixel)

    def iou(left: Tensor, right: Tensor) -> Tensor:
        low, high = torch.maximum(left[:2], right[:2]), torch.minimum(left[2:], right[2:])
        inter = (high - low + pixel).prod() if defect == "clamp" else (high - low + pixel).clamp(min=0).prod()
        union = area(left) + area(right) - (0 if defect == "union" else inter)
        if defect == "smaller":
            union = torch.minimum(area(left), area(right))
        return inter / union

    count = len(scores)
    key = [-float("inf") if s != s else s for s in scores.tolist()]
    if defect == "nan":
        key = [float("inf") if s != s else s for s in scores.tolist()]
    later_first = -1 if defect == "ties" else 1
    order = sorted(range(count), key=lambda i: (-key[i], later_first * i))
    if defect == "ascending":
        order = order[::-1]
    kept: list[int] = []
    judges: list[int] = []
    for i in order:
        rivals = [j for j in judges if idxs is None or defect == "classes" or idxs[i] == idxs[j]]
        overlaps = [float(iou(boxes[i], boxes[j])) for j in rivals]
        if defect == "equal":
            dropped = any(overlap >= iou_threshold for overlap in overlaps)
        else:
            dropped = any(overlap > iou_threshold for overlap in overlaps)
        if not dropped:
            kept.append(i)
        if not dropped or defect == "chain":
            judges.append(i)
    if defect == "index-order":
        kept.sort()
    if score_threshold is not None and defect != "no-score-threshold":
        kept = [i for i in kept if key[i] > score_threshold or (defect == "score-equal" and key[i] == score_threshold)]
    if max_output is not None and defect != "no-limit":
        kept = kept[: max_output + 1] if defect == "one-more" else kept[:max_output]
    return torch.tensor(kept, dtype=torch.int32 if defect == "int32" else torch.int64)


def nms_with(defect: str) -> Any:
    return lambda *arguments, **options: _greedy(*arguments, **options, defect=defect)


def batched_with(defect: str) -> Any:
    return lambda boxes, scores, idxs, iou_threshold: _greedy(boxes, scores, iou_threshold, idxs, defect=defect)


def padded_with(defect: str) -> Any:
    def padded(boxes: Tensor, scores: Tensor, iou_threshold: float, max_output: int) -> tuple[Tensor, Tensor]:
        indices = torch.full((len(boxes), max_output), 0 if defect == "zeros" else -1)
        count = torch.zeros(len(boxes), dtype=torch.int64)
        for image in range(len(boxes)):
            kept = _greedy(boxes[image], scores[image], iou_threshold, defect=defect)
            count[image] = len(kept) if defect == "count-all" else min(len(kept), max_output)
            if defect == "flat-index":
                kept = kept + image * boxes.shape[1]
            found = kept[:max_output]
            if defect == "first-image" and image:
                indices[image] = indices[0]
            else:
                indices[image, : len(found)] = found
        return indices, count

    return padded


def match_with(defect: str) -> Any:
    def match(boxes: Tensor, scores: Tensor, iou_threshold: float) -> list[Tensor]:
        groups: list[list[int]] = []
        for i in torch.argsort(scores, descending=True, stable=True).tolist():
            near = [g for g in groups if len(_greedy(boxes[[g[0], i]], scores[[g[0], i]], iou_threshold)) == 1]
            if not near:
                groups.append([i])
            elif defect == "all":
                for group in near:
                    group.append(i)
            else:
                near[-1 if defect == "last" else 0].append(i)
        if defect == "no-leader":
            groups = [group[1:] for group in groups]
        return [torch.tensor(group, dtype=torch.int64) for group in groups]

    return match


def by_coordinate_shift(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    """Classes moved apart by the largest coordinate: wrong where coordinates are negative."""
    shift = idxs.to(boxes) * (boxes.max() + 1)
    return _greedy(boxes + shift[:, None], scores, iou_threshold)


def _many() -> Any:
    corner = torch.rand(40, 2) * 20 - 10
    boxes = torch.cat([corner, corner + 1 + torch.rand(40, 2) * 10], 1)
    return (boxes, torch.rand(40), 0.4), {}


def _at_threshold() -> Any:
    return (torch.tensor([[0.0, 0, 2, 1], [0, 0, 1, 1]]), torch.tensor([0.9, 0.8]), 0.5), {}


def _ties() -> Any:
    return (torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 5], [9, 9, 10, 10]]), torch.tensor([0.5, 0.5, 0.5]), 0.5), {}


def _missing_score() -> Any:
    return (torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 5]]), torch.tensor([0.5, float("nan")]), 0.5), {}


def _chain() -> Any:
    boxes = torch.tensor([[0.0, 0, 10, 1], [4, 0, 14, 1], [8, 0, 18, 1]])
    return (boxes, torch.tensor([0.9, 0.8, 0.7]), 0.3), {}


def _two_apart() -> Any:
    return (torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30]]), torch.tensor([0.9, 0.8]), 0.5), {}


def _negative_classes() -> Any:
    boxes = torch.tensor([[-11.0, -11, -1, -1], [-11, -11, -1, -1]])
    return (boxes, torch.tensor([0.9, 0.8]), torch.tensor([0, 1]), 0.5), {}


def _many_classes() -> Any:
    (boxes, scores, threshold), _ = _many()
    return (boxes, scores, torch.randint(3, (40,)), threshold), {}


def _scores_on_threshold() -> Any:
    boxes = torch.arange(4)[:, None] * 9 + torch.tensor([0, 0, 1, 1])
    return (boxes, torch.tensor([0.5, 0.25, 0.75, 0.5]), 0.5), {"score_threshold": 0.5}


def _limited() -> Any:
    arguments, _ = _many()
    return arguments, {"max_output": 3}


def _images() -> Any:
    corner = torch.rand(3, 15, 2) * 20
    boxes = torch.cat([corner, corner + 4 + torch.rand(3, 15, 2) * 12], 2)
    return (boxes, torch.rand(3, 15), 0.3, 15), {}


def _images_cut() -> Any:
    (boxes, scores, threshold, _), _ = _images()
    return (boxes, scores, threshold, 2), {}


def _dropped_by_two() -> Any:
    boxes = torch.tensor([[0.0, 0, 10, 1], [8, 0, 18, 1], [4, 0, 14, 1]])
    return (boxes, torch.tensor([0.9, 0.8, 0.7]), 0.3), {}


MUTANTS = [
    Mutant("nms-drops-at-equality", "nms", nms_with("equal"), _at_threshold),
    Mutant("nms-ties-to-the-later", "nms", nms_with("ties"), _ties),
    Mutant("nms-nan-score-first", "nms", nms_with("nan"), _missing_score),
    Mutant("nms-dropped-boxes-drop", "nms", nms_with("chain"), _chain),
    Mutant("nms-no-clamp", "nms", nms_with("clamp"), _two_apart),
    Mutant("nms-counts-pixels", "nms", nms_with("pixel"), _many),
    Mutant("nms-union-counts-twice", "nms", nms_with("union"), _many),
    Mutant("nms-over-smaller-box", "nms", nms_with("smaller"), _many),
    Mutant("nms-lowest-score-first", "nms", nms_with("ascending"), _many),
    Mutant("nms-index-order", "nms", nms_with("index-order"), _many),
    Mutant("nms-int32", "nms", nms_with("int32"), _many),
    Mutant("batched-nms-coordinate-shift", "batched_nms", by_coordinate_shift, _negative_classes),
    Mutant("batched-nms-ignores-classes", "batched_nms", batched_with("classes"), _many_classes),
    Mutant("batched-nms-index-order", "batched_nms", batched_with("index-order"), _many_classes),
    Mutant("nms-score-at-threshold-takes-part", "nms", nms_with("score-equal"), _scores_on_threshold),
    Mutant("nms-ignores-score-threshold", "nms", nms_with("no-score-threshold"), _scores_on_threshold),
    Mutant("nms-ignores-max-output", "nms", nms_with("no-limit"), _limited),
    Mutant("nms-one-more-than-max-output", "nms", nms_with("one-more"), _limited),
    Mutant("nms-padded-with-zeros", "nms_padded", padded_with("zeros"), _images),
    Mutant("nms-padded-counts-all", "nms_padded", padded_with("count-all"), _images_cut),
    Mutant("nms-padded-flat-index", "nms_padded", padded_with("flat-index"), _images),
    Mutant("nms-padded-first-image", "nms_padded", padded_with("first-image"), _images),
    Mutant("nms-match-all-suppressors", "nms_match", match_with("all"), _dropped_by_two),
    Mutant("nms-match-last-suppressor", "nms_match", match_with("last"), _dropped_by_two),
    Mutant("nms-match-no-leader", "nms_match", match_with("no-leader"), _dropped_by_two),
]
# The frame the mistakes are made in is itself right.
CORRECT = [
    Mutant("nms", "nms", nms_with(""), _many),
    Mutant("nms-ties", "nms", nms_with(""), _ties),
    Mutant("nms-at-threshold", "nms", nms_with(""), _at_threshold),
    Mutant("nms-missing-score", "nms", nms_with(""), _missing_score),
    Mutant("batched-nms", "batched_nms", batched_with(""), _many_classes),
    Mutant("nms-score-threshold", "nms", nms_with(""), _scores_on_threshold),
    Mutant("nms-max-output", "nms", nms_with(""), _limited),
    Mutant("nms-padded", "nms_padded", padded_with(""), _images),
    Mutant("nms-padded-cut", "nms_padded", padded_with(""), _images_cut),
    Mutant("nms-match", "nms_match", match_with(""), _dropped_by_two),
]
