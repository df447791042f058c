"""Non-maximum suppression."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opzoo._library import LIBRARY
from opzoo.ops._common import move_batch_first, register_fake, require_number, require_tensor
from opzoo.reference.nms import score_order


def nms(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    *,
    score_threshold: float | None = None,
    max_output: int | None = None,
) -> Tensor:
    """Drop boxes that overlap a better one: greedy non-maximum suppression.

    Boxes are visited by descending score. A box is kept unless its IoU with a box kept before it is
    greater than ``iou_threshold``.

    Args:
        boxes: ``Tensor[N, 4]`` of ``(x1, y1, x2, y2)`` in any unit, of any float or integer dtype.
        scores: ``Tensor[N]`` of any float or integer dtype, on the device of ``boxes``. NaN ranks last.
        iou_threshold: in [0, 1].
        score_threshold: only boxes with ``score > score_threshold``, rounded to the dtype of ``scores``,
            take part; a NaN score does not. None lets all take part.
        max_output: stop after this many kept boxes. None does not stop.

    Returns:
        ``Tensor[K]`` of int64: indices of the kept boxes, by score descending, then index ascending.

    Raises:
        TypeError: an argument is no tensor or no number.
        RuntimeError: a tensor has the wrong rank, shape, dtype or device.
        ValueError: ``iou_threshold`` is outside [0, 1], ``score_threshold`` is NaN, ``max_output`` is negative.

    IoU is computed in float32 (float64 for float64, int32 and int64 boxes) and compared with
    ``iou_threshold`` rounded to that type. An undefined IoU, as that of two empty boxes or of a box
    with a NaN coordinate, suppresses nothing. Autocast changes nothing. Indices have no gradient;
    inputs that require one are fine. vmap raises, because images keep different numbers of boxes:
    use :func:`nms_padded`. Deterministic, and equal on every device.

    Source: the standard greedy procedure, as in Felzenszwalb et al., "Object Detection with
    Discriminatively Trained Part-Based Models", TPAMI 2010, section 7.2, with IoU as the overlap.

    Example:
        >>> boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10], [20, 20, 30, 30]])
        >>> opzoo.nms(boxes, torch.tensor([0.8, 0.9, 0.7]), 0.5)
        tensor([1, 2])
    """
    _require("nms", boxes=boxes, scores=scores)
    _require_numbers("nms", iou_threshold, score_threshold, max_output)
    return _nms(boxes, scores, iou_threshold, score_threshold=score_threshold, max_output=max_output)


def batched_nms(
    boxes: Tensor,
    scores: Tensor,
    idxs: Tensor,
    iou_threshold: float,
    *,
    score_threshold: float | None = None,
    max_output: int | None = None,
) -> Tensor:
    """:func:`nms` within each class: boxes of different classes never suppress each other.

    Classes are compared as integers beside the boxes; no coordinate is shifted. So the result is that
    of one :func:`nms` per class, whatever the coordinates, the dtype or the size of the ids.

    Args:
        boxes: ``Tensor[N, 4]`` of ``(x1, y1, x2, y2)`` in any unit, of any float or integer dtype.
        scores: ``Tensor[N]`` of any float or integer dtype, on the device of ``boxes``. NaN ranks last.
        idxs: ``Tensor[N]`` of any integer dtype: class, image, or both in one number. Any values.
        iou_threshold: in [0, 1].
        score_threshold: only boxes with ``score > score_threshold``, rounded to the dtype of ``scores``,
            take part; a NaN score does not. None lets all take part.
        max_output: stop after this many kept boxes of all classes together. None does not stop.

    Returns:
        ``Tensor[K]`` of int64: indices of the kept boxes of all classes, by score descending, then
        index ascending.

    Raises:
        TypeError: an argument is no tensor or no number.
        RuntimeError: a tensor has the wrong rank, shape, dtype or device.
        ValueError: ``iou_threshold`` is outside [0, 1], ``score_threshold`` is NaN, ``max_output`` is negative.

    Arithmetic, autocast, gradients, vmap and determinism are those of :func:`nms`.

    Source: as :func:`nms`; suppression per class as in Girshick et al., "Rich feature hierarchies for
    accurate object detection and semantic segmentation", CVPR 2014.

    Example:
        >>> boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10], [0, 0, 10, 10]])
        >>> opzoo.batched_nms(boxes, torch.tensor([0.8, 0.9, 0.7]), torch.tensor([1, 1, 2]), 0.5)
        tensor([1, 2])
    """
    _require("batched_nms", boxes=boxes, scores=scores, idxs=idxs)
    _require_numbers("batched_nms", iou_threshold, score_threshold, max_output)
    return _batched_nms(boxes, scores, idxs, iou_threshold, score_threshold=score_threshold, max_output=max_output)


def nms_padded(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    max_output: int,
    *,
    idxs: Tensor | None = None,
    score_threshold: float | None = None,
) -> tuple[Tensor, Tensor]:
    """NMS of whole batches into tensors of known shape: no wait for the device.

    Each image is worked off by itself, as :func:`nms` or, with ``idxs``, :func:`batched_nms` would. The
    shape of the result does not depend on the data, so the call can be captured in a CUDA graph,
    compiled, exported and mapped by ``torch.vmap``.

    Args:
        boxes: ``Tensor[..., N, 4]`` of ``(x1, y1, x2, y2)`` in any unit, of any float or integer dtype.
        scores: ``Tensor[..., N]`` of any float or integer dtype, on the device of ``boxes``. NaN ranks last.
        iou_threshold: in [0, 1].
        max_output: kept boxes of an image at most, all its classes together; may exceed N, but not 2**31 - 1.
        idxs: ``Tensor[..., N]`` of any integer dtype, the class of each box; None for one class.
        score_threshold: only boxes with ``score > score_threshold``, rounded to the dtype of ``scores``,
            take part; a NaN score does not. None lets all take part.

    Returns:
        ``(indices, count)``: ``Tensor[..., max_output]`` of int64, in each image the kept boxes by score
        descending, then index ascending, and -1 from ``count`` on; ``Tensor[...]`` of int64.

    Raises:
        TypeError: an argument is no tensor or no number.
        RuntimeError: a tensor has the wrong rank, shape, dtype or device.
        ValueError: ``iou_threshold`` is outside [0, 1], ``score_threshold`` is NaN, ``max_output`` is outside
            [0, 2**31).

    Arithmetic, autocast, gradients and determinism are those of :func:`nms`.

    Example:
        >>> boxes = torch.tensor([[[0.0, 0, 10, 10], [1, 0, 11, 10]], [[0, 0, 10, 10], [20, 0, 30, 10]]])
        >>> opzoo.nms_padded(boxes, torch.tensor([[0.8, 0.9], [0.7, 0.6]]), 0.5, 2)
        (tensor([[ 1, -1],
                [ 0,  1]]), tensor([1, 2]))
    """
    _require("nms_padded", boxes=boxes, scores=scores)
    if idxs is not None:
        _require("nms_padded", idxs=idxs)
    require_number("nms_padded", "max_output", max_output, "__index__")
    _require_numbers("nms_padded", iou_threshold, score_threshold, None)
    indices, count = _nms_padded(boxes, scores, iou_threshold, max_output, idxs, score_threshold=score_threshold)
    return indices, count


def nms_match(boxes: Tensor, scores: Tensor, iou_threshold: float) -> list[Tensor]:
    """:func:`nms` that tells, for each kept box, which boxes it dropped.

    Args:
        boxes: ``Tensor[N, 4]`` of ``(x1, y1, x2, y2)`` in any unit, of any float or integer dtype.
        scores: ``Tensor[N]`` of any float or integer dtype, on the device of ``boxes``. NaN ranks last.
        iou_threshold: in [0, 1].

    Returns:
        One ``Tensor[M]`` of int64 per kept box, in the order of :func:`nms`: its index, then those of the
        boxes that it was the first to drop, by score descending, then index ascending. Each box is in
        exactly one group.

    Raises:
        TypeError: an argument is no tensor or no number.
        RuntimeError: a tensor has the wrong rank, shape, dtype or device.
        ValueError: ``iou_threshold`` is outside [0, 1] or NaN.

    Arithmetic, autocast, gradients and determinism are those of :func:`nms`. The number of groups is
    data, so the call waits for the device and cannot be compiled into one graph.

    Source: Li et al., "Learning from Noisy Anchors for One-stage Object Detection", CVPR 2020, in the
    form of mmcv's ``nms_match``, which also drops at equality.

    Example:
        >>> boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10], [20, 20, 30, 30]])
        >>> opzoo.nms_match(boxes, torch.tensor([0.8, 0.9, 0.7]), 0.5)
        [tensor([1, 0]), tensor([2])]
    """
    _require("nms_match", boxes=boxes, scores=scores)
    require_number("nms_match", "iou_threshold", iou_threshold)
    _check_one_image("nms_match", boxes)
    _check("nms_match", boxes, scores, None, iou_threshold)
    if boxes.layout != torch.strided or scores.layout != torch.strided or boxes.is_meta:
        raise RuntimeError(
            "opzoo::nms_match: boxes and scores must be dense and hold values: no sparse, no meta tensors"
        )
    leaders = _nms_leaders(boxes, scores, iou_threshold)
    order = score_order(scores)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    leading = rank[leaders[order]]  # rank of the leader, by rank
    members = order[torch.argsort(leading, stable=True)]
    sizes = torch.bincount(leading, minlength=len(order))
    return list(members.split(sizes[sizes > 0].tolist())) if len(order) else []


def _require(op: str, **tensors: Any) -> None:
    for name, t in tensors.items():
        require_tensor(op, name, t)


def _require_numbers(op: str, iou_threshold: Any, score_threshold: Any, max_output: Any) -> None:
    require_number(op, "iou_threshold", iou_threshold)
    if score_threshold is not None:
        require_number(op, "score_threshold", score_threshold)
    if max_output is not None:
        require_number(op, "max_output", max_output, "__index__")


_MAX_PADDED_OUTPUT = 2**31 - 1  # results are as long as max_output says
_REAL_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_REAL_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, *_REAL_INTEGERS)


def _check(
    op: str,
    boxes: Tensor,
    scores: Tensor,
    idxs: Tensor | None,
    iou_threshold: float,
    score_threshold: float | None = None,
    max_output: int | None = None,
) -> None:
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
    torch._check_value(
        score_threshold is None or score_threshold == score_threshold,
        lambda: f"opzoo::{op}: score_threshold must be a number, got {score_threshold}",
    )
    torch._check_value(
        max_output is None or max_output >= 0,
        lambda: f"opzoo::{op}: max_output must be at least 0, got {max_output}",
    )


def _check_one_image(op: str, boxes: Tensor) -> None:
    torch._check(boxes.dim() == 2, lambda: f"opzoo::{op}: boxes must have 2 axes, got {boxes.dim()}")
    torch._check(boxes.shape[1] == 4, lambda: f"opzoo::{op}: boxes must have shape [N, 4], got {list(boxes.shape)}")


def _check_one_per_box(op: str, name: str, t: Tensor, boxes: Tensor) -> None:
    axes = boxes.dim() - 1
    torch._check(t.dim() == axes, lambda: f"opzoo::{op}: {name} must have {axes} axes, got {t.dim()}")
    if axes == 1:
        torch._check(
            t.shape[0] == boxes.shape[0],
            lambda: f"opzoo::{op}: {name} must have one element per box, {boxes.shape[0]}, got {t.shape[0]}",
        )
    for got, expected in zip(t.shape, boxes.shape[:-1], strict=True):
        torch._check(
            got == expected,
            lambda: f"opzoo::{op}: {name} must have shape {list(boxes.shape[:-1])}, got {list(t.shape)}",
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


def _fake_nms(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    *,
    score_threshold: float | None = None,
    max_output: int | None = None,
) -> Tensor:
    _check_one_image("nms", boxes)
    _check("nms", boxes, scores, None, iou_threshold, score_threshold, max_output)
    return _fake_result(boxes)


def _fake_batched_nms(
    boxes: Tensor,
    scores: Tensor,
    idxs: Tensor,
    iou_threshold: float,
    *,
    score_threshold: float | None = None,
    max_output: int | None = None,
) -> Tensor:
    _check_one_image("batched_nms", boxes)
    _check("batched_nms", boxes, scores, idxs, iou_threshold, score_threshold, max_output)
    return _fake_result(boxes)


def _fake_nms_padded(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    max_output: int,
    idxs: Tensor | None = None,
    *,
    score_threshold: float | None = None,
) -> tuple[Tensor, Tensor]:
    torch._check(
        boxes.dim() >= 2 and boxes.shape[-1] == 4,
        lambda: f"opzoo::nms_padded: boxes must have shape [..., N, 4], got {list(boxes.shape)}",
    )
    _check("nms_padded", boxes, scores, idxs, iou_threshold, score_threshold, max_output)
    torch._check_value(
        not isinstance(max_output, int) or max_output <= _MAX_PADDED_OUTPUT,
        lambda: f"opzoo::nms_padded: max_output must be at most {_MAX_PADDED_OUTPUT}, got {max_output}",
    )
    batch = boxes.shape[:-2]
    return boxes.new_empty([*batch, max_output], dtype=torch.int64), boxes.new_empty(batch, dtype=torch.int64)


def _fake_nms_leaders(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    _check_one_image("_nms_leaders", boxes)
    _check("_nms_leaders", boxes, scores, None, iou_threshold)
    return boxes.new_empty(boxes.shape[:1], dtype=torch.int64)


def _refuse_vmap(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        "opzoo::nms, batched_nms and nms_match have no vmap rule, because images keep different numbers of boxes; "
        "use nms_padded, or flatten the batch and call batched_nms with the image as class"
    )


def _nms_padded_vmap(
    info: Any,
    in_dims: Any,
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    max_output: int,
    idxs: Tensor | None = None,
    *,
    score_threshold: float | None = None,
) -> Any:
    """The mapped axis is one more leading axis; a tensor that is not mapped is the same in all."""

    def lead(t: Tensor | None, dim: int | None) -> Any:
        return t.expand(info.batch_size, *t.shape) if t is not None and dim is None else move_batch_first(t, dim)

    boxes, scores = lead(boxes, in_dims[0]), lead(scores, in_dims[1])
    idxs = lead(idxs, in_dims[4] if len(in_dims) > 4 else None)
    return _nms_padded(boxes, scores, iou_threshold, max_output, idxs, score_threshold=score_threshold), (0, 0)


register_fake("nms", _fake_nms)
register_fake("batched_nms", _fake_batched_nms)
register_fake("nms_padded", _fake_nms_padded)
register_fake("_nms_leaders", _fake_nms_leaders)
for _name in ("nms", "batched_nms", "nms_padded", "_nms_leaders"):
    LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # indices have no derivative
for _name in ("nms", "batched_nms", "_nms_leaders"):
    LIBRARY.impl(_name, _refuse_vmap, "FuncTorchBatched")
torch.library.register_vmap("opzoo::nms_padded", _nms_padded_vmap, lib=LIBRARY)
_nms = torch.ops.opzoo.nms.default
_batched_nms = torch.ops.opzoo.batched_nms.default
_nms_padded = torch.ops.opzoo.nms_padded.default
_nms_leaders = torch.ops.opzoo._nms_leaders.default
