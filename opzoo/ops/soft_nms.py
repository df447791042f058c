"""Soft non-maximum suppression."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opzoo._library import LIBRARY
from opzoo.ops._common import register_fake, require_number, require_tensor

_METHODS = {"naive": 0, "linear": 1, "gaussian": 2}


def soft_nms(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float = 0.3,
    sigma: float = 0.5,
    min_score: float = 1e-3,
    method: str = "linear",
) -> tuple[Tensor, Tensor]:
    """Lower the scores of boxes that overlap a better one, instead of dropping them: Soft-NMS.

    The box of the highest score is selected, and the score of every box left that overlaps it (IoU
    greater than 0) is multiplied by a factor; then the next box is selected, until none is left. A
    box whose score is not at least ``min_score`` is dropped on the spot. The factor is

    - ``"naive"``: 0 where IoU >= ``iou_threshold``, else 1;
    - ``"linear"``: 1 - IoU where IoU >= ``iou_threshold``, else 1;
    - ``"gaussian"``: exp(-IoU^2 / ``sigma``).

    Args:
        boxes: ``Tensor[N, 4]`` of ``(x1, y1, x2, y2)`` in any unit, of any float or integer dtype.
        scores: ``Tensor[N]`` of any float or integer dtype, on the device of ``boxes``.
        iou_threshold: in [0, 1]; ``"gaussian"`` does not use it.
        sigma: greater than 0; only ``"gaussian"`` uses it.
        min_score: not negative.
        method: ``"naive"``, ``"linear"`` or ``"gaussian"``.

    Returns:
        ``(scores, indices)``: ``Tensor[K]`` of the scores as decayed, in the dtype of ``scores`` (for
        integers in float32, for int32 and int64 in float64), and ``Tensor[K]`` of int64, the boxes they
        belong to; by decayed score descending, then index ascending.

    Raises:
        TypeError: an argument is no tensor or no number.
        RuntimeError: a tensor has the wrong rank, shape, dtype or device.
        ValueError: a number is out of its range or NaN, or ``method`` is none of the three.

    Arithmetic is float32, and float64 where boxes or scores are float64, int32 or int64. An undefined
    IoU, as that of two empty boxes or of a box with a NaN coordinate, lowers nothing; a box whose
    score is NaN or negative is dropped. Autocast changes nothing. Not differentiable: the scores
    returned carry no gradient, ``scores[indices]`` does. vmap raises, because images keep different
    numbers of boxes: use :func:`batched_soft_nms` with the image as class. Deterministic, and equal on
    every device.

    Source: Bodla et al., "Soft-NMS: Improving Object Detection With One Line of Code", ICCV 2017.

    Example:
        >>> boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 5], [20, 20, 30, 30]])
        >>> opzoo.soft_nms(boxes, torch.tensor([1.0, 0.5, 0.75]))
        (tensor([1.0000, 0.7500, 0.2500]), tensor([0, 2, 1]))
    """
    code = _require("soft_nms", (iou_threshold, sigma, min_score), method, boxes=boxes, scores=scores)
    return _soft_nms(boxes, scores, iou_threshold, sigma, min_score, code)


def batched_soft_nms(
    boxes: Tensor,
    scores: Tensor,
    idxs: Tensor,
    iou_threshold: float = 0.3,
    sigma: float = 0.5,
    min_score: float = 1e-3,
    method: str = "linear",
) -> tuple[Tensor, Tensor]:
    """:func:`soft_nms` within each class: a box lowers the scores of boxes of its own class only.

    Classes are compared as integers beside the boxes; no coordinate is shifted. So the result is that
    of one :func:`soft_nms` per class, merged by score.

    Args:
        boxes: ``Tensor[N, 4]`` of ``(x1, y1, x2, y2)`` in any unit, of any float or integer dtype.
        scores: ``Tensor[N]`` of any float or integer dtype, on the device of ``boxes``.
        idxs: ``Tensor[N]`` of any integer dtype: class, image, or both in one number. Any values.
        iou_threshold: in [0, 1]; ``"gaussian"`` does not use it.
        sigma: greater than 0; only ``"gaussian"`` uses it.
        min_score: not negative.
        method: ``"naive"``, ``"linear"`` or ``"gaussian"``.

    Returns:
        ``(scores, indices)`` of the boxes of all classes, as from :func:`soft_nms`.

    Raises:
        TypeError: an argument is no tensor or no number.
        RuntimeError: a tensor has the wrong rank, shape, dtype or device.
        ValueError: a number is out of its range or NaN, or ``method`` is none of the three.

    Factors, arithmetic, autocast, gradients, vmap and determinism are those of :func:`soft_nms`.

    Source: as :func:`soft_nms`.

    Example:
        >>> boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 5], [0, 0, 10, 10]])
        >>> opzoo.batched_soft_nms(boxes, torch.tensor([1.0, 0.5, 0.75]), torch.tensor([1, 1, 2]))
        (tensor([1.0000, 0.7500, 0.2500]), tensor([0, 2, 1]))
    """
    numbers = (iou_threshold, sigma, min_score)
    code = _require("batched_soft_nms", numbers, method, boxes=boxes, scores=scores, idxs=idxs)
    return _batched_soft_nms(boxes, scores, idxs, iou_threshold, sigma, min_score, code)


def _require(op: str, numbers: tuple[Any, ...], method: Any, **tensors: Any) -> int:
    for name, t in tensors.items():
        require_tensor(op, name, t)
    for name, value in zip(("iou_threshold", "sigma", "min_score"), numbers, strict=True):
        require_number(op, name, value)
    if not isinstance(method, str):
        raise TypeError(f"opzoo::{op}: method must be a str, got {method!r}")
    if method not in _METHODS:
        raise ValueError(f"opzoo::{op}: method must be 'naive', 'linear' or 'gaussian', got {method!r}")
    return _METHODS[method]


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _check(op: str, boxes: Tensor, scores: Tensor, idxs: Tensor | None, numbers: tuple[float, float, float]) -> None:
    torch._check(
        boxes.dim() == 2 and boxes.shape[1] == 4,
        lambda: f"opzoo::{op}: boxes must have shape [N, 4], got {list(boxes.shape)}",
    )
    torch._check(
        boxes.dtype in _FLOATS + _INTEGERS,
        lambda: f"opzoo::{op}: boxes must have a float or integer dtype, got {boxes.dtype}",
    )
    _check_one_per_box(op, "scores", scores, boxes)
    torch._check(
        scores.dtype in _FLOATS + _INTEGERS,
        lambda: f"opzoo::{op}: scores must have a float or integer dtype, got {scores.dtype}",
    )
    if idxs is not None:
        _check_one_per_box(op, "idxs", idxs, boxes)
        torch._check(idxs.dtype in _INTEGERS, lambda: f"opzoo::{op}: idxs must have an integer dtype, got {idxs.dtype}")
    iou_threshold, sigma, min_score = numbers
    torch._check_value(
        0 <= iou_threshold <= 1, lambda: f"opzoo::{op}: iou_threshold must be in [0, 1], got {iou_threshold}"
    )
    torch._check_value(sigma > 0, lambda: f"opzoo::{op}: sigma must be greater than 0, got {sigma}")
    torch._check_value(min_score >= 0, lambda: f"opzoo::{op}: min_score must not be negative, got {min_score}")


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


def _fake_results(boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    dtype = scores.dtype
    if not dtype.is_floating_point:
        dtype = torch.float64 if dtype in (torch.int64, torch.int32) else torch.float32
    n: Any = boxes.shape[0]
    # Any size from 0 on: the default lower bound of 2 would make an exported model fail on one box.
    # Of no boxes the size is known: inductor cannot index nothing with an unknown number of indices.
    kept = 0 if isinstance(n, int) and n == 0 else torch.library.get_ctx().new_dynamic_size(min=0)
    return scores.new_empty([kept], dtype=dtype), scores.new_empty([kept], dtype=torch.int64)


def _check_method(op: str, method: int) -> None:
    torch._check_value(
        0 <= method <= 2,
        lambda: f"opzoo::{op}: method must be 0 (naive), 1 (linear) or 2 (gaussian), got {method}",
    )


def _fake_soft_nms(
    boxes: Tensor, scores: Tensor, iou_threshold: float, sigma: float, min_score: float, method: int
) -> tuple[Tensor, Tensor]:
    _check("soft_nms", boxes, scores, None, (iou_threshold, sigma, min_score))
    _check_method("soft_nms", method)
    return _fake_results(boxes, scores)


def _fake_batched_soft_nms(
    boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float, sigma: float, min_score: float, method: int
) -> tuple[Tensor, Tensor]:
    _check("batched_soft_nms", boxes, scores, idxs, (iou_threshold, sigma, min_score))
    _check_method("batched_soft_nms", method)
    return _fake_results(boxes, scores)


def _refuse_vmap(*args: Any) -> Any:
    raise NotImplementedError(
        "opzoo::soft_nms and opzoo::batched_soft_nms have no vmap rule, because images keep different numbers of "
        "boxes; flatten the batch and call batched_soft_nms with the image as class"
    )


register_fake("soft_nms", _fake_soft_nms)
register_fake("batched_soft_nms", _fake_batched_soft_nms)
for _name in ("soft_nms", "batched_soft_nms"):
    LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # no derivative, by definition
    LIBRARY.impl(_name, _refuse_vmap, "FuncTorchBatched")
_soft_nms = torch.ops.opzoo.soft_nms.default
_batched_soft_nms = torch.ops.opzoo.batched_soft_nms.default
