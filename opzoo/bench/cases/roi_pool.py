"""roi_pool on detector-like RoIs: the bytes of the map's windows and of the result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opzoo.bench.case import LABELS, Case, Tensors, Work, nbytes
from opzoo.bench.data import detector_boxes, normal, seeded
from opzoo.bench.gate import TOLERANCE, relative_error, sampled_rows


def _gate(case: Case, tensors: Tensors) -> float:
    """How many boxes differ from the definition, among those compared; all of them if the gradient does.

    In the dtype of the case: where a bin begins is a rounding of fp32 coordinates, which fp64 need not share.
    """
    x, rois = tensors
    rows = sampled_rows(len(rois), case.gate_rows, x.device)
    ours, reference = (x.detach().requires_grad_() for _ in range(2))
    output, expected = case.ours(ours, rois), case.reference(reference, rois[rows])
    part = torch.randn(expected.shape, generator=seeded(x.device, 2), device=x.device).to(x.dtype)
    grad = torch.zeros_like(output).index_copy(0, rows, part)
    (found,) = torch.autograd.grad(output, ours, grad)
    (wanted,) = torch.autograd.grad(expected, reference, part)
    if not relative_error(found, wanted.double()) <= TOLERANCE[case.dtype]:
        return float(len(rows))
    return float((output[rows] != expected).flatten(1).any(1).sum())


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
        differentiable=(0,),
        gate=_gate,
    )


def cases(device_type: str) -> list[Case]:
    if device_type == "cuda":
        return [_case(1000, 200, 304, dtype) for dtype in (torch.float32, torch.float16)]
    return [_case(256, 100, 152, torch.float32)]


def quick() -> list[Case]:
    return [_case(16, 20, 30, torch.float32)]


def tiny() -> list[Case]:
    return [_case(1, 4, 4, torch.float32)]
