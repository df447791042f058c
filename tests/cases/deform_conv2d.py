import torch
from helpers import Case

import opzoo


def _off_the_grid(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Offsets whose fraction is far from 0: the derivative jumps at whole pixels."""
    whole = torch.randint(-2, 3, shape, device=device)
    return (whole + 0.125 + 0.75 * torch.rand(shape, device=device)).to(dtype)


CASES = [
    Case(
        id="deform_conv2d-plain",
        op="deform_conv2d",
        tensors=lambda device, dtype: (
            torch.randn(2, 3, 5, 6, device=device, dtype=dtype),
            _off_the_grid(2, 18, 5, 6, device=device, dtype=dtype),
            torch.randn(4, 3, 3, 3, device=device, dtype=dtype),
        ),
        call=lambda input, offset, weight: opzoo.deform_conv2d(input, offset, weight, padding=1),
        raw=lambda input, offset, weight: (input, offset, weight, None, None, 1, 1, 1, 1, 1, 1),
        differentiable=(0, 1, 2),
        double_backward=True,
        deterministic_backward=False,
        same_for_any_threads=False,
        dynamic={0: 0, 1: 0},
        autocast_output="autocast",
        vmap_dims=(0, 0, None),
    ),
    Case(
        id="deform_conv2d-mask-groups",
        op="deform_conv2d",
        tensors=lambda device, dtype: (
            torch.randn(3, 4, 7, 6, device=device, dtype=dtype),
            _off_the_grid(3, 24, 4, 3, device=device, dtype=dtype),
            torch.randn(6, 2, 3, 2, device=device, dtype=dtype),
            torch.randn(6, device=device, dtype=dtype),
            torch.rand(3, 12, 4, 3, device=device, dtype=dtype),
        ),
        call=lambda input, offset, weight, bias, mask: opzoo.deform_conv2d(
            input, offset, weight, bias, stride=(2, 3), padding=(1, 2), dilation=(1, 2), mask=mask
        ),
        raw=lambda input, offset, weight, bias, mask: (input, offset, weight, bias, mask, 2, 3, 1, 2, 1, 2),
        differentiable=(0, 1, 2, 3, 4),
        double_backward=True,
        deterministic_backward=False,
        same_for_any_threads=False,
        dynamic={0: 0, 1: 0, 4: 0},
        autocast_output="autocast",
        vmap_dims=(0, 0, 0, 0, 0),
    ),
]

MODULES = [
    lambda: opzoo.DeformConv2d(3, 4, 3, padding=1),
    lambda: opzoo.DeformConv2d(4, 6, (3, 2), stride=2, dilation=(1, 2), groups=2, bias=False),
    lambda: opzoo.DeformConv2dPack(4, 6, 3, offset_groups=2),
    lambda: opzoo.ModulatedDeformConv2dPack(4, 4, (1, 3), groups=2, bias=False),
]
