"""score_threshold and max_output of every form of NMS, nms_padded and nms_match."""

from __future__ import annotations

import pytest
import torch
from helpers import FLOATS, detector_boxes
from hypothesis import given
from hypothesis import strategies as st
from nms_inputs import INF, LAYOUTS, NAN
from torch import Tensor

import opzoo


def _inputs(n: int, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    boxes, scores, idxs = detector_boxes(n, 100, 100), torch.rand(n), torch.randint(3, (n,))
    return boxes.to(device), scores.to(device, dtype), idxs.to(device)


def _padded(kept: Tensor, max_output: int) -> tuple[list[int], int]:
    found = kept[:max_output].tolist()
    return [*found, *[-1] * (max_output - len(found))], len(found)


# Options


@pytest.mark.parametrize("n", [200, 3000])
def test_options_shorten_the_result(device, n):
    boxes, scores, idxs = _inputs(n, device)
    for op, arguments in (("nms", (boxes, scores)), ("batched_nms", (boxes, scores, idxs))):
        function, reference = getattr(opzoo, op), getattr(opzoo.reference, op)
        everything = function(*arguments, 0.4)
        for max_output in (0, 1, 7, 65, len(everything), n, 2**40):
            assert torch.equal(function(*arguments, 0.4, max_output=max_output), everything[:max_output])
        for score_threshold in (-INF, -1, 0.0, 0.5, 0.9, 1, INF):
            result = function(*arguments, 0.4, score_threshold=score_threshold)
            assert torch.equal(result, everything[scores[everything] > score_threshold])
            both = function(*arguments, 0.4, score_threshold=score_threshold, max_output=5)
            assert torch.equal(both, result[:5])
            assert torch.equal(both, reference(*arguments, 0.4, score_threshold=score_threshold, max_output=5))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_score_threshold_is_rounded_to_the_scores_dtype(device, dtype):
    scores = torch.tensor([0.3, 0.7, 0.1, NAN, INF, -INF, -0.0, 0.0], dtype=dtype, device=device)
    boxes = torch.arange(8, device=device)[:, None] * 9 + torch.tensor([0, 0, 1, 1], device=device)
    for score_threshold, kept in (
        (0.3, [4, 1]),
        (0.7, [4]),
        (0.0, [4, 1, 0, 2]),
        (-INF, [4, 1, 0, 2, 6, 7]),
        (-1e300, [4, 1, 0, 2, 6, 7]),
        (INF, []),
        (1e300, [4] if dtype == torch.float64 else []),
    ):
        assert opzoo.nms(boxes, scores, 0.5, score_threshold=score_threshold).tolist() == kept
        assert opzoo.reference.nms(boxes, scores, 0.5, score_threshold=score_threshold).tolist() == kept


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8], ids=str)
def test_score_threshold_against_integers_is_exact(device, dtype):
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    scores = torch.tensor([low, high, -1, 0, 1, high - 1], dtype=dtype, device=device)
    boxes = torch.arange(6, device=device)[:, None] * 9 + torch.tensor([0, 0, 1, 1], device=device)
    for score_threshold in (-INF, -1e30, float(low), -1, -0.5, 0, 0.5, 1, float(high), 1e30, INF):
        result = opzoo.nms(boxes, scores, 0.5, score_threshold=score_threshold).tolist()
        order = [1, 5, 4, 3, 2, 0]
        assert result == [i for i in order if int(scores[i]) > score_threshold]


def test_opcheck_with_options(device):
    boxes, scores, idxs = _inputs(30, device)
    options = {"score_threshold": 0.2, "max_output": 9}
    torch.library.opcheck(torch.ops.opzoo.nms.default, (boxes, scores, 0.5), options)
    torch.library.opcheck(torch.ops.opzoo.batched_nms.default, (boxes, scores, idxs, 0.5), options)
    padded = (boxes[None], scores[None], 0.5, 9, idxs[None])
    torch.library.opcheck(torch.ops.opzoo.nms_padded.default, padded, {"score_threshold": 0.2})


# nms_padded


