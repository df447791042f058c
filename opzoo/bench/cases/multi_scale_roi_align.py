"""multi_scale_roi_align: the box pooler of a detector with a pyramid of five levels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opzoo.bench.case import LABELS, Case, Tensors, Work, nbytes
from opzoo.bench.cases.roi_align import touched_pixels
from opzoo.bench.data import detector_boxes, normal, seeded
from opzoo.reference.multi_scale_roi_align import choose_levels

LEVELS = 5
RATIO = 2
POOLED = 7


def _scales(levels: int) -> list[float]:
    return [0.25 / 2**level for level in range(levels)]


def _proposals(count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """``Tensor[count, 4]``: sides of 10 to 250 px and of 40 to 1000 px, half each; the last covers the image.

    Corners are whole pixels: exact in float16, the dtype torchvision wants them in beside float16 maps.
    """
    small = detector_boxes(count // 2, generator, width, height)
    large = 4 * detector_boxes(count - count // 2, generator, width / 4, height / 4)
    boxes = torch.cat([small, large]).round()
    boxes[-1] = torch.tensor([0, 0, width, height])
    return boxes


@functools.cache
def _torchvision_pooler(levels: int) -> Any:
    """One module for all calls, as in a detector: it infers its scales on the first."""
    from torchvision.ops import MultiScaleRoIAlign

    return MultiScaleRoIAlign([str(level) for level in range(levels)], POOLED, RATIO)


@dataclass(frozen=True)
class _PoolerCase(Case):
    """The peer is a module that takes a dict of maps and the sizes of the images."""

    def theirs(self, *tensors: Tensor) -> Tensor:
        images, _, height, width = tensors[0].shape
        maps, boxes = tensors[:-images], list(tensors[-images:])
        names = {str(level): t for level, t in enumerate(maps)}
        pooled: Tensor = _torchvision_pooler(len(maps))(names, boxes, [(4 * height, 4 * width)] * images)
        return pooled


def _case(
    shape: tuple[int, int, int, int],
    levels: int,
    count: int,
    dtype: torch.dtype,
    channels_last: bool = False,
) -> Case:
    images, channels, height, width = shape

    def tensors(device: torch.device) -> Tensors:
        generator = seeded(device)
        sizes = [(-(-height // 2**level), -(-width // 2**level)) for level in range(levels)]
        maps = [normal((images, channels, *size), dtype, generator, channels_last=channels_last) for size in sizes]
        boxes = [_proposals(count, 4 * height, 4 * width, generator) for _ in range(images)]
        return (*maps, *boxes)

    def call(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return function(list(tensors[:levels]), list(tensors[levels:]), POOLED, _scales(levels), RATIO)

    def sample(rows: Tensor, *tensors: Tensor) -> Tensors:
        boxes = [
            t[rows[(rows >= i * count) & (rows < (i + 1) * count)] - i * count] for i, t in enumerate(tensors[levels:])
        ]
        return (*tensors[:levels], *boxes)

    def work(tensors: Tensors, output: Tensor) -> dict[str, Work]:
        maps, boxes = tensors[:levels], tensors[levels:]
        rois = torch.cat([torch.nn.functional.pad(t, (1, 0), value=float(i)) for i, t in enumerate(boxes)])
        number = (choose_levels(rois[:, 1:]) - 2).clamp(0, levels - 1)
        touched = sum(
            touched_pixels(t.shape, rois[number == level], scale) * channels * t.element_size()
            for level, (t, scale) in enumerate(zip(maps, _scales(levels), strict=True))
        )
        return {"fwd": Work(touched + nbytes(*boxes, output)), "bwd": Work(nbytes(output, *tensors))}

    def peer_tensors(*tensors: Tensor) -> Tensors:
        half = torch.float16 if dtype == torch.bfloat16 else dtype
        return tuple(t.to(half) for t in tensors)

    return _PoolerCase(
        op="multi_scale_roi_align",
        waits=True,
        id=f"{LABELS[dtype]} {'NHWC' if channels_last else 'NCHW'} L{levels} {POOLED}x{POOLED} R{images}x{count}",
        dtype=dtype,
        tensors=tensors,
        call=call,
        work=work,
        peer="torchvision.ops",
        sample=sample,
        differentiable=tuple(range(levels)),
        gate_rows=64,
        peer_tensors=peer_tensors,
    )


def cases(device_type: str) -> list[Case]:
    if device_type == "cpu":
        return [_case((2, 256, 100, 152), LEVELS - 1, 128, torch.float32)]
    return [
        _case((2, 256, 200, 304), LEVELS, 1000, dtype, channels_last)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for channels_last in (False, True)
    ]


def quick() -> list[Case]:
    return [_case((2, 16, 50, 76), 2, 16, torch.float32)]


def tiny() -> list[Case]:
    return [_case((1, 1, 8, 8), 2, 2, torch.float32)]
