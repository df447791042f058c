"""soft_nms and batched_soft_nms against the reference and the loop of mmcv, on inputs of every kind."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers import FLOATS, HALVES, detector_boxes
from hypothesis import given
from hypothesis import strategies as st
from nms_inputs import INF, NAN, integer_grid, nested, touching
from torch import Tensor

import opzoo

METHODS = ("naive", "linear", "gaussian")
methods = pytest.mark.parametrize("method", METHODS)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _chain(n: int) -> Tensor:
    x = torch.arange(n, dtype=torch.float32) * 4
    return torch.stack([x, 0 * x, x + 10, 0 * x + 1], 1)


LAYOUTS = {
    "clustered": lambda n: detector_boxes(n, 800, 1333),
    "crowded": lambda n: detector_boxes(n, 30, 40),
    "touching": touching,
    "nested": nested,
    "chain": _chain,
    "identical": lambda n: torch.tensor([3.0, 4.0, 9.0, 11.0]).repeat(n, 1),
    "negative": lambda n: detector_boxes(n, 800, 1333) - 900,
    "million-pixels": lambda n: detector_boxes(n, 1e6, 1e6),
    "sub-pixel": lambda n: detector_boxes(n, 1e-3, 1e-3),
    "integer-grid": integer_grid,
    "empty-and-inverted": lambda n: detector_boxes(n, 60, 60) + torch.randint(-9, 2, (n, 4)),
}


def mmcv_loop(
    boxes: Tensor, scores: Tensor, iou_threshold: float, sigma: float, min_score: float, method: str
) -> tuple[list[float], list[int]]:
    """mmcv's CPU kernel, swaps and all, in Python's double arithmetic."""
    rows, values, indices = boxes.tolist(), scores.tolist(), list(range(len(boxes)))
    count, i = len(rows), 0
    while i < count:
        best = max(range(i, count), key=lambda pos: values[pos])
        for items in (rows, values, indices):
            items[i], items[best] = items[best], items[i]
        x1, y1, x2, y2 = rows[i]
        pos = i + 1
        while pos < count:
            u1, v1, u2, v2 = rows[pos]
            inter = max(0.0, min(x2, u2) - max(x1, u1)) * max(0.0, min(y2, v2) - max(y1, v1))
            iou = inter / ((x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - inter)
            if method == "gaussian":
                values[pos] *= math.exp(-(iou * iou) / sigma)
            elif iou >= iou_threshold:
                values[pos] *= 1 - iou if method == "linear" else 0
            if values[pos] < min_score:
                for items in (rows, values, indices):
                    items[pos] = items[count - 1]
                count -= 1
                pos -= 1
            pos += 1
        i += 1
    return values[:count], indices[:count]


def assert_result(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], method: str) -> None:
    """Equal to the bit; gaussian scores in float64 within the error of two exponentials per selection."""
    scores, indices = result
    assert indices.dtype == torch.int64 and scores.dtype == expected[0].dtype
    assert indices.tolist() == expected[1].tolist()
    if method == "gaussian" and scores.dtype == torch.float64:
        torch.testing.assert_close(scores, expected[0], rtol=1e-12, atol=0)
    else:
        assert torch.equal(scores, expected[0])


def per_class(boxes: Tensor, scores: Tensor, idxs: Tensor, *numbers) -> tuple[Tensor, Tensor]:
    """One soft_nms for each class, merged by score, ties by index."""
    parts = []
    for c in idxs.unique():
        members = (idxs == c).nonzero().flatten()
        decayed, kept = opzoo.soft_nms(boxes[members], scores[members], *numbers)
        parts.append((decayed, members[kept]))
    decayed, kept = (torch.cat(column) for column in zip(*parts, strict=True))
    by_index = kept.argsort()
    order = by_index[decayed[by_index].argsort(descending=True, stable=True)]
    return decayed[order], kept[order]


@methods
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_reference(device, layout, method):
    for n, numbers in ((60, (0.3, 0.5, 1e-3)), (150, (0.0, 0.1, 0.2)), (150, (0.7, 2.0, 0.0)), (40, (1.0, 0.5, 0.5))):
        boxes, scores = LAYOUTS[layout](n).to(device), torch.rand(n).to(device)
        idxs = torch.randint(3, (n,), device=device)
        result = opzoo.soft_nms(boxes, scores, *numbers, method)
        assert result[0].device == result[1].device == boxes.device
        assert_result(result, opzoo.reference.soft_nms(boxes, scores, *numbers, method), method)
        result = opzoo.batched_soft_nms(boxes, scores, idxs, *numbers, method)
        assert_result(result, opzoo.reference.batched_soft_nms(boxes, scores, idxs, *numbers, method), method)


@methods
@pytest.mark.parametrize("layout", ["clustered", "crowded", "nested", "chain", "negative", "integer-grid"])
def test_matches_the_loop_of_mmcv(device, layout, method):
    for n, numbers in ((200, (0.3, 0.5, 1e-3)), (120, (0.6, 0.2, 0.3)), (120, (0.3, 0.5, 0.0))):
        boxes = LAYOUTS[layout](n).double()
        boxes[:, 2:] += 1e-3  # mmcv's result for two empty boxes is NaN
        scores = torch.rand(n, dtype=torch.float64)
        values, indices = mmcv_loop(boxes, scores, *numbers, method)
        decayed, kept = opzoo.soft_nms(boxes.to(device), scores.to(device), *numbers, method)
        if numbers[2] == 0:  # many scores of 0, which mmcv leaves in no certain order
            positive = sum(value > 0 for value in values)
            assert sorted(kept.tolist()) == sorted(indices)
            values, indices, decayed, kept = values[:positive], indices[:positive], decayed[:positive], kept[:positive]
        assert_result((decayed.cpu(), kept.cpu()), (scores.new_tensor(values), torch.tensor(indices)), method)


@methods
@pytest.mark.parametrize("classes", [1, 2, 80, 1203])
def test_batched_equals_one_call_per_class(device, classes, method):
    n = 700
    boxes, scores = detector_boxes(n, 100, 100).to(device), torch.rand(n).to(device)
    scores[::5] = 0.5
    idxs = torch.randint(classes, (n,), device=device)
    for numbers in ((0.3, 0.5, 1e-3), (0.5, 0.3, 0.2)):
        expected = per_class(boxes, scores, idxs, *numbers, method)
        assert_result(opzoo.batched_soft_nms(boxes, scores, idxs, *numbers, method), expected, method)


@pytest.mark.parametrize("ids", [(2**24, 2**24 + 1), (-1, 0, 1), (-(2**63), 2**63 - 1, 0), (2**53, 2**53 + 1)], ids=str)
def test_ids_of_any_value(device, ids):
    boxes, scores = detector_boxes(200, 50, 50).to(device), torch.rand(200).to(device)
    idxs = torch.tensor(ids, device=device)[torch.randint(len(ids), (200,), device=device)]
    assert_result(opzoo.batched_soft_nms(boxes, scores, idxs), per_class(boxes, scores, idxs), "linear")


def test_every_small_size(device):
    for n in range(1, 131):
        boxes, scores = detector_boxes(n, 40, 40).to(device), torch.rand(n).to(device)
        assert_result(opzoo.soft_nms(boxes, scores), opzoo.reference.soft_nms(boxes, scores), "linear")
        idxs = torch.arange(n, device=device) % 3
        assert_result(opzoo.batched_soft_nms(boxes, scores, idxs), per_class(boxes, scores, idxs), "linear")


@pytest.mark.parametrize("n", [255, 257, 511, 513, 1023, 1025, 2049, 4097, 9000])
def test_sizes_around_internal_limits(device, n):
    boxes, scores = detector_boxes(n, 800, 1333), torch.rand(n)
    expected = opzoo.reference.soft_nms(boxes, scores, 0.3, 0.5, 0.2)
    result = opzoo.soft_nms(boxes.to(device), scores.to(device), 0.3, 0.5, 0.2)
    assert_result(tuple(t.cpu() for t in result), expected, "linear")
    idxs = torch.randint(4, (n,)) * torch.randint(2, (n,))  # class 0 is large
    expected = opzoo.reference.batched_soft_nms(boxes, scores, idxs, 0.3, 0.5, 0.2)
    result = opzoo.batched_soft_nms(boxes.to(device), scores.to(device), idxs.to(device), 0.3, 0.5, 0.2)
    assert_result(tuple(t.cpu() for t in result), expected, "linear")


@pytest.mark.parametrize("layout", ["identical", "nested", "chain", "touching"])
def test_many_ties(device, layout):
    """Equal scores and equal boxes, in more than one block of either device."""
    n = 1500
    boxes, scores = LAYOUTS[layout](n).to(device), torch.ones(n, device=device)
    idxs = torch.arange(n, device=device) % 2
    for method in METHODS:
        expected = opzoo.reference.soft_nms(boxes.cpu(), scores.cpu(), 0.3, 0.5, 0.1, method)
        result = opzoo.soft_nms(boxes, scores, 0.3, 0.5, 0.1, method)
        assert_result(tuple(t.cpu() for t in result), expected, method)
        result = opzoo.batched_soft_nms(boxes, scores, idxs, 0.3, 0.5, 0.1, method)
        assert_result(result, per_class(boxes, scores, idxs, 0.3, 0.5, 0.1, method), method)


@pytest.mark.gpu
@methods
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_devices_agree_to_the_bit(dtype, method):
    for n in (50, 500, 3000, 12000):
        boxes, scores = detector_boxes(n, 800, 1333).to(dtype), torch.rand(n, dtype=dtype)
        one_large, three_large = torch.randint(20, (n,)) * torch.randint(2, (n,)), torch.randint(3, (n,))
        for function, arguments in (
            (opzoo.soft_nms, (boxes, scores)),
            (opzoo.batched_soft_nms, (boxes, scores, one_large)),
            (opzoo.batched_soft_nms, (boxes, scores, three_large)),
        ):
            cpu = function(*arguments, 0.3, 0.5, 1e-3, method)
            cuda = function(*(t.cuda() for t in arguments), 0.3, 0.5, 1e-3, method)
            assert all(torch.equal(a, b.cpu()) for a, b in zip(cpu, cuda, strict=True))


@pytest.mark.gpu
@pytest.mark.slow
def test_100000_boxes_on_cuda():
    boxes, scores = detector_boxes(100_000, 800, 1333), torch.rand(100_000)
    idxs = torch.randint(80, (100_000,))
    for function, arguments in ((opzoo.soft_nms, (boxes, scores)), (opzoo.batched_soft_nms, (boxes, scores, idxs))):
        cpu, cuda = function(*arguments), function(*(t.cuda() for t in arguments))
        assert all(torch.equal(a, b.cpu()) for a, b in zip(cpu, cuda, strict=True))


# Dtypes


@pytest.mark.parametrize("scores_dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("boxes_dtype", [*FLOATS, *INTEGERS], ids=str)
def test_every_mix_of_dtypes(device, boxes_dtype, scores_dtype):
    boxes = detector_boxes(150, 100, 100).to(device, boxes_dtype)
    scores = (torch.rand(150) * 100).to(device, scores_dtype)  # many ties in the narrow types
    idxs = torch.randint(3, (150,), device=device)
    for method in METHODS:
        result = opzoo.soft_nms(boxes, scores, method=method)
        assert_result(result, opzoo.reference.soft_nms(boxes, scores, method=method), method)
        result = opzoo.batched_soft_nms(boxes, scores, idxs, method=method)
        assert_result(result, opzoo.reference.batched_soft_nms(boxes, scores, idxs, method=method), method)
    wide = torch.float64 if scores_dtype in (torch.int64, torch.int32) else torch.float32
    assert result[0].dtype == (scores_dtype if scores_dtype.is_floating_point else wide)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_only_store(device, dtype):
    boxes, scores = detector_boxes(200, 1000, 1000).to(device, dtype), torch.rand(200).to(device, dtype)
    decayed, kept = opzoo.soft_nms(boxes, scores)
    exact, expected = opzoo.soft_nms(boxes.float(), scores.float())
    assert torch.equal(kept, expected) and torch.equal(decayed, exact.to(dtype))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_idxs_of_every_integer_dtype(device, dtype):
    boxes, scores = detector_boxes(100, 100, 100).to(device), torch.rand(100).to(device)
    idxs = torch.randint(5, (100,), device=device)
    result = opzoo.batched_soft_nms(boxes, scores, idxs.to(dtype))
    assert_result(result, opzoo.batched_soft_nms(boxes, scores, idxs), "linear")


# Rules


def test_factors(device):
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 5], [0, 0, 5, 5], [20, 0, 30, 10]], device=device)
    scores = torch.tensor([1.0, 0.5, 0.25, 0.125], device=device)
    expected = {
        "naive": ([1, 0.25, 0.125], [0, 2, 3]),
        "linear": ([1, 0.25, 0.125, 0.125], [0, 1, 2, 3]),  # 0.25 * 1 (IoU 0.25 is below 0.3) * 0.5
        "gaussian": ([1, 0.5 * math.exp(-0.5), 0.25 * math.exp(-0.625), 0.125], [0, 1, 2, 3]),
    }
    for method, (values, indices) in expected.items():
        decayed, kept = opzoo.soft_nms(boxes, scores, method=method)
        assert kept.tolist() == indices
        assert decayed.tolist() == pytest.approx(values, rel=1e-6)


def test_a_score_equal_to_min_score_stays(device):
    boxes = torch.tensor([[0.0, 0, 2, 1], [0, 0, 1, 1], [5, 5, 6, 6]], device=device)
    scores = torch.tensor([0.5, 0.25, 0.125], device=device)
    assert opzoo.soft_nms(boxes, scores, 0.3, 0.5, 0.125)[1].tolist() == [0, 1, 2]
    assert opzoo.soft_nms(boxes, scores, 0.3, 0.5, 0.1251)[1].tolist() == [0]


def test_min_score_is_rounded_to_the_arithmetic(device):
    boxes, scores = torch.tensor([[0.0, 0, 2, 1]], device=device), torch.tensor([0.1], device=device)
    assert len(opzoo.soft_nms(boxes, scores, 0.3, 0.5, 0.1)[1]) == 1  # float32(0.1) >= float32(0.1)
    assert len(opzoo.soft_nms(boxes, scores.double(), 0.3, 0.5, 0.1)[1]) == 1  # the double above 0.1
    assert len(opzoo.soft_nms(boxes, scores, 0.3, 0.5, 0.2)[1]) == 0


@methods
def test_zero_scores_stay_where_min_score_is_zero(device, method):
    boxes = torch.tensor([[0.0, 0, 2, 1]], device=device).repeat(3, 1)
    decayed, kept = opzoo.soft_nms(boxes, torch.tensor([0.0, -0.0, 1.0], device=device), 0.5, 0.5, 0.0, method)
    assert kept.tolist() == [2, 0, 1]
    assert decayed.tolist() == [1, 0, 0] and not decayed.signbit().any()


@methods
def test_special_scores(device, method):
    values = [NAN, INF, -0.0, -1.0, -INF, 1.0, INF]
    x = torch.arange(len(values), device=device) * 5
    boxes = torch.stack([x, 0 * x, x + 1, 0 * x + 1], 1)
    scores = torch.tensor(values, device=device)
    decayed, kept = opzoo.soft_nms(boxes, scores, 0.3, 0.5, 0.0, method)
    assert kept.tolist() == [1, 6, 5, 2] and decayed.tolist() == [INF, INF, 1, 0]
    same = torch.tensor([[0.0, 0, 4, 4]], device=device).repeat(len(values), 1)
    assert_result(
        opzoo.soft_nms(same, scores, 0.3, 0.5, 0.0, method),
        opzoo.reference.soft_nms(same, scores, 0.3, 0.5, 0.0, method),
        method,
    )


@pytest.mark.parametrize("sigma", [5e-324, 1e-300, 1e300, INF])
def test_extreme_sigma(device, sigma):
    boxes, scores = detector_boxes(80, 20, 20).to(device), torch.rand(80).to(device)
    result = opzoo.soft_nms(boxes, scores, 0.3, sigma, 1e-3, "gaussian")
    assert_result(result, opzoo.reference.soft_nms(boxes, scores, 0.3, sigma, 1e-3, "gaussian"), "gaussian")
    assert sigma < 1 or torch.equal(result[0], scores[scores >= 1e-3].sort(descending=True).values)


def test_the_exponential_is_right_to_the_last_place(device):
    """One pair of boxes per IoU: its factor is the score of the second."""
    n = 4096
    width = torch.arange(1, n + 1, dtype=torch.float64, device=device) / n  # of which every IoU is exact
    zero, one = torch.zeros_like(width), torch.ones_like(width)
    boxes = torch.cat([torch.stack([zero, zero, one, one], 1), torch.stack([zero, zero, width, one], 1)])
    scores, idxs = torch.cat([one * 2, one]), torch.arange(n, device=device).repeat(2)
    for sigma in (0.5, 0.01, 0.0015):
        decayed, kept = opzoo.batched_soft_nms(boxes, scores, idxs, 0.3, sigma, 0.0, "gaussian")
        factor = torch.empty_like(scores).index_put_((kept,), decayed)[n:]
        exact = torch.exp(-(width * width).cpu() / sigma).to(device)  # on CUDA torch divides by a number's inverse
        torch.testing.assert_close(factor, exact, rtol=4.5e-16, atol=1e-304)
        if sigma == 0.5:
            narrow, kept = opzoo.batched_soft_nms(boxes.float(), scores.float(), idxs, 0.3, sigma, 0.0, "gaussian")
            result = torch.empty_like(narrow).index_put_((kept,), narrow)[n:]
            assert torch.equal(result, exact.float())


@methods
def test_an_infinite_score_whose_factor_is_zero_becomes_zero(device, method):
    """Not NaN, which inf * 0 is."""
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 10], [50, 50, 60, 60]], device=device)
    scores = torch.tensor([INF, INF, 1.0], device=device)
    idxs = torch.zeros(3, dtype=torch.int64, device=device)
    for zoo in (opzoo, opzoo.reference):  # a sigma so small that the exponential is 0
        for decayed, kept in (
            zoo.soft_nms(boxes, scores, 0.5, 1e-30, 0.0, method),
            zoo.batched_soft_nms(boxes, scores, idxs, 0.5, 1e-30, 0.0, method),
        ):
            assert decayed.tolist() == [INF, 1.0, 0.0] and kept.tolist() == [0, 2, 1]


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


@methods
@pytest.mark.parametrize("row", BAD_ROWS)
def test_bad_rows_keep_their_score_and_change_no_other_box(device, row, method):
    n = 120
    boxes, scores = detector_boxes(n, 60, 60).to(device), (torch.rand(n) + 0.1).to(device)
    idxs = torch.randint(3, (n,), device=device)
    bad = torch.zeros(n, dtype=torch.bool, device=device)
    bad[torch.randperm(n)[:20]] = True
    boxes[bad] = torch.tensor(BAD_ROWS[row], device=device)
    good = (~bad).nonzero().flatten()
    for threshold in (0, 0.3):
        result = opzoo.soft_nms(boxes, scores, threshold, method=method)
        assert_result(result, opzoo.reference.soft_nms(boxes, scores, threshold, method=method), method)
        for (decayed, kept), (score, without) in (
            (result, opzoo.soft_nms(boxes[good], scores[good], threshold, method=method)),
            (
                opzoo.batched_soft_nms(boxes, scores, idxs, threshold, method=method),
                opzoo.batched_soft_nms(boxes[good], scores[good], idxs[good], threshold, method=method),
            ),
        ):
            among = ~bad[kept]
            assert torch.equal(kept[among], good[without]) and torch.equal(decayed[among], score)
            assert torch.equal(decayed[~among], scores[kept[~among]]) and int((~among).sum()) == 20


# Layouts in memory


def test_any_strides(device):
    boxes, scores = detector_boxes(90, 100, 100).to(device), torch.rand(90).to(device)
    idxs = torch.randint(3, (90,), device=device)
    expected = opzoo.batched_soft_nms(boxes, scores, idxs)
    column_major = boxes.t().contiguous().t()
    strided = torch.zeros(180, 9, device=device)[::2, 1::2]
    strided.copy_(boxes)
    offset = torch.cat([torch.full((7,), NAN, device=device), boxes.flatten()])[7:].view(90, 4)
    spread_scores = torch.stack([scores, scores + 1], 1)[:, 0]
    spread_idxs = torch.stack([idxs, idxs + 1], 1)[:, 0]
    for b, s, c in itertools.product((column_major, strided, offset), (scores, spread_scores), (idxs, spread_idxs)):
        assert_result(opzoo.batched_soft_nms(b, s, c), expected, "linear")
    one = torch.zeros(1, dtype=torch.int64, device=device).expand(90)
    assert_result(opzoo.batched_soft_nms(boxes, scores, one), opzoo.soft_nms(boxes, scores), "linear")


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_no_boxes_and_one_box(device, dtype):
    for n, score in ((0, 1), (1, 1), (1, 0)):
        boxes = torch.ones(n, 4, device=device, dtype=dtype)
        scores = torch.full((n,), score, device=device)
        idxs = torch.ones(n, dtype=torch.int64, device=device)
        for decayed, kept in (opzoo.soft_nms(boxes, scores), opzoo.batched_soft_nms(boxes, scores, idxs)):
            assert kept.tolist() == list(range(n * score)) and decayed.tolist() == [1.0] * (n * score)
            assert decayed.device == kept.device == boxes.device
            assert decayed.is_contiguous() and kept.is_contiguous()


def test_results_do_not_hold_on_to_the_memory_of_all_boxes(device):
    boxes = torch.tensor([[0.0, 0, 5, 5]], device=device).repeat(800, 1)
    for result in opzoo.soft_nms(boxes, torch.rand(800, device=device), method="naive"):
        assert result.untyped_storage().nbytes() <= 8


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


@given(_box_sets(), st.floats(0, 1), st.floats(0, 1), st.sampled_from(METHODS), st.sampled_from(FLOATS))
def test_any_set_matches_the_reference(sets, threshold, min_score, method, dtype):
    boxes, scores, idxs = sets
    boxes, numbers = boxes.to(dtype), (threshold, 0.5, min_score, method)
    expected = opzoo.reference.soft_nms(boxes, scores, *numbers)
    assert_result(opzoo.soft_nms(boxes, scores, *numbers), expected, method)
    expected = opzoo.reference.batched_soft_nms(boxes, scores, idxs, *numbers)
    assert_result(opzoo.batched_soft_nms(boxes, scores, idxs, *numbers), expected, method)
