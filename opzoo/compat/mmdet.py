"""opzoo's own modules in configs of MMDetection: ``opzoo.compat.mmdet.register()``.

After it a config can name them: ``type='opzoo.DCNv2'``, ``type='opzoo.RoIAlign'``. With
``register(override=True)`` the unmodified names (``type='DCNv2'``, ``'RoIAlign'``) mean opzoo's modules too,
and mmcv's ``batched_nms``, ``soft_nms`` and CPU attention are replaced where they were imported: no loop over
classes in Python, no copy to the CPU, no shifted coordinates, no ``grid_sample``.

Each module is a subclass of mmcv's, so parameters, ``state_dict`` keys, initial values, upgrade hooks and the
rules of optimizers that look for mmcv's classes stay. What changes is the call in between: mixed dtypes,
bfloat16, any batch size, channels_last without a copy, ``torch.compile``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import opzoo.compat.mmcv  # before mmcv.ops

# isort: split
import mmcv.ops
import torch
from mmengine.registry import MODELS, Registry
from mmengine.utils import deprecated_api_warning
from torch import Tensor, nn

import opzoo
from opzoo.compat._mmcv_boxes import _to_edges
from opzoo.compat._mmcv_checks import as_given, require_tensors
from opzoo.compat._rebind import rebind

# The function of the same name hides the module mmcv.ops.nms.
_nms_module = sys.modules["mmcv.ops.nms"]
_attention_module = sys.modules["mmcv.ops.multi_scale_deform_attn"]
_mmcv_batched_nms = _nms_module.batched_nms
_mmcv_soft_nms = _nms_module.soft_nms
_mmcv_roi_align = mmcv.ops.RoIAlign
_mmcv_attention = mmcv.ops.MultiScaleDeformableAttention
_mmcv_grid_sample_attention = _attention_module.multi_scale_deformable_attn_pytorch


class RoIAlign(mmcv.ops.RoIAlign):  # type: ignore[misc]
    """mmcv's RoIAlign over :func:`opzoo.roi_align`."""

    def forward(self, input: Tensor, rois: Tensor) -> Tensor:
        size, scale, ratio = self.output_size, self.spatial_scale, self.sampling_ratio
        return opzoo.roi_align(input, rois, size, scale, ratio, self.aligned, self.pool_mode)


class DCN(mmcv.ops.DeformConv2dPack):  # type: ignore[misc]
    """mmcv's DeformConv2dPack over :func:`opzoo.deform_conv2d`."""

    def forward(self, x: Tensor) -> Tensor:
        offset = _in_fp32(self.conv_offset, x)
        return opzoo.deform_conv2d(x, offset, self.weight, None, self.stride, self.padding, self.dilation)


class DCNv2(mmcv.ops.ModulatedDeformConv2dPack):  # type: ignore[misc]
    """mmcv's ModulatedDeformConv2dPack over :func:`opzoo.deform_conv2d`."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, mask = _in_fp32(self.conv_offset, x).chunk(3, dim=1)
        offset = torch.cat((first, second), dim=1)
        geometry = (self.stride, self.padding, self.dilation)
        return opzoo.deform_conv2d(x, offset, self.weight, self.bias, *geometry, mask.sigmoid())


class MultiScaleDeformableAttention(mmcv.ops.MultiScaleDeformableAttention):  # type: ignore[misc]
    """mmcv's attention over :func:`opzoo.ms_deform_attn`, on the CPU as well."""

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        identity: Tensor | None = None,
        query_pos: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        reference_points: Any = None,
        spatial_shapes: Any = None,
        level_start_index: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        return opzoo.MultiScaleDeformableAttention.forward(
            self,
            query,
            key,
            value,
            kwargs.get("residual", identity),
            query_pos,
            key_padding_mask,
            reference_points=reference_points,
            spatial_shapes=spatial_shapes,
            level_start_index=level_start_index,
        )


def _in_fp32(conv: nn.Module, x: Tensor) -> Tensor:
    """The offsets of a convolution outside autocast: coordinates are never half by accident."""
    with as_given(x):
        offset: Tensor = conv(x.to(next(conv.parameters()).dtype))
        return offset


