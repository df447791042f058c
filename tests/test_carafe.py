"""carafe against the reference: values, gradients, layouts, sizes, errors."""

from __future__ import annotations

import pytest
import torch
from helpers import FLOATS, assert_as_good_as

import opzoo


def make(device, dtype=torch.float64, *, N=2, C=6, H=5, W=7, k=3, groups=1, s=2):
    features = torch.randn(N, C, H, W, device=device).to(dtype)
    return features, torch.rand(N, groups * k * k, H * s, W * s, device=device).to(dtype), k, groups, s


def loss_and_gradients(function, features, masks, *numbers):
    leaves = [t.detach().requires_grad_() for t in (features, masks)]
    out = function(*leaves, *numbers)
    along = torch.arange(out.numel(), device=out.device).remainder(5).sub(2).reshape(out.shape).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, along)


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("s", [1, 2, 3])
def test_values_and_gradients(s, groups, k, device):
    inputs = make(device, k=k, groups=groups, s=s)
    for ours, theirs in zip(
        loss_and_gradients(opzoo.carafe, *inputs), loss_and_gradients(opzoo.reference.carafe, *inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dtypes(dtype, device):
    features, masks, *numbers = make(device, dtype, k=5, C=32)
    found = loss_and_gradients(opzoo.carafe, features, masks, *numbers)
    exact = loss_and_gradients(opzoo.reference.carafe, features.double(), masks.double(), *numbers)
    peer = loss_and_gradients(opzoo.reference.carafe, features, masks, *numbers)
    for ours, theirs, truth in zip(found, peer, exact, strict=True):
        assert ours.dtype == dtype and ours.is_contiguous()
        if dtype != torch.float64:
            assert_as_good_as(ours, theirs, truth)


@pytest.mark.parametrize("size", [(1, 1), (1, 31), (33, 2)], ids=str)
def test_sizes_and_layouts(size, device):
    features, masks, *numbers = make(device, N=1, C=4, H=size[0], W=size[1], groups=2)
    expected = loss_and_gradients(opzoo.reference.carafe, features, masks, *numbers)
    layouts = (
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t.repeat_interleave(2, 3)[..., ::2],
        lambda t: t.mT.contiguous().mT,
    )
    for layout in layouts:
        found = loss_and_gradients(opzoo.carafe, layout(features), layout(masks), *numbers)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_deterministic(device):
    inputs = make(device, torch.float32, C=64, H=20, W=30, k=5, groups=4)
    first = loss_and_gradients(opzoo.carafe, *inputs)
    for _ in range(5):
        for ours, theirs in zip(loss_and_gradients(opzoo.carafe, *inputs), first, strict=True):
            assert torch.equal(ours, theirs)


def test_errors(device):
    features, masks, *_ = make(device)
    with pytest.raises(TypeError, match=r"opzoo::carafe: kernel_size must be an int, got 3\.0"):
        opzoo.carafe(features, masks, 3.0)
    for number in (0, 2, -3, 1025, 2**62):
        with pytest.raises(ValueError, match="opzoo::carafe: kernel_size must be odd"):
            opzoo.carafe(features, masks, number)
    for number in (0, -1, 1025, 2**62):
        with pytest.raises(ValueError, match="opzoo::carafe: scale_factor must be from 1 to 1024"):
            opzoo.carafe(features, masks, 3, 1, number)
    with pytest.raises(ValueError, match="opzoo::carafe: group_size must divide the 6 channels of features, got 4"):
        opzoo.carafe(features, masks, 3, 4)
    with pytest.raises(RuntimeError, match=r"opzoo::carafe: masks must have shape \[2, 25, 10, 14\], got"):
        opzoo.carafe(features, masks, 5)
    with pytest.raises(RuntimeError, match="opzoo::carafe: masks must have the dtype of features, float64, got"):
        opzoo.carafe(features, masks.float(), 3)
