"""Gradients to the boxes of multi_scale_roi_align: each box has the one roi_align gives on the map it takes."""

from __future__ import annotations

import pytest
import torch
from roi_inputs import close, make_map
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

import opzoo

SCALES = [1 / 4, 1 / 8, 1 / 16]
# One box per map, with a box of 64 pixels at level 3; one of negative area; one off the map.
COORDINATES = [
    [3.3, 5.1, 25.7, 29.9],
    [10.2, 1.7, 90.4, 80.6],
    [-9.1, 4.2, 150.8, 121.3],
    [30.5, 20.5, 20.5, 60.5],
    [500.0, 500.0, 520.0, 520.0],
]
LEVELS = [0, 1, 2, None, 0]
OPTIONS = {"canonical_scale": 64, "canonical_level": 3}


def make_maps(device, dtype=torch.float64, channels_last=False):
    return [make_map(2, 3, 32 >> i, 40 >> i, device=device, dtype=dtype, channels_last=channels_last) for i in range(3)]


def make_boxes(device, dtype=torch.float64):
    coordinates = torch.tensor(COORDINATES, device=device, dtype=dtype)
    index = torch.arange(len(COORDINATES), device=device, dtype=dtype) % 2
    return torch.cat([index[:, None], coordinates], 1)


def pool(maps, boxes, ratio=2):
    return opzoo.multi_scale_roi_align(maps, boxes, (2, 3), SCALES, ratio, True, **OPTIONS)


def level_by_level(maps, boxes, ratio=2):
    rows = []
    for i, level in enumerate(LEVELS):
        if level is None:
            rows.append(boxes.new_zeros(1, 3, 2, 3))
        else:
            rows.append(opzoo.roi_align(maps[level], boxes[i : i + 1], (2, 3), SCALES[level], ratio, True))
    return torch.cat(rows)


@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("ratio", [2, 0])
def test_gradient_is_that_of_the_level(device, ratio, channels_last):
    maps, boxes = make_maps(device, channels_last=channels_last), make_boxes(device)
    results = []
    for function in (pool, level_by_level):
        leaves = [t.clone().requires_grad_() for t in (*maps, boxes)]
        out = function(leaves[:3], leaves[3], ratio)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for ours, expected in zip(*results, strict=True):
        close(ours, expected, 1e-10)
    assert results[0][-1][:3, 1:].all() and not results[0][-1][3:].any() and not results[0][-1][:, 0].any()


def test_boxes_alone_and_a_list(device):
    maps, boxes = make_maps(device), make_boxes(device)
    whole = boxes.clone().requires_grad_()
    (expected,) = torch.autograd.grad(pool(maps, whole).square().sum(), whole)
    order = torch.tensor([0, 2, 4, 1, 3], device=device)
    first, second = boxes[0::2, 1:].clone().requires_grad_(), boxes[1::2, 1:].clone().requires_grad_()
    grads = torch.autograd.grad(pool(maps, [first, second]).square().sum(), (first, second))
    close(torch.cat(grads), expected[order, 1:], 1e-10)


def test_gradient_of_the_map_gradient(device):
    maps, boxes = make_maps(device), make_boxes(device)

    def penalty(function):
        leaves, moving = [t.clone().requires_grad_() for t in maps], boxes.clone().requires_grad_()
        out = function(leaves, moving)
        first = torch.autograd.grad((out * out.detach().cos()).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(t.square().sum() for t in first), moving)[0]

    close(penalty(pool), penalty(level_by_level), 1e-10)


def test_half_boxes_keep_their_dtype(device):
    boxes = make_boxes(device, torch.float16).requires_grad_()
    pool(make_maps(device, torch.float16), boxes).sum().backward()
    assert boxes.grad.dtype == torch.float16 and boxes.grad.any()


def test_torch_func(device):
    maps, boxes = make_maps(device), make_boxes(device)
    moving = boxes.clone().requires_grad_()
    (expected,) = torch.autograd.grad(pool(maps, moving).square().sum(), moving)
    close(grad(lambda b: pool(maps, b).square().sum())(boxes), expected, 1e-10)
    stacked = torch.stack([boxes, boxes.flip(0)])
    each = vmap(grad(lambda b: pool(maps, b).square().sum()))(stacked)
    close(each[0], expected, 1e-10)
    close(each[1], expected.flip(0), 1e-10)
    (raw,) = torch.autograd.grad(
        torch.ops.opzoo.multi_scale_roi_align(maps, moving, None, 2, 3, SCALES, 2, True, 64.0, 3.0, 2, 4)
        .square()
        .sum(),
        moving,
    )
    close(raw, expected, 1e-10)


def test_what_does_not_exist_is_refused(device):
    maps, boxes = make_maps(device), make_boxes(device)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative in boxes; detach them"):
        jvp(lambda b: pool(maps, b), (boxes,), (boxes,))
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="no forward-mode derivative in boxes; detach them"),
    ):
        pool(maps, forward_ad.make_dual(boxes, boxes))
    moving = boxes.clone().requires_grad_()
    (first,) = torch.autograd.grad(pool(maps, moving).square().sum(), moving, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        first.sum().backward()


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile(device):
    maps, boxes = make_maps(device, torch.float32), make_boxes(device, torch.float32)
    results = []
    for function in (pool, torch.compile(pool, fullgraph=True)):
        moving = boxes.clone().requires_grad_()
        results.append(torch.autograd.grad(function(maps, moving).square().sum(), moving)[0])
    close(results[1], results[0], 1e-4)
