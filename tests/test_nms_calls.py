"""nms and batched_nms under transforms, compilers and threads, and with arguments they refuse."""

from __future__ import annotations

import pytest
import torch
from helpers import detector_boxes
from torch import Tensor

import opzoo

NAN = float("nan")

# Transforms


@pytest.mark.parametrize("op", [opzoo.nms, torch.ops.opzoo.nms], ids=["public", "raw"])
def test_vmap_raises(device, op):
    boxes, scores = torch.rand(2, 5, 4, device=device), torch.rand(5, device=device)
    with pytest.raises(NotImplementedError, match="no vmap rule, because images keep different numbers of boxes"):
        torch.vmap(lambda b: op(b, scores, 0.5))(boxes)
    with pytest.raises(NotImplementedError, match="no vmap rule"):
        idxs = torch.zeros(5, dtype=torch.int64, device=device)
        torch.vmap(lambda b: opzoo.batched_nms(b, scores, idxs, 0.5))(boxes)


def test_inputs_that_require_a_gradient(device):
    boxes, scores = detector_boxes(50, 50, 50).to(device), torch.rand(50).to(device)
    idxs = torch.randint(2, (50,), device=device)
    kept = opzoo.batched_nms(boxes, scores, idxs, 0.5)
    expected = torch.zeros(50, device=device).index_fill(0, kept, 1.0)

    def loss(b: Tensor, s: Tensor) -> Tensor:
        return s[opzoo.batched_nms(b, s, idxs, 0.5)].sum()

    leaf = scores.clone().requires_grad_()
    result = opzoo.batched_nms(boxes.clone().requires_grad_(), leaf, idxs, 0.5)
    assert not result.requires_grad and result.grad_fn is None
    loss(boxes, leaf).backward()
    assert torch.equal(leaf.grad, expected)
    assert torch.equal(torch.func.grad(loss, argnums=1)(boxes, scores), expected)
    _, tangent = torch.func.jvp(loss, (boxes, scores), (torch.ones_like(boxes), torch.ones_like(scores)))
    assert float(tangent) == len(kept)


class _Nms(torch.nn.Module):
    def forward(self, boxes: Tensor, scores: Tensor, idxs: Tensor) -> tuple[Tensor, Tensor]:
        plain = opzoo.nms(boxes, scores, 0.5)
        return boxes[plain], opzoo.batched_nms(boxes, scores, idxs, 0.5)


