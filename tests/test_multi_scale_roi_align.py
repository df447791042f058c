"""multi_scale_roi_align against torchvision's MultiScaleRoIAlign, the definition and roi_align level by level."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from helpers import HALVES, assert_as_good_as
from hypothesis import given
from hypothesis import strategies as st
from peers import torchvision
from roi_inputs import close

import opzoo
from opzoo import reference
from opzoo.ops.multi_scale_roi_align import _infer_scales, _number_of_map

NAN, INF = float("nan"), float("inf")
SCALES = [0.25, 0.125, 0.0625, 0.03125]
LevelMapper, _setup_scales = torchvision.ops.poolers.LevelMapper, torchvision.ops.poolers._setup_scales
IMAGES = [(128, 192), (120, 180)]


def make_maps(levels=4, channels=5, *, device="cpu", dtype=torch.float32, channels_last=False):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    maps = OrderedDict()
    for level in range(levels):
        t = torch.randn(2, channels, 32 >> level, 48 >> level, dtype=torch.float64)
        maps[str(level)] = t.to(device=device, dtype=dtype, memory_format=layout).requires_grad_()
    return maps


def make_boxes(count, device="cpu", dtype=torch.float32):
    """Of all sizes from 4 to 400 pixels, inside and outside, as a list with one tensor per image."""
    boxes = []
    for _ in IMAGES:
        corner = torch.rand(count, 2) * 150 - 20
        extent = 4 * 100 ** torch.rand(count, 2)
        boxes.append(torch.cat([corner, corner + extent], 1).to(device, dtype))
    return boxes


def pair_of_modules(names, *args, **kwargs):
    return opzoo.MultiScaleRoIAlign(names, *args, **kwargs), torchvision.ops.MultiScaleRoIAlign(names, *args, **kwargs)


def assert_same_results(maps, boxes, *args, images=IMAGES, tolerance=5e-5, **kwargs):
    ours, peer = pair_of_modules(list(maps), *args, **kwargs)
    out, expected = ours(maps, boxes, images), peer(maps, boxes, images)
    close(out, expected, tolerance)
    g = torch.randn_like(out)
    leaves = list(maps.values())
    for grad, other in zip(torch.autograd.grad(out, leaves, g), torch.autograd.grad(expected, leaves, g), strict=True):
        close(grad, other, 10 * tolerance)


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("levels", [1, 2, 3, 4])
@pytest.mark.parametrize("size,ratio", [((7, 7), 2), ((3, 5), -1), (14, 1)])
def test_matches_torchvision(device, size, ratio, levels, channels_last):
    maps = make_maps(levels, device=device, channels_last=channels_last)
    assert_same_results(maps, make_boxes(12, device), size, ratio, canonical_scale=56, canonical_level=4)


@pytest.mark.parametrize("channels", [1, 16, 33])
def test_matches_torchvision_in_float64(device, channels):
    maps = make_maps(channels=channels, device=device, dtype=torch.float64)
    assert_same_results(maps, make_boxes(9, device, torch.float64), 7, 2, tolerance=1e-12)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("boxes_as", ["list", "tensor"])
def test_matches_reference(device, boxes_as, aligned):
    maps, boxes = list(make_maps(device=device).values()), make_boxes(14, device)
    if boxes_as == "tensor":
        boxes = torch.cat([torch.nn.functional.pad(t, (1, 0), value=i) for i, t in enumerate(boxes)])
    args = (maps, boxes, (3, 4), SCALES, 2, aligned)
    out = opzoo.multi_scale_roi_align(*args, canonical_scale=40)
    expected = reference.multi_scale_roi_align(*args, canonical_scale=40)
    close(out, expected)
    g = torch.randn_like(out)
    for grad, other in zip(torch.autograd.grad(out, maps, g), torch.autograd.grad(expected, maps, g), strict=True):
        close(grad, other, 1e-4)


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_are_as_good_as_torchvision(device, dtype, channels_last):
    """torchvision computes coordinates in half precision, and has no bfloat16."""
    maps = make_maps(device=device, dtype=dtype, channels_last=channels_last)
    boxes = [t.round() for t in make_boxes(8, device)]
    exact_maps = OrderedDict((name, t.detach().double().requires_grad_()) for name, t in maps.items())
    ours, peer = pair_of_modules(list(maps), 7, 2, canonical_scale=56)
    out = ours(maps, boxes, IMAGES)
    exact = peer(exact_maps, [t.double() for t in boxes], IMAGES)
    rounded = peer(OrderedDict((name, t.float()) for name, t in maps.items()), boxes, IMAGES).to(dtype)
    assert out.dtype == dtype
    assert_as_good_as(out, rounded, exact.detach())
    g = torch.randn_like(out)
    grads = torch.autograd.grad(out, list(maps.values()), g)
    exact_grads = torch.autograd.grad(exact, list(exact_maps.values()), g.double())
    rounded_grads = torch.autograd.grad(rounded, list(maps.values()), g)
    for grad, other, true in zip(grads, rounded_grads, exact_grads, strict=True):
        assert_as_good_as(grad, other, true)


def test_one_map_is_roi_align(device):
    x, boxes = make_maps(1, device=device)["0"], make_boxes(8, device)
    assert torch.equal(
        opzoo.multi_scale_roi_align([x], boxes, 7, [0.25], 2),
        opzoo.roi_align(x, boxes, 7, spatial_scale=0.25, sampling_ratio=2),
    )


def test_each_level_is_roi_align(device):
    """Small, middle and large boxes: three maps, each as roi_align alone."""
    maps = list(make_maps(3, device=device).values())
    for level, side in enumerate((50.0, 112.0, 224.0)):
        boxes = [torch.tensor([[1.0, 2.0, 1 + side, 2 + side]], device=device)] * 2
        pooled = opzoo.multi_scale_roi_align(maps, boxes, 7, SCALES[:3], 2)
        close(pooled, opzoo.roi_align(maps[level], boxes, 7, SCALES[level], 2), 0)


# The level


def level_maps(count, device, dtype=torch.float32):
    """Maps full of their own number, from 1 on: the result says which one a box took."""
    return [torch.full((1, 1, 4, 4), level + 1.0, device=device, dtype=dtype) for level in range(count)]


def levels_taken(boxes, *, scales=SCALES, dtype=torch.float32, **options):
    # Boxes are so large beside the maps that most samples lie outside: any sample inside will do.
    inside = torch.cat([boxes.new_zeros(len(boxes), 2), boxes[:, 2:] - boxes[:, :2]], 1)
    pooled = opzoo.multi_scale_roi_align(
        level_maps(len(scales), boxes.device, dtype), [inside], 128, scales, 1, **options
    )
    return pooled.flatten(1).amax(1).round().long() - 1


def sides_at_boundaries(dtype, steps=40):
    """Sides of squares around 112, 224 and 448 (and 1e-6 below), unit in the last place by unit."""
    found = []
    for boundary in (112.0, 224.0, 448.0):
        for centre in (boundary, boundary * 2**-1e-6):
            side = torch.tensor([centre], dtype=dtype)
            above, below = [side], [side]
            for _ in range(steps):
                above.append(torch.nextafter(above[-1], side.new_tensor(INF)))
                below.append(torch.nextafter(below[-1], side.new_tensor(0)))
            found += above + below
    return torch.cat(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_levels_at_their_boundaries(dtype):
    """To the last bit, where the offset of 1e-6 decides."""
    sides = sides_at_boundaries(dtype)
    boxes = torch.stack([torch.zeros_like(sides), torch.zeros_like(sides), sides, sides], 1)
    expected = LevelMapper(2, 5)([boxes])
    assert len(expected.unique()) == 4
    assert torch.equal(levels_taken(boxes, dtype=dtype), expected)


def test_levels_of_whole_pixel_boxes(device):
    width, height = torch.meshgrid(
        torch.arange(1.0, 1000, 7), torch.tensor([1.0, 56, 112, 223, 224, 448, 900]), indexing="ij"
    )
    boxes = torch.stack([torch.zeros_like(width), torch.zeros_like(width), width, height], -1).reshape(-1, 4).to(device)
    assert torch.equal(levels_taken(boxes), LevelMapper(2, 5)([boxes]))


@given(
    sides=st.lists(st.tuples(st.floats(0, 3000, width=32), st.floats(0, 3000, width=32)), min_size=1, max_size=8),
    canonical_scale=st.integers(1, 500),
    canonical_level=st.integers(-2, 8),
)
def test_levels_of_any_box(sides, canonical_scale, canonical_level):
    boxes = torch.tensor([[0.0, 0.0, w, h] for w, h in sides])
    taken = levels_taken(boxes, canonical_scale=canonical_scale, canonical_level=canonical_level)
    assert torch.equal(taken, LevelMapper(2, 5, canonical_scale, canonical_level)([boxes]))


def test_half_boxes_take_the_levels_of_their_values(device):
    """An area of 300 x 300 overflows float16."""
    boxes = torch.tensor([[0.0, 0.0, 300.0, 300.0], [0.0, 0.0, 600.0, 600.0], [0.0, 0.0, 100.0, 100.0]], device=device)
    for dtype in HALVES:
        assert torch.equal(levels_taken(boxes.to(dtype), dtype=dtype), levels_taken(boxes))


def test_levels_without_boxes(device):
    """All boxes on one map: the others get a gradient of zeros."""
    maps = make_maps(device=device)
    boxes = [torch.tensor([[0.0, 0.0, 30.0, 30.0]], device=device)] * 2
    assert_same_results(maps, boxes, 7, 2)
    out = opzoo.multi_scale_roi_align(list(maps.values()), boxes, 7, SCALES, 2)
    grads = torch.autograd.grad(out.sum(), list(maps.values()))
    assert grads[0].any() and not any(grad.any() for grad in grads[1:])


@pytest.mark.parametrize("levels", [1, 3])
def test_no_boxes(device, levels):
    maps = make_maps(levels, device=device)
    boxes = [torch.zeros(0, 4, device=device)] * 2
    out = opzoo.MultiScaleRoIAlign(list(maps), (3, 5), 2)(maps, boxes, IMAGES)
    assert out.shape == (0, 5, 3, 5)
    assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), list(maps.values())))
    mixed = [boxes[0], torch.tensor([[1.0, 2.0, 30.0, 40.0]], device=device)]
    assert_same_results(maps, mixed, 7, 2)


def test_unusual_boxes(device):
    """Zero area and boxes turned over on both axes as in torchvision; NaN areas are zeros there too."""
    maps = make_maps(device=device)
    usual = [
        [5.0, 5.0, 5.0, 5.0],  # zero area: first map, one pixel
        [5.0, 5.0, 300.0, 5.0],
        [90.0, 80.0, 20.0, 10.0],  # turned over along both axes: a positive area
        [90.0, 10.0, 20.0, 80.0],  # along one: no level
        [10.0, 80.0, 90.0, 20.0],
        [-900.0, -900.0, -400.0, -400.0],
    ]
    boxes = [torch.tensor(usual, device=device), torch.zeros(0, 4, device=device)]
    assert_same_results(maps, boxes, 3, 2)
    pooled = opzoo.MultiScaleRoIAlign(list(maps), 3, 2)(maps, boxes, IMAGES)
    assert not pooled[3:5].any() and pooled[:3].any()


@pytest.mark.parametrize("ratio", [-1, 2])
@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38])
def test_infinite_and_nan_boxes_give_zeros(device, value, ratio):
    maps = list(make_maps(device=device).values())
    for position in range(4):
        box = [1.0, 2.0, 30.0, 40.0]
        box[position] = value
        out = opzoo.multi_scale_roi_align(maps, [torch.tensor([box], device=device)] * 2, 3, SCALES, ratio)
        grads = torch.autograd.grad(out.sum(), maps)
        assert out.isfinite().all() and all(grad.isfinite().all() for grad in grads)
        if value != 3e38:
            assert not out.any() and not any(grad.any() for grad in grads)


# Scales


def test_scales_are_torchvisions():
    for image in (40, 64, 256, 333, 800, 1201):
        for height in (*range(1, 70), 200, 201, 256, 334):
            t = torch.empty(1, 1, height, 3)
            scales, mapper = _setup_scales([t, t[:, :, : max(height // 4, 1)]], [(image, 7), (3, 9)], 224, 4)
            ours = _infer_scales([t, t[:, :, : max(height // 4, 1)]], [(image, 7), (3, 9)])
            assert ours == scales
            assert (_number_of_map(ours[0]), _number_of_map(ours[1])) == (mapper.k_min, mapper.k_max)


def test_scales_of_every_call(device):
    """The second batch has its own scales; torchvision would keep the first one's."""
    module = opzoo.MultiScaleRoIAlign(["0", "1"], 3, 2)
    for size in (64, 128):
        maps = OrderedDict((str(i), torch.randn(1, 2, 32 >> i, 32 >> i, device=device)) for i in range(2))
        boxes = [torch.tensor([[3.0, 4.0, 50.0, 60.0]], device=device)]
        peer = torchvision.ops.MultiScaleRoIAlign(["0", "1"], 3, 2)
        close(module(maps, boxes, [(size, size)]), peer(maps, boxes, [(size, size)]))


