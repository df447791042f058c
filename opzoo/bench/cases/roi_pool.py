"""roi_pool on detector-like RoIs: the bytes of the map's windows and of the result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opzoo.bench.case import LABELS, Case, Tensors, Work, nbytes
from opzoo.bench.data import detector_boxes, normal, seeded


def _case(count: int, height: int, width: int, dtype: torch.dtype) -> Case:
    def tensors(device: torch.device) -> Tensors:
        generator = seeded(device)
        x = normal((2, 256, height, width), dtype, generator)
        boxes = detector_boxes(count, generator)
        index = torch.arange(count, device=device)[:, None] % 2
        return x, torch.cat([index.to(boxes.dtype), boxes], 1)

    def call(function: Callable[..., Tensor], x: Tensor, rois: Tensor) -> Tensor:
        return function(x, rois.to(x.dtype) if function.__module__.startswith("torchvision") else rois, (7, 7), 0.25)

    return Case(
        op="roi_pool",
        id=f"{LABELS[dtype]} NCHW 7x7 R{count}",
        dtype=dtype,
        tensors=tensors,
        call=call,
        work=lambda tensors, output: {
            "fwd": Work(nbytes(output)),
            "bwd": Work(nbytes(tensors[0], output)),
        },
        peer="torchvision.ops",
        sample=lambda rows, x, rois: (x, rois[rows]),
        differentiable=(0,),
    )


def cases(device_type: str) -> list[Case]:
    if device_type == "cuda":
        return [_case(1000, 200, 304, dtype) for dtype in (torch.float32, torch.float16)]
    return [_case(256, 100, 152, torch.float32)]


def quick() -> list[Case]:
    return [_case(16, 20, 30, torch.float32)]


def tiny() -> list[Case]:
    return [_case(1, 4, 4, torch.float32)]
