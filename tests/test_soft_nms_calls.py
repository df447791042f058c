"""soft_nms and batched_soft_nms under transforms, compilers and threads, and with arguments they refuse."""

from __future__ import annotations

import pytest
import torch
from helpers import detector_boxes
from torch import Tensor

import opzoo

NAN = float("nan")
CODES = {"naive": 0, "linear": 1, "gaussian": 2}

# Transforms


@pytest.mark.parametrize("raw", [False, True], ids=["public", "raw"])
def test_vmap_raises(device, raw):
    boxes, scores = torch.rand(2, 5, 4, device=device), torch.rand(5, device=device)
    idxs = torch.zeros(5, dtype=torch.int64, device=device)
    calls = [
        lambda b: torch.ops.opzoo.soft_nms(b, scores, 0.3, 0.5, 1e-3, 1) if raw else opzoo.soft_nms(b, scores),
        lambda b: opzoo.batched_soft_nms(b, scores, idxs),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match="no vmap rule, because images keep different numbers of boxes"):
            torch.vmap(call)(boxes)


def test_inputs_that_require_a_gradient(device):
    boxes, scores = detector_boxes(50, 50, 50).to(device), torch.rand(50).to(device)
    idxs = torch.randint(2, (50,), device=device)
    leaf = scores.clone().requires_grad_()
    decayed, kept = opzoo.batched_soft_nms(boxes.clone().requires_grad_(), leaf, idxs)
    assert not decayed.requires_grad and decayed.grad_fn is None and not kept.requires_grad
    expected = torch.zeros(50, device=device).index_fill(0, kept, 1.0)

    def loss(b: Tensor, s: Tensor) -> Tensor:
        return s[opzoo.batched_soft_nms(b, s, idxs)[1]].sum()

    loss(boxes, leaf).backward()
    assert torch.equal(leaf.grad, expected)
    assert torch.equal(torch.func.grad(loss, argnums=1)(boxes, scores), expected)
    _, tangent = torch.func.jvp(loss, (boxes, scores), (torch.ones_like(boxes), torch.ones_like(scores)))
    assert float(tangent) == len(kept)


class _SoftNms(torch.nn.Module):
    def forward(self, boxes: Tensor, scores: Tensor, idxs: Tensor) -> tuple[Tensor, ...]:
        decayed, kept = opzoo.soft_nms(boxes, scores, method="gaussian", min_score=0.05)
        return decayed, boxes[kept], *opzoo.batched_soft_nms(boxes, scores, idxs)


