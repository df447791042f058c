"""roi_align against the definition, torchvision, and the kinds of input that broke other libraries."""

from __future__ import annotations

import pytest
import torch
from helpers import HALVES, assert_as_good_as, detector_boxes, error_against
from hypothesis import given
from hypothesis import strategies as st
from peers import torchvision
from roi_inputs import box, close, make_boxes, make_map

import opzoo
from opzoo import reference

MODES = ("avg", "max")
NAN, INF = float("nan"), float("inf")
OPS = torch.ops.opzoo


GEOMETRIES = [
    pytest.param((3, 3), 1.0, 2, False, id="fixed"),
    pytest.param((3, 3), 1.0, 2, True, id="fixed-aligned"),
    pytest.param((2, 5), 0.5, -1, False, id="adaptive"),
    pytest.param((2, 5), 0.3, 0, True, id="adaptive-aligned"),
    pytest.param((1, 1), 2.0, 3, True, id="one-bin"),
    pytest.param((7, 7), 0.25, 1, False, id="small"),
    pytest.param((1, 31), 1.7, -1, True, id="wide"),
    pytest.param((33, 2), 0.1, 5, False, id="tall"),
]


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(2, 19, 13, 17), (3, 1, 31, 1), (1, 33, 1, 9)], ids=str)
@pytest.mark.parametrize("size,scale,ratio,aligned", GEOMETRIES)
def test_average_matches_torchvision_and_reference(device, size, scale, ratio, aligned, shape, channels_last):
    x = make_map(*shape, device=device, channels_last=channels_last).requires_grad_()
    boxes = make_boxes(9, shape[0], 20 / scale, device)
    out = opzoo.roi_align(x, boxes, size, scale, ratio, aligned)
    peer = torchvision.ops.roi_align(x, boxes, size, scale, ratio, aligned)
    close(out, peer)
    close(out, reference.roi_align(x, boxes, size, scale, ratio, aligned))
    g = torch.randn_like(out)
    close(torch.autograd.grad(out, x, g)[0], torch.autograd.grad(peer, x, g)[0], 1e-4)


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("size,scale,ratio,aligned", GEOMETRIES)
def test_maximum_matches_reference(device, size, scale, ratio, aligned, channels_last):
    x = make_map(2, 17, 13, 15, device=device, channels_last=channels_last).requires_grad_()
    boxes = make_boxes(9, 2, 20 / scale, device)
    out = opzoo.roi_align(x, boxes, size, scale, ratio, aligned, "max")
    expected = reference.roi_align(x, boxes, size, scale, ratio, aligned, "max")
    close(out, expected)
    g = torch.randn_like(out)
    close(torch.autograd.grad(out, x, g)[0], torch.autograd.grad(expected, x, g)[0], 1e-4)


