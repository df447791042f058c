"""``deform_conv2d``: the order of offsets, masks, borders, groups."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mutants import Mutant


def _bilinear(plane: Tensor, y: Tensor, x: Tensor, defect: str) -> Tensor:
    """``plane[N, c, H, W]`` at ``[N, OH, OW]`` points; pixels outside are zero."""
    N, c, H, W = plane.shape
    inside = (y > -1) & (y < H) & (x > -1) & (x < W)
    if defect == "clamp-border":
        y, x = y.clamp(0, H - 1), x.clamp(0, W - 1)
    top, left = y.detach().floor(), x.detach().floor()
    total = plane.new_zeros(N, c, *y.shape[1:])
    image = torch.arange(N).view(N, 1, 1).expand_as(top)
    for row, weight_y in ((top, 1 - (y - top)), (top + 1, y - top)):
        for column, weight_x in ((left, 1 - (x - left)), (left + 1, x - left)):
            valid = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            pixels = plane[image, :, row.clamp(0, H - 1).long(), column.clamp(0, W - 1).long()].movedim(-1, 1)
            total = total + pixels * (weight_y * weight_x * valid).unsqueeze(1)
    return total


def deform_conv2d_with(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    mask: Tensor | None = None,
    *,
    defect: str = "",
) -> Tensor:
    C = input.shape[1]
    K, per_group, kh, kw = weight.shape
    OH, OW = offset.shape[2:]
    D, G = offset.shape[1] // (2 * kh * kw), C // per_group
    if defect == "padding-swapped":
        padding = padding[::-1]
    if defect == "dilation":
        dilation = (1, 1)
    base_y = (torch.arange(OH) * stride[0] - padding[0]).view(OH, 1).to(input)
    base_x = (torch.arange(OW) * stride[1] - padding[1]).view(1, OW).to(input)
    taps = []
    for tap in range(kh * kw):
        i, j = divmod(tap, kh if defect == "tap-order" else kw)
        columns = []
        for d in range(D):
            if defect == "dy-then-dx":  # all dy, then all dx, instead of pairs
                dy = offset[:, d * 2 * kh * kw + tap]
                dx = offset[:, d * 2 * kh * kw + kh * kw + tap]
            else:
                dy, dx = offset[:, 2 * (d * kh * kw + tap)], offset[:, 2 * (d * kh * kw + tap) + 1]
            if defect == "dx-dy":
                dy, dx = dx, dy
            if defect == "first-offset-group":
                dy, dx = offset[:, 2 * tap], offset[:, 2 * tap + 1]
            channels = input[:, d * (C // D) : (d + 1) * (C // D)]
            column = _bilinear(channels, base_y + i * dilation[0] + dy, base_x + j * dilation[1] + dx, defect)
            if mask is not None and defect != "mask":
                share = mask[:, d * kh * kw + tap].unsqueeze(1)
                column = column * (share.sigmoid() if defect == "mask-sigmoid" else share)
            columns.append(column)
        taps.append(torch.cat(columns, 1))
    gathered = torch.stack(taps, 2)  # [N, C, kh*kw, OH, OW]
    outs = []
    for g in range(G):
        part = gathered[:, g * per_group : (g + 1) * per_group]
        own = weight[g::G] if defect == "interleaved-groups" else weight[g * (K // G) : (g + 1) * (K // G)]
        outs.append(torch.einsum("nctyx,kct->nkyx", part, own.flatten(2)))
    out = torch.cat(outs, 1)
    return out if bias is None or defect == "bias" else out + bias.view(-1, 1, 1)


def _inputs() -> Any:
    """Two weight groups, two offset groups, a kernel and strides that are not square."""
    N, C, H, W, K, kh, kw, D = 2, 4, 6, 7, 4, 3, 2, 2
    stride, padding, dilation = (1, 2), (2, 1), (2, 1)
    OH = (H + 2 * padding[0] - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    OW = (W + 2 * padding[1] - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    tensors = (
        torch.randn(N, C, H, W),
        torch.randn(N, 2 * D * kh * kw, OH, OW) * 1.5,
        torch.randn(K, C // 2, kh, kw),
        torch.randn(K),
    )
    mask = torch.rand(N, D * kh * kw, OH, OW)
    return tensors, {"stride": stride, "padding": padding, "dilation": dilation, "mask": mask}


def _with(defect: str) -> Any:
    return functools.partial(deform_conv2d_with, defect=defect)


DEFECTS = {
    "swaps-dy-and-dx": "dx-dy",
    "all-dy-before-dx": "dy-then-dx",
    "without-mask": "mask",
    "mask-through-sigmoid": "mask-sigmoid",
    "clamp-border": "clamp-border",
    "ignores-dilation": "dilation",
    "swaps-padding": "padding-swapped",
    "wrong-tap-order": "tap-order",
    "first-offset-group-only": "first-offset-group",
    "interleaved-weight-groups": "interleaved-groups",
    "without-bias": "bias",
}


class _SwappedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, offset: Tensor) -> Tensor:
        return offset.view_as(offset)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        pairs = grad.unflatten(1, (-1, 2))
        return pairs.flip(2).flatten(1, 2)


def backward_swaps_dy_and_dx(input: Tensor, offset: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return deform_conv2d_with(input, _SwappedGradient.apply(offset), *args, **kwargs)


MUTANTS = [
    *(Mutant(f"deform-conv2d-{name}", "deform_conv2d", _with(defect), _inputs) for name, defect in DEFECTS.items()),
    Mutant("deform-conv2d-backward-swaps-dy-and-dx", "deform_conv2d", backward_swaps_dy_and_dx, _inputs),
]
CORRECT = [Mutant("deform-conv2d", "deform_conv2d", _with(""), _inputs)]
