"""nms and batched_nms, timed until the number of kept boxes is known on the host; nms_padded, captured on CUDA.

torchvision's CUDA kernel indexes its bit mask with 32 bits and breaks from 370,728 boxes on, and its CPU loop
would take minutes there: a million boxes are timed without it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opzoo.bench.case import Case, Tensors, Work, nbytes, operator
from opzoo.bench.data import detector_boxes, seeded

THRESHOLD = 0.5
CLASSES = 80
# An IoU this close to the threshold may fall on either side: it is rounded in float32.
MARGIN = 1e-5
PAIRS_PER_CHUNK = 1 << 24
PAIRS_CHECKED = 1 << 28  # above, evenly spaced boxes are checked against all kept ones
REFERENCE_BOXES = 500
PEER_BOXES = 100_000
IMAGES, IMAGE_BOXES, IMAGE_OUTPUT = 8, 1000, 100


def _call(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    return function(*tensors, THRESHOLD)


def _iou(a: Tensor, b: Tensor) -> Tensor:
    """``Tensor[A, B]``."""
    low = torch.maximum(a[:, None, :2], b[None, :, :2])
    high = torch.minimum(a[:, None, 2:], b[None, :, 2:])
    overlap = (high - low).clamp_(min=0).prod(2)
    area_a, area_b = ((t[:, 2:] - t[:, :2]).prod(1) for t in (a, b))
    return overlap / (area_a[:, None] + area_b[None, :] - overlap)


def wrong_boxes(keep: Tensor, boxes: Tensor, scores: Tensor, classes: Tensor | None = None) -> int:
    """How many boxes break the definition of greedy NMS.

    Greedy NMS keeps the one set in which no two boxes of a class overlap by more than the threshold
    while every other box overlaps so with a kept one of higher score. It needs kept x all pairs only.
    """
    boxes = boxes.double() if boxes.shape[0] <= REFERENCE_BOXES else boxes
    kept = torch.zeros(boxes.shape[0], dtype=torch.bool, device=boxes.device)
    kept[keep] = True
    wrong = keep.numel() - int(kept.sum()) + int((scores[keep].diff() > 0).sum())
    # Higher score first; an equal one by its smaller index.
    rank = torch.empty_like(scores, dtype=torch.long)
    rank[scores.argsort(descending=True, stable=True)] = torch.arange(boxes.shape[0], device=boxes.device)
    step = 1 + boxes.shape[0] * len(keep) // PAIRS_CHECKED
    checked = torch.arange(0, boxes.shape[0], step, device=boxes.device)
    for part in checked.split(max(1, PAIRS_PER_CHUNK // max(1, len(keep)))):
        iou = _iou(boxes[part], boxes[keep])
        earlier = rank[keep][None, :] < rank[part][:, None]
        if classes is not None:
            earlier &= classes[keep][None, :] == classes[part][:, None]
        surely = (earlier & (iou > THRESHOLD + MARGIN)).any(1)
        perhaps = (earlier & (iou > THRESHOLD - MARGIN)).any(1)
        wrong += int(torch.where(kept[part], surely, ~perhaps).sum())
    return wrong


def _gate(case: Case, tensors: Tensors) -> float:
    """The definition on all boxes, and the reference on the first few hundred."""
    wrong = wrong_boxes(case.ours(*tensors), *tensors)
    few = tuple(t[:REFERENCE_BOXES] for t in tensors)
    result, expected = case.ours(*few), case.reference(*few)
    if result.dtype != torch.int64 or not torch.equal(result, expected):
        wrong += max(1, len(set(result.tolist()) ^ set(expected.tolist())))
    return float(wrong)


def _case(op: str, count: int) -> Case:
    batched = op == "batched_nms"

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
        id=f"N{count} {CLASSES}cls" if batched else f"N{count} iou.5",
        dtype=torch.float32,
        tensors=tensors,
        call=_call,
        work=lambda tensors, output: {"fwd": Work(nbytes(*tensors, output))},
        peer="torchvision.ops" if count <= PEER_BOXES else "",
        gate=_gate,
    )


class _Replayed:
    """Calls ``nms_padded``; on CUDA, captures the call on these tensors once and replays it from then on."""

    def __init__(self, max_output: int) -> None:
        self._max_output = max_output
        self._captured: Tensors = ()

    def __call__(self, function: Callable[..., tuple[Tensor, Tensor]], boxes: Tensor, scores: Tensor) -> Tensor:
        if not boxes.is_cuda:
            return function(boxes, scores, THRESHOLD, self._max_output)[0]
        if not self._captured or self._captured[0] is not boxes or self._captured[1] is not scores:
            function(boxes, scores, THRESHOLD, self._max_output)
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                indices, _ = function(boxes, scores, THRESHOLD, self._max_output)
            self._captured = boxes, scores, indices
        self._graph.replay()
        return self._captured[2]


def _padded_gate(case: Case, tensors: Tensors) -> float:
    """The reference on every image."""
    result = case.ours(*tensors)
    expected = torch.full_like(result, -1)
    for row, boxes, scores in zip(expected, *tensors, strict=True):
        kept = operator("opzoo.reference", "nms")(boxes, scores, THRESHOLD, max_output=len(row))
        row[: len(kept)] = kept
    return float((result != expected).sum())


def _padded_case(images: int, count: int, max_output: int) -> Case:
    def tensors(device: torch.device) -> Tensors:
        generator = seeded(device)
        boxes = torch.stack([detector_boxes(count, generator) for _ in range(images)])
        return boxes, torch.rand(images, count, generator=generator, device=device)

    return Case(
        op="nms_padded",
        id=f"{images}xN{count} top{max_output}",
        dtype=torch.float32,
        tensors=tensors,
        call=_Replayed(max_output),
        work=lambda tensors, output: {"fwd": Work(nbytes(*tensors, output))},
        peer="",
        gate=_padded_gate,
    )


def cases(device_type: str) -> list[Case]:
    counts = (1000, 5000, 20_000, 100_000, 1_000_000)
    plain = [_case(op, count) for op in ("nms", "batched_nms") for count in counts]
    return [*plain, _padded_case(IMAGES, IMAGE_BOXES, IMAGE_OUTPUT)]


def quick() -> list[Case]:
    return [_case("nms", 200), _case("batched_nms", 200), _padded_case(2, 100, 20)]


def tiny() -> list[Case]:
    return [_case("nms", 2), _case("batched_nms", 2), _padded_case(1, 2, 2)]