def _transform_inputs(n: int, device: torch.device, identical: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    boxes = torch.tensor([0.0, 0, 5, 5]).repeat(n, 1) if identical else detector_boxes(n, 100, 100)
    return boxes.to(device), torch.rand(n).to(device) + 0.05, torch.zeros(n, dtype=torch.int64, device=device)


# Sizes that keep many, one and no boxes, in one block of either device and in several.
TRANSFORM_SETS = [(60, False), (50, True), (0, False), (1, False), (900, False)]


def _assert_same_outputs(module, inputs):
    for got, expected in zip(module(*inputs), _SoftNms()(*inputs), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("first", TRANSFORM_SETS[:3], ids=str)
def test_compile_fullgraph(device, backend, first):
    compiled = torch.compile(_SoftNms(), fullgraph=True, backend=backend)
    for n, identical in (first, *TRANSFORM_SETS):
        _assert_same_outputs(compiled, _transform_inputs(n, device, identical))


def test_export_with_dynamic_size(device):
    n = torch.export.Dim("n")
    shapes = {"boxes": {0: n}, "scores": {0: n}, "idxs": {0: n}}
    exported = torch.export.export(_SoftNms(), _transform_inputs(60, device), dynamic_shapes=shapes)
    for size, identical in TRANSFORM_SETS:
        _assert_same_outputs(exported.module(), _transform_inputs(size, device, identical))


# Threads


def test_any_number_of_threads_gives_the_same(device):
    if device.type != "cpu":
        pytest.skip("about CPU threads")
    boxes, scores = detector_boxes(9000, 800, 1333), torch.rand(9000)
    idxs = torch.randint(40, (9000,)) * torch.randint(2, (9000,))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append((*opzoo.soft_nms(boxes, scores), *opzoo.batched_soft_nms(boxes, scores, idxs)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


# Errors

GOOD = {
    "boxes": torch.rand(3, 4),
    "scores": torch.rand(3),
    "idxs": torch.zeros(3, dtype=torch.int64),
    "iou_threshold": 0.3,
    "sigma": 0.5,
    "min_score": 1e-3,
    "method": "linear",
}
ERRORS = {
    "boxes-rank": ({"boxes": torch.rand(4)}, RuntimeError, r"boxes must have 2 axes, got 1"),
    "boxes-3d": ({"boxes": torch.rand(1, 3, 4)}, RuntimeError, r"boxes must have 2 axes, got 3"),
    "boxes-columns": ({"boxes": torch.rand(3, 5)}, RuntimeError, r"boxes must have shape \[N, 4\], got \[3, 5\]"),
    "boxes-bool": (
        {"boxes": torch.ones(3, 4).bool()},
        RuntimeError,
        r"boxes must have a float or integer dtype, got bool",
    ),
    "boxes-complex": (
        {"boxes": torch.ones(3, 4).cfloat()},
        RuntimeError,
        r"boxes must have a float or integer dtype, got complex",
    ),
    "boxes-count": (
        {"boxes": torch.rand(1, 4).expand(2**30 + 1, 4), "scores": torch.rand(1).expand(2**30 + 1)},
        RuntimeError,
        r"boxes must be at most 1073741824, got 1073741825",
    ),
    "scores-rank": ({"scores": torch.rand(3, 1)}, RuntimeError, r"scores must have 1 axes, got 2"),
    "scores-size": ({"scores": torch.rand(2)}, RuntimeError, r"scores must have one element per box, 3, got 2"),
    "scores-bool": (
        {"scores": torch.ones(3).bool()},
        RuntimeError,
        r"scores must have a float or integer dtype, got bool",
    ),
    "idxs-rank": ({"idxs": torch.tensor(0)}, RuntimeError, r"idxs must have 1 axes, got 0"),
    "idxs-size": (
        {"idxs": torch.zeros(4, dtype=torch.int64)},
        RuntimeError,
        r"idxs must have one element per box, 3, got 4",
    ),
    "idxs-float": ({"idxs": torch.zeros(3)}, RuntimeError, r"idxs must have an integer dtype, got float32"),
    "threshold-negative": ({"iou_threshold": -0.1}, ValueError, r"iou_threshold must be in \[0, 1\], got -0.1"),
    "threshold-large": ({"iou_threshold": 1.5}, ValueError, r"iou_threshold must be in \[0, 1\], got 1.5"),
    "threshold-nan": ({"iou_threshold": NAN}, ValueError, r"iou_threshold must be in \[0, 1\], got nan"),
    "sigma-zero": ({"sigma": 0.0}, ValueError, r"sigma must be greater than 0, got 0"),
    "sigma-nan": ({"sigma": NAN}, ValueError, r"sigma must be greater than 0, got nan"),
    "min-score-negative": ({"min_score": -1.0}, ValueError, r"min_score must not be negative, got -1"),
    "min-score-nan": ({"min_score": NAN}, ValueError, r"min_score must not be negative, got nan"),
}


def _on(device, changed):
    arguments = {**GOOD, **changed}
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def _raw(arguments):
    return [CODES[value] if name == "method" else value for name, value in arguments.items()]


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_op_argument_expected_and_got(device, case):
    changed, error, message = ERRORS[case]
    if case == "boxes-count" and device.type == "cuda":
        pytest.skip("moving an expanded tensor to the device writes it out")
    arguments = _on(device, changed)
    with pytest.raises(error, match=rf"opzoo::batched_soft_nms: {message}"):
        opzoo.batched_soft_nms(**arguments)
    with pytest.raises(error, match="opzoo::batched_soft_nms"):
        torch.ops.opzoo.batched_soft_nms(*_raw(arguments))
    if not case.startswith("idxs"):
        del arguments["idxs"]
        with pytest.raises(error, match=rf"opzoo::soft_nms: {message}"):
            opzoo.soft_nms(**arguments)


@pytest.mark.parametrize("case", ERRORS)
def test_fake_kernel_refuses_the_same(case):
    if case == "boxes-count":
        pytest.skip("a limit would become a guard of every exported program")
    changed, error, message = ERRORS[case]
    argument = message.split()[0]
    with pytest.raises(error, match=f"opzoo::batched_soft_nms: {argument} must"):
        torch.ops.opzoo.batched_soft_nms(*_raw(_on("meta", changed)))


def test_methods_are_checked(device):
    boxes, scores = torch.rand(3, 4, device=device), torch.rand(3, device=device)
    with pytest.raises(ValueError, match="opzoo::soft_nms: method must be 'naive', 'linear' or 'gaussian', got 'hard'"):
        opzoo.soft_nms(boxes, scores, method="hard")
    with pytest.raises(TypeError, match="opzoo::soft_nms: method must be a str, got 1"):
        opzoo.soft_nms(boxes, scores, method=1)
    for method in (-1, 3, 2**62):
        for b, s in ((boxes, scores), (boxes.to("meta"), scores.to("meta"))):
            with pytest.raises(ValueError, match=r"method must be 0 \(naive\), 1 \(linear\) or 2 \(gaussian\), got"):
                torch.ops.opzoo.soft_nms(b, s, 0.3, 0.5, 1e-3, method)


def test_types_are_checked(device):
    boxes, scores = torch.rand(3, 4, device=device), torch.rand(3, device=device)
    with pytest.raises(TypeError, match="opzoo::soft_nms: scores must be a tensor, got list"):
        opzoo.soft_nms(boxes, [0.1, 0.2, 0.3])
    with pytest.raises(TypeError, match="opzoo::soft_nms: sigma must be a"):
        opzoo.soft_nms(boxes, scores, sigma="0.5")


def test_tensors_on_another_device_are_refused(device):
    if device.type == "cpu":
        pytest.skip("needs two devices")
    boxes, scores = torch.rand(3, 4, device=device), torch.rand(3, device=device)
    with pytest.raises(RuntimeError, match=r"scores must be on the device of boxes, cuda:., got cpu"):
        opzoo.soft_nms(boxes, scores.cpu())
    with pytest.raises(RuntimeError, match="scores must be on the device of boxes, cpu, got cuda"):
        opzoo.soft_nms(boxes.cpu(), scores)
    with pytest.raises(RuntimeError, match=r"idxs must be on the device of boxes, cuda:., got cpu"):
        opzoo.batched_soft_nms(boxes, scores, torch.ones(3, dtype=torch.int64))
