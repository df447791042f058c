import torch
from helpers import Case

import opzoo

CASES = [
    Case(
        id="matmul-2d",
        op="matmul",
        tensors=lambda device, dtype: (
            torch.randn(7, 5, device=device, dtype=dtype),
            torch.randn(5, 6, device=device, dtype=dtype),
        ),
        call=opzoo.matmul,
        raw=lambda a, b: (a, b),
        differentiable=(0, 1),
        forward_ad=True,
        double_backward=True,
        dynamic={0: 0},
        autocast_output="autocast",
        vmap_dims=(0, 0),
    ),
    Case(
        id="matmul-broadcast",
        op="matmul",
        tensors=lambda device, dtype: (
            torch.randn(3, 1, 4, 5, device=device, dtype=dtype),
            torch.randn(2, 6, 5, device=device, dtype=dtype).mT,
        ),
        call=opzoo.matmul,
        raw=lambda a, b: (a.expand(3, 2, 4, 5), b.expand(3, 2, 5, 6)),
        differentiable=(0, 1),
        forward_ad=True,
        double_backward=True,
        dynamic={0: 2},
        autocast_output="autocast",
        vmap_dims=(0, None),
    ),
]
