"""nms and batched_nms against the reference, torchvision, and the reports of what goes wrong elsewhere."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import FLOATS, HALVES, detector_boxes
from hypothesis import given
from hypothesis import strategies as st
from nms_inputs import EXACT_THRESHOLDS, INF, LAYOUTS, NAN, THRESHOLDS, per_class_torchvision
from peers import torchvision
from torch import Tensor

import opzoo

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def assert_kept(result: Tensor, expected: Tensor) -> None:
    assert result.dtype == torch.int64
    assert result.tolist() == expected.tolist()


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nms_matches_reference_and_torchvision(device, layout, threshold):
    for n in (60, 300):
        boxes, scores = LAYOUTS[layout](n).to(device), torch.rand(n).to(device)
        result = opzoo.nms(boxes, scores, threshold)
        assert result.device == boxes.device
        assert_kept(result, opzoo.reference.nms(boxes.cpu(), scores.cpu(), threshold))
        if threshold in EXACT_THRESHOLDS:
            assert_kept(result, torchvision.ops.nms(boxes.cpu(), scores.cpu(), threshold))


@pytest.mark.parametrize("classes", [1, 2, 80, 1203])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batched_nms_matches_reference_and_torchvision(device, layout, classes):
    n = 250
    boxes, scores = LAYOUTS[layout](n).to(device), torch.rand(n).to(device)
    idxs = torch.randint(classes, (n,), device=device)
    for threshold in THRESHOLDS:
        result = opzoo.batched_nms(boxes, scores, idxs, threshold)
        assert_kept(result, opzoo.reference.batched_nms(boxes.cpu(), scores.cpu(), idxs.cpu(), threshold))
        if threshold in EXACT_THRESHOLDS:
            assert_kept(result, per_class_torchvision(boxes, scores, idxs, threshold))


@pytest.mark.parametrize("ids", [(2**24, 2**24 + 1), (-1, 0, 1), (-(2**63), 2**63 - 1, 0), (2**53, 2**53 + 1)], ids=str)
def test_ids_of_any_value(device, ids):
    boxes, scores = detector_boxes(200, 200, 200).to(device), torch.rand(200).to(device)
    idxs = torch.tensor(ids, device=device)[torch.randint(len(ids), (200,), device=device)]
    assert_kept(opzoo.batched_nms(boxes, scores, idxs, 0.5), per_class_torchvision(boxes, scores, idxs, 0.5))


def test_every_small_size(device):
    for n in range(1, 131):
        boxes, scores = detector_boxes(n, 100, 100).to(device), torch.rand(n).to(device)
        assert_kept(opzoo.nms(boxes, scores, 0.5), torchvision.ops.nms(boxes.cpu(), scores.cpu(), 0.5))
        idxs = torch.arange(n, device=device) % 3
        expected = per_class_torchvision(boxes, scores, idxs, 0.5)
        assert_kept(opzoo.batched_nms(boxes, scores, idxs, 0.5), expected)


@pytest.mark.parametrize("n", [1023, 1025, 4095, 4097, 9000])
def test_sizes_around_internal_limits(device, n):
    boxes, scores = detector_boxes(n, 800, 1333).to(device), torch.rand(n).to(device)
    assert_kept(opzoo.nms(boxes, scores, 0.5), torchvision.ops.nms(boxes.cpu(), scores.cpu(), 0.5))
    idxs = torch.randint(4, (n,), device=device) * torch.randint(2, (n,), device=device)  # class 0 is large
    assert_kept(opzoo.batched_nms(boxes, scores, idxs, 0.5), per_class_torchvision(boxes, scores, idxs, 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("n", [370_729, 420_000, 1_000_000])
def test_very_many_boxes(device, n):
    # Disjoint boxes and one copy of each of the last 1000. A bit per pair would be 17 to 125 GB.
    x = torch.arange(n, dtype=torch.float32, device=device)
    boxes = torch.stack([x, 0 * x, x + 0.5, 0 * x + 1], 1)
    boxes[-1000:] = boxes[-2000:-1000]
    assert_kept(opzoo.nms(boxes, -x, 0.5), torch.arange(n - 1000, device=device))
    idxs = torch.arange(n, device=device) % 1000  # each box and its copy are of one class
    assert_kept(opzoo.batched_nms(boxes, -x, idxs, 0.5), torch.arange(n - 1000, device=device))


# Dtypes


@pytest.mark.parametrize("scores_dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("boxes_dtype", [*FLOATS, *INTEGERS], ids=str)
def test_every_mix_of_dtypes(device, boxes_dtype, scores_dtype):
    boxes = detector_boxes(150, 100, 100).to(device, boxes_dtype)
    scores = (torch.rand(150) * 100).to(device, scores_dtype)  # many ties in the narrow types
    idxs = torch.randint(3, (150,), device=device)
    for threshold in THRESHOLDS:
        assert_kept(opzoo.nms(boxes, scores, threshold), opzoo.reference.nms(boxes.cpu(), scores.cpu(), threshold))
        result = opzoo.batched_nms(boxes, scores, idxs, threshold)
        assert_kept(result, opzoo.reference.batched_nms(boxes.cpu(), scores.cpu(), idxs.cpu(), threshold))
    # The dtype only stores: the same boxes in the type they are compared in give the same result.
    wide = boxes.to(torch.float64 if boxes_dtype in (torch.int64, torch.int32) else boxes_dtype).to(
        torch.float64 if boxes_dtype in (torch.float64, torch.int64, torch.int32) else torch.float32
    )
    assert_kept(
        opzoo.nms(boxes, scores, 0.5), torchvision.ops.nms(wide.cpu(), _distinct_scores(scores).to(wide).cpu(), 0.5)
    )


def _distinct_scores(scores: Tensor) -> Tensor:
    """Distinct scores with the order of ``scores``, ties by index."""
    order = torch.argsort(scores, descending=True, stable=True)
    ranks = torch.empty(len(scores), device=scores.device)
    ranks[order] = torch.arange(len(scores), 0, -1, dtype=torch.float32, device=scores.device)
    return ranks


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_idxs_of_every_integer_dtype(device, dtype):
    boxes, scores = detector_boxes(100, 100, 100).to(device), torch.rand(100).to(device)
    idxs = torch.randint(5, (100,), device=device)
    assert_kept(opzoo.batched_nms(boxes, scores, idxs.to(dtype), 0.5), opzoo.batched_nms(boxes, scores, idxs, 0.5))


def test_float64_boxes_are_compared_in_float64(device):
    # IoU 0.5 + 2^-41: above the threshold in double, equal to it in float.
    boxes = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0.5 + 2.0**-41]], dtype=torch.float64, device=device)
    scores = torch.tensor([1.0, 0.5], device=device)
    assert opzoo.nms(boxes, scores, 0.5).tolist() == [0]
    assert opzoo.nms(boxes.float(), scores, 0.5).tolist() == [0, 1]


def test_large_integer_coordinates_are_exact(device):
    base = 2**24  # odd numbers beyond this do not exist in float32
    boxes = torch.tensor([[base, 0, base + 1, 10], [base + 1, 0, base + 2, 10]], dtype=torch.int32, device=device)
    assert opzoo.nms(boxes, torch.tensor([2, 1], device=device), 0.0).tolist() == [0, 1]


@pytest.mark.parametrize("threshold", [0.3, 0.1, 0.7, 0.9])
def test_iou_on_the_threshold_is_kept(device, threshold):
    # The IoU is the float nearest to the threshold; only "greater" suppresses.
    tenths = round(threshold * 10)
    boxes = torch.tensor([[0.0, 0, 10, 1], [0, 0, tenths, 1]], device=device)
    scores = torch.tensor([1.0, 0.5], device=device)
    assert opzoo.nms(boxes, scores, threshold).tolist() == [0, 1]
    assert opzoo.nms(boxes, scores, threshold - 1e-6).tolist() == [0]


# Order


@pytest.mark.parametrize("op", ["nms", "batched_nms"])
def test_equal_scores_keep_index_order(device, op):
    x = torch.arange(5000, dtype=torch.float32, device=device) * 2
    boxes = torch.stack([x, 0 * x, x + 1, 0 * x + 1], 1)
    arguments = (boxes, torch.ones(5000, device=device))
    if op == "batched_nms":
        arguments += (torch.arange(5000, device=device) % 7,)
    assert_kept(getattr(opzoo, op)(*arguments, 0.5), torch.arange(5000))


def test_equal_scores_keep_the_first_of_identical_boxes(device):
    boxes = torch.tensor([1.0, 1.0, 4.0, 4.0], device=device).expand(5000, 4)
    assert opzoo.nms(boxes, torch.zeros(5000, device=device), 0.5).tolist() == [0]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_order_of_special_scores(device, dtype):
    values = [NAN, -INF, -0.0, 1.0, 0.0, INF, NAN, -1.0, -INF, torch.finfo(dtype).tiny, -torch.finfo(dtype).tiny]
    scores = torch.tensor(values, dtype=dtype, device=device)
    x = torch.arange(len(values), device=device) * 5
    boxes = torch.stack([x, 0 * x, x + 1, 0 * x + 1], 1)
    result = opzoo.nms(boxes, scores, 0.5)
    assert result.tolist() == [5, 3, 9, 2, 4, 10, 7, 1, 8, 0, 6]
    assert_kept(result, opzoo.reference.nms(boxes.cpu(), scores.cpu(), 0.5))


def test_extreme_integer_scores(device):
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    scores = torch.tensor([low, 2**53, 2**53 + 1, high, -1], device=device)  # two are one double
    boxes = torch.arange(5, device=device)[:, None] * 5 + torch.tensor([0, 0, 1, 1], device=device)
    assert opzoo.nms(boxes, scores, 0.5).tolist() == [3, 2, 1, 4, 0]


def test_nan_score_does_not_suppress_a_scored_box(device):
    boxes = torch.tensor([[0.0, 0, 9, 9]], device=device).repeat(3, 1)
    assert opzoo.nms(boxes, torch.tensor([NAN, -INF, 0.5], device=device), 0.5).tolist() == [2]


# Boxes that are no boxes

BAD_ROWS = {
    "nan": [NAN, NAN, NAN, NAN],
    "one-nan": [0.0, NAN, 50.0, 50.0],
    "inf": [-INF, -INF, INF, INF],
    "right-inf": [0.0, 0.0, INF, 50.0],
    "only-inf": [INF, INF, INF, INF],
    "area-overflow": [0.0, 0.0, 1e20, 1e20],
    "point": [5.0, 5.0, 5.0, 5.0],
    "line": [5.0, 5.0, 5.0, 50.0],
    "inverted": [50.0, 50.0, 0.0, 0.0],
    "inverted-x": [50.0, 0.0, 0.0, 50.0],
}


@pytest.mark.parametrize("row", BAD_ROWS)
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_bad_rows_are_kept_and_change_no_other_box(device, row, threshold):
    n = 120
    boxes, scores = detector_boxes(n, 60, 60).to(device), torch.rand(n).to(device)
    idxs = torch.randint(3, (n,), device=device)
    bad = torch.zeros(n, dtype=torch.bool, device=device)
    bad[torch.randperm(n)[:20]] = True
    boxes[bad] = torch.tensor(BAD_ROWS[row], device=device)
    good = (~bad).nonzero().flatten()
    for result, without in (
        (opzoo.nms(boxes, scores, threshold), opzoo.nms(boxes[good], scores[good], threshold)),
        (
            opzoo.batched_nms(boxes, scores, idxs, threshold),
            opzoo.batched_nms(boxes[good], scores[good], idxs[good], threshold),
        ),
    ):
        assert_kept(result[~bad[result]], good[without])
        assert int(bad[result].sum()) == 20
    assert_kept(opzoo.nms(boxes, scores, threshold), opzoo.reference.nms(boxes.cpu(), scores.cpu(), threshold))


# Layouts in memory


@pytest.mark.parametrize("threshold", [0.5])
def test_any_strides(device, threshold):
    boxes, scores = detector_boxes(90, 100, 100).to(device), torch.rand(90).to(device)
    idxs = torch.randint(3, (90,), device=device)
    expected = opzoo.batched_nms(boxes, scores, idxs, threshold)
    column_major = boxes.t().contiguous().t()
    strided = torch.zeros(180, 9, device=device)[::2, 1::2]
    strided.copy_(boxes)
    offset = torch.cat([torch.full((7,), NAN, device=device), boxes.flatten()])[7:].view(90, 4)
    spread_scores = torch.stack([scores, scores + 1], 1)[:, 0]
    spread_idxs = torch.stack([idxs, idxs + 1], 1)[:, 0]
    for b, s, c in itertools.product((column_major, strided, offset), (scores, spread_scores), (idxs, spread_idxs)):
        assert_kept(opzoo.batched_nms(b, s, c, threshold), expected)
    one = torch.zeros(1, dtype=torch.int64, device=device).expand(90)
    assert_kept(opzoo.batched_nms(boxes, scores, one, threshold), opzoo.nms(boxes, scores, threshold))
    same = scores[:1].expand(90)
    assert_kept(opzoo.nms(boxes, same, threshold), opzoo.nms(boxes, same.contiguous(), threshold))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_no_boxes_and_one_box(device, dtype):
    for n in (0, 1):
        boxes = torch.ones(n, 4, device=device, dtype=dtype)
        scores, idxs = torch.ones(n, device=device), torch.ones(n, dtype=torch.int64, device=device)
        for result in (opzoo.nms(boxes, scores, 0.5), opzoo.batched_nms(boxes, scores, idxs, 0.5)):
            assert_kept(result, torch.arange(n))
            assert result.device == boxes.device and result.is_contiguous()


# Reported elsewhere


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("image", [0, 1, 79, 700, 10**7, 2**24 + 1, 2**40, -5])
def test_large_ids_do_not_cost_precision(device, dtype, image):
    boxes = torch.tensor([[0, 0, 100, 100], [0, 0, 100, 98]], device=device).to(dtype)
    scores = torch.tensor([0.9, 0.8], device=device).to(dtype)
    idxs = torch.tensor([image, image], device=device)
    assert opzoo.batched_nms(boxes, scores, idxs, 0.5).tolist() == [0]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert opzoo.batched_nms(boxes, scores, idxs, 0.5).tolist() == [0]
    assert opzoo.batched_nms(boxes, scores, torch.tensor([image, image + 1], device=device), 0.5).tolist() == [0, 1]


def test_many_classes_times_images_equal_one_nms_per_class(device):
    boxes = detector_boxes(2000, 4000, 4000).to(device)
    scores, idxs = torch.rand(2000).to(device), (torch.randint(80, (2000,)) * 16).to(device)
    assert_kept(opzoo.batched_nms(boxes, scores, idxs, 0.5), per_class_torchvision(boxes, scores, idxs, 0.5))


def test_negative_coordinates_do_not_mix_classes(device):
    boxes = torch.tensor([[-11.0, -11, -1, -1]], device=device).repeat(2, 1)
    idxs = torch.tensor([0, 1], device=device)
    assert opzoo.batched_nms(boxes, torch.tensor([0.9, 0.8], device=device), idxs, 0.5).tolist() == [0, 1]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_bad_box_does_not_poison_the_rest(device, value):
    boxes = torch.tensor([[0.0, 0, 9, 9], [0, 0, 9, 9], [value, 0, 5, 5]], device=device)
    scores, idxs = torch.tensor([0.9, 0.8, 0.7], device=device), torch.tensor([0, 0, 1], device=device)
    assert opzoo.batched_nms(boxes, scores, idxs, 0.5).tolist() == [0, 2]


@pytest.mark.parametrize("row", [[5.0, 5, 5, 5], [0, 0, 1e20, 1e20]])
def test_copies_without_a_defined_iou_are_both_kept(device, row):
    boxes = torch.tensor([row, row], device=device)
    assert opzoo.nms(boxes, torch.ones(2, device=device), 0.5).tolist() == [0, 1]


def test_float64_holds_what_overflows_in_float32(device):
    boxes = torch.tensor([[0, 0, 1e20, 1e20]] * 2, dtype=torch.float64, device=device)
    assert opzoo.nms(boxes, torch.ones(2, device=device), 0.5).tolist() == [0]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_boxes_are_not_compared_in_half(device, dtype):
    # Areas near 1e6 overflow float16, and bfloat16 has 8 bits for them.
    boxes = torch.tensor([[0, 0, 1000, 1000], [0, 0, 1000, 504]], dtype=dtype, device=device)
    scores = torch.tensor([0.9, 0.8], dtype=dtype, device=device)
    assert opzoo.nms(boxes, scores, 0.5).tolist() == [0]
    assert opzoo.nms(boxes, scores, 0.505).tolist() == [0, 1]


# Anything


@st.composite
def _box_sets(draw):
    n = draw(st.integers(0, 70))
    coordinate = st.one_of(
        st.integers(-6, 6).map(float), st.floats(-1e6, 1e6, width=32), st.sampled_from([NAN, INF, -INF, 1e30])
    )
    score = st.one_of(st.integers(-2, 2).map(float), st.floats(width=32))
    boxes = draw(st.lists(st.tuples(*[coordinate] * 4), min_size=n, max_size=n))
    scores = draw(st.lists(score, min_size=n, max_size=n))
    idxs = draw(st.lists(st.integers(-1, 1), min_size=n, max_size=n))
    return torch.tensor(boxes).reshape(n, 4), torch.tensor(scores).reshape(n), torch.tensor(idxs, dtype=torch.int64)


@given(_box_sets(), st.floats(0, 1), st.sampled_from(FLOATS))
def test_any_set_matches_the_reference(sets, threshold, dtype):
    boxes, scores, idxs = sets
    boxes = boxes.to(dtype)
    assert_kept(opzoo.nms(boxes, scores, threshold), opzoo.reference.nms(boxes.cpu(), scores.cpu(), threshold))
    result = opzoo.batched_nms(boxes, scores, idxs, threshold)
    assert_kept(result, opzoo.reference.batched_nms(boxes.cpu(), scores.cpu(), idxs.cpu(), threshold))
