import torch
from helpers import Case

import opzoo

LEVELS = ((4, 5), (2, 3))


def tensors(device, dtype):
    value = torch.randn(2, 26, 2, 4, device=device, dtype=dtype)
    locations = torch.rand(2, 3, 2, 2, 3, 2, device=device, dtype=torch.promote_types(dtype, torch.float32))
    weights = torch.rand(2, 3, 2, 2, 3, device=device, dtype=locations.dtype)
    return value, torch.tensor(LEVELS, device=device), torch.tensor([0, 20], device=device), locations, weights


def vectors(device, dtype):
    """Heads of 16 channels, and locations off the map."""
    value = torch.randn(1, 26, 1, 16, device=device, dtype=dtype)
    locations = torch.rand(1, 5, 1, 2, 4, 2, device=device, dtype=torch.promote_types(dtype, torch.float32))
    weights = torch.rand(1, 5, 1, 2, 4, device=device, dtype=locations.dtype)
    levels = torch.tensor(LEVELS, device=device), torch.tensor([0, 20], device=device)
    return value, *levels, 1.6 * locations - 0.3, weights


CASES = [
    Case(
        id="ms_deform_attn",
        op="ms_deform_attn",
        tensors=tensors,
        call=opzoo.ms_deform_attn,
        raw=lambda *tensors: tensors,
        differentiable=(0, 3, 4),
        deterministic_backward=False,
        dynamic={3: 1, 4: 1},
        autocast_output="autocast",
        vmap_dims=(0, None, None, 0, None),
    ),
    Case(
        id="ms_deform_attn-vectors",
        op="ms_deform_attn",
        tensors=vectors,
        call=opzoo.ms_deform_attn,
        raw=lambda *tensors: tensors,
        differentiable=(0, 3, 4),
        deterministic_backward=False,
        dynamic={3: 1, 4: 1},
        autocast_output="autocast",
        vmap_dims=(None, None, None, 0, 0),
    ),
]

MODULES = [
    lambda: opzoo.MultiScaleDeformableAttention(16, 2, 3, 2),
    lambda: opzoo.MultiScaleDeformableAttention(8, 4, 1, 4, dropout=0.0, batch_first=True, value_proj_ratio=0.5),
]
