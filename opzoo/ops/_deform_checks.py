"""What the fake kernels of deform_conv2d check: the checks of the C++ layer, as far as a shape can tell."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opzoo.ops._common import require_tensor

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MAX_EXTENT = 2**31 - 1


def _check(op: str, condition: Any, message: str) -> None:
    torch._check(condition, lambda: f"opzoo::{op}: {message}")


def check_value(op: str, condition: Any, message: str) -> None:
    torch._check_value(condition, lambda: f"opzoo::{op}: {message}")


def _check_geometry(op: str, geometry: tuple[int, ...]) -> None:
    names = ("stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w")
    for name, value in zip(names, geometry, strict=True):
        least = 0 if name.startswith("pad") else 1
        in_range = value >= least and value <= _MAX_EXTENT
        check_value(op, in_range, f"{name} must be in [{least}, {_MAX_EXTENT}], got {value}")


def _check_operands(op: str, input: Tensor, tensors: dict[str, Tensor | None]) -> None:
    for name, t in tensors.items():
        if t is None:
            continue
        rank = 1 if name == "bias" else 4
        _check(op, t.dim() == rank, f"{name} must have {rank} axes, got {t.dim()} (shape {list(t.shape)})")
        _check(op, t.dtype in _FLOATS, f"{name} must be float64, float32, float16 or bfloat16, got {t.dtype}")
        same_device = t.device == input.device
        _check(op, same_device, f"{name} must be on the device of input, {input.device}, got {t.device}")
        same_dtype = name in ("offset", "mask") or t.dtype == input.dtype
        _check(op, same_dtype, f"{name} must have the dtype of input, {input.dtype}, got {t.dtype}")


def output_size(op: str, axis: str, size: int, kernel: int, stride: int, pad: int, dilation: int) -> int:
    _check(
        op,
        size > 0 and size <= _MAX_EXTENT and kernel > 0 and kernel <= _MAX_EXTENT,
        f"input and weight must have between 1 and {_MAX_EXTENT} pixels along {axis}, got {size} and {kernel}",
    )
    room = size + 2 * pad - dilation * (kernel - 1) - 1
    check_value(
        op,
        room >= 0,
        f"the output would be empty along {axis}: input {size}, kernel {kernel}, padding {pad}, dilation {dilation}",
    )
    return room // stride + 1


def _check_channels(op: str, input: Tensor, offset: Tensor, weight: Tensor) -> None:
    C, K, per_group, channels = input.shape[1], weight.shape[0], weight.shape[1], offset.shape[1]
    _check(
        op,
        C > 0 and per_group > 0,
        f"input and weight must have at least one input channel, got shapes {list(input.shape)} and "
        f"{list(weight.shape)}",
    )
    _check(op, C % per_group == 0, f"input channels must be a multiple of weight.shape[1] = {per_group}, got {C}")
    groups = C // per_group
    _check(op, K % groups == 0, f"weight.shape[0] must be a multiple of the {groups} groups, got {K}")
    step = 2 * weight.shape[2] * weight.shape[3]
    _check(
        op,
        channels > 0 and channels % step == 0,
        f"offset.shape[1] must be a positive multiple of 2 * kernel height * kernel width = {step}, got {channels}",
    )
    groups = channels // step
    _check(op, C % groups == 0, f"input channels must be a multiple of the {groups} offset groups, got {C}")


def check_all(
    op: str, input: Tensor, offset: Tensor, weight: Tensor, geometry: tuple[int, ...], **others: Tensor | None
) -> tuple[int, int, int, int]:
    """The kernels' own checks; returns the output's shape."""
    _check_geometry(op, geometry)
    _check_operands(op, input, {"input": input, "offset": offset, "weight": weight, **others})
    N, _, H, W = input.shape
    K, _, kh, kw = weight.shape
    OH = output_size(op, "height", H, kh, *geometry[0::2])
    OW = output_size(op, "width", W, kw, *geometry[1::2])
    _check_channels(op, input, offset, weight)
    channels = offset.shape[1]
    expected: tuple[tuple[str, Tensor | None, tuple[int, ...]], ...] = (
        ("offset", offset, (N, channels, OH, OW)),
        ("mask", others.get("mask"), (N, channels // 2, OH, OW)),
        ("bias", others.get("bias"), (K,)),
        ("grad", others.get("grad"), (N, K, OH, OW)),
    )
    for name, t, shape in expected:
        if t is not None:
            for given, size in zip(t.shape, shape, strict=True):
                _check(op, given == size, f"{name} must have shape {list(shape)}, got {list(t.shape)}")
    return N, K, OH, OW


def empty_image(shape: tuple[int, ...], like: Tensor) -> Tensor:
    channels_last = not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if channels_last and shape[1] > 0 else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=memory_format)


def check_branch(input: Tensor, conv: nn.Conv2d) -> None:
    """What the convolution that makes offsets would refuse in words of its own."""
    op, weight, channels = "deform_conv2d", conv.weight, conv.in_channels
    require_tensor(op, "input", input)
    dense = input.dim() == 4 and input.shape[1] == channels and input.layout == torch.strided
    _check(op, dense, f"input must be dense of shape [N, {channels}, H, W], got {list(input.shape)} ({input.layout})")
    for axis, name in enumerate(("height", "width")):
        padding = conv.padding[axis]
        assert isinstance(padding, int)
        size, kernel = input.shape[2 + axis], conv.kernel_size[axis]
        output_size(op, name, size, kernel, conv.stride[axis], padding, conv.dilation[axis])
    _check(
        op,
        input.is_floating_point() and input.device == weight.device,
        f"input must be floating and on the device of the parameters, {weight.device}, got {input.dtype} on "
        f"{input.device}",
    )


def check_halves(dy: Tensor, dx: Tensor) -> None:
    op = "make_offset"
    require_tensor(op, "dy", dy)
    require_tensor(op, "dx", dx)
    same = dy.dim() == 4 and dy.shape == dx.shape
    _check(op, same, f"dy and dx must have 4 axes, the same, got {list(dy.shape)} and {list(dx.shape)}")
    for name, t in (("dy", dy), ("dx", dx)):
        _check(
            op,
            t.layout == torch.strided and t.device == dy.device and t.dtype in _FLOATS,
            f"{name} must be dense, float64, float32, float16 or bfloat16 and on the device of dy, {dy.device}, "
            f"got {t.layout}, {t.dtype} on {t.device}",
        )
