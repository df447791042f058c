"""``roi_align``: where it samples, what lies outside the map, what it divides by."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from mutants import Mutant


def _clamp(t: Tensor, low: float, high: float, gradient_passes: bool) -> Tensor:
    clamped = t.clamp(low, high)
    return t + (clamped - t).detach() if gradient_passes else clamped


def _sample(image: Tensor, y: Tensor, x: Tensor, defect: str) -> Tensor:
    """``image[C, H, W]`` at one point."""
    H, W = image.shape[1:]
    if not (-1 <= y <= H and -1 <= x <= W):
        return image.new_zeros(image.shape[0])
    if defect != "zero-border":
        passes = defect == "gradient-passes-the-edge"
        y, x = _clamp(y, 0, H - 1, passes), _clamp(x, 0, W - 1, passes)
    total = image.new_zeros(image.shape[0])
    top, left = math.floor(y.detach()), math.floor(x.detach())
    for row, weight_y in ((top, 1 - (y - top)), (top + 1, y - top)):
        for column, weight_x in ((left, 1 - (x - left)), (left + 1, x - left)):
            if 0 <= row < H and 0 <= column < W:
                if defect == "nearest":
                    weight_y, weight_x = weight_y.round(), weight_x.round()
                total = total + image[:, row, column] * weight_y * weight_x
    return total


def roi_align_with(
    input: Tensor,
    boxes: Tensor,
    output_size: tuple[int, int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    aligned: bool = False,
    *,
    defect: str = "",
) -> Tensor:
    ph, pw = output_size
    outs = []
    for row in boxes:
        image = input[0 if defect == "first-image" else int(row[0].detach())]
        x1, y1, x2, y2 = (row[1:] * (1 if defect == "scale" else spatial_scale)).unbind()
        if defect == "xy":
            x1, y1, x2, y2 = y1, x1, y2, x2
        shift = 0.5 if aligned != (defect == "half-pixel") else 0.0
        x1, y1, x2, y2 = x1 - shift, y1 - shift, x2 - shift, y2 - shift
        height, width = y2 - y1, x2 - x1
        if not aligned or defect == "min-size":
            passes = defect == "gradient-passes-the-minimum"
            height, width = _clamp(height, 1, math.inf, passes), _clamp(width, 1, math.inf, passes)
        if defect == "inclusive":
            height, width = height + 1, width + 1
        bin_h, bin_w = height / ph, width / pw
        rounding = math.floor if defect == "floor-grid" else math.ceil
        grid_h = sampling_ratio if sampling_ratio > 0 else max(rounding(bin_h.detach()), 1 if defect else 0)
        grid_w = sampling_ratio if sampling_ratio > 0 else max(rounding(bin_w.detach()), 1 if defect else 0)
        at = 0.0 if defect == "corners" else 0.5
        bins = []
        for p in range(ph):
            for q in range(pw):
                samples = [
                    _sample(image, y1 + (p + (i + at) / grid_h) * bin_h, x1 + (q + (j + at) / grid_w) * bin_w, defect)
                    for i in range(grid_h)
                    for j in range(grid_w)
                ]
                count = 1 if defect == "count" else len(samples)
                bins.append(sum(samples, start=image.new_zeros(image.shape[0])) / max(count, 1))
        out = torch.stack(bins, 1).reshape(-1, ph, pw)
        outs.append(out.mT.reshape(-1, ph, pw) if defect == "bins-transposed" else out)
    return torch.stack(outs)


class _LosesCount(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, count: int) -> Tensor:
        ctx.count = count
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.count, None


def backward_forgets_count(input: Tensor, boxes: Tensor, output_size: Any, *args: Any, **kwargs: Any) -> Tensor:
    return _LosesCount.apply(roi_align_with(input, boxes, output_size, *args, **kwargs), 4)


class _Tampers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, boxes: Tensor, change: Any) -> Tensor:
        ctx.change = change
        return boxes.view_as(boxes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return ctx.change(grad), None


def _box_gradient(change: Any) -> Any:
    """The right values and gradient to the map, and ``change`` on the gradient to the boxes."""

    def wrong(input: Tensor, boxes: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return roi_align_with(input, _Tampers.apply(boxes, change), *args, **kwargs)

    return wrong


def _follows_the_first_corner(grad: Tensor) -> Tensor:
    """As if every sample kept its distance to (x1, y1)."""
    return torch.cat([grad[:, :1], grad[:, 1:3] + grad[:, 3:], torch.zeros_like(grad[:, 3:])], 1)


def _inputs(aligned: bool = True, sampling_ratio: int = 2) -> Any:
    """Two images; boxes inside, over each border, thin, and a small one."""
    boxes = [
        [0, 2.3, 1.1, 9.7, 6.2],
        [1, -3.5, -2.0, 5.0, 4.0],
        [1, 8.0, 5.0, 17.0, 13.0],
        [0, 4.0, 4.0, 4.6, 4.4],
        [1, 1.0, 3.0, 12.0, 5.0],
    ]
    kwargs = {"spatial_scale": 0.75, "sampling_ratio": sampling_ratio, "aligned": aligned}
    return (torch.randn(2, 3, 7, 9), torch.tensor(boxes), (3, 2)), kwargs


_legacy = functools.partial(_inputs, False)
_adaptive = functools.partial(_inputs, True, -1)


def _with(defect: str) -> Any:
    return functools.partial(roi_align_with, defect=defect)


def _mutant(id: str, wrong: Any, inputs: Any) -> Mutant:
    return Mutant(id, "roi_align", wrong, inputs, constant=(1,))


def _box_mutant(id: str, wrong: Any, inputs: Any = _inputs) -> Mutant:
    return Mutant(id, "roi_align", wrong, inputs)


MUTANTS = [
    _mutant("roi-align-off-by-half-a-pixel", _with("half-pixel"), _inputs),
    _mutant("roi-align-legacy-off-by-half-a-pixel", _with("half-pixel"), _legacy),
    _mutant("roi-align-without-count", _with("count"), _inputs),
    _mutant("roi-align-zero-border", _with("zero-border"), _inputs),
    _mutant("roi-align-swaps-x-and-y", _with("xy"), _inputs),
    _mutant("roi-align-transposes-bins", _with("bins-transposed"), _inputs),
    _mutant("roi-align-ignores-scale", _with("scale"), _inputs),
    _mutant("roi-align-first-image-only", _with("first-image"), _inputs),
    _mutant("roi-align-minimum-size-when-aligned", _with("min-size"), _inputs),
    _mutant("roi-align-inclusive-corner", _with("inclusive"), _inputs),
    _mutant("roi-align-samples-at-corners", _with("corners"), _inputs),
    _mutant("roi-align-nearest", _with("nearest"), _inputs),
    _mutant("roi-align-adaptive-floor", _with("floor-grid"), _adaptive),
    _mutant("roi-align-backward-forgets-count", backward_forgets_count, _inputs),
    _box_mutant("roi-align-boxes-without-count", _box_gradient(lambda grad: 4 * grad)),
    _box_mutant("roi-align-boxes-swaps-dx-and-dy", _box_gradient(lambda grad: grad[:, [0, 2, 1, 4, 3]])),
    _box_mutant("roi-align-boxes-swaps-the-corners", _box_gradient(lambda grad: grad[:, [0, 3, 4, 1, 2]])),
    _box_mutant("roi-align-boxes-ignores-scale", _box_gradient(lambda grad: grad / 0.75)),
    _box_mutant("roi-align-boxes-wrong-sign", _box_gradient(torch.neg)),
    _box_mutant("roi-align-boxes-first-corner-only", _box_gradient(_follows_the_first_corner)),
    _box_mutant("roi-align-boxes-none", _box_gradient(torch.zeros_like)),
    _box_mutant("roi-align-boxes-pass-the-edge", _with("gradient-passes-the-edge")),
    _box_mutant("roi-align-boxes-pass-the-minimum", _with("gradient-passes-the-minimum"), _legacy),
]
CORRECT = [
    _box_mutant("roi-align", _with("")),
    _box_mutant("roi-align-legacy", _with(""), _legacy),
    _box_mutant("roi-align-adaptive", _with(""), _adaptive),
]
