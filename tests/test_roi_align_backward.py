"""The average backward of roi_align: the shapes, layouts and heaps of boxes that its kernels tell apart."""

from __future__ import annotations

import pytest
import torch
from helpers import error_against
from roi_inputs import make_boxes

from opzoo import reference

INF = float("inf")
OPS = torch.ops.opzoo


def exact_gradient(shape, boxes, g, *args):
    x = torch.zeros(shape, dtype=torch.float64, device=g.device, requires_grad=True)
    out = reference.roi_align(x, boxes.double(), tuple(g.shape[2:]), *args)
    return torch.autograd.grad(out, x, g.double())[0]


def gradient(shape, boxes, g, *args, channels_last=False):
    return OPS._roi_align_backward(g, boxes, None, *shape, *args, channels_last)


def check(shape, boxes, g, *args, tolerance=1e-4):
    exact = exact_gradient(shape, boxes, g, *args)
    results = [gradient(shape, boxes, g, *args, channels_last=last) for last in (False, True)]
    assert results[1].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(results[0], results[1])
    assert error_against(exact, results[0]) <= tolerance * max(1.0, float(exact.abs().max()))
    return results[0]


def pixel_boxes(rows, device):
    return torch.tensor(rows, dtype=torch.float32, device=device)


@pytest.mark.parametrize("count", [1, 10, 100])
def test_few_boxes_on_a_large_map(device, count):
    boxes = make_boxes(count, 2, 180, device)
    g = torch.randn(count, 3, 7, 7, device=device)
    check((2, 3, 201, 303), boxes, g, 1.0, 2, True)


@pytest.mark.parametrize("channels", [1, 5, 8, 12, 129, 264, 520])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_channels_and_layouts_of_grad(device, dtype, channels):
    shape = (2, channels, 11, 35)
    boxes = make_boxes(12, 2, 12, device).to(torch.float64 if dtype == torch.float64 else torch.float32)
    g = torch.randn(12, channels, 3, 4, device=device).to(dtype)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 8e-3}[dtype]
    grad_input = check(shape, boxes, g, 1.0, 2, True, tolerance=tolerance)
    storage = torch.zeros(12 * channels * 12 + 1, device=device, dtype=dtype)
    offset = storage[1:].view(12, channels, 3, 4).copy_(g)  # not on a 16-byte boundary
    for other in (g.contiguous(memory_format=torch.channels_last), g.repeat_interleave(2, 3)[..., ::2], offset):
        assert torch.equal(gradient(shape, boxes, other, 1.0, 2, True), grad_input)
    one = torch.ones((), device=device, dtype=dtype)
    assert torch.equal(
        gradient(shape, boxes, one.expand(12, channels, 3, 4), 1.0, 2, True),
        gradient(shape, boxes, torch.ones_like(g), 1.0, 2, True),
    )


@pytest.mark.parametrize("size", [(1, 40), (40, 3), (16, 16), (17, 16), (14, 14)], ids=str)
@pytest.mark.parametrize("ratio", [0, 1, 3, 9])
def test_bins_smaller_and_larger_than_pixels(device, size, ratio):
    """Along each axis boxes with fewer pixels than bins, and with more."""
    sides = [0.1875, 3.0, 13.0, 30.0]
    rows = [[0, 4.25, 5.125, 4.25 + w, 5.125 + h] for w in sides for h in sides]
    # No sample lies at -1 or 40, where a rounding decides whether it counts.
    rows += [[0, -2.875, -2.0, 2.0, 45.0], [0, 38.0, 36.0, 52.0, 41.0]]
    boxes = pixel_boxes(rows, device)
    check((1, 3, 40, 43), boxes, torch.randn(len(rows), 3, *size, device=device), 1.0, ratio, True)


def test_mirrored_and_empty_boxes(device):
    rows = [[0, 20.0, 3.0, 4.0, 17.0], [0, 3.0, 19.0, 18.0, 6.0], [0, 9.5, 2.0, 9.5, 15.0], [0, 6.0, 6.0, 6.0, 6.0]]
    boxes = pixel_boxes(rows, device)
    for size in ((7, 7), (2, 3)):
        check((1, 4, 21, 22), boxes, torch.randn(4, 4, *size, device=device), 1.0, 2, True)


def test_a_heap_of_boxes_on_one_spot(device):
    """More boxes than a tile lists at once, large and small ones in turn."""
    count = 2100
    boxes = torch.rand(count, 5) + torch.tensor([0, 9.0, 9.0, 12.0, 13.0])
    boxes[:, 0] = 0
    boxes[::3, 3:] += 14
    g = torch.randn(count, 2, 3, 3, device=device)
    check((1, 2, 32, 32), boxes.to(device), g, 1.0, 2, True)


def test_huge_coordinates(device):
    """Against float64: bins of a thousand pixels and more, of which few samples fall on the map."""
    rows = [
        [0, -1e4, -1e4, 1e4, 1e4],
        [0, -1e4, 2.0, 3e4, 9.0],
        [0, 1e6, 1e6, 1e6 + 8, 1e6 + 8],
        [0, 0.0, 0.0, 1e4, 4.0],
    ]
    boxes = pixel_boxes(rows, device)
    g = torch.randn(4, 3, 8, 8, device=device)
    exact = gradient((1, 3, 16, 19), boxes.double(), g.double(), 1.0, 2, False)
    assert error_against(exact, gradient((1, 3, 16, 19), boxes, g, 1.0, 2, False)) <= 1e-3
    assert gradient((1, 3, 16, 19), boxes * 1e25, g, 1.0, 2, False).isfinite().all()


@pytest.mark.parametrize("side", [2.0, 24.0], ids=["folded", "bins"])
def test_an_infinite_gradient_stays_where_it_has_weight(device, side):
    boxes = pixel_boxes([[0, 2.0, 2.0, 2.0 + side, 2.0 + side], [0, 0.0, 0.0, 31.0, 31.0]], device)
    g = torch.ones(2, 3, 7, 7, device=device)
    g[0, 1, 0, 0] = INF
    grad_input = gradient((1, 3, 32, 32), boxes, g, 1.0, 2, True)
    weight = gradient((1, 3, 32, 32), boxes, (g == INF).float(), 1.0, 2, True)
    assert torch.equal(grad_input == INF, weight > 0) and not grad_input.isnan().any()


def test_gradient_without_memory_is_refused(device):
    """Elements that an expanded tensor only claims to have."""
    if device.type != "cuda":
        pytest.skip("the CPU reads them in place")
    g = torch.ones((), device=device)
    boxes = torch.zeros(1, 5, device=device)
    for shape in ((1, 1, 2**20, 2**20), (1, 1, 2**29, 2**29)):
        with pytest.raises(RuntimeError, match=r"_roi_align_backward: grad must have at most 2\^25 bins"):
            gradient((1, 1, 4, 4), boxes, g.expand(shape), 1.0, 2, True)


@pytest.mark.parametrize("count", [10, 1000])
def test_same_bits_every_time(device, count):
    boxes = make_boxes(count, 2, 40, device)
    g = torch.randn(count, 9, 7, 7, device=device)
    first = gradient((2, 9, 45, 50), boxes, g, 1.0, 2, True)
    assert all(torch.equal(gradient((2, 9, 45, 50), boxes, g, 1.0, 2, True), first) for _ in range(3))