@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("n", [0, 1, 50])
def test_padded_equals_one_call_per_image(device, batch, n):
    boxes = detector_boxes(max(1, len(batch)) * 6 * n, 60, 60)[: torch.Size(batch).numel() * n].reshape(*batch, n, 4)
    scores, idxs = torch.rand(*batch, n), torch.randint(3, (*batch, n))
    boxes, scores, idxs = boxes.to(device), scores.to(device), idxs.to(device)
    for max_output in (0, 1, 9, 60):
        for classes, score_threshold in ((None, None), (idxs, None), (idxs, 0.3)):
            options = {"idxs": classes, "score_threshold": score_threshold}
            indices, count = opzoo.nms_padded(boxes, scores, 0.5, max_output, **options)
            assert indices.dtype == count.dtype == torch.int64
            assert indices.device == count.device == boxes.device
            assert indices.shape == (*batch, max_output) and count.shape == batch
            assert indices.is_contiguous() and count.is_contiguous()
            if classes is not None:
                options["idxs"] = classes.cpu()
            expected = opzoo.reference.nms_padded(boxes.cpu(), scores.cpu(), 0.5, max_output, **options)
            assert torch.equal(indices.cpu(), expected[0]) and torch.equal(count.cpu(), expected[1])
    if batch == (3,) and n:
        for image in range(3):
            kept = opzoo.batched_nms(boxes[image], scores[image], idxs[image], 0.5)
            indices, count = opzoo.nms_padded(boxes, scores, 0.5, 9, idxs=idxs)
            assert (indices[image].tolist(), int(count[image])) == _padded(kept, 9)


def test_padded_takes_any_strides(device):
    boxes = detector_boxes(120, 60, 60).reshape(2, 3, 20, 4).to(device)
    scores, idxs = torch.rand(2, 3, 20, device=device), torch.randint(2, (2, 3, 20), device=device)
    expected = opzoo.nms_padded(boxes, scores, 0.5, 20, idxs=idxs)
    column_major = boxes.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    odd_scores = scores.transpose(0, 2).contiguous().transpose(0, 2)
    odd_idxs = torch.stack([idxs, idxs + 1], -1)[..., 0]
    for result in (
        opzoo.nms_padded(column_major, odd_scores, 0.5, 20, idxs=odd_idxs),
        opzoo.nms_padded(boxes, odd_scores, 0.5, 20, idxs=odd_idxs.to(torch.int32)),
    ):
        assert all(torch.equal(got, wanted) for got, wanted in zip(result, expected, strict=True))
    shared = boxes[:1, :1].expand(2, 3, 20, 4)
    result = opzoo.nms_padded(shared, scores, 0.5, 20)
    expected = opzoo.nms_padded(shared.contiguous(), scores, 0.5, 20)
    assert all(torch.equal(got, wanted) for got, wanted in zip(result, expected, strict=True))


