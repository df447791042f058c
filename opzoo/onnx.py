"""Export to standard ONNX operators: what ``torch.onnx.export`` shall write for opzoo's.

    program = torch.onnx.export(
        model, inputs, dynamo=True, opset_version=19, custom_translation_table=opzoo.onnx.translation_table()
    )

====================  ======================================================================
opzoo                 ONNX
====================  ======================================================================
nms, batched_nms      NonMaxSuppression (opset 11)
roi_align             RoiAlign (opset 16); not ``pool_mode="max"``
deform_conv2d         DeformConv (opset 19)
====================  ======================================================================

Every other operator of opzoo is refused with a sentence that names it. The functions below run while a model
is exported; they build a graph and compute nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import opzoo

try:
    import onnx_ir
    from onnxscript import opset18 as op18
    from onnxscript import opset19 as op19
except ImportError as error:
    raise ImportError("opzoo.onnx needs onnx and onnxscript: pip install 'opzoo[onnx]'") from error

_FLOAT, _DOUBLE, _INT64 = onnx_ir.DataType.FLOAT, onnx_ir.DataType.DOUBLE, onnx_ir.DataType.INT64
_HALVES = (onnx_ir.DataType.FLOAT16, onnx_ir.DataType.BFLOAT16)
# Their values are exact in float32, the only type of NonMaxSuppression; opzoo too compares them in float32.
_IN_FLOAT32 = (_FLOAT, *_HALVES, onnx_ir.DataType.INT8, onnx_ir.DataType.UINT8, onnx_ir.DataType.INT16)
_ALL = 2**31 - 1  # more boxes than NonMaxSuppression can be asked for in any runtime
_LOWEST = torch.finfo(torch.float32).min


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """For the argument ``custom_translation_table`` of ``torch.onnx.export(..., dynamo=True)``.

    Returns:
        From operators of ``torch.ops.opzoo`` to functions that build their ONNX graph.

    The exported model gives what opzoo gives, in float32 (RoiAlign and DeformConv also in float64, half types
    through float32), with these limits:

    - nms, batched_nms: scores must be finite, boxes and scores float32 or a type that fits in it; others raise
      while exporting. A box with ``x2 < x1`` or ``y2 < y1`` is read with its corners exchanged.
    - roi_align: boxes must be finite and image indices inside the batch; the runtime checks neither. The output
      size must be fixed while exporting, and so must the channels of deform_conv2d's arguments.
    """
    table: dict[Callable[..., Any], Callable[..., Any]] = {
        _target(name): _refusing(name) for name in _forward_operators()
    }
    return table | {
        _target("nms"): _nms,
        _target("batched_nms"): _batched_nms,
        _target("roi_align"): _roi_align,
        _target("deform_conv2d"): _deform_conv2d,
    }


def _target(name: str) -> Callable[..., Any]:
    overload: Callable[..., Any] = getattr(torch.ops.opzoo, name).default
    return overload


def _forward_operators() -> list[str]:
    public = [name for name in opzoo.__all__ if hasattr(opzoo.reference, name) and hasattr(torch.ops.opzoo, name)]
    return [*public, "_roi_align_max"]


def _refuse(name: str, what: str) -> NotImplementedError:
    return NotImplementedError(f"opzoo::{name}: no export to ONNX: {what}")


def _refusing(name: str) -> Callable[..., Any]:
    what = "no standard operator computes it"
    if name == "_roi_align_max":
        name, what = "roi_align", 'pool_mode="max" takes the largest sample, the mode "max" of RoiAlign does not'

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise _refuse(name, what)

    return refuse


def _require_fixed(name: str, argument: str, value: Any) -> int:
    if not isinstance(value, int):
        raise _refuse(name, f"{argument} must be a number that is fixed while exporting, got {value}")
    return value


def _as_float32(name: str, argument: str, value: Any) -> Any:
    if value.dtype not in _IN_FLOAT32:
        raise _refuse(name, f"{argument} must fit in float32, the type of NonMaxSuppression, got {value.dtype}")
    return value if value.dtype == _FLOAT else op18.Cast(value, to=_FLOAT)


# Non-maximum suppression


def _column(values: Any, number: int) -> Any:
    return op18.Gather(values, op18.Constant(value_int=number), axis=1)


def _scalar(value: float) -> Any:
    return op18.Constant(value_floats=[value])


def _at_most(kept: Any, max_output: int | None) -> Any:
    if max_output is None:
        return kept
    first, last = op18.Constant(value_ints=[0]), op18.Constant(value_ints=[max_output])
    return op18.Slice(kept, first, last)


def _candidates(name: str, boxes: Any, scores: Any, threshold: float | None) -> tuple[Any, Any, Any]:
    """Boxes and scores above the threshold, and their indices among all, or None for all.

    Not by the operator's own threshold: at equality its text and its implementations differ.
    """
    boxes, scores = _as_float32(name, "boxes", boxes), _as_float32(name, "scores", scores)
    if threshold is None:
        return boxes, scores, None
    above = op18.Greater(scores, op18.CastLike(_scalar(threshold), scores))
    chosen = op18.Reshape(op18.NonZero(above), op18.Constant(value_ints=[-1]))
    return op18.Gather(boxes, chosen), op18.Gather(scores, chosen), chosen


def _suppress(boxes: Any, scores: Any, iou_threshold: float, count: int, *least: Any) -> Any:
    """``[N, 4]`` and ``[classes, N]`` to the indices of the kept boxes, by class, then by rank."""
    first = op18.Constant(value_ints=[0])
    count_, iou = op18.Constant(value_ints=[count]), _scalar(iou_threshold)
    boxes, scores = op18.Unsqueeze(boxes, first), op18.Unsqueeze(scores, first)
    return _column(op18.NonMaxSuppression(boxes, scores, count_, iou, *least), 2)


def _nms(
    boxes: Any, scores: Any, iou_threshold: float, score_threshold: float | None = None, max_output: int | None = None
) -> Any:
    boxes, scores, chosen = _candidates("nms", boxes, scores, score_threshold)
    one_class = op18.Unsqueeze(scores, op18.Constant(value_ints=[0]))
    kept = _suppress(boxes, one_class, iou_threshold, _ALL if max_output is None else max_output)
    return kept if chosen is None else op18.Gather(chosen, kept)


def _batched_nms(
    boxes: Any,
    scores: Any,
    idxs: Any,
    iou_threshold: float,
    score_threshold: float | None = None,
    max_output: int | None = None,
) -> Any:
    """One row of scores per class that occurs, in which the other boxes have no score; then merge the rows."""
    boxes, scores, chosen = _candidates("batched_nms", boxes, scores, score_threshold)
    idxs = op18.Cast(idxs, to=_INT64)
    idxs = idxs if chosen is None else op18.Gather(idxs, chosen)
    classes, *_ = op18.Unique(idxs, sorted=1)
    member = op18.Equal(op18.Unsqueeze(classes, op18.Constant(value_ints=[1])), idxs)
    rows = op18.Where(member, scores, op18.CastLike(_scalar(float("-inf")), scores))
    kept = _suppress(boxes, rows, iou_threshold, _ALL, _scalar(_LOWEST))
    # TopK puts the lower position first among equals: by index first, then by score.
    kept, _ = op18.TopK(kept, op18.Shape(kept), largest=0)
    _, rank = op18.TopK(op18.Gather(scores, kept), op18.Shape(kept))
    kept = _at_most(op18.Gather(kept, rank), max_output)
    return kept if chosen is None else op18.Gather(chosen, kept)


# Sampling


def _widened(value: Any) -> Any:
    """Half types are storage: the arithmetic is that of float32, here as in opzoo's kernels."""
    return op18.Cast(value, to=_FLOAT) if value.dtype in _HALVES else value


