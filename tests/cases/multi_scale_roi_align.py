import torch
from helpers import Case

import opzoo

# Of the first map, of the second, over the border, past the last level.
BOXES = [[0, 0.5, 1.0, 5.0, 6.5], [1, -2.0, 1.0, 12.0, 13.0], [1, 3.0, 2.0, 9.2, 5.1], [0, 0.0, 0.0, 40.0, 30.0]]
# canonical_scale and canonical_level; the maps are numbers 1 and 2, as their scales say.
LEVELS = (8.0, 1.0, 1, 2)


def make_maps(device, dtype):
    return [torch.randn(2, 3, *size, device=device, dtype=dtype) for size in ((7, 8), (4, 5))]


def make_boxes(device):
    return torch.tensor(BOXES, device=device)


def tensors(device, dtype):
    return *make_maps(device, dtype), make_boxes(device)


def channels_last(device, dtype):
    maps = [t.contiguous(memory_format=torch.channels_last) for t in make_maps(device, dtype)]
    return *maps, make_boxes(device)


def listed(device, dtype):
    boxes = make_boxes(device)[:, 1:]
    return *make_maps(device, dtype), boxes[:2], boxes[2:]


def one_map(device, dtype):
    return make_maps(device, dtype)[0], make_boxes(device)


def moving(device, dtype):
    """Boxes that get a gradient, per image, in a dtype of their own, without a sample near a kink."""
    boxes = make_boxes(device).to(torch.promote_types(dtype, torch.float32))[:, 1:]
    boxes = boxes + torch.tensor([0.13, -0.21, 0.34, 0.27], device=device)
    return *make_maps(device, dtype), boxes[:2], boxes[2:]


def case(id, tensors, call, raw, differentiable, boxes, vmap_dims, linear=True):
    return Case(
        id=f"multi_scale_roi_align-{id}",
        op="multi_scale_roi_align",
        tensors=tensors,
        call=call,
        raw=raw,
        differentiable=differentiable,
        forward_ad=linear,
        double_backward=linear,
        dynamic={boxes: 0},
        vmap_dims=vmap_dims,
    )


CASES = [
    case(
        "adaptive",
        tensors,
        lambda fine, coarse, boxes: opzoo.multi_scale_roi_align(
            [fine, coarse], boxes, (2, 3), [0.5, 0.25], -1, True, canonical_scale=8, canonical_level=1
        ),
        lambda fine, coarse, boxes: ([fine, coarse], boxes, None, 2, 3, [0.5, 0.25], -1, True, *LEVELS),
        (0, 1),
        2,
        (0, 0, 0),
    ),
    case(
        "channels-last",
        channels_last,
        lambda fine, coarse, boxes: opzoo.multi_scale_roi_align(
            [fine, coarse], boxes, 3, [0.5, 0.25], 2, canonical_scale=8, canonical_level=1
        ),
        lambda fine, coarse, boxes: ([fine, coarse], boxes, None, 3, 3, [0.5, 0.25], 2, False, *LEVELS),
        (0, 1),
        2,
        (0, None, None),
    ),
    case(
        "list",
        listed,
        lambda fine, coarse, first, second: opzoo.multi_scale_roi_align(
            [fine, coarse], [first, second], 2, [0.5, 0.25], 2, canonical_scale=8, canonical_level=1
        ),
        lambda fine, coarse, first, second: (
            [fine, coarse],
            torch.cat([first, second]),
            torch.tensor([0] * len(first) + [1] * len(second), device=fine.device),
            2,
            2,
            [0.5, 0.25],
            2,
            False,
            *LEVELS,
        ),
        (0, 1),
        3,
        (None, None, 0, 0),
    ),
    case(
        "boxes",
        moving,
        lambda fine, coarse, first, second: opzoo.multi_scale_roi_align(
            [fine, coarse], [first, second], (2, 3), [0.5, 0.25], 2, True, canonical_scale=8, canonical_level=1
        ),
        lambda fine, coarse, first, second: (
            [fine, coarse],
            torch.cat([first, second]),
            torch.tensor([0] * len(first) + [1] * len(second), device=fine.device),
            2,
            3,
            [0.5, 0.25],
            2,
            True,
            *LEVELS,
        ),
        (0, 1, 2, 3),
        3,
        (0, 0, None, None),
        linear=False,
    ),
    case(
        "one-map",
        one_map,
        lambda fine, boxes: opzoo.multi_scale_roi_align([fine], boxes, 2, [0.5], 2),
        lambda fine, boxes: ([fine], boxes, None, 2, 2, [0.5], 2, False, 224.0, 4.0, 1, 1),
        (0,),
        1,
        (0, 0),
    ),
]

MODULES = [
    lambda: opzoo.MultiScaleRoIAlign(["0", "1"], 7, 2),
    lambda: opzoo.MultiScaleRoIAlign(
        ["a"], (3, 5), -1, canonical_scale=32, canonical_level=3, spatial_scales=[0.25], aligned=True
    ),
]
