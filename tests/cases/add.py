import torch
from helpers import Case

import opzoo

CASES = [
    Case(
        id="add-same-shape",
        op="add",
        tensors=lambda device, dtype: (
            torch.randn(3, 5, device=device, dtype=dtype),
            torch.randn(3, 5, device=device, dtype=dtype),
        ),
        call=lambda a, b: opzoo.add(a, b, alpha=2.5),
        raw=lambda a, b: (a, b, 2.5),
        differentiable=(0, 1),
        forward_ad=True,
        double_backward=True,
        dynamic={0: 0, 1: 0},
        vmap_dims=(0, 0),
    ),
    Case(
        id="add-broadcast",
        op="add",
        tensors=lambda device, dtype: (
            torch.randn(2, 1, 5, device=device, dtype=dtype),
            torch.randn(4, 1, device=device, dtype=dtype),
        ),
        call=opzoo.add,
        raw=lambda a, b: (a, b, 1.0),
        differentiable=(0, 1),
        forward_ad=True,
        double_backward=True,
        dynamic={0: 0},
        vmap_dims=(0, None),
    ),
]