def test_pyramid_that_skips_a_level(device):
    """Inferred scales: zeros past the last map, as in torchvision. Explicit ones: the coarsest map there is."""
    maps = OrderedDict(feat1=torch.rand(1, 5, 64, 64), feat2=torch.rand(1, 5, 32, 32), feat3=torch.rand(1, 5, 16, 16))
    maps = OrderedDict((name, t.to(device)) for name, t in maps.items())
    sides = torch.tensor([100.0, 230.0, 500.0], device=device)
    boxes = [torch.stack([sides * 0, sides * 0, sides, sides], 1)]
    ours, peer = pair_of_modules(["feat1", "feat3"], 3, 2)
    out = ours(maps, boxes, [(512, 512)])
    close(out, peer(maps, boxes, [(512, 512)]))
    assert out[:2].all() and not out[2].any()
    explicit = opzoo.MultiScaleRoIAlign(["feat1", "feat3"], 3, 2, spatial_scales=[1 / 8, 1 / 32])
    assert explicit(maps, boxes)[2].all()
    close(explicit(maps, boxes)[:2], out[:2])


def test_scales_that_are_no_powers_of_two(device):
    maps = list(make_maps(3, device=device).values())
    boxes = make_boxes(9, device)
    scales = [0.3, 0.17, 0.07]
    close(
        opzoo.multi_scale_roi_align(maps, boxes, 3, scales, 2, canonical_scale=60),
        reference.multi_scale_roi_align(maps, boxes, 3, scales, 2, canonical_scale=60),
    )


def test_explicit_scales_equal_inferred_ones(device):
    maps, boxes = make_maps(device=device), make_boxes(9, device)
    explicit = opzoo.MultiScaleRoIAlign(list(maps), 7, 2, spatial_scales=SCALES)
    inferred = opzoo.MultiScaleRoIAlign(list(maps), 7, 2)
    assert torch.equal(explicit(maps, boxes), inferred(maps, boxes, IMAGES))
