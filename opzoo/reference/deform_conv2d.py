"""``deform_conv2d`` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = (1, 1),
    padding: int | tuple[int, int] = (0, 0),
    dilation: int | tuple[int, int] = (1, 1),
    mask: Tensor | None = None,
) -> Tensor:
    """Gather all samples, then one matrix product per weight group. Differentiable any number of times.

    Args:
        input: ``Tensor[N, C, H, W]``.
        offset: ``Tensor[N, 2*D*kh*kw, OH, OW]``, (dy, dx) interleaved per tap.
        weight: ``Tensor[K, C/G, kh, kw]``.
        bias: ``Tensor[K]``.
        stride: (vertical, horizontal).
        padding: (vertical, horizontal).
        dilation: (vertical, horizontal).
        mask: ``Tensor[N, D*kh*kw, OH, OW]``.
    """
    stride, padding, dilation = ((v, v) if isinstance(v, int) else v for v in (stride, padding, dilation))
    N, C, H, W = input.shape
    K, per_group, kh, kw = weight.shape
    OH, OW = offset.shape[2:]
    D = offset.shape[1] // (2 * kh * kw)
    G = C // per_group
    work = torch.float64 if input.dtype == torch.float64 else torch.float32
    image, offset = input.to(work), offset.to(work)
    device = input.device

    # Where every tap of every output pixel reads: [N, D, kh*kw, OH, OW].
    i = torch.arange(kh, device=device).repeat_interleave(kw)
    j = torch.arange(kw, device=device).repeat(kh)
    grid_y = torch.arange(OH, device=device) * stride[0] - padding[0]
    grid_x = torch.arange(OW, device=device) * stride[1] - padding[1]
    dy, dx = offset.view(N, D, kh * kw, 2, OH, OW).unbind(3)
    y = (i * dilation[0]).view(-1, 1, 1) + grid_y.view(-1, 1) + dy
    x = (j * dilation[1]).view(-1, 1, 1) + grid_x + dx

    # Pixels outside the map are zero; a sample at or beyond -1 or the size has no derivative either.
    outside = (y <= -1) | (y >= H) | (x <= -1) | (x >= W)
    y, x = y.masked_fill(outside, -2), x.masked_fill(outside, -2)
    top, left = y.detach().floor(), x.detach().floor()
    columns = image.new_zeros(())
    for corner_y, weight_y in ((top, 1 - (y - top)), (top + 1, y - top)):
        for corner_x, weight_x in ((left, 1 - (x - left)), (left + 1, x - left)):
            missing = (corner_y < 0) | (corner_y >= H) | (corner_x < 0) | (corner_x >= W)
            at = corner_y.nan_to_num().clamp(0, H - 1).long() * W + corner_x.nan_to_num().clamp(0, W - 1).long()
            flat = image.reshape(N, D, C // D, H * W)
            index = at.view(N, D, 1, -1).expand(-1, -1, C // D, -1)
            pixels = flat.gather(3, index).view(N, D, C // D, kh * kw, OH, OW)
            share = (weight_y * weight_x).masked_fill(missing, 0)
            columns = columns + share.unsqueeze(2) * pixels.masked_fill(missing.unsqueeze(2), 0)
    if mask is not None:
        columns = columns * mask.to(work).view(N, D, 1, kh * kw, OH, OW)

    # [N, G, K/G, C/G*kh*kw] @ [N, G, C/G*kh*kw, OH*OW]
    columns = columns.reshape(N, G, per_group * kh * kw, OH * OW)
    matrix = weight.to(work).reshape(G, K // G, per_group * kh * kw)
    output = (matrix @ columns).view(N, K, OH, OW)
    if bias is not None:
        output = output + bias.to(work).view(-1, 1, 1)
    return output.to(input.dtype)