WIDE_BOXES = [
    [0, 1.5, 2.0, 118.0, 19.5],  # few of the columns it spans are sampled
    [1, -4.0, 3.0, 9.0, 30.0],
    [0, 100.0, 0.0, 140.0, 8.0],
    [1, 60.3, 5.2, 60.9, 5.4],
    [0, 90.0, 17.0, 20.0, 4.0],  # mirrored where aligned
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
@pytest.mark.parametrize("channels", [1, 7, 16, 37, 150])
@pytest.mark.parametrize("ratio", [-1, 1, 3])
def test_cpu_layouts_agree_bit_by_bit(channels, ratio, dtype):
    """Adjacent columns, adjacent channels and neither are summed by different loops, in one order."""
    x = make_map(2, channels, 21, 120, device="cpu", dtype=dtype)
    boxes = torch.tensor(WIDE_BOXES)
    args = (boxes, (7, 5), 0.9, ratio, True)
    expected = opzoo.roi_align(x, *args)
    peer_x = x.double().requires_grad_()
    peer = torchvision.ops.roi_align(peer_x, boxes.double(), *args[1:])
    tolerance = {torch.float64: 1e-5, torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert error_against(peer, expected) <= tolerance
    last = x.contiguous(memory_format=torch.channels_last)
    for view in (last, x.repeat_interleave(2, 3)[..., ::2], last.repeat(1, 2, 1, 1)[:, :channels]):
        assert torch.equal(opzoo.roi_align(view, *args), expected)
    g = torch.randn_like(expected)
    grads = []
    for leaf in (x.clone().requires_grad_(), last.clone().requires_grad_()):
        for grad in (g, g.contiguous(memory_format=torch.channels_last), g.repeat_interleave(2, 3)[..., ::2]):
            grads.append(torch.autograd.grad(opzoo.roi_align(leaf, *args), leaf, grad)[0])
    (peer_grad,) = torch.autograd.grad(peer, peer_x, g.double())
    assert error_against(peer_grad, grads[0]) <= 10 * tolerance
    assert all(torch.equal(grad, grads[0]) for grad in grads)


def test_backward_across_tiles(device):
    """A plane that is cut along both axes, with boxes across the cuts."""
    x = make_map(1, 17, 70, 1100, device=device).requires_grad_()
    boxes = torch.tensor([[0, 5.0, 3.0, 1090.0, 66.0], [0, 540.0, 10.0, 560.0, 60.0]], device=device)
    for ratio, mode in ((-1, "avg"), (2, "avg"), (2, "max")):
        out = opzoo.roi_align(x, boxes, (5, 9), 1.0, ratio, True, mode)
        expected = reference.roi_align(x, boxes, (5, 9), 1.0, ratio, True, mode)
        g = torch.randn_like(out)
        close(torch.autograd.grad(out, x, g)[0], torch.autograd.grad(expected, x, g)[0], 1e-4)


def test_pixel_centres_by_hand(device):
    x = torch.arange(16.0, device=device).reshape(1, 1, 4, 4)
    out = opzoo.roi_align(x, box(0.0, 0.0, 4.0, 4.0, device=device), 2, aligned=True)
    assert out.flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    # Without the half-pixel shift the samples lie between the pixels, and the last ones are clamped.
    out = opzoo.roi_align(x, box(0.0, 0.0, 4.0, 4.0, device=device), 4)
    assert out[0, 0, 0].tolist() == [2.5, 3.5, 4.5, 5.0]


def test_maximum_by_hand(device):
    """One bin, samples at 0 and 1 in each direction: the four top-left pixels, then their maximum."""
    x = torch.tensor([[1.0, 2.0, 9.0], [3.0, -4.0, 9.0], [9.0, 9.0, 9.0]], device=device)[None, None]
    boxes = box(0.0, 0.0, 2.0, 2.0, device=device)
    out, argmax = OPS._roi_align_max(x, boxes, None, 1, 1, 1.0, 2, True)
    assert out.item() == 3 and argmax.item() == 2
    x.requires_grad_()
    opzoo.roi_align(x, boxes, 1, 1.0, 2, True, "max").backward()
    assert x.grad.nonzero().tolist() == [[0, 0, 1, 0]] and x.grad.sum() == 1


@pytest.mark.parametrize(
    "fill,coordinates,value,argmax",
    [
        pytest.param(-1.0, (0.0, 0.0, 2.0, 2.0), -1.0, 0, id="all-inside-first-of-equals"),
        pytest.param(-1.0, (-8.0, 0.0, 2.0, 2.0), 0.0, -1, id="one-outside-counts-as-0"),
        pytest.param(1.0, (-8.0, 0.0, 2.0, 2.0), 1.0, 1, id="inside-beats-0"),
        pytest.param(0.0, (-8.0, 0.0, 2.0, 2.0), 0.0, -1, id="equal-to-an-earlier-outside"),
        pytest.param(0.0, (0.0, 0.0, 8.0, 2.0), 0.0, 0, id="equal-to-a-later-outside"),
        pytest.param(NAN, (-8.0, 0.0, 2.0, 2.0), NAN, 1, id="nan-beats-0"),
        pytest.param(5.0, (2.0, 2.0, 0.0, 9.0), 0.0, -1, id="no-samples"),
    ],
)
def test_maximum_rules(device, fill, coordinates, value, argmax):
    x = torch.full((1, 1, 3, 3), fill, device=device)
    ratio = -1 if argmax == -1 and fill == 5 else 2
    out, arg = OPS._roi_align_max(x, box(*coordinates, device=device), None, 1, 1, 1.0, ratio, True)
    assert torch.equal(out.cpu().flatten().nan_to_num(nan=7), torch.tensor([value]).nan_to_num(nan=7))
    assert arg.item() == argmax


def test_maximum_keeps_nan(device):
    x = torch.zeros(1, 1, 4, 4, device=device)
    x[0, 0, 1, 1] = NAN
    assert opzoo.roi_align(x, box(0.0, 0.0, 4.0, 4.0, device=device), 2, 1.0, 2, True, "max").isnan().sum() == 1


# Boxes, indices and layouts


@pytest.mark.parametrize("mode", MODES)
def test_list_equals_tensor(device, mode):
    x = make_map(3, 4, 9, 9, device=device)
    boxes = make_boxes(7, 3, 9, device)
    boxes = boxes[boxes[:, 0].argsort(stable=True)]
    listed = [boxes[boxes[:, 0] == i, 1:] for i in range(3)]
    expected = opzoo.roi_align(x, boxes, 3, 0.8, pool_mode=mode)
    for given_boxes in (listed, tuple(listed)):
        assert torch.equal(opzoo.roi_align(x, given_boxes, 3, 0.8, pool_mode=mode), expected)
    indexed = OPS.roi_align(x, boxes[:, 1:], boxes[:, 0].long(), 3, 3, 0.8, -1, False)
    assert torch.equal(indexed, opzoo.roi_align(x, boxes, 3, 0.8))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float64, torch.int64, torch.int32, torch.uint8], ids=str)