def _batched_nms(
    boxes: Tensor, scores: Tensor, idxs: Tensor, nms_cfg: dict[str, Any] | None, class_agnostic: bool = False
) -> tuple[Tensor, Tensor]:
    """mmcv's ``batched_nms`` for ``(x1, y1, x2, y2)`` boxes and the types "nms" and "soft_nms"; else mmcv's own."""
    options = dict(nms_cfg or {})
    kind = options.pop("type", "nms")
    agnostic = options.pop("class_agnostic", class_agnostic)
    options.pop("split_thr", None)
    limit = options.pop("max_num", -1)
    threshold = options.pop("iou_threshold", None)
    if threshold is None:
        threshold = options.pop("iou_thr", None)
    offset = options.pop("offset", 0)
    own = {"nms": ("score_threshold",), "soft_nms": ("sigma", "min_score", "method")}.get(kind, ())
    special = {key: options.pop(key) for key in own if key in options}
    if nms_cfg is None or options or not own or boxes.dim() != 2 or boxes.shape[-1] != 4:
        return _mmcv_batched_nms(boxes, scores, idxs, nms_cfg, class_agnostic)
    require_tensors("batched_nms", boxes=boxes, scores=scores, idxs=idxs)
    edges = _to_edges("batched_nms", boxes, offset)
    classes = torch.zeros_like(idxs, dtype=torch.int64) if agnostic else _classes(idxs)
    if kind == "soft_nms":
        given = {} if threshold is None else {"iou_threshold": threshold}
        kept_scores, keep = opzoo.batched_soft_nms(edges, scores, classes, **given, **special)
        if limit > 0:
            kept_scores, keep = kept_scores[:limit], keep[:limit]
    else:
        least = special.get("score_threshold", 0)
        keep = opzoo.batched_nms(
            edges,
            scores,
            classes,
            threshold,
            score_threshold=least if least > 0 else None,
            max_output=limit if limit > 0 else None,
        )
        kept_scores = scores[keep]
    return torch.cat([boxes[keep], kept_scores[:, None]], -1), keep


def _classes(idxs: Tensor) -> Tensor:
    """Integers that are equal where ``idxs`` are: mmcv takes class ids of any dtype, fractions among them."""
    if not idxs.is_floating_point():
        return idxs.to(torch.int64)
    return torch.unique(idxs, return_inverse=True)[1]


@deprecated_api_warning({"iou_thr": "iou_threshold"})  # type: ignore[untyped-decorator]
def _soft_nms(
    boxes: Any,
    scores: Any,
    iou_threshold: float = 0.3,
    sigma: float = 0.5,
    min_score: float = 1e-3,
    method: str = "linear",
    offset: int = 0,
) -> tuple[Any, Any]:
    """mmcv's ``soft_nms`` on the device of the boxes; arrays go to mmcv's own."""
    if not (isinstance(boxes, Tensor) and isinstance(scores, Tensor)):
        return _mmcv_soft_nms(boxes, scores, iou_threshold, sigma, min_score, method, offset)
    edges = _to_edges("soft_nms", boxes, offset)
    lowered, keep = opzoo.soft_nms(edges, scores, iou_threshold, sigma, min_score, method)
    return torch.cat([boxes[keep], lowered[:, None]], -1), keep


def _attention(value: Tensor, value_spatial_shapes: Any, sampling_locations: Tensor, weights: Tensor) -> Tensor:
    shapes = torch.as_tensor(value_spatial_shapes, dtype=torch.int64, device=value.device)
    sizes = shapes.prod(1)
    return opzoo.ms_deform_attn(value, shapes, sizes.cumsum(0) - sizes, sampling_locations, weights)


_MODULES: dict[str, type[nn.Module]] = {
    "RoIAlign": RoIAlign,
    "DCN": DCN,
    "DCNv2": DCNv2,
    "MultiScaleDeformableAttention": MultiScaleDeformableAttention,
}
_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _mmcv_batched_nms: _batched_nms,
    _mmcv_soft_nms: _soft_nms,
    _mmcv_grid_sample_attention: _attention,
}
_PACKAGES = ("mmcv", "mmdet")
_registry = Registry("opzoo model", parent=MODELS, scope="opzoo")


def register(*, override: bool = False) -> None:
    """Make opzoo's modules known to configs as ``opzoo.<name>``; with ``override`` under mmcv's names as well.

    ``override`` reaches what is imported already; call it again after importing more of MMDetection. Models
    built before keep their modules.
    """
    for name, module in _MODULES.items():
        _registry.register_module(name=name, module=module, force=True)
        setattr(mmcv.ops, f"opzoo.{name}", module)  # where RoI extractors look a type up
        if override and name != "RoIAlign":
            MODELS.register_module(name=name, module=module, force=True)
    if override:
        rebind(_PACKAGES, {**_FUNCTIONS, _mmcv_roi_align: RoIAlign, _mmcv_attention: MultiScaleDeformableAttention})
