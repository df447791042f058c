"""``carafe`` in plain PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def carafe(features: Tensor, masks: Tensor, kernel_size: int, group_size: int = 1, scale_factor: int = 2) -> Tensor:
    """Upsampling whose ``kernel_size x kernel_size`` kernel at every pixel of the result is data.

    Args:
        features: ``Tensor[N, C, H, W]``.
        masks: ``Tensor[N, group_size * kernel_size**2, scale_factor * H, scale_factor * W]``, the kernels.
        kernel_size: odd.
        group_size: number of groups of channels with kernels of their own.
        scale_factor: pixels of the result per pixel of ``features``, along both axes.
    """
    N, C, H, W = features.shape
    padded = F.pad(features, (kernel_size // 2,) * 4)
    windows = padded.unfold(2, kernel_size, 1).unfold(3, kernel_size, 1)  # [N, C, H, W, k, k]
    kernels = masks.reshape(N, group_size, kernel_size, kernel_size, H, scale_factor, W, scale_factor)
    windows = windows.unflatten(1, (group_size, C // group_size))
    out = (windows.permute(0, 1, 2, 5, 6, 3, 4)[:, :, :, :, :, :, None, :, None] * kernels[:, :, None]).sum((3, 4))
    return out.reshape(N, C, H * scale_factor, W * scale_factor)
