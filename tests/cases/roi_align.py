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


def moving(device, dtype):
    """Coordinates that get a gradient, in a dtype of their own, without a sample near a kink."""
    boxes = make_boxes(device).to(torch.promote_types(dtype, torch.float32))
    shift = torch.tensor([0.13, -0.21, 0.34, 0.27], device=device)
    return make_input(device, dtype), boxes[:, :1].clone(), boxes[:, 1:] + shift


def moving_list(device, dtype):
    input, _, coordinates = moving(device, dtype)
    return input.contiguous(memory_format=torch.channels_last), coordinates[:1], coordinates[1:]


def joined(image, coordinates):
    """On the CPU where the two lie on different devices: the operator has to see it, not torch.cat."""
    device = image.device if image.device == coordinates.device else torch.device("cpu")
    return torch.cat([image.to(device), coordinates.to(device)], 1)


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
        id="roi_align-boxes",
        op="roi_align",
        tensors=moving,
        call=lambda input, image, coordinates: opzoo.roi_align(
            input, joined(image, coordinates), (2, 3), 0.7, -1, True
        ),
        raw=lambda input, image, coordinates: (
            input,
            joined(image, coordinates),
            None,
            2,
            3,
            0.7,
            -1,
            True,
        ),
        differentiable=(0, 2),
        dynamic={1: 0, 2: 0},
        vmap_dims=(None, None, 0),
    ),
    Case(
        id="roi_align-boxes-list",
        op="roi_align",
        tensors=moving_list,
        call=lambda input, first, second: opzoo.roi_align(input, [first, second], 3, 0.5, 2),
        raw=lambda input, first, second: (
            input,
            torch.cat([first, second]),
            torch.tensor([0, 1, 1], device=input.device),
            3,
            3,
            0.5,
            2,
            False,
        ),
        differentiable=(0, 1, 2),
        dynamic={2: 0},
        vmap_dims=(0, 0, None),
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
