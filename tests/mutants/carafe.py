"""``carafe``: the window's place, its order, the groups, and the pixel that a kernel belongs to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mutants import Mutant


def _upsample(
    features: Tensor,
    masks: Tensor,
    k: int,
    groups: int,
    s: int,
    *,
    shift: int = 0,
    turn: bool = False,
    interleave: bool = False,
) -> Tensor:
    N, C, H, W = features.shape
    windows = F.unfold(F.pad(features, (k // 2 + shift, k // 2 - shift, k // 2, k // 2)), k).reshape(N, C, k * k, H, W)
    if turn:
        windows = windows.reshape(N, C, k, k, H, W).transpose(2, 3).reshape(N, C, k * k, H, W)
    windows = windows.repeat_interleave(s, 3).repeat_interleave(s, 4)
    kernels = masks.reshape(N, groups, k * k, s * H, s * W)
    kernels = kernels.repeat(1, C // groups, 1, 1, 1) if interleave else kernels.repeat_interleave(C // groups, 1)
    return (windows * kernels).sum(2)


def shifts_the_window(features: Tensor, masks: Tensor, k: int, groups: int = 1, s: int = 2) -> Tensor:
    return _upsample(features, masks, k, groups, s, shift=1)


def swaps_the_axes(features: Tensor, masks: Tensor, k: int, groups: int = 1, s: int = 2) -> Tensor:
    return _upsample(features, masks, k, groups, s, turn=True)


def interleaves_groups(features: Tensor, masks: Tensor, k: int, groups: int = 1, s: int = 2) -> Tensor:
    return _upsample(features, masks, k, groups, s, interleave=True)


def _inputs() -> Any:
    return (torch.randn(1, 4, 3, 4), torch.rand(1, 18, 6, 8), 3, 2, 2), {}


MUTANTS = [
    Mutant("carafe-shifts-the-window", "carafe", shifts_the_window, _inputs),
    Mutant("carafe-swaps-the-axes", "carafe", swaps_the_axes, _inputs),
    Mutant("carafe-interleaves-groups", "carafe", interleaves_groups, _inputs),
]
