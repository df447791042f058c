"""What callers of ``mmcv._ext`` hand over: results that they allocated, and numbers that repeat what a shape says.

Tensors that an operator of opzoo reads are checked there. Here is what no operator sees.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from opzoo.ops._common import _autocast_enabled

# Dynamo takes no question about layout, strides or gradients inside mmcv's Functions.
_is_compiling = torch.compiler.is_compiling


def require_tensors(op: str, **tensors: Any) -> None:
    """TypeError for what is no tensor, RuntimeError for a sparse one."""
    compiling = _is_compiling()
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"mmcv._ext.{op}: {name} must be a tensor, got {type(t).__name__}")
        if not compiling and t.layout is not torch.strided:
            raise RuntimeError(f"mmcv._ext.{op}: {name} must be dense, got {t.layout}")


def require_rank(op: str, rank: int, **tensors: Tensor) -> None:
    """RuntimeError unless each has this many axes."""
    for name, t in tensors.items():
        if t.dim() != rank:
            raise RuntimeError(f"mmcv._ext.{op}: {name} must have {rank} axes, got shape {list(t.shape)}")


def require_shape(op: str, shape: Sequence[int | None], **tensors: Tensor) -> None:
    """RuntimeError unless each has this shape; None stands for any size."""
    for name, t in tensors.items():
        if t.shape == shape:  # a tuple without None
            continue
        fits = t.dim() == len(shape) and all(
            size is None or size == given for size, given in zip(shape, t.shape, strict=True)
        )
        if not fits:
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            raise RuntimeError(f"mmcv._ext.{op}: {name} must have shape [{sizes}], got {list(t.shape)}")


def require_floats(op: str, **tensors: Tensor) -> None:
    """RuntimeError unless each is float64, float32, float16 or bfloat16, on the device of the first."""
    device = next(iter(tensors.values())).device
    for name, t in tensors.items():
        if t.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise RuntimeError(
                f"mmcv._ext.{op}: {name} must be float64, float32, float16 or bfloat16, got {_type_name(t)}"
            )
        require_device(op, device, **{name: t})


def require_indices(op: str, device: torch.device, **tensors: Tensor) -> None:
    """RuntimeError unless each is int64 or int32 and on ``device``."""
    for name, t in tensors.items():
        if t.dtype not in (torch.int64, torch.int32):
            raise RuntimeError(f"mmcv._ext.{op}: {name} must be int64 or int32, got {_type_name(t)}")
        require_device(op, device, **{name: t})


def require_device(op: str, device: torch.device, **tensors: Tensor) -> None:
    for name, t in tensors.items():
        if t.device != device:
            raise RuntimeError(f"mmcv._ext.{op}: {name} must be on {device}, got {t.device}")


def require_equal(op: str, **numbers: tuple[Any, int]) -> None:
    """ValueError unless each number is what the shapes of the tensors say: ``name=(given, expected)``."""
    for name, (given, expected) in numbers.items():
        if isinstance(given, Tensor) or given != expected:
            raise ValueError(f"mmcv._ext.{op}: {name} must be {expected} for tensors of these shapes, got {given}")


def require_integers(op: str, least: int, **numbers: Any) -> None:
    """TypeError for what is no integer, ValueError for one below ``least`` or beyond int32."""
    for name, given in numbers.items():
        if isinstance(given, (bool, Tensor)) or not hasattr(given, "__index__"):
            raise TypeError(f"mmcv._ext.{op}: {name} must be an int, got {given!r}")
        if not least <= given < 1 << 31:
            raise ValueError(f"mmcv._ext.{op}: {name} must be in [{least}, {(1 << 31) - 1}], got {given}")


def require_finite(op: str, **numbers: Any) -> None:
    """TypeError for what is no number, ValueError for an infinite one or NaN."""
    for name, given in numbers.items():
        if not hasattr(given, "__float__") or (isinstance(given, Tensor) and given.numel() != 1):
            raise TypeError(f"mmcv._ext.{op}: {name} must be a number, got {type(given).__name__}")
        if not math.isfinite(given):
            raise ValueError(f"mmcv._ext.{op}: {name} must be finite, got {given}")


def write(op: str, **results: tuple[Tensor, Tensor]) -> None:
    """``name=(target, result)``: copy each result where the caller wants it, after all of them are seen to fit.

    ``Tensor.copy_`` alone would broadcast, cast, and take a meta tensor for a place.
    """
    for name, (target, result) in results.items():
        if not _plainly_fits(target, result):
            _require_place(op, name, target, result)
    for target, result in results.values():
        target.copy_(result)


def _plainly_fits(target: Any, result: Tensor) -> bool:
    """What mmcv allocates does; a cheap question on the way of every call."""
    return (
        isinstance(target, Tensor)
        and target.shape == result.shape
        and target.dtype == result.dtype
        and target.device == result.device
        and (
            _is_compiling() or (target.layout is torch.strided and target.is_contiguous() and not target.requires_grad)
        )
    )


def _require_place(op: str, name: str, target: Any, result: Tensor) -> None:
    require_tensors(op, **{name: target})
    require_shape(op, result.shape, **{name: target})
    if target.dtype != result.dtype:
        raise RuntimeError(f"mmcv._ext.{op}: {name} must be {_type_name(result)}, got {_type_name(target)}")
    require_device(op, result.device, **{name: target})
    if any(size > 1 and step == 0 for size, step in zip(target.shape, target.stride(), strict=True)):
        raise RuntimeError(f"mmcv._ext.{op}: {name} must have memory for every element, got strides {target.stride()}")
    if target.requires_grad and target.is_leaf and torch.is_grad_enabled():
        raise RuntimeError(f"mmcv._ext.{op}: {name} must not require a gradient, got a leaf that does")


def as_given(t: Tensor) -> AbstractContextManager[Any]:
    """Autocast off: mmcv has cast its operands already, and its results have their dtype."""
    if _autocast_enabled(t.device.type):
        return torch.autocast(t.device.type, enabled=False)
    return contextlib.nullcontext()


def _type_name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")
