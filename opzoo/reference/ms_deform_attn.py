"""``ms_deform_attn`` in plain PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def ms_deform_attn(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Weighted bilinear samples of several maps, head by head.

    Args:
        value: ``Tensor[B, S, M, D]``, the pixels of all levels one after the other.
        spatial_shapes: ``Tensor[L, 2]``, height and width of each level.
        level_start_index: ``Tensor[L]``, the first pixel of each level.
        sampling_locations: ``Tensor[B, Q, M, L, P, 2]``, (x, y), 0 to 1 across the map.
        attention_weights: ``Tensor[B, Q, M, L, P]``.
    """
    B, _, M, D = value.shape
    out = value.new_zeros(B * M, D, sampling_locations.shape[1])
    for level, (height, width) in enumerate(spatial_shapes.tolist()):
        start = int(level_start_index[level])
        maps = value[:, start : start + height * width].permute(0, 2, 3, 1).reshape(B * M, D, height, width)
        grid = 2 * sampling_locations[:, :, :, level].to(value.dtype).transpose(1, 2).flatten(0, 1) - 1
        samples = F.grid_sample(maps, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        weights = attention_weights[:, :, :, level].to(value.dtype).transpose(1, 2).flatten(0, 1)
        out = out + (samples * weights.unsqueeze(1)).sum(-1)
    return out.reshape(B, M * D, -1).transpose(1, 2)