def _narrowed(result: Any, like: Any) -> Any:
    return op18.CastLike(result, like) if like.dtype in _HALVES else result


def _roi_align(
    input: Any,
    boxes: Any,
    batch_index: Any,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> Any:
    x = _widened(input)
    if batch_index is None:
        batch_index = op18.Cast(_column(boxes, 0), to=_INT64)
        first, last, axis = (op18.Constant(value_ints=[n]) for n in (1, 5, 1))
        boxes = op18.Slice(boxes, first, last, axis)
    pooled = op18.RoiAlign(
        x,
        op18.CastLike(boxes, x),
        batch_index,
        coordinate_transformation_mode="half_pixel" if aligned else "output_half_pixel",
        mode="avg",
        output_height=_require_fixed("roi_align", "the output's height", pooled_height),
        output_width=_require_fixed("roi_align", "the output's width", pooled_width),
        sampling_ratio=max(sampling_ratio, 0),
        spatial_scale=spatial_scale,
    )
    return _narrowed(pooled, input)


def _deform_conv2d(
    input: Any,
    offset: Any,
    weight: Any,
    bias: Any,
    mask: Any,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    precision: int = 0,
    method: int = 0,
) -> Any:
    _, channels, kernel_h, kernel_w = (_require_fixed("deform_conv2d", "weight's shape", n) for n in weight.shape)
    all_channels = _require_fixed("deform_conv2d", "the number of input's channels", input.shape[1])
    offsets = _require_fixed("deform_conv2d", "the number of offset's channels", offset.shape[1])
    x = _widened(input)
    result = op19.DeformConv(
        x,
        _widened(weight),
        op19.CastLike(offset, x),
        None if bias is None else _widened(bias),
        None if mask is None else op19.CastLike(mask, x),
        dilations=[dilation_h, dilation_w],
        group=all_channels // channels,
        kernel_shape=[kernel_h, kernel_w],
        offset_group=offsets // (2 * kernel_h * kernel_w),
        pads=[pad_h, pad_w, pad_h, pad_w],
        strides=[stride_h, stride_w],
    )
    return _narrowed(result, input)
