"""sigmoid_focal_loss: the bandwidth of logits, labels and losses; a RetinaNet's class ids and labels per element."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opzoo.bench.case import LABELS, Case, Tensors, Work, nbytes
from opzoo.bench.data import normal, seeded

_CLASSES = 80


def _case(rows: int, dtype: torch.dtype, ids: bool) -> Case:
    def tensors(device: torch.device) -> Tensors:
        generator = seeded(device)
        inputs = normal((rows, _CLASSES), dtype, generator)
        shape, most = ((rows,), 2 * _CLASSES) if ids else ((rows, _CLASSES), 2)
        targets = torch.randint(0, most, shape, generator=generator, device=device)
        return inputs, targets if ids else targets.to(dtype)

    def call(function: Callable[..., Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        if ids and function.__module__.startswith("torchvision"):  # it takes labels alone
            targets = (targets.unsqueeze(1) == torch.arange(_CLASSES, device=inputs.device)).to(inputs.dtype)
        return function(inputs, targets)

    return Case(
        op="sigmoid_focal_loss",
        id=f"{LABELS[dtype]} {rows}x{_CLASSES} {'ids' if ids else 'labels'}",
        dtype=dtype,
        tensors=tensors,
        call=call,
        work=lambda tensors, output: {
            "fwd": Work(nbytes(*tensors, output)),
            "bwd": Work(nbytes(*tensors, output, output)),
        },
        peer="torchvision.ops",
        sample=lambda rows, inputs, targets: (inputs[rows], targets[rows]),
        differentiable=(0,),
        gate_rows=1 << 14,
    )


def cases(device_type: str) -> list[Case]:
    rows = 1 << 20 if device_type == "cuda" else 1 << 15
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    return [_case(rows, dtype, ids) for dtype in dtypes for ids in (False, True)]


def quick() -> list[Case]:
    return [_case(1 << 10, torch.float32, False)]


def tiny() -> list[Case]:
    return [_case(4, torch.float32, True)]
