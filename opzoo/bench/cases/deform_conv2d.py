"""deform_conv2d: 3x3 layers with masks, as in a detector's backbone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opzoo.bench.case import LABELS, Case, Tensors, Work, as_half, nbytes
from opzoo.bench.data import normal, seeded

KERNEL = 3
OFFSET_PX = 2.0


def _case(images: int, channels: int, height: int, width: int, dtype: torch.dtype, channels_last: bool = False) -> Case:
    taps = KERNEL * KERNEL

    def tensors(device: torch.device) -> Tensors:
        generator = seeded(device)

        def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return normal(shape, dtype, generator, channels_last=channels_last)

        # Multiples of 2^-10, so that coordinates are exact in float32: the gradient of an offset
        # jumps where a coordinate is whole, and operator and reference must agree which side it is.
        offset = draw(images, 2 * taps, height, width, dtype=torch.float32) * OFFSET_PX
        offset = ((offset * 1024).round() / 1024).to(dtype)
        mask = draw(images, taps, height, width).sigmoid()
        weight = draw(channels, channels, KERNEL, KERNEL) / (channels * taps) ** 0.5
        bias = torch.randn(channels, generator=generator, device=device, dtype=dtype)
        return draw(images, channels, height, width), offset, weight, bias, mask

    def call(
        function: Callable[..., Tensor], x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, mask: Tensor
    ) -> Tensor:
        return function(x, offset, weight, bias, stride=(1, 1), padding=(1, 1), dilation=(1, 1), mask=mask)

    def work(tensors: Tensors, output: Tensor) -> dict[str, Work]:
        flops = 2 * images * height * width * channels * channels * taps
        return {
            "fwd": Work(nbytes(*tensors, output), flops, dtype),
            # One product for the columns' gradient, one for the weight's; each input read, each gradient written.
            "bwd": Work(nbytes(output, *tensors, *tensors), 2 * flops, dtype),
        }

    return Case(
        op="deform_conv2d",
        id=f"{LABELS[dtype]} {'NHWC' if channels_last else 'NCHW'} N{images} {channels}->{channels} {height}x{width}",
        dtype=dtype,
        tensors=tensors,
        call=call,
        work=work,
        peer="torchvision.ops",
        sample=lambda rows, x, offset, weight, bias, mask: (x[rows], offset[rows], weight, bias, mask[rows]),
        differentiable=(0, 1, 2, 3, 4),
        gate_rows=2,
        peer_tensors=as_half,
    )


def cases(device_type: str) -> list[Case]:
    if device_type == "cpu":
        return [_case(1, 64, 50, 76, torch.float32), _case(1, 256, 25, 38, torch.float32)]
    return [
        _case(*size, dtype, channels_last)
        for size in ((8, 256, 64, 64), (2, 128, 100, 152), (2, 256, 50, 76), (2, 512, 25, 38))
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for channels_last in (False, True)
    ]


def quick() -> list[Case]:
    return [_case(1, 8, 12, 19, torch.float32)]


def tiny() -> list[Case]:
    return [_case(1, 1, 3, 3, torch.float32)]
