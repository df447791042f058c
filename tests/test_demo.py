"""The example that trains a detector of digits: its data, its measures, and a short run from end to end."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

for package in ("sklearn", "matplotlib", "tqdm", "torchvision"):
    pytest.importorskip(package)
EXAMPLES = str(Path(__file__).resolve().parent.parent / "examples")
if EXAMPLES not in sys.path:
    sys.path.insert(0, EXAMPLES)

import detect_digits  # noqa: E402
import torchvision  # noqa: E402
from digits import boxes as box_code  # noqa: E402
from digits.data import SIZE, make_scenes, split_digits  # noqa: E402
from digits.evaluate import average_precision, compare, match, mean_average_precision  # noqa: E402
from digits.model import Detections, Detector, sample  # noqa: E402


def detections(*rows: tuple[list[float], float, int]) -> Detections:
    """Detections from ``(box, score, label)`` rows."""
    boxes, scores, labels = zip(*rows, strict=True) if rows else ([], [], [])
    return Detections(
        torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        torch.tensor(scores, dtype=torch.float32),
        torch.tensor(labels, dtype=torch.int64),
    )


# --- data ---------------------------------------------------------------------------------------------------


def test_training_and_held_out_digits_are_disjoint_and_complete() -> None:
    training, held_out = split_digits()
    assert set(training.ids).isdisjoint(held_out.ids)
    assert sorted([*training.ids, *held_out.ids]) == list(range(1797))
    assert set(held_out.labels) == set(training.labels) == set(range(10))


def test_scenes_depend_on_the_seed_alone() -> None:
    digits = split_digits()[0]
    first, again, other = make_scenes(digits, 3, seed=5), make_scenes(digits, 3, seed=5), make_scenes(digits, 3, seed=6)
    assert torch.equal(first.images, again.images)
    for a, b in zip(first.boxes + first.labels, again.boxes + again.labels, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.images, other.images)


def test_boxes_lie_in_the_scene_and_overlap_mildly() -> None:
    scenes = make_scenes(split_digits()[0], 20, seed=0)
    assert scenes.images.shape == (20, 3, SIZE, SIZE) and scenes.images.dtype == torch.uint8
    for boxes, labels in zip(scenes.boxes, scenes.labels, strict=True):
        assert len(boxes) == len(labels) >= 1
        assert boxes.min() >= 0 and boxes.max() <= SIZE
        assert (boxes[:, 2:] - boxes[:, :2]).min() >= 3
        assert box_code.box_iou(boxes, boxes).fill_diagonal_(0).max() < 0.25


# --- boxes --------------------------------------------------------------------------------------------------


def random_boxes(count: int) -> Tensor:
    corner = torch.rand(count, 2, dtype=torch.float64) * 80
    return torch.cat([corner, corner + 5 + torch.rand(count, 2, dtype=torch.float64) * 12], 1)


def test_decode_inverts_encode() -> None:
    boxes, anchors, scale = random_boxes(50), random_boxes(50), torch.tensor([10.0, 10, 5, 5], dtype=torch.float64)
    deltas = box_code.encode(boxes, anchors, scale)
    torch.testing.assert_close(box_code.decode(deltas, anchors, scale), boxes)
    assert (deltas.abs() > 0.1).any()
    torch.testing.assert_close(box_code.decode(torch.zeros_like(deltas), anchors, scale), anchors)


def test_box_iou_is_torchvisions() -> None:
    a, b = random_boxes(20), random_boxes(30)
    torch.testing.assert_close(box_code.box_iou(a, b), torchvision.ops.box_iou(a, b))


def test_anchors_sit_on_the_cells() -> None:
    anchors = box_code.anchor_grid(torch.empty(1, 1, 2, 3), stride=4, heights=(10.0, 20.0), aspect=0.5)
    assert anchors.shape == (2 * 3 * 2, 4)
    assert anchors[0].tolist() == [2 - 2.5, 2 - 5, 2 + 2.5, 2 + 5]
    assert anchors[3].tolist() == [6 - 5, 2 - 10, 6 + 5, 2 + 10]  # second column, second height
    assert anchors[6].tolist() == [2 - 2.5, 6 - 5, 2 + 2.5, 6 + 5]  # second row


def test_sample_keeps_the_balance() -> None:
    positive, negative = torch.arange(100) < 40, torch.arange(100) >= 60
    rows, is_positive = sample(positive, negative, 32, 0.25)
    assert len(rows) == len(set(rows.tolist())) == 32 and int(is_positive.sum()) == 8
    assert torch.equal(positive[rows], is_positive) and not ((rows >= 40) & (rows < 60)).any()
    rows, is_positive = sample(torch.arange(100) < 2, negative, 32, 0.25)
    assert len(rows) == 32 and int(is_positive.sum()) == 2


# --- measures -----------------------------------------------------------------------------------------------

A, B, C = [0.0, 0, 10, 10], [20.0, 20, 30, 30], [50.0, 50, 60, 60]
SHIFTED_A = [2.0, 0, 12, 10]  # IoU with A: 80 / 120
FAR_A = [4.0, 0, 14, 10]  # IoU with A: 60 / 140

MAP_CASES = {
    "perfect": ([(A, 0.9, 0), (B, 0.8, 1)], [(A, 0), (B, 1)], 1.0),
    "nothing found": ([], [(A, 0)], 0.0),
    "one miss": ([(A, 0.9, 0)], [(A, 0), (B, 0)], 0.5),
    "one miss of two classes": ([(A, 0.9, 0)], [(A, 0), (B, 1)], 0.5),
    "close enough": ([(SHIFTED_A, 0.9, 0)], [(A, 0)], 1.0),
    "too far": ([(FAR_A, 0.9, 0)], [(A, 0)], 0.0),
    "duplicate below costs nothing": ([(A, 0.9, 0), (SHIFTED_A, 0.8, 0)], [(A, 0)], 1.0),
    # right, repeat, right: precision 1, 1/2, 2/3 at recall 1/2, 1/2, 1
    "duplicate between": ([(A, 0.9, 0), (SHIFTED_A, 0.8, 0), (B, 0.7, 0)], [(A, 0), (B, 0)], (1 + 2 / 3) / 2),
    "better score takes the truth": ([(A, 0.7, 0), (SHIFTED_A, 0.9, 0)], [(A, 0)], 1.0),
    "wrong class": ([(A, 0.9, 1)], [(A, 0)], 0.0),
    # class 0: the false B comes first, so precision 1/2 at recall 1; class 1: B is missed
    "confusion": ([(B, 0.9, 0), (A, 0.8, 0)], [(A, 0), (B, 1)], 0.25),
    # wrong, right, right: precision 0, 1/2, 2/3, of which the envelope is 2/3 throughout
    "envelope": ([(C, 0.9, 0), (A, 0.8, 0), (B, 0.7, 0)], [(A, 0), (B, 0)], 2 / 3),
}


@pytest.mark.parametrize(("found", "truth", "expected"), MAP_CASES.values(), ids=MAP_CASES.keys())
def test_mean_average_precision_by_hand(found: list, truth: list, expected: float) -> None:
    boxes, labels = torch.tensor([box for box, _ in truth]), torch.tensor([label for _, label in truth])
    mean, _ = mean_average_precision([detections(*found)], [boxes], [labels], classes=3)
    assert mean == pytest.approx(expected)


def test_images_are_kept_apart_and_scores_are_not() -> None:
    # The same box is right in the first image and wrong in the second, where it has the better score.
    found = [detections((A, 0.6, 0)), detections((A, 0.9, 0), (B, 0.5, 0))]
    mean, per_class = mean_average_precision(found, [torch.tensor([A]), torch.tensor([B])], [torch.tensor([0])] * 2, 2)
    assert mean == pytest.approx(2 / 3)
    assert per_class[0] == pytest.approx(2 / 3) and per_class[1] != per_class[1]


def test_match_prefers_the_larger_overlap() -> None:
    truth, labels = torch.tensor([SHIFTED_A, A]), torch.tensor([0, 0])
    assert match(detections((A, 0.5, 0), (A, 0.9, 0)), truth, labels).tolist() == [0, 1]


def test_average_precision_does_not_depend_on_the_order_given() -> None:
    right, scores = torch.tensor([True, False, True, False, True]), torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5])
    order = torch.tensor([3, 0, 4, 2, 1])
    expected = (1 + 2 / 3 + 3 / 5) / 4
    assert average_precision(right, scores, 4) == pytest.approx(expected)
    assert average_precision(right[order], scores[order], 4) == pytest.approx(expected)


def test_compare_sees_every_kind_of_difference() -> None:
    base = detections((A, 0.9, 0), (B, 0.8, 1))
    swapped = detections((B, 0.8, 1), (A, 0.9, 0))
    assert compare([base], [swapped], 1e-6) == (2, 2, 0.0)
    near = Detections(base.boxes + torch.tensor([[0.0, 0, 0, 1e-3], [0, 0, 0, 0]]), base.scores, base.labels)
    assert compare([base], [near], 1e-2).difference == pytest.approx(1e-3, rel=0.01)
    different = {
        "box": near,
        "score": Detections(base.boxes, base.scores - 0.01, base.labels),
        "label": Detections(base.boxes, base.scores, base.labels.flip(0)),
        "fewer": detections((A, 0.9, 0)),
        "more": detections((A, 0.9, 0), (B, 0.8, 1), (B, 0.8, 1)),
        "none": detections(),
    }
    for what, other in different.items():
        assert not compare([base], [other], 1e-4).identical, what
        assert not compare([other], [base], 1e-4).identical, what


# --- the whole job ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operators", ["opzoo", "torchvision"])
def test_short_run(operators: str, device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "new" / "digits.png"
    options = ["--steps", "3", "--scenes", "6", "--held-out", "3", "--operators", operators]
    args = detect_digits.parse_args([*options, "--device", str(device), "--out", str(picture)])
    report = detect_digits.run(args)
    assert report.parity_ok and report.parity[torch.float64].identical
    assert report.parity[torch.float64].total > 0  # not a comparison of nothing with nothing
    assert 0 <= report.mean_ap < 0.8 and not report.ok  # three steps teach nothing
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "FAILED" in capsys.readouterr().out


def test_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = compare([], [], 0.0), compare([detections((A, 0.9, 0))], [detections()], 1.0)
    for mean_ap, parity, status in ((0.81, good, 0), (0.79, good, 1), (0.81, bad, 1)):
        report = detect_digits.Report(mean_ap, {torch.float64: parity, torch.float32: good})
        monkeypatch.setattr(detect_digits, "run", lambda args, report=report: report)
        assert detect_digits.main([]) == status


def test_parity_fails_for_a_wrong_operator() -> None:
    """Half a cell's shift in RoIAlign, the classic mistake, must not pass for rounding."""
    theirs = importlib.import_module("torchvision.ops")

    def shifted(*args: object, aligned: bool, **kwargs: object) -> torch.nn.Module:
        return theirs.RoIAlign(*args, aligned=not aligned, **kwargs)

    wrong = SimpleNamespace(
        DeformConv2d=theirs.DeformConv2d, RoIAlign=shifted, nms=theirs.nms, batched_nms=theirs.batched_nms
    )
    parity = detect_digits.check_parity(Detector(wrong), make_scenes(split_digits()[1], 3, seed=1), torch.device("cpu"))
    assert not parity[torch.float64].identical
    assert not detect_digits.Report(1.0, parity).parity_ok


@pytest.mark.parametrize("operators", ["opzoo", "torchvision.ops"])
def test_every_parameter_learns(operators: str, device: torch.device) -> None:
    model = Detector(importlib.import_module(operators)).to(device)
    scenes = make_scenes(split_digits()[0], 2, seed=0)
    images = detect_digits.to_batch(scenes.images, device)
    losses = model.losses(images, [b.to(device) for b in scenes.boxes], [label.to(device) for label in scenes.labels])
    torch.stack(list(losses.values())).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name
        assert bool((parameter.grad != 0).any()), name
