"""soft_nms and batched_soft_nms: timed until the number of boxes left is known on the host.

The peer stands for mmcv's ``soft_nms``, a loop over the boxes that always runs on the CPU: the same loop
in tensor operations, with the copies to the CPU and back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opzoo.bench.case import Case, Tensors, Work, nbytes
from opzoo.bench.data import detector_boxes, seeded

CLASSES = 80
REFERENCE_BOXES = 3000
MOST_PEER_BOXES = 5000
Scored = tuple[Tensor, Tensor]


def soft_nms(
    boxes: Tensor, scores: Tensor, iou_threshold: float = 0.3, min_score: float = 1e-3, method: str = "linear"
) -> Tensor:
    """Linear or gaussian soft-NMS of sigma 0.5, one selection at a time; returns indices."""
    left, current = boxes.cpu(), scores.cpu().clone()
    indices = torch.arange(len(current))
    area = (left[:, 2:] - left[:, :2]).prod(1)
    selected = []
    while len(current):
        best = int(current.argmax())
        selected.append(int(indices[best]))
        overlap = (torch.minimum(left[best, 2:], left[:, 2:]) - torch.maximum(left[best, :2], left[:, :2])).clamp_(0)
        inter = overlap[:, 0] * overlap[:, 1]
        iou = inter / (area[best] + area - inter)
        if method == "gaussian":
            current *= torch.exp(iou * iou / -0.5)
        else:
            current *= torch.where(iou >= iou_threshold, 1 - iou, 1)
        current[best] = -1
        stay = current >= min_score
        left, area, current, indices = left[stay], area[stay], current[stay], indices[stay]
    return torch.tensor(selected, device=boxes.device)


def batched_soft_nms(boxes: Tensor, scores: Tensor, idxs: Tensor, method: str = "linear") -> Tensor:
    """:func:`soft_nms` of boxes moved apart by class, as mmcv does it."""
    shift = idxs.to(boxes) * (boxes.max() + 1)
    return soft_nms(boxes + shift[:, None], scores, method=method)


def _call(method: str) -> Callable[..., Tensor]:
    def call(function: Callable[..., Tensor | Scored], *tensors: Tensor) -> Tensor:
        result = function(*tensors, method=method)
        return result if isinstance(result, Tensor) else result[1]

    return call


def _gate(case: Case, tensors: Tensors) -> float:
    """How many of the first few thousand boxes are selected wrongly or in the wrong order."""
    few = tuple(t[:REFERENCE_BOXES].cpu() for t in tensors)
    expected = case.reference(*few)
    result = case.ours(*(t[:REFERENCE_BOXES] for t in tensors)).cpu()
    if result.dtype == torch.int64 and torch.equal(result, expected):
        return 0.0
    return float(max(1, len(set(result.tolist()) ^ set(expected.tolist()))))


def _peer_tensors(*tensors: Tensor) -> Tensors:
    if len(tensors[0]) > MOST_PEER_BOXES:
        raise ValueError(f"seconds a call above {MOST_PEER_BOXES} boxes")
    return tensors


def _case(op: str, count: int, method: str = "linear") -> Case:
    batched = op == "batched_soft_nms"

    def tensors(device: torch.device) -> Tensors:
        generator = seeded(device)
        boxes = detector_boxes(count, generator)
        scores = torch.rand(count, generator=generator, device=device)
        if not batched:
            return boxes, scores
        return boxes, scores, torch.randint(CLASSES, (count,), generator=generator, device=device)

    return Case(
        op=op,
        waits=True,
        id=f"N{count} {method}" + (f" {CLASSES}cls" if batched else ""),
        dtype=torch.float32,
        tensors=tensors,
        call=_call(method),
        work=lambda tensors, output: {"fwd": Work(nbytes(*tensors, output))},
        peer="opzoo.bench.cases.soft_nms",
        gate=_gate,
        peer_tensors=_peer_tensors,
    )


def cases(device_type: str) -> list[Case]:
    return [
        *(_case("soft_nms", count, method) for method in ("linear", "gaussian") for count in (100, 2000, 20000)),
        *(_case("batched_soft_nms", count) for count in (2000, 20000)),
    ]


def quick() -> list[Case]:
    return [_case("soft_nms", 200), _case("batched_soft_nms", 200)]


def tiny() -> list[Case]:
    return [_case("soft_nms", 2), _case("batched_soft_nms", 2)]