def _transform_inputs(n: int, device: torch.device, identical: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    boxes = torch.tensor([0.0, 0, 5, 5]).repeat(n, 1) if identical else detector_boxes(n, 100, 100)
    return boxes.to(device), torch.rand(n).to(device), torch.zeros(n, dtype=torch.int64, device=device)


# Sizes that keep many, one and no boxes, below and above 1000.
TRANSFORM_SETS = [(60, False), (50, True), (0, False), (1, False), (1500, False)]


def _assert_same_outputs(module, inputs):
    for got, expected in zip(module(*inputs), _Nms()(*inputs), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("first", TRANSFORM_SETS[:3], ids=str)
def test_compile_fullgraph(device, backend, first):
    compiled = torch.compile(_Nms(), fullgraph=True, backend=backend)
    for n, identical in (first, *TRANSFORM_SETS):
        _assert_same_outputs(compiled, _transform_inputs(n, device, identical))


def test_export_with_dynamic_size(device):
    n = torch.export.Dim("n")
    shapes = {"boxes": {0: n}, "scores": {0: n}, "idxs": {0: n}}
    exported = torch.export.export(_Nms(), _transform_inputs(60, device), dynamic_shapes=shapes)
    for size, identical in TRANSFORM_SETS:
        _assert_same_outputs(exported.module(), _transform_inputs(size, device, identical))


@pytest.mark.parametrize("op", ["nms", "batched_nms"])
def test_opcheck(device, op):
    boxes, scores, idxs = _transform_inputs(30, device)
    arguments = (boxes, scores, 0.5) if op == "nms" else (boxes, scores, idxs, 0.5)
    torch.library.opcheck(getattr(torch.ops.opzoo, op).default, arguments)


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
            results.append((opzoo.nms(boxes, scores, 0.4), opzoo.batched_nms(boxes, scores, idxs, 0.4)))
    finally:
        torch.set_num_threads(before)
    for plain, batched in results[1:]:
        assert torch.equal(plain, results[0][0])
        assert torch.equal(batched, results[0][1])


# Errors

GOOD = (torch.rand(3, 4), torch.rand(3), torch.zeros(3, dtype=torch.int64), 0.5)
ERRORS = {
    "boxes-rank": ((torch.rand(4), *GOOD[1:]), RuntimeError, r"boxes must have 2 axes, got 1"),
    "boxes-3d": ((torch.rand(1, 3, 4), *GOOD[1:]), RuntimeError, r"boxes must have 2 axes, got 3"),
    "boxes-columns": ((torch.rand(3, 5), *GOOD[1:]), RuntimeError, r"boxes must have shape \[N, 4\], got \[3, 5\]"),
    "boxes-empty": ((torch.rand(0), *GOOD[1:]), RuntimeError, r"boxes must have 2 axes, got 1"),
    "boxes-bool": (
        (torch.ones(3, 4).bool(), *GOOD[1:]),
        RuntimeError,
        r"boxes must have a float or integer dtype, got bool",
    ),
    "boxes-complex": (
        (torch.ones(3, 4).cfloat(), *GOOD[1:]),
        RuntimeError,
        r"boxes must have a float or integer dtype, got complex",
    ),
    "scores-rank": ((GOOD[0], torch.rand(3, 1), *GOOD[2:]), RuntimeError, r"scores must have 1 axes, got 2"),
    "scores-size": (
        (GOOD[0], torch.rand(2), *GOOD[2:]),
        RuntimeError,
        r"scores must have one element per box, 3, got 2",
    ),
    "scores-bool": (
        (GOOD[0], torch.ones(3).bool(), *GOOD[2:]),
        RuntimeError,
        r"scores must have a float or integer dtype, got bool",
    ),
    "idxs-rank": ((*GOOD[:2], torch.tensor(0), 0.5), RuntimeError, r"idxs must have 1 axes, got 0"),
    "idxs-size": (
        (*GOOD[:2], torch.zeros(4, dtype=torch.int64), 0.5),
        RuntimeError,
        r"idxs must have one element per box, 3, got 4",
    ),
    "idxs-float": ((*GOOD[:2], torch.zeros(3), 0.5), RuntimeError, r"idxs must have an integer dtype, got float32"),
    "threshold-negative": ((*GOOD[:3], -0.1), ValueError, r"iou_threshold must be in \[0, 1\], got -0.1"),
    "threshold-large": ((*GOOD[:3], 1.5), ValueError, r"iou_threshold must be in \[0, 1\], got 1.5"),
    "threshold-nan": ((*GOOD[:3], NAN), ValueError, r"iou_threshold must be in \[0, 1\], got nan"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_op_argument_expected_and_got(device, case):
    arguments, error, message = ERRORS[case]
    boxes, scores, idxs, threshold = (a.to(device) if isinstance(a, Tensor) else a for a in arguments)
    with pytest.raises(error, match=rf"opzoo::batched_nms: {message}"):
        opzoo.batched_nms(boxes, scores, idxs, threshold)
    with pytest.raises(error, match="opzoo::batched_nms"):
        torch.ops.opzoo.batched_nms(boxes, scores, idxs, threshold)
    if not case.startswith("idxs"):
        with pytest.raises(error, match=rf"opzoo::nms: {message}"):
            opzoo.nms(boxes, scores, threshold)


@pytest.mark.parametrize("case", ERRORS)
def test_fake_kernel_refuses_the_same(case):
    arguments, error, message = ERRORS[case]
    meta = [a.to("meta") if isinstance(a, Tensor) else a for a in arguments]
    argument = message.split()[0]
    with pytest.raises(error, match=f"opzoo::batched_nms: {argument} must"):
        torch.ops.opzoo.batched_nms(*meta)


def test_scores_on_another_device_are_refused(device):
    if device.type == "cpu":
        pytest.skip("needs two devices")
    with pytest.raises(RuntimeError, match=r"scores must be on the device of boxes, cuda:., got cpu"):
        opzoo.nms(torch.rand(3, 4, device=device), torch.rand(3), 0.5)
    with pytest.raises(RuntimeError, match="scores must be on the device of boxes, cpu, got cuda"):
        opzoo.nms(torch.rand(3, 4), torch.rand(3, device=device), 0.5)
    with pytest.raises(RuntimeError, match=r"idxs must be on the device of boxes, cuda:., got cpu"):
        scores = torch.rand(3, device=device)
        opzoo.batched_nms(torch.rand(3, 4, device=device), scores, torch.ones(3, dtype=torch.int64), 0.5)
