"""More than 2**31 elements in inputs, results, offsets and boxes, values looked at. Every test is slow.

Maps are zeros, which cost no memory until they are written, or expanded views: on the CPU no test
holds more than 10 GB. What an operator's own file tests already is not here again.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import opzoo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
OPS = torch.ops.opzoo
HALF = torch.float16
BEYOND = 2**31
SIDE = 2**15  # SIDE * SIDE * 2 elements are 2**31


def zeros(*shape: int, device: torch.device, dtype: torch.dtype = HALF) -> Tensor:
    t = torch.zeros(shape, dtype=dtype, device=device)
    assert t.numel() > BEYOND
    return t


def test_add_broadcasts_to_a_large_result(device: torch.device) -> None:
    rows = torch.arange(2**16 + 1, device=device).remainder(100).to(torch.int8)[:, None]
    columns = torch.arange(SIDE + 3, device=device).remainder(27).to(torch.int8)
    out = opzoo.add(rows, columns)
    assert out.numel() > BEYOND
    assert torch.equal(out[-1], rows[-1] + columns) and torch.equal(out[:, -1], rows[:, 0] + columns[-1])


def test_matmul_of_expanded_operands(device: torch.device) -> None:
    """Batches of one matrix: offsets lie beyond 32 bits where strides are not 0."""
    a = torch.ones(1, 1, 2, dtype=HALF, device=device).expand(2**30 + 9, 1, 2)[-5:]
    wide = zeros(5, 1, 2**29, device=device)[:, :, -2:]
    wide[4] = 3
    assert opzoo.matmul(a, wide.mT).flatten().tolist() == [0, 0, 0, 0, 6]


@pytest.mark.parametrize("options", [{}, {"channels_last": True}], ids=["NCHW", "NHWC"])
def test_roi_align_and_its_backwards(device: torch.device, options: dict[str, bool]) -> None:
    shape = (3, 1, SIDE, 21847)
    x = zeros(*shape, device=device)
    if options:
        x = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    x[2, 0, -8:, -8:] = 2
    far = torch.tensor([[2.0, 21847 - 6, SIDE - 6, 21847 - 3, SIDE - 3]], device=device)
    assert opzoo.roi_align(x, far, 2, 1.0, 2).unique().tolist() == [2]
    out, argmax = OPS._roi_align_max(x, far, None, 2, 2, 1.0, 2, False)
    assert out.unique().tolist() == [2]
    assert OPS._roi_align_max_sample(x, argmax, far, None, 1.0, 2, False).unique().tolist() == [2]
    grad = torch.ones(1, 1, 2, 2, dtype=HALF, device=device)
    slope = OPS._roi_align_boxes_backward(grad, x, far, None, 1.0, 2, False)
    assert slope.abs().sum() == 0  # a constant window
    del x
    channels_last = bool(options)
    for grad_input in (
        lambda: OPS._roi_align_backward(grad, far, None, *shape, 1.0, 2, False, channels_last),
        lambda: OPS._roi_align_max_backward(grad, argmax, far, None, *shape, 1.0, 2, False, channels_last),
    ):
        found = grad_input()
        assert float(found[2, 0, -10:, -10:].float().sum()) == pytest.approx(4, rel=0.01)
        assert not found[0, 0, :9].any()
        del found


def test_roi_align_of_many_boxes(device: torch.device) -> None:
    """The result and the boxes' own memory lie beyond 2**31 elements."""
    x = torch.zeros(1, 1, 1, 1, dtype=HALF, device=device)
    x += 3
    boxes = torch.zeros(1, 5, dtype=HALF, device=device).expand(2**26 + 3, 5)
    out = opzoo.roi_align(x, boxes, (4, 8), 1.0, 1)
    assert out.numel() > BEYOND and bool(out[-1].eq(3).all()) and bool(out[::65537].eq(3).all())


