"""roi_align: a detector's second stage on the stride-4 level."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opzoo.bench.case import LABELS, Case, Tensors, Work, as_half, nbytes
from opzoo.bench.data import detector_boxes, normal, seeded

SCALE = 0.25


def _rois(count: int, images: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """``Tensor[count, 5]``, image index first.

    Corners are whole pixels: exact in float16, the dtype torchvision wants them in beside a float16
    input, and sampling_ratio=0 then rounds the number of samples alike in float32 and float64.
    """
    boxes = detector_boxes(count, generator, width / SCALE, height / SCALE).round()
    index = torch.randint(images, (count, 1), generator=generator, device=generator.device)
    return torch.cat([index.to(boxes.dtype), boxes], 1)


def touched_pixels(shape: torch.Size, rois: Tensor, scale: float = SCALE) -> int:
    """Pixels of the map inside at least one RoI, over all images: what any implementation reads."""
    n, _, height, width = shape
    covered = torch.zeros(n, height + 1, width + 1, device=rois.device)
    image = rois[:, 0].long()
    x1, y1 = ((rois[:, i] * scale).floor().long().clamp_(0) for i in (1, 2))
    x2, y2 = ((rois[:, i] * scale).ceil().long().clamp_(max=limit) for i, limit in ((3, width), (4, height)))
    one = torch.ones_like(rois[:, 0])
    for y, x, sign in ((y1, x1, 1), (y1, x2, -1), (y2, x1, -1), (y2, x2, 1)):
        covered.index_put_((image, y, x), sign * one, accumulate=True)
    return int((covered.cumsum(1).cumsum(2)[:, :height, :width] > 0.5).sum())


def _case(
    shape: tuple[int, int, int, int],
    count: int,
    pooled: int,
    ratio: int,
    dtype: torch.dtype,
    channels_last: bool = False,
) -> Case:
    def tensors(device: torch.device) -> Tensors:
        generator = seeded(device)
        n, _, height, width = shape
        return (
            normal(shape, dtype, generator, channels_last=channels_last),
            _rois(count, n, height, width, generator),
        )

    def call(function: Callable[..., Tensor], x: Tensor, rois: Tensor) -> Tensor:
        return function(x, rois, (pooled, pooled), spatial_scale=SCALE, sampling_ratio=ratio, aligned=True)

    def work(tensors: Tensors, output: Tensor) -> dict[str, Work]:
        x, rois = tensors
        touched = touched_pixels(x.shape, rois) * x.shape[1] * x.element_size()
        # No flops: samples share arithmetic, so the formula's count is no lower bound.
        return {
            "fwd": Work(touched + nbytes(rois, output)),
            "bwd": Work(nbytes(output, rois, x)),
        }

    def peer_tensors(x: Tensor, rois: Tensor) -> Tensors:
        (x,) = as_half(x)
        return x, rois.to(x.dtype)

    return Case(
        op="roi_align",
        id=f"{LABELS[dtype]} {'NHWC' if channels_last else 'NCHW'} {pooled}x{pooled} sr{ratio} R{count}",
        dtype=dtype,
        tensors=tensors,
        call=call,
        work=work,
        peer="torchvision.ops",
        sample=lambda rows, x, rois: (x, rois[rows]),
        differentiable=(0,),
        gate_rows=32,
        peer_tensors=peer_tensors,
    )


def cases(device_type: str) -> list[Case]:
    settings = ((7, 2), (14, 2), (7, 0))
    if device_type == "cpu":
        return [
            _case((2, 256, 100, 152), 256, pooled, ratio, torch.float32, channels_last)
            for channels_last in (False, True)
            for pooled, ratio in settings
        ]
    return [
        _case((2, 256, 200, 304), 1000, pooled, ratio, dtype, channels_last)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for channels_last in (False, True)
        for pooled, ratio in settings
    ] + [
        # Few RoIs: little to do for the backward but to write a map of zeros.
        _case((2, 256, 200, 304), count, 7, 2, dtype, channels_last)
        for dtype in (torch.float32, torch.float16)
        for channels_last in (False, True)
        for count in (10, 100)
    ]


def quick() -> list[Case]:
    return [_case((2, 16, 50, 76), 16, 7, 2, torch.float32)]


def tiny() -> list[Case]:
    return [_case((1, 1, 4, 4), 1, 1, 1, torch.float32)]
