import torch
from helpers import Case

import opzoo


def tensors(device, dtype):
    features = torch.randn(2, 4, 3, 5, device=device, dtype=dtype)
    return features, torch.rand(2, 18, 6, 10, device=device, dtype=dtype)


CASES = [
    Case(
        id="carafe",
        op="carafe",
        tensors=tensors,
        call=lambda features, masks: opzoo.carafe(features, masks, 3, 2, 2),
        raw=lambda features, masks: (features, masks, 3, 2, 2),
        differentiable=(0, 1),
        dynamic={0: 0, 1: 0},
        vmap_dims=(0, None),
    ),
]