def test_boxes_far_in_memory(device: torch.device) -> None:
    """Boxes and scores whose strides reach beyond 2**31 elements."""
    step = 2**29
    memory = zeros(4 * step + 4, device=device)
    boxes = memory.as_strided((5, 4), (step, 1))
    scores = memory[1:].as_strided((5,), (step,))
    boxes.copy_(torch.tensor([[0, 0, 4, 4], [0, 0, 4, 4], [9, 0, 13, 4], [0, 0, 4, 3], [9, 0, 13, 4.0]]))
    near = boxes.clone()
    order = torch.tensor([0.1, 0.5, 0.2, 0.4, 0.3])
    own = zeros(4 * step + 1, device=device)
    scores = own.as_strided((5,), (step,))
    scores.copy_(order)
    idxs = torch.zeros(5, dtype=torch.int64, device=device)
    few = scores.clone()
    for call in (
        lambda b, s: [opzoo.nms(b, s, 0.5)],
        lambda b, s: [opzoo.batched_nms(b, s, idxs, 0.5)],
        lambda b, s: list(opzoo.nms_padded(b, s, 0.5, 4)),
        lambda b, s: opzoo.nms_match(b, s, 0.5),
        lambda b, s: list(opzoo.soft_nms(b, s)),
        lambda b, s: list(opzoo.batched_soft_nms(b, s, idxs)),
    ):
        for got, wanted in zip(call(boxes, scores), call(near, few), strict=True):
            assert torch.equal(got, wanted)
    rois = torch.cat([torch.zeros(5, 1, device=device, dtype=HALF), near], 1)
    wide = memory.as_strided((5, 5), (step - 1, 1))
    wide.copy_(rois)
    image = torch.randn(1, 2, 14, 14, device=device)
    assert torch.equal(opzoo.roi_align(image, wide, 2), opzoo.roi_align(image, rois, 2))
    assert torch.equal(opzoo.roi_pool(image, wide, 2), opzoo.roi_pool(image, rois, 2))


