import torch
from helpers import Case

import opzoo

BOXES = [[0, 0.5, 1.0, 5.0, 6.5], [1, -2.0, 1.0, 8.0, 9.0], [1, 3.0, 2.0, 3.2, 2.1]]


def make_input(device, dtype):
    return torch.randn(2, 3, 7, 8, device=device, dtype=dtype)


def make_boxes(device):
    return torch.tensor(BOXES, device=device)


def tensors(device, dtype):
    return make_input(device, dtype), make_boxes(device)


def channels_last(device, dtype):
    return make_input(device, dtype).contiguous(memory_format=torch.channels_last), make_boxes(device)


def listed(device, dtype):
    boxes = make_boxes(device)[:, 1:]
    return make_input(device, dtype), boxes[:1], boxes[1:]


CASES = [
    Case(
        id="roi_align-adaptive",
        op="roi_align",
        tensors=tensors,
        call=lambda input, boxes: opzoo.roi_align(input, boxes, (2, 3), 0.7, -1, True),
        raw=lambda input, boxes: (input, boxes, None, 2, 3, 0.7, -1, True),
        differentiable=(0,),
        forward_ad=True,
        double_backward=True,
        dynamic={1: 0},
        vmap_dims=(0, 0),
    ),
    Case(
        id="roi_align-channels-last",
        op="roi_align",
        tensors=channels_last,
        call=lambda input, boxes: opzoo.roi_align(input, boxes, 3, 0.5, 2),
        raw=lambda input, boxes: (input, boxes, None, 3, 3, 0.5, 2, False),
        differentiable=(0,),
        forward_ad=True,
        double_backward=True,
        dynamic={1: 0},
        vmap_dims=(0, None),
    ),
    Case(
        id="roi_align-list",
        op="roi_align",
        tensors=listed,
        call=lambda input, first, second: opzoo.roi_align(input, [first, second], 2, 1.0, 2),
        raw=lambda input, first, second: (
            input,
            torch.cat([first, second]),
            torch.tensor([0, 1, 1], device=input.device),
            2,
            2,
            1.0,
            2,
            False,
        ),
        differentiable=(0,),
        forward_ad=True,
        double_backward=True,
        dynamic={2: 0},
        vmap_dims=(0, 0, 0),
    ),
    Case(
        id="roi_align-max",
        op="_roi_align_max",
        tensors=tensors,
        call=lambda input, boxes: opzoo.roi_align(input, boxes, (2, 3), 0.7, 2, True, "max"),
        raw=lambda input, boxes: (input, boxes, None, 2, 3, 0.7, 2, True),
        differentiable=(0,),
        forward_ad=True,
        double_backward=True,
        dynamic={1: 0},
        vmap_dims=(0, 0),
    ),
]

MODULES = [
    lambda: opzoo.RoIAlign((3, 5), 0.5, 2),
    lambda: opzoo.RoIAlign(7, 0.25, -1, aligned=True, pool_mode="max"),
]
