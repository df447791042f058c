"""What the fake kernels of RoI operators check: the checks of the C++ layer, as far as a shape can tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opzoo.ops._roi_fold import largest_exact_index

MAX_SAMPLING_RATIO = 32767
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
BOX_DTYPES = (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_boxes(
    op: str, name: str, features: Tensor, boxes: Tensor, batch_index: Tensor | None, batch: Any, no_pixels: bool
) -> None:
    columns = 5 if batch_index is None else 4
    torch._check(
        boxes.dim() == 2 and boxes.shape[1] == columns,
        lambda: f"opzoo::{op}: boxes must have shape [K, {columns}], got {list(boxes.shape)}",
    )
    torch._check(
        boxes.dtype in BOX_DTYPES,
        lambda: f"opzoo::{op}: boxes must have a floating or integer dtype, got {boxes.dtype}",
    )
    torch._check(
        boxes.device == features.device and (batch_index is None or batch_index.device == features.device),
        lambda: f"opzoo::{op}: boxes and batch_index must be on the device of {name}, {features.device}",
    )
    if no_pixels:
        torch._check(boxes.shape[0] == 0, lambda: f"opzoo::{op}: boxes must be empty for a map without pixels")
    if batch_index is None:
        largest = largest_exact_index(boxes.dtype, features.dtype)
        torch._check(
            batch - 1 <= largest,
            lambda: f"opzoo::{op}: boxes of dtype {boxes.dtype} hold image indices exactly up to {largest}",
        )
        return
    torch._check(
        batch_index.dim() == 1 and batch_index.dtype == torch.int64,
        lambda: f"opzoo::{op}: batch_index must be an int64 tensor of shape [K], got {batch_index.dtype}",
    )
    torch._check(
        batch_index.shape[0] == boxes.shape[0],
        lambda: f"opzoo::{op}: batch_index must have shape [{boxes.shape[0]}], got {list(batch_index.shape)}",
    )


def check_features(op: str, name: str, t: Tensor) -> None:
    torch._check(t.dim() == 4, lambda: f"opzoo::{op}: {name} must have 4 axes, got {t.dim()}")
    torch._check(t.dtype.is_floating_point, lambda: f"opzoo::{op}: {name} must be floating, got {t.dtype}")


def check_numbers(op: str, height: Any, width: Any, spatial_scale: float, sampling_ratio: int) -> None:
    torch._check_value(height > 0, lambda: f"opzoo::{op}: output_size must be positive, got ({height}, {width})")
    torch._check_value(width > 0, lambda: f"opzoo::{op}: output_size must be positive, got ({height}, {width})")
    torch._check_value(
        math.isfinite(spatial_scale) and spatial_scale > 0,
        lambda: f"opzoo::{op}: spatial_scale must be finite and positive, got {spatial_scale}",
    )
    torch._check_value(
        sampling_ratio <= MAX_SAMPLING_RATIO,
        lambda: f"opzoo::{op}: sampling_ratio must be at most {MAX_SAMPLING_RATIO}, got {sampling_ratio}",
    )


def is_channels_last(t: Tensor) -> bool:
    return t.dim() == 4 and not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last)


def empty_map(n: Any, h: Any, w: Any) -> bool:
    return bool(n == 0 or h == 0 or w == 0)


def check_argmax(op: str, argmax: Tensor, shape: Sequence[Any]) -> None:
    torch._check(argmax.dtype == torch.int64, lambda: f"opzoo::{op}: argmax must have dtype int64, got {argmax.dtype}")
    check_shape(op, "argmax", argmax, shape)


def check_shape(op: str, name: str, t: Tensor, shape: Sequence[Any]) -> None:
    for axis, size in enumerate(shape):
        torch._check(
            t.shape[axis] == size,
            lambda: f"opzoo::{op}: {name} must have shape {list(shape)}, got {list(t.shape)}",
        )
