"""Non-maximum suppression."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opzoo._library import LIBRARY
from opzoo.ops._common import require_number, require_tensor


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Drop boxes that overlap a better one: greedy non-maximum suppression.

    Boxes are visited by descending score. A box is kept unless its IoU with a box kept before it is
    greater than ``iou_threshold``.

    Args:
        boxes: ``Tensor[N, 4]`` of ``(x1, y1, x2, y2)`` in any unit, of any float or integer dtype.
        scores: ``Tensor[N]`` of any float or integer dtype, on the device of ``boxes``. NaN ranks last.
        iou_threshold: in [0, 1].

    Returns:
        ``Tensor[K]`` of int64: indices of the kept boxes, by score descending, then index ascending.

    Raises:
        TypeError: an argument is no tensor or no number.
        RuntimeError: a tensor has the wrong rank, shape, dtype or device.
        ValueError: ``iou_threshold`` is outside [0, 1] or NaN.

    IoU is computed in float32 (float64 for float64, int32 and int64 boxes) and compared with
    ``iou_threshold`` rounded to that type. An undefined IoU, as that of two empty boxes or of a box
    with a NaN coordinate, suppresses nothing. Autocast changes nothing. Indices have no gradient;
    inputs that require one are fine. vmap raises, because images keep different numbers of boxes:
    use :func:`batched_nms` with the image as class. Deterministic, and equal on every device.

    Source: the standard greedy procedure, as in Felzenszwalb et al., "Object Detection with
    Discriminatively Trained Part-Based Models", TPAMI 2010, section 7.2, with IoU as the overlap.

    Example:
        >>> boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10], [20, 20, 30, 30]])
        >>> opzoo.nms(boxes, torch.tensor([0.8, 0.9, 0.7]), 0.5)
        tensor([1, 2])
    """
    _require("nms", iou_threshold, boxes=boxes, scores=scores)
    return _nms(boxes, scores, iou_threshold)


def batched_nms(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    """:func:`nms` within each class: boxes of different classes never suppress each other.

    Classes are compared as integers beside the boxes; no coordinate is shifted. So the result is that
    of one :func:`nms` per class, whatever the coordinates, the dtype or the size of the ids.

    Args:
        boxes: ``Tensor[N, 4]`` of ``(x1, y1, x2, y2)`` in any unit, of any float or integer dtype.
        scores: ``Tensor[N]`` of any float or integer dtype, on the device of ``boxes``. NaN ranks last.
        idxs: ``Tensor[N]`` of any integer dtype: class, image, or both in one number. Any values.
        iou_threshold: in [0, 1].

    Returns:
        ``Tensor[K]`` of int64: indices of the kept boxes of all classes, by score descending, then
        index ascending.

    Raises:
        TypeError: an argument is no tensor or no number.
        RuntimeError: a tensor has the wrong rank, shape, dtype or device.
        ValueError: ``iou_threshold`` is outside [0, 1] or NaN.

    Arithmetic, autocast, gradients, vmap and determinism are those of :func:`nms`.

    Source: as :func:`nms`; suppression per class as in Girshick et al., "Rich feature hierarchies for
    accurate object detection and semantic segmentation", CVPR 2014.

    Example:
        >>> boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10], [0, 0, 10, 10]])
        >>> opzoo.batched_nms(boxes, torch.tensor([0.8, 0.9, 0.7]), torch.tensor([1, 1, 2]), 0.5)
        tensor([1, 2])
    """
    _require("batched_nms", iou_threshold, boxes=boxes, scores=scores, idxs=idxs)
    return _batched_nms(boxes, scores, idxs, iou_threshold)


def _require(op: str, iou_threshold: Any, **tensors: Any) -> None:
    for name, t in tensors.items():
        require_tensor(op, name, t)
    require_number(op, "iou_threshold", iou_threshold)


_REAL_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_REAL_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, *_REAL_INTEGERS)


def _check(op: str, boxes: Tensor, scores: Tensor, idxs: Tensor | None, iou_threshold: float) -> None:
    torch._check(
        boxes.dim() == 2 and boxes.shape[1] == 4,
        lambda: f"opzoo::{op}: boxes must have shape [N, 4], got {list(boxes.shape)}",
    )
    torch._check(
        boxes.dtype in _REAL_DTYPES,
        lambda: f"opzoo::{op}: boxes must have a float or integer dtype, got {boxes.dtype}",
    )
    for name, t, dtypes in (("scores", scores, _REAL_DTYPES), ("idxs", idxs, _REAL_INTEGERS)):
        if t is None:
            continue
        _check_one_per_box(op, name, t, boxes)
        kind = "a float or integer" if name == "scores" else "an integer"
        torch._check(t.dtype in dtypes, lambda: f"opzoo::{op}: {name} must have {kind} dtype, got {t.dtype}")  # noqa: B023
    torch._check_value(
        0 <= iou_threshold <= 1,
        lambda: f"opzoo::{op}: iou_threshold must be in [0, 1], got {iou_threshold}",
    )


def _check_one_per_box(op: str, name: str, t: Tensor, boxes: Tensor) -> None:
    torch._check(t.dim() == 1, lambda: f"opzoo::{op}: {name} must have 1 axes, got {t.dim()}")
    torch._check(
        t.shape[0] == boxes.shape[0],
        lambda: f"opzoo::{op}: {name} must have one element per box, {boxes.shape[0]}, got {t.shape[0]}",
    )
    torch._check(
        t.device == boxes.device,
        lambda: f"opzoo::{op}: {name} must be on the device of boxes, {boxes.device}, got {t.device}",
    )


def _fake_result(boxes: Tensor) -> Tensor:
    n = boxes.shape[0]
    if (
        isinstance(n, int) and n == 0
    ):  # a known size: inductor cannot index zero boxes with an unknown number of indices
        return boxes.new_empty([0], dtype=torch.int64)
    # Any size from 0 on: the default lower bound of 2 would make an exported model fail on one box.
    kept = torch.library.get_ctx().new_dynamic_size(min=0)
    return boxes.new_empty([kept], dtype=torch.int64)


def _fake_nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    _check("nms", boxes, scores, None, iou_threshold)
    return _fake_result(boxes)


def _fake_batched_nms(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    _check("batched_nms", boxes, scores, idxs, iou_threshold)
    return _fake_result(boxes)


def _refuse_vmap(*args: Any) -> Any:
    raise NotImplementedError(
        "opzoo::nms and opzoo::batched_nms have no vmap rule, because images keep different numbers of boxes; "
        "flatten the batch and call batched_nms with the image as class"
    )


torch.library.register_fake("opzoo::nms", _fake_nms, lib=LIBRARY)
torch.library.register_fake("opzoo::batched_nms", _fake_batched_nms, lib=LIBRARY)
for _name in ("nms", "batched_nms"):
    LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # indices have no derivative
    LIBRARY.impl(_name, _refuse_vmap, "FuncTorchBatched")
_nms = torch.ops.opzoo.nms.default
_batched_nms = torch.ops.opzoo.batched_nms.default