def test_boxes_of_any_dtype(device, dtype):
    x = make_map(2, 3, 9, 9, device=device)
    boxes = torch.tensor([[0, 1, 2, 7, 8], [1, 0, 3, 5, 5]], device=device, dtype=dtype)
    expected = torchvision.ops.roi_align(x, boxes.float(), 3)
    close(opzoo.roi_align(x, boxes, 3), expected)
    close(opzoo.roi_align(x.double(), boxes, 3), torchvision.ops.roi_align(x.double(), boxes.double(), 3), 1e-12)
    close(opzoo.roi_align(x, [boxes[:1, 1:], boxes[1:, 1:]], 3), expected)


@pytest.mark.parametrize("dtype,images", [(torch.float16, 2100), (torch.bfloat16, 300)], ids=str)
def test_half_boxes_never_hold_an_image_index(device, dtype, images):
    x = torch.arange(float(images), device=device).reshape(-1, 1, 1, 1)
    boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0]], device=device, dtype=dtype)
    out = opzoo.roi_align(x, [boxes] * images, 1)
    assert torch.equal(out.flatten(), torch.arange(float(images), device=device))
    with pytest.raises(RuntimeError, match=r"hold image indices exactly up to \d+.*list with one tensor per image"):
        opzoo.roi_align(x, torch.zeros(1, 5, device=device, dtype=dtype), 1)
    limit = 2049 if dtype == torch.float16 else 257
    last = torch.tensor([[limit - 1, 0.0, 0.0, 1.0, 1.0]], device=device, dtype=dtype)
    assert opzoo.roi_align(x[:limit], last, 1).item() == limit - 1


