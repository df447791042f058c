"""nms, batched_nms and nms_padded against a plain greedy loop, over thousands of generated sets of boxes."""

from __future__ import annotations

import pytest
import torch
from helpers import detector_boxes
from nms_inputs import EXACT_THRESHOLDS, LAYOUTS, THRESHOLDS, greedy, per_class_torchvision
from peers import torchvision
from torch import Tensor

import opzoo

SETS = 25
SIZES = (7, 96)  # of a set: 10 layouts x 5 thresholds x 5 choices of classes x 2 sizes x 25 = 12,500 sets

CLASSES = {
    "one": lambda shape: torch.zeros(shape, dtype=torch.int64),
    "two": lambda shape: torch.randint(2, shape),
    "80": lambda shape: torch.randint(80, shape),
    "1203": lambda shape: torch.randint(1203, shape),
    "beyond-2^24": lambda shape: 2**24 + torch.randint(3, shape),
}
SCORES = {  # with and without ties
    "distinct": torch.rand,
    "tied": lambda shape: torch.randint(4, shape).float(),
}


def _sets(layout: str, n: int) -> Tensor:
    return torch.stack([LAYOUTS[layout](n) for _ in range(SETS)])


def _assert_padded(result: tuple[Tensor, Tensor], expected: list[Tensor], max_output: int) -> None:
    indices, count = (t.cpu() for t in result)
    assert count.tolist() == [min(len(kept), max_output) for kept in expected]
    rows = [[*kept[:max_output].tolist(), *[-1] * (max_output - len(kept))] for kept in expected]
    assert indices.tolist() == rows


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_generated_sets(device, layout, classes, threshold):
    for n, score in zip(SIZES, SCORES.values(), strict=True):
        boxes, scores, idxs = _sets(layout, n), score((SETS, n)), CLASSES[classes]((SETS, n))
        expected = greedy(boxes, scores, idxs, threshold)
        boxes, scores, idxs = boxes.to(device), scores.to(device), idxs.to(device)
        _assert_padded(opzoo.nms_padded(boxes, scores, threshold, n, idxs=idxs), expected, n)
        _assert_padded(opzoo.nms_padded(boxes, scores, threshold, 5, idxs=idxs), expected, 5)
        for i, kept in enumerate(expected):
            assert torch.equal(opzoo.batched_nms(boxes[i], scores[i], idxs[i], threshold).cpu(), kept)
            if classes == "one":
                assert torch.equal(opzoo.nms(boxes[i], scores[i], threshold).cpu(), kept)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sets_large_enough_for_tiles(device, layout, score):
    n = 2100
    boxes, scores = LAYOUTS[layout](n), SCORES[score]((n,))
    for threshold in (*THRESHOLDS, 0.01, 0.95):
        for idxs in (torch.zeros(n, dtype=torch.int64), torch.randint(5, (n,)) // 4):
            (expected,) = greedy(boxes[None], scores[None], idxs[None], threshold)
            result = opzoo.batched_nms(boxes.to(device), scores.to(device), idxs.to(device), threshold)
            assert torch.equal(result.cpu(), expected)
            if threshold in EXACT_THRESHOLDS:
                assert torch.equal(expected, per_class_torchvision(boxes, scores, idxs, threshold))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32], ids=str)
def test_tiles_of_every_arithmetic(device, dtype):
    n = 2100
    boxes, scores = (detector_boxes(n, 800, 1333)).to(dtype), torch.rand(n)
    idxs = torch.zeros(n, dtype=torch.int64)
    wide = boxes.double() if dtype != torch.float16 else boxes.float()
    for threshold in THRESHOLDS:
        (expected,) = greedy(wide[None], scores[None], idxs[None], threshold)
        assert torch.equal(opzoo.nms(boxes.to(device), scores.to(device), threshold).cpu(), expected)


@pytest.mark.parametrize("layout", ["clustered", "uniform"])
def test_sets_large_enough_for_several_threads(device, layout):
    n = 20_000
    boxes, scores = LAYOUTS[layout](n), torch.rand(n)
    expected = torchvision.ops.nms(boxes, scores, 0.5)
    assert torch.equal(opzoo.nms(boxes.to(device), scores.to(device), 0.5).cpu(), expected)
    idxs = torch.randint(40, (n,)) * torch.randint(10, (n,)).clamp(max=1)  # class 0 has a tenth and more
    expected = per_class_torchvision(boxes, scores, idxs, 0.5)
    assert torch.equal(opzoo.batched_nms(boxes.to(device), scores.to(device), idxs.to(device), 0.5).cpu(), expected)


@pytest.mark.parametrize("n", [300, 3000, 100_000])
def test_chain_in_which_each_box_suppresses_the_next(device, n):
    x = torch.arange(n, dtype=torch.float64, device=device) * 4
    boxes = torch.stack([x, 0 * x, x + 10, 0 * x + 1], 1)
    assert opzoo.nms(boxes, -x, 0.3).tolist() == list(range(0, n, 2))
    (indices,), (count,) = opzoo.nms_padded(boxes[None], -x[None], 0.3, n)
    assert indices[: int(count)].tolist() == list(range(0, n, 2))


def test_one_far_box_and_boxes_that_take_no_part_among_many(device):
    n = 3000
    boxes, scores = detector_boxes(n, 800, 1333), torch.rand(n)
    boxes[17] = torch.tensor([-1e30, -1e30, -1e30, 1e30])
    boxes[18] = torch.tensor([1e18, 1e18, 1.1e18, 1.1e18])
    boxes[torch.randperm(n)[:50]] = torch.tensor([float("nan"), 0, 5, 5])
    boxes[torch.randperm(n)[:50]] = torch.tensor([9.0, 9, 5, 5])
    boxes[torch.randperm(n)[:50]] = torch.tensor([-float("inf"), 0, float("inf"), 500])
    for threshold in (0, 0.5):
        result = opzoo.nms(boxes.to(device), scores.to(device), threshold)
        assert result.tolist() == opzoo.reference.nms(boxes, scores, threshold).tolist()


def test_copies_at_the_highest_thresholds(device):
    boxes = torch.tensor([1.0, 2, 11, 12], device=device).expand(3000, 4)
    scores = torch.zeros(3000, device=device)
    assert opzoo.nms(boxes, scores, 1).tolist() == list(range(3000))
    assert opzoo.nms(boxes, scores, 1 - 2**-24).tolist() == [0]
