"""opzoo under the functions of ``torchvision.ops``, for models that are already written.

``install()`` rebinds ``nms``, ``batched_nms``, ``roi_align``, ``deform_conv2d``, ``sigmoid_focal_loss`` and the
pooler of a pyramid wherever torchvision's own modules hold them, so ``torchvision.models.detection`` and the modules
of ``torchvision.ops`` call opzoo, models built earlier included. Names that other code imported
(``from torchvision.ops import nms``) stay what they were. ``uninstall()`` takes it back, and
``installed()`` does both around a ``with`` block::

    with opzoo.compat.torchvision.installed():
        detections = model(images)

Results are torchvision's, but for rounding; nms and batched_nms never shift coordinates, so classes stay
apart for negative and huge boxes too. Quantized tensors still go to torchvision. While installed, a model
cannot be scripted; compile or export it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torchvision
from torch import Tensor
from torchvision.ops import boxes as _boxes

import opzoo
from opzoo.compat._rebind import rebind
from opzoo.ops.multi_scale_roi_align import _pool

# Not attributes of torchvision.ops: there the functions stand, by the same names.
_poolers = sys.modules["torchvision.ops.poolers"]
_roi_align_module = sys.modules["torchvision.ops.roi_align"]
_deform_conv_module = sys.modules["torchvision.ops.deform_conv"]

_original_nms = _boxes.nms
_original_batched_nms = _boxes.batched_nms
_original_roi_align = _roi_align_module.roi_align
_original_deform_conv2d = _deform_conv_module.deform_conv2d
_original_pool = _poolers._multiscale_roi_align


def _nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    if boxes.is_quantized:
        return _original_nms(boxes, scores, iou_threshold)
    return opzoo.nms(boxes, scores, iou_threshold)


def _batched_nms(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    # Classes may come as floats, which torchvision multiplies into an offset.
    idxs = idxs if not idxs.is_floating_point() else idxs.unique(return_inverse=True)[1]
    return opzoo.batched_nms(boxes, scores, idxs, iou_threshold)


def _roi_align(
    input: Tensor,
    boxes: Any,
    output_size: Any,
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    aligned: bool = False,
) -> Tensor:
    if input.is_quantized:
        return _original_roi_align(input, boxes, output_size, spatial_scale, sampling_ratio, aligned)
    return opzoo.roi_align(input, boxes, output_size, spatial_scale, sampling_ratio, aligned)


def _multiscale_roi_align(
    x_filtered: list[Tensor], boxes: list[Tensor], output_size: Any, sampling_ratio: int, scales: Any, mapper: Any
) -> Tensor:
    if scales is None or mapper is None:
        raise ValueError("scales and mapper should not be None")
    if mapper.eps != 1e-6:
        return _original_pool(x_filtered, boxes, output_size, sampling_ratio, scales, mapper)
    return _pool(
        x_filtered,
        boxes,
        output_size,
        list(scales),
        sampling_ratio,
        False,
        mapper.s0,
        mapper.lvl0,
        mapper.k_min,
        mapper.k_max,
    )


_REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    _original_nms: _nms,
    _original_batched_nms: _batched_nms,
    _original_roi_align: _roi_align,
    _original_pool: _multiscale_roi_align,
    _original_deform_conv2d: opzoo.deform_conv2d,
    torchvision.ops.sigmoid_focal_loss: opzoo.sigmoid_focal_loss,
}
_PACKAGES = ("torchvision",)


def install() -> None:
    """Put opzoo under torchvision's operators; a second call also reaches modules imported since the first."""
    rebind(_PACKAGES, _REPLACEMENTS)


def uninstall() -> None:
    """Give torchvision its own operators back."""
    rebind(_PACKAGES, {ours: theirs for theirs, ours in _REPLACEMENTS.items()})


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """opzoo under torchvision's operators inside a ``with`` block; nests."""
    before = torchvision.ops.nms is _nms
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()