def test_padded_under_vmap(device):
    boxes = detector_boxes(120, 60, 60).reshape(2, 3, 20, 4).to(device)
    scores, idxs = torch.rand(2, 3, 20, device=device), torch.randint(2, (2, 3, 20), device=device)

    def call(b: Tensor, s: Tensor, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return opzoo.nms_padded(b, s, 0.5, 8, idxs=c, score_threshold=0.1)

    def same(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
        assert all(torch.equal(got, wanted) for got, wanted in zip(result, expected, strict=True))

    same(torch.vmap(call)(boxes, scores), call(boxes, scores))
    same(torch.vmap(torch.vmap(call))(boxes, scores, idxs), call(boxes, scores, idxs))
    same(
        torch.vmap(call, in_dims=(1, 2))(boxes, scores.movedim(1, 2)),
        call(boxes.transpose(0, 1), scores.transpose(0, 1)),
    )
    shared = boxes[0, 0]
    expected = call(shared.expand(2, 3, 20, 4), scores, idxs)
    same(torch.vmap(torch.vmap(call, in_dims=(None, 0, 0)), in_dims=(None, 0, 0))(shared, scores, idxs), expected)
    fixed = idxs[0, 0]
    per_image = torch.vmap(lambda b, s: call(b, s, fixed))(boxes[0], scores[0])
    same(per_image, call(boxes[0], scores[0], fixed.expand(3, 20)))


class _Padded(torch.nn.Module):
    def forward(self, boxes: Tensor, scores: Tensor, idxs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        indices, count = opzoo.nms_padded(boxes, scores, 0.5, 6, idxs=idxs, score_threshold=0.2)
        picked = boxes.gather(-2, indices.clamp(min=0)[..., None].expand(*indices.shape, 4))
        return indices, count, picked


def _batch(images: int, n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    boxes = detector_boxes(images * n, 60, 60).reshape(images, n, 4)
    return boxes.to(device), torch.rand(images, n, device=device), torch.randint(2, (images, n), device=device)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_padded_compiles_to_one_graph(device, backend):
    compiled = torch.compile(_Padded(), fullgraph=True, backend=backend)
    for images, n in ((3, 20), (3, 30), (2, 7), (1, 1)):
        inputs = _batch(images, n, device)
        for got, expected in zip(compiled(*inputs), _Padded()(*inputs), strict=True):
            assert torch.equal(got, expected)


def test_padded_exports_with_dynamic_sizes(device):
    images, n = torch.export.Dim("images"), torch.export.Dim("n")
    shapes = {name: {0: images, 1: n} for name in ("boxes", "scores", "idxs")}
    exported = torch.export.export(_Padded(), _batch(3, 20, device), dynamic_shapes=shapes).module()
    for size in ((3, 20), (2, 50), (5, 2)):
        inputs = _batch(*size, device)
        for got, expected in zip(exported(*inputs), _Padded()(*inputs), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.gpu
def test_padded_in_a_cuda_graph():
    boxes, scores, idxs = _batch(8, 1000, torch.device("cuda"))
    opzoo.nms_padded(boxes, scores, 0.5, 100, idxs=idxs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = opzoo.nms_padded(boxes, scores, 0.5, 100, idxs=idxs)
    for _ in range(3):
        boxes.copy_(boxes.roll(1, 0))
        scores.copy_(torch.rand_like(scores))
        graph.replay()
        expected = opzoo.nms_padded(boxes, scores, 0.5, 100, idxs=idxs)
        assert all(torch.equal(got, wanted) for got, wanted in zip(captured, expected, strict=True))


# nms_match


@pytest.mark.parametrize("layout", LAYOUTS)
def test_match_gives_every_box_to_its_first_suppressor(device, layout):
    boxes, scores = LAYOUTS[layout](150).to(device), (torch.rand(150) * 50).round().to(device)
    for threshold in (0, 0.3, 0.5, 1):
        groups = opzoo.nms_match(boxes, scores, threshold)
        expected = opzoo.reference.nms_match(boxes.cpu(), scores.cpu(), threshold)
        assert [group.tolist() for group in groups] == [group.tolist() for group in expected]
        assert [int(group[0]) for group in groups] == opzoo.nms(boxes, scores, threshold).tolist()
        assert sorted(torch.cat(groups).tolist()) == list(range(150))


def test_match_of_few_boxes(device):
    assert opzoo.nms_match(torch.zeros(0, 4, device=device), torch.zeros(0, device=device), 0.5) == []
    (group,) = opzoo.nms_match(torch.ones(1, 4, device=device), torch.ones(1, device=device), 0.5)
    assert group.tolist() == [0] and group.device.type == device.type
    boxes = torch.tensor([[0.0, 0, 9, 9]] * 3, device=device)
    groups = opzoo.nms_match(boxes, torch.tensor([NAN, 0.2, 0.5], device=device), 0.5)
    assert [g.tolist() for g in groups] == [[2, 1, 0]]


@given(
    st.integers(0, 40), st.integers(0, 2**31), st.floats(0, 1), st.integers(0, 50), st.sampled_from([None, 0.0, 0.5])
)
def test_any_options_match_the_reference(n, seed, threshold, max_output, score_threshold):
    generator = torch.Generator().manual_seed(seed)
    corner, size = (torch.randint(0, 9, (2, n, 2), generator=generator) for _ in range(2))
    boxes, scores = torch.cat([corner, corner + size], -1).float(), torch.rand(2, n, generator=generator)
    idxs = torch.randint(3, (2, n), generator=generator)
    options = {"idxs": idxs, "score_threshold": score_threshold}
    result = opzoo.nms_padded(boxes, scores, threshold, max_output, **options)
    expected = opzoo.reference.nms_padded(boxes, scores, threshold, max_output, **options)
    assert all(torch.equal(got, wanted) for got, wanted in zip(result, expected, strict=True))


# Errors


@pytest.mark.parametrize("device_type", ["cpu", "meta"])
def test_wrong_options_are_named(device_type):
    boxes, scores = torch.rand(2, 5, 4, device=device_type), torch.rand(2, 5, device=device_type)
    one = (boxes[0], scores[0], 0.5)
    with pytest.raises(ValueError, match="opzoo::nms: max_output must be at least 0, got -1"):
        opzoo.nms(*one, max_output=-1)
    with pytest.raises(ValueError, match="opzoo::nms: score_threshold must be a number, got nan"):
        opzoo.nms(*one, score_threshold=NAN)
    with pytest.raises(ValueError, match="opzoo::nms_padded: max_output must be at least 0, got -3"):
        opzoo.nms_padded(boxes, scores, 0.5, -3)
    with pytest.raises(ValueError, match=r"opzoo::nms_padded: iou_threshold must be in \[0, 1\], got 2"):
        opzoo.nms_padded(boxes, scores, 2, 3)
    with pytest.raises(RuntimeError, match=r"opzoo::nms_padded: boxes must have shape \[..., N, 4\], got \[2, 5\]"):
        opzoo.nms_padded(scores, scores, 0.5, 3)
    with pytest.raises(RuntimeError, match=r"opzoo::nms_padded: scores must have 2 axes, got 1"):
        opzoo.nms_padded(boxes, scores[0], 0.5, 3)
    with pytest.raises(RuntimeError, match=r"opzoo::nms_padded: scores must have shape \[2, 5\], got \[2, 4\]"):
        opzoo.nms_padded(boxes, scores[:, :4], 0.5, 3)
    with pytest.raises(RuntimeError, match=r"opzoo::nms_padded: idxs must have an integer dtype, got"):
        opzoo.nms_padded(boxes, scores, 0.5, 3, idxs=scores)
    with pytest.raises(RuntimeError, match="opzoo::nms_match: boxes must have 2 axes, got 3"):
        opzoo.nms_match(boxes, scores, 0.5)


def test_wrong_types_are_named():
    boxes, scores = torch.rand(5, 4), torch.rand(5)
    with pytest.raises(TypeError, match=r"opzoo::nms: max_output must be an int, got 2\.5"):
        opzoo.nms(boxes, scores, 0.5, max_output=2.5)
    with pytest.raises(TypeError, match="opzoo::batched_nms: score_threshold must be a number, got 'a'"):
        opzoo.batched_nms(boxes, scores, scores.long(), 0.5, score_threshold="a")
    with pytest.raises(TypeError, match="opzoo::nms_padded: max_output must be an int, got None"):
        opzoo.nms_padded(boxes, scores, 0.5, None)
    with pytest.raises(TypeError, match="opzoo::nms_padded: idxs must be a tensor, got list"):
        opzoo.nms_padded(boxes, scores, 0.5, 3, idxs=[1] * 5)
    with pytest.raises(TypeError, match="opzoo::nms_match: boxes must be a tensor, got list"):
        opzoo.nms_match([], scores, 0.5)


def test_images_of_any_stride():
    """An axis of one image may have any stride: it says nothing of where the next image lies."""
    values = torch.rand(2, 3, 4)
    values[..., 2:] += values[..., :2]
    for stride in (1, 999, 2**40):
        boxes = torch.as_strided(values, (2, 1, 3, 4), (12, stride, 4, 1))
        scores = torch.as_strided(torch.rand(6), (2, 1, 3), (3, stride, 1))
        idxs = torch.as_strided(torch.tensor([0, 1, 0, 1, 1, 0]), (2, 1, 3), (3, stride, 1))
        result = opzoo.nms_padded(boxes, scores, 0.3, 3, idxs=idxs)
        expected = opzoo.reference.nms_padded(boxes, scores, 0.3, 3, idxs=idxs)
        assert all(torch.equal(got, wanted) for got, wanted in zip(result, expected, strict=True))


@pytest.mark.parametrize("device_type", ["cpu", "meta"])
def test_max_output_has_a_limit(device_type):
    boxes, scores = torch.rand(5, 4, device=device_type), torch.rand(5, device=device_type)
    with pytest.raises(ValueError, match="opzoo::nms_padded: max_output must be at most 2147483647, got 2147483648"):
        opzoo.nms_padded(boxes, scores, 0.5, 2**31)
