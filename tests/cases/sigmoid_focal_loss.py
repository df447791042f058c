import torch
from helpers import Case

import opzoo


def labels(device, dtype):
    return torch.randn(3, 5, device=device, dtype=dtype), torch.rand(3, 5, device=device).to(dtype)


def class_ids(device, dtype):
    return torch.randn(4, 5, device=device, dtype=dtype), torch.tensor([0, 4, 5, -1], device=device)


CASES = [
    Case(
        id="sigmoid_focal_loss-labels",
        op="sigmoid_focal_loss",
        tensors=labels,
        call=lambda inputs, targets: opzoo.sigmoid_focal_loss(inputs, targets, 0.3, 1.5),
        raw=lambda inputs, targets: (inputs, targets, 0.3, 1.5),
        differentiable=(0,),
        double_backward=True,
        dynamic={0: 0, 1: 0},
        vmap_dims=(0, 0),
    ),
    Case(
        id="sigmoid_focal_loss-classes",
        op="sigmoid_focal_loss",
        tensors=class_ids,
        call=lambda inputs, targets: opzoo.sigmoid_focal_loss(inputs, targets, -1, 2.0),
        raw=lambda inputs, targets: (inputs, targets, -1.0, 2.0),
        differentiable=(0,),
        dynamic={0: 0, 1: 0},
        vmap_dims=(0, None),
    ),
]

MODULES = [lambda: opzoo.SigmoidFocalLoss(0.5, 1.0, "sum")]
