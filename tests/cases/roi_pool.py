import torch
from helpers import Case

import opzoo


def tensors(device, dtype):
    boxes = [[0, 0.5, 1.0, 5.0, 6.5], [1, -2.0, 1.0, 8.0, 9.0], [1, 3.0, 2.0, 3.2, 2.1]]
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.randn(2, 3, 7, 8, device=device, dtype=dtype), torch.tensor(boxes, device=device, dtype=exact)


CASES = [
    Case(
        id="roi_pool",
        op="roi_pool",
        tensors=tensors,
        call=lambda input, boxes: opzoo.roi_pool(input, boxes, (2, 3), 0.7),
        raw=lambda input, boxes: (input, boxes, 2, 3, 0.7, True),
        differentiable=(0,),
        double_backward=True,
        deterministic_backward=False,
        dynamic={1: 0},
    ),
]

MODULES = [lambda: opzoo.RoIPool((3, 5), 0.5)]
