"""Inputs and the comparison of the roi_align tests."""

from __future__ import annotations

import torch
from helpers import error_against


def make_map(*shape, device, dtype=torch.float32, channels_last=False):
    t = torch.randn(*shape, dtype=torch.float64).to(device=device, dtype=dtype)
    return t.contiguous(memory_format=torch.channels_last) if channels_last else t


def make_boxes(count, images, size, device):
    """Boxes that start and end inside and outside the map, with the image index in front."""
    corner = torch.rand(count, 2) * (size + 8) - 6
    extent = torch.rand(count, 2) * size
    index = torch.randint(images, (count, 1)).float()
    return torch.cat([index, corner, corner + extent], 1).to(device)


def box(*coordinates, image=0.0, device="cpu"):
    return torch.tensor([[image, *coordinates]], device=device)


def close(result, expected, tolerance=1e-5):
    assert result.dtype == expected.dtype
    assert error_against(expected, result) <= tolerance