LAYOUTS = {
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "sliced": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "offset": lambda x: torch.cat([x.flatten()[:3], x.flatten()])[3:].reshape(x.shape),
    "strided": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "batch-inside": lambda x: x.movedim(0, 3).contiguous().movedim(3, 0),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views(device, layout, mode):
    x = make_map(2, 5, 8, 9, device=device)
    view = LAYOUTS[layout](x)
    assert torch.equal(view, x)
    boxes = make_boxes(6, 2, 9, device)
    expected = opzoo.roi_align(x, boxes, 3, 1.0, 2, pool_mode=mode)
    wide = torch.cat([boxes, boxes], 1)[:, :5].t().contiguous().t()
    out = opzoo.roi_align(view, wide, 3, 1.0, 2, pool_mode=mode)
    assert torch.equal(out, expected) and out.is_contiguous()
    index = torch.stack([boxes[:, 0].long()] * 2, 1)[:, 0]
    if mode == "avg":
        assert torch.equal(OPS.roi_align(view, wide[:, 1:], index, 3, 3, 1.0, 2, False), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_channels_last_stays(device, mode, dtype):
    x = make_map(2, 5, 8, 9, device=device, dtype=dtype, channels_last=True).requires_grad_()
    out = opzoo.roi_align(x, make_boxes(6, 2, 9, device), 3, pool_mode=mode)
    assert out.is_contiguous(memory_format=torch.channels_last) and not out.is_contiguous()
    (grad_input,) = torch.autograd.grad(out.float().square().sum(), x)
    assert grad_input.stride() == x.stride()


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_any_strides(device, mode):
    x = make_map(2, 5, 8, 9, device=device).requires_grad_()
    out = opzoo.roi_align(x, make_boxes(6, 2, 9, device), 3, 1.0, 2, pool_mode=mode)
    dense = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, x, dense, retain_graph=True)
    for layout in LAYOUTS.values():
        close(torch.autograd.grad(out, x, layout(dense), retain_graph=True)[0], expected)
    (expanded,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    close(expanded, torch.autograd.grad(out, x, torch.ones_like(out))[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "shape,count",
    [((2, 3, 5, 5), 0), ((2, 0, 5, 5), 4), ((0, 3, 5, 5), 0), ((2, 3, 0, 5), 0), ((0, 0, 0, 0), 0)],
    ids=str,
)
def test_empty(device, shape, count, mode):
    x = torch.randn(shape, device=device, requires_grad=True)
    out = opzoo.roi_align(x, torch.zeros(count, 5, device=device), (2, 3), pool_mode=mode)
    assert out.shape == (count, shape[1], 2, 3)
    out.sum().backward()
    assert x.grad.shape == x.shape and not x.grad.any()
    listed = [torch.zeros(0, 4, device=device)] * shape[0]
    assert opzoo.roi_align(x, listed, 2, pool_mode=mode).shape == (0, shape[1], 2, 2)


def test_image_without_boxes(device):
    x = make_map(3, 2, 5, 5, device=device).requires_grad_()
    out = opzoo.roi_align(x, [box(0.0, 0.0, 3.0, 3.0, device=device)[:, 1:], x.new_zeros(0, 4), x.new_zeros(0, 4)], 2)
    out.sum().backward()
    assert out.shape[0] == 1 and not x.grad[1:].any() and x.grad[0].sum().item() == pytest.approx(8, rel=1e-5)


# Coordinates nobody should pass, and somebody does


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ratio", [-1, 1, 2])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("position", range(4))
def test_non_finite_boxes_give_zeros(device, position, bad, aligned, ratio, mode):
    boxes = torch.tensor([[0, 0.0, 0.0, 3.0, 3.0]] * 2, device=device)
    boxes[1, 1 + position] = bad
    x = torch.ones(1, 3, 4, 4, device=device, requires_grad=True)
    out = opzoo.roi_align(x, boxes, 2, 1.0, ratio, aligned, mode)
    assert (out[0] == 1).all() and (out[1] == 0).all()
    out[1].sum().backward()
    assert not x.grad.any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [INF, NAN, 3e38, 1e30, 2e10, 1e9])
@pytest.mark.parametrize("ratio", [-1, 2])
def test_huge_boxes_finish(device, value, ratio, mode):
    """Overflow of the coordinate, of the grid, or of the count of samples."""
    x = torch.ones(1, 1, 4, 4, device=device)
    boxes = torch.tensor([[0, -value, -value, value, value], [0, 0, 0, value, value]], device=device)
    for aligned in (False, True):
        out = opzoo.roi_align(x, boxes, 7, 1.0, ratio, aligned, mode)
        assert out.isfinite().all() and (out >= 0).all() and (out <= 1.001).all()


def test_half_boxes_that_overflow(device):
    boxes = torch.tensor([[0, 0, 0, 70000, 70000]], device=device, dtype=torch.float16)
    assert not opzoo.roi_align(torch.ones(1, 1, 4, 4, device=device), boxes, 1, 1.0, 1).any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("coordinates", [(0, 0, 1e5, 9), (-5e4, 1, 5e4, 7), (3, -1e5, 9, 30), (-900, -700, 300, 500)])
def test_large_adaptive_boxes_equal_every_sample_summed(device, coordinates, aligned, mode):
    # The expected value is the CPU's on every device: torch divides by a reciprocal on CUDA, which moves
    # samples that lie exactly on the border.
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        x = make_map(1, 2, 9, 11, device="cpu", dtype=dtype)
        boxes = torch.tensor([[0, *coordinates]], dtype=dtype)
        out = opzoo.roi_align(x.to(device), boxes.to(device), 2, 1.0, -1, aligned, mode)
        close(out.cpu(), reference.roi_align(x, boxes, 2, 1.0, -1, aligned, mode), tolerance)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_box_of_a_million_pixels_is_torchvisions(device, axis):
    x = make_map(1, 2, 9, 11, device=device)
    low, high = [1.0, 1.0], [8.0, 8.0]
    low[axis], high[axis] = -1e3, 1e6
    boxes = torch.tensor([[0, *low, *high]], device=device)
    close(opzoo.roi_align(x, boxes, 3), torchvision.ops.roi_align(x, boxes, 3), 1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_inverted_boxes(device, mode):
    x = make_map(1, 3, 6, 7, device=device)
    inverted = torch.tensor([[0, 5, 1, 2, 4], [0, 1, 4, 5, 2], [0, 5, 4, 2, 1]], device=device, dtype=torch.float32)
    straight = torch.tensor([[0, 2, 1, 5, 4], [0, 1, 2, 5, 4], [0, 2, 1, 5, 4]], device=device, dtype=torch.float32)
    for ratio in (-1, 0):
        assert not opzoo.roi_align(x, inverted, 3, 1.0, ratio, True, mode).any()
    mirrored = opzoo.roi_align(x, straight, 3, 1.0, 2, True, mode)
    mirrored = torch.stack([mirrored[0].flip(2), mirrored[1].flip(1), mirrored[2].flip(1, 2)])
    fixed = opzoo.roi_align(x, inverted, 3, 1.0, 2, True, mode)
    close(fixed, mirrored)
    if mode == "avg":
        close(fixed, torchvision.ops.roi_align(x, inverted, 3, 1.0, 2, True))
        legacy = torchvision.ops.roi_align(x, inverted, 3, 1.0, -1, False)  # one pixel wide or high
        close(opzoo.roi_align(x, inverted, 3, 1.0, -1, False), legacy)


coordinate = st.floats(-30, 40, width=32)


@given(
    boxes=st.lists(st.tuples(st.integers(0, 1), coordinate, coordinate, coordinate, coordinate), max_size=4),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    size=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    scale=st.sampled_from([0.25, 0.5, 1.0, 1.3]),
    ratio=st.sampled_from([-1, 1, 2, 40]),
    aligned=st.booleans(),
    mode=st.sampled_from(MODES),
)
def test_any_box(boxes, height, width, size, scale, ratio, aligned, mode):
    x = torch.linspace(-1, 2, 2 * 2 * height * width, dtype=torch.float64).reshape(2, 2, height, width)
    x.requires_grad_()
    boxes = torch.tensor(boxes, dtype=torch.float64).reshape(len(boxes), 5)
    out = opzoo.roi_align(x, boxes, size, scale, ratio, aligned, mode)
    expected = reference.roi_align(x, boxes, size, scale, ratio, aligned, mode)
    close(out, expected, 1e-12)
    if mode == "avg" and len(boxes):
        close(torch.autograd.grad(out.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0], 1e-10)


# Precision


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_are_as_good_as_fp32_rounded(device, dtype, channels_last):
    x = make_map(1, 4, 75, 80, device=device, dtype=dtype, channels_last=channels_last)
    boxes = detector_boxes(40, 1200, 1280).to(device)
    boxes = torch.cat([torch.zeros(40, 1, device=device), boxes], 1)
    for ratio in (-1, 2):
        args = (boxes, 7, 1 / 16, ratio, True)
        exact_x = x.double().requires_grad_()
        exact = torchvision.ops.roi_align(exact_x, boxes.double(), *args[1:])
        ours_x = x.clone().requires_grad_()
        ours = opzoo.roi_align(ours_x, *args)
        single_x = x.float().requires_grad_()
        single = torchvision.ops.roi_align(single_x, *args)
        assert ours.dtype == dtype
        assert_as_good_as(ours, single.to(dtype), exact)
        g = torch.randn_like(ours)
        ours.backward(g)
        exact.backward(g.double())
        single.backward(g.float())
        assert_as_good_as(ours_x.grad, single_x.grad.to(dtype), exact_x.grad)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_maximum_is_the_fp32_maximum_rounded(device, dtype):
    x = make_map(2, 4, 20, 20, device=device, dtype=dtype)
    boxes = make_boxes(9, 2, 18, device)
    single = opzoo.roi_align(x.float(), boxes, 5, 0.9, pool_mode="max")
    assert torch.equal(opzoo.roi_align(x, boxes, 5, 0.9, pool_mode="max"), single.to(dtype))


def test_autocast_keeps_the_input_dtype(device):
    x, boxes = make_map(1, 2, 5, 5, device=device), box(0.0, 0.0, 3.0, 3.0, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            assert opzoo.roi_align(x.to(dtype), boxes, 2).dtype == dtype


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_results_do_not_depend_on_threads(dtype, channels_last, mode):
    x = make_map(2, 40, 20, 20, device="cpu", dtype=dtype, channels_last=channels_last).requires_grad_()
    boxes = make_boxes(60, 2, 18, "cpu")
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            out = opzoo.roi_align(x, boxes, 7, pool_mode=mode)
            results.append((out, torch.autograd.grad(out.float().sum(), x)[0]))
    finally:
        torch.set_num_threads(threads)
    for out, grad_input in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(grad_input, results[0][1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
def test_backward_is_deterministic(device, mode, channels_last):
    x = make_map(2, 5, 20, 33, device=device, channels_last=channels_last).requires_grad_()
    boxes = make_boxes(300, 2, 30, device)
    torch.use_deterministic_algorithms(True)
    try:
        grads = []
        for _ in range(3):
            out = opzoo.roi_align(x, boxes, 7, 1.0, 2, True, mode)
            grads.append(torch.autograd.grad(out, x, torch.ones_like(out))[0])
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
