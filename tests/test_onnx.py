"""Models exported to standard ONNX operators, run by onnxruntime, against opzoo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import detector_boxes
from torch import Tensor, nn

for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package)

import onnxruntime  # noqa: E402

import opzoo  # noqa: E402
import opzoo.onnx  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ANY = torch.export.Dim.DYNAMIC


class Calling(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


class Exported:
    """A function of tensors as an ONNX model; ``free[i]`` of the axes of tensor i may vary in length."""

    def __init__(self, function: Callable[..., Any], tensors: tuple[Tensor, ...], *free: tuple[int, ...]) -> None:
        shapes = tuple(dict.fromkeys(axes, ANY) for axes in free) or tuple({} for _ in tensors)
        program = torch.onnx.export(
            Calling(function),
            tensors,
            dynamo=True,
            verbose=False,
            opset_version=19,
            dynamic_shapes={"tensors": shapes},
            custom_translation_table=opzoo.onnx.translation_table(),
        )
        assert program is not None
        self.operators = [node.op_type for node in program.model.graph]
        assert {node.domain for node in program.model.graph} == {""}, "not of the standard"
        self.session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())

    def __call__(self, *tensors: Tensor) -> Tensor:
        names = [value.name for value in self.session.get_inputs()]
        values = {name: t.numpy() for name, t in zip(names, tensors, strict=True)}
        return torch.from_numpy(self.session.run(None, values)[0])


def boxes_and_scores(count: int, ties: bool = False) -> tuple[Tensor, Tensor]:
    scores = torch.rand(count)
    return detector_boxes(count, 100, 120), (scores * 4).round() / 4 if ties else scores


# Half of a box is another: an IoU of exactly 0.5.
HALVES = torch.tensor([[0.0, 0, 2, 1], [0, 0, 1, 1], [5, 5, 6, 6]])


def test_nms_of_any_number_of_boxes() -> None:
    def call(boxes: Tensor, scores: Tensor) -> Tensor:
        return opzoo.nms(boxes, scores, 0.5)

    exported = Exported(call, boxes_and_scores(8), (0,), (0,))
    assert "NonMaxSuppression" in exported.operators
    for count in (0, 1, 2, 150):
        for ties in (False, True):
            inputs = boxes_and_scores(count, ties)
            assert exported(*inputs).tolist() == call(*inputs).tolist()
    inputs = HALVES, torch.tensor([0.9, 0.8, 0.7])
    assert exported(*inputs).tolist() == call(*inputs).tolist() == [0, 1, 2]


@pytest.mark.parametrize("max_output", [None, 0, 7, 10**6])
@pytest.mark.parametrize("score_threshold", [None, 0.5, -1.0, 2.0])
def test_nms_options(score_threshold: float | None, max_output: int | None) -> None:
    """Ties put scores on the threshold, which opzoo drops."""

    def call(boxes: Tensor, scores: Tensor) -> Tensor:
        return opzoo.nms(boxes, scores, 0.3, score_threshold=score_threshold, max_output=max_output)

    inputs = boxes_and_scores(60, ties=True)
    assert Exported(call, inputs)(*inputs).tolist() == call(*inputs).tolist()


@pytest.mark.parametrize("max_output", [None, 7])
@pytest.mark.parametrize("score_threshold", [None, 0.5])
def test_batched_nms(score_threshold: float | None, max_output: int | None) -> None:
    def call(boxes: Tensor, scores: Tensor, idxs: Tensor) -> Tensor:
        return opzoo.batched_nms(boxes, scores, idxs, 0.3, score_threshold=score_threshold, max_output=max_output)

    def inputs(count: int) -> tuple[Tensor, Tensor, Tensor]:
        return *boxes_and_scores(count, ties=True), torch.randint(-2, 3, (count,)) * 2**40

    exported = Exported(call, inputs(8), (0,), (0,), (0,))
    for count in (1, 120):
        drawn = inputs(count)
        assert exported(*drawn).tolist() == call(*drawn).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.int16, torch.uint8], ids=str)
def test_nms_of_boxes_that_fit_in_float32(dtype: torch.dtype) -> None:
    boxes, scores = boxes_and_scores(60)
    inputs = boxes.to(dtype), scores.half()
    actual = Exported(lambda b, s: opzoo.nms(b, s, 0.3), inputs)(*inputs)
    assert actual.tolist() == opzoo.nms(*inputs, 0.3).tolist()


GEOMETRIES = [
    pytest.param((3, 4), 0.2, 2, False, id="fixed"),
    pytest.param(3, 0.2, 2, True, id="fixed-aligned"),
    pytest.param((3, 4), 0.25, -1, False, id="adaptive"),
    pytest.param((2, 5), 1.0, 0, True, id="adaptive-aligned"),
]


@pytest.mark.parametrize(("size", "scale", "ratio", "aligned"), GEOMETRIES)
@pytest.mark.parametrize("form", ["rois", "lists"])
def test_roi_align(form: str, size: Any, scale: float, ratio: int, aligned: bool) -> None:
    def call(x: Tensor, boxes: Tensor, *more: Tensor) -> Tensor:
        return opzoo.roi_align(x, [boxes, *more] if more else boxes, size, scale, ratio, aligned)

    def inputs(x: Tensor, count: int) -> tuple[Tensor, ...]:
        boxes = detector_boxes(count, 100, 120)
        boxes[0] = torch.tensor([-30.0, -20, 300, 200])  # past every edge of the map
        if form == "rois":
            return x, torch.cat([torch.arange(count)[:, None] % 2, boxes], 1)
        return x, boxes, detector_boxes(5, 100, 120)

    x = torch.randn(2, 3, 20, 24)
    exported = Exported(call, inputs(x, 6), (2, 3), (0,), *([()] if form == "lists" else []))
    assert "RoiAlign" in exported.operators
    for features, count in ((x, 6), (torch.randn(2, 3, 17, 30), 31)):
        arguments = inputs(features, count)
        torch.testing.assert_close(exported(*arguments), call(*arguments), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_roi_align_in_other_dtypes(dtype: torch.dtype) -> None:
    """A coordinate of half type would be a pixel off at 1024; boxes stay what they are."""
    x = torch.randn(1, 3, 8, 300).to(dtype)
    boxes = torch.tensor([[0.0, 2050.3, 3.0, 2071.7, 50.0]], dtype=torch.float64 if dtype.itemsize == 8 else None)

    def call(x: Tensor, boxes: Tensor) -> Tensor:
        return opzoo.roi_align(x, boxes, 3, 0.125, 2, True)

    actual = Exported(call, (x, boxes))(x, boxes)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, call(x, boxes), rtol=2e-3 if dtype.itemsize == 2 else 1e-6, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_deform_conv2d(masked: bool, biased: bool, dtype: torch.dtype) -> None:
    """Two weight groups, two offset groups, a kernel, stride, padding and dilation that differ between the axes."""
    x, weight = torch.randn(2, 4, 11, 14).to(dtype), torch.randn(6, 2, 3, 2).to(dtype)
    bias = torch.randn(6).to(dtype) if biased else None
    options: dict[str, Any] = {"stride": (1, 2), "padding": (2, 1), "dilation": (2, 1)}

    def call(x: Tensor, offset: Tensor, *mask: Tensor) -> Tensor:
        return opzoo.deform_conv2d(x, offset, weight, bias, mask=mask[0] if mask else None, **options)

    def inputs(count: int) -> tuple[Tensor, ...]:
        tensors = torch.randn(count, 4, 11, 14), 3 * torch.randn(count, 2 * 2 * 6, 11, 8), torch.rand(count, 12, 11, 8)
        return tuple(t.to(dtype) for t in tensors[: 2 + masked])

    exported = Exported(call, inputs(2), *[(0,)] * (2 + masked))
    assert "DeformConv" in exported.operators
    x = inputs(3)
    torch.testing.assert_close(exported(*x), call(*x), rtol=1e-2 if dtype.itemsize == 2 else 1e-4, atol=1e-3)


def causes(error: BaseException | None) -> str:
    return "" if error is None else f"{error} {causes(error.__cause__)}"


def rois(x: Tensor, boxes: Tensor) -> Tensor:
    return opzoo.roi_align(x, boxes, 2, pool_mode="max")


@pytest.mark.parametrize(
    ("function", "tensors", "message"),
    [
        (rois, (torch.rand(1, 1, 4, 4), torch.zeros(1, 5)), 'opzoo::roi_align: no export to ONNX: pool_mode="max"'),
        (
            lambda b, s: opzoo.nms(b, s, 0.5),
            (HALVES.double(), torch.rand(3)),
            "opzoo::nms: no export to ONNX: boxes must fit in float32",
        ),
        (
            lambda b, s: opzoo.batched_nms(b, s, torch.arange(3), 0.5),
            (HALVES, torch.arange(3)),
            "opzoo::batched_nms: no export to ONNX: scores must fit in float32",
        ),
        (opzoo.add, (torch.rand(2), torch.rand(2)), "opzoo::add: no export to ONNX: no standard operator computes it"),
    ],
    ids=["max", "double", "integer scores", "add"],
)
def test_refused(function: Callable[..., Any], tensors: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(torch.onnx.OnnxExporterError) as caught:
        Exported(function, tensors)
    assert message in causes(caught.value)


def test_every_operator_has_an_answer() -> None:
    table = opzoo.onnx.translation_table()
    public = [name for name in opzoo.__all__ if hasattr(opzoo.reference, name) and hasattr(torch.ops.opzoo, name)]
    assert {getattr(torch.ops.opzoo, name).default for name in public} < table.keys()