def test_nms_padded_of_a_large_result(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("int64 results of 2**31 elements are 17 GB")
    indices, count = opzoo.nms_padded(torch.ones(3, 4, 4, device=device), torch.rand(3, 4, device=device), 0.5, 2**30)
    assert count.tolist() == [1, 1, 1] and bool((indices[2, 1:9] == -1).all()) and int(indices[2, -1]) == -1


def test_roi_pool(device: torch.device) -> None:
    x = zeros(3, 1, SIDE, 21847, device=device)
    x[2, 0, -3, -4] = 5
    far = torch.tensor([[2.0, 21847 - 6, SIDE - 6, 21847 - 1, SIDE - 1]], device=device)
    out, argmax = OPS.roi_pool(x, far, 1, 1, 1.0, True)
    assert out.item() == 5
    del x
    if device.type == "cpu":
        return  # the gradient is summed in float32: 9 GB
    found = OPS._roi_pool_backward(torch.ones_like(out), argmax, far, 3, 1, SIDE, 21847)
    assert found[2, 0, -3, -4].item() == 1


def test_multi_scale_roi_align(device: torch.device) -> None:
    fine = zeros(3, 1, SIDE, 21847, device=device)
    fine[2, 0, -8:, -8:] = 2
    coarse = torch.zeros(3, 1, 8, 8, dtype=HALF, device=device)
    far = torch.tensor([[2.0, 21847 - 6, SIDE - 6, 21847 - 3, SIDE - 3]], device=device)
    out = opzoo.multi_scale_roi_align([fine, coarse], far, 2, [1.0, 0.5], 2)
    assert out.unique().tolist() == [2]
    del fine
    heights, widths = [SIDE, 8], [21847, 8]
    levels = (1.0, 0.5), 2, False, 224.0, 4.0, 0, 1, False
    found = OPS._multi_scale_roi_align_backward(torch.ones_like(out), far, None, 3, 1, heights, widths, *levels)
    assert float(found[0][2, 0, -10:, -10:].float().sum()) == pytest.approx(4, rel=0.01)


def test_deform_conv2d_backward_of_a_large_input(device: torch.device) -> None:
    input = zeros(2, 1, SIDE, 40000, device=device)
    offset = torch.zeros(2, 2, 1, 1, device=device)
    offset[:, 0], offset[:, 1] = SIDE - 1, 39999
    weight = torch.full((1, 1, 1, 1), 3, dtype=HALF, device=device)
    input[1, 0, -1, -1] = 7
    stride = (SIDE, 40000)
    needs = (False, False, True, False)
    grad = torch.ones(2, 1, 1, 1, dtype=HALF, device=device)
    *_, to_weight, _ = OPS._deform_conv2d_backward(grad, input, offset, weight, None, *stride, 0, 0, 1, 1, *needs)
    assert to_weight.item() == 7


def test_deform_conv2d_of_a_large_offset(device: torch.device) -> None:
    """An offset of more than 2**31 elements, all of them the same memory but for the axis of pixels."""
    size = 2**13
    offset = torch.zeros(1, 1, size, size, dtype=HALF, device=device)
    offset[..., -1, -1] = 1
    taps = 4
    offset = offset.expand(5, 2 * taps, size, size)
    assert offset.numel() > BEYOND
    input = torch.zeros(1, 1, size + 1, size + 1, dtype=HALF, device=device)
    input[..., -1, -1] = 1
    input = input.expand(5, 1, size + 1, size + 1)
    weight = torch.ones(1, 1, 2, 2, dtype=HALF, device=device)
    out = opzoo.deform_conv2d(input, offset, weight)
    # The last pixel's taps are moved by (1, 1): the first of them meets the one pixel that is 1.
    assert [float(image[0, -1, -1]) for image in out] == [1] * 5
    assert not out[:, :, 0].any()


def test_ms_deform_attn(device: torch.device) -> None:
    side = 32768
    value = zeros(1, side * (side + 1), 1, 2, device=device)
    value[0, -1] = 3
    shapes, starts = torch.tensor([[side + 1, side]], device=device), torch.tensor([0], device=device)
    where = torch.tensor([(side - 0.5) / side, (side + 0.5) / (side + 1)], device=device).reshape(1, 1, 1, 1, 1, 2)
    weights = torch.ones(1, 1, 1, 1, 1, device=device)
    out = opzoo.ms_deform_attn(value, shapes, starts, where, weights)
    # The rounded location is a hundredth of a pixel from the centre of the last one.
    assert out.flatten().tolist() == pytest.approx([3, 3], rel=0.02)
    *_, to_weights = OPS._ms_deform_attn_backward(out, value, shapes, starts, where, weights, False)
    assert to_weights.item() == pytest.approx(18, rel=0.05)


def test_carafe(device: torch.device) -> None:
    features = zeros(2, 1, SIDE, SIDE + 1, device=device)
    features[1, 0, -1, -1] = 5
    masks = torch.full((1, 1, 1, 1), 2.0, dtype=HALF, device=device).expand(2, 1, SIDE, SIDE + 1)
    out = opzoo.carafe(features, masks, 1, 1, 1)
    assert out[1, 0, -1, -1].item() == 10 and out[0, 0, -1, -1].item() == 0


def test_sigmoid_focal_loss(device: torch.device) -> None:
    inputs = zeros(2, SIDE, SIDE + 1, device=device)
    inputs[1, -1, -1] = 4
    ids = torch.full((2, SIDE), -1, device=device)
    loss = opzoo.sigmoid_focal_loss(inputs, ids, -1, 2)
    few = opzoo.sigmoid_focal_loss(inputs[1, -1:, -9:].clone(), ids[0, :1], -1, 2)
    assert torch.equal(loss[1, -1:, -9:], few) and torch.equal(loss[0, :1, :8], few[:, :8])
