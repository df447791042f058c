"""RoIAlign over a feature pyramid: every box is pooled from the map that suits its size."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opzoo.ops._common import _autocast_enabled, pair, require_flag, require_number, require_tensor
from opzoo.ops._multi_scale_derivatives import _OP, MAX_LEVELS, _average
from opzoo.ops.roi_align import _concatenate


def multi_scale_roi_align(
    inputs: Sequence[Tensor],
    boxes: Tensor | Sequence[Tensor],
    output_size: int | Sequence[int],
    spatial_scales: Sequence[float],
    sampling_ratio: int = -1,
    aligned: bool = False,
    *,
    canonical_scale: float = 224,
    canonical_level: float = 4,
) -> Tensor:
    """Pool the window of each box, as :func:`roi_align` does, from one map of a pyramid.

    A box takes map number ``floor(canonical_level + log2(sqrt(area) / canonical_scale) + 1e-6)``, counted
    from the first map, which is number ``-log2(spatial_scales[0])``, and cut to the maps there are. The
    choice is made on the device: nothing waits for it.

    Args:
        inputs: 1 to 8 feature maps ``Tensor[N, C, H, W]``, floating, finest first, each half as fine as the
            one before. N, C, dtype and device are common.
        boxes: ``Tensor[K, 5]`` of ``(image index, x1, y1, x2, y2)``, or one ``Tensor[L, 4]`` of
            ``(x1, y1, x2, y2)`` per image, in image pixels. Any floating or integer dtype.
        output_size: ``(height, width)`` of the result, or one int for both. Positive.
        spatial_scales: map pixels per image pixel, one number per map. Finite and positive.
        sampling_ratio: samples per bin and axis, at most 32767. Zero or negative: as many as the bin
            has map pixels, rounded up.
        aligned: shift the maps by half a pixel, see :func:`roi_align`.
        canonical_scale: side in image pixels of a square box that belongs to ``canonical_level``. Finite
            and positive.
        canonical_level: number of the map for a box of that side. Finite.

    Returns:
        ``Tensor[K, C, height, width]`` of the maps' dtype, channels_last if the first map is. Under
        autocast the maps may differ in dtype; the result then has the first one's.

    Raises:
        TypeError: an argument is no tensor, no number, no list, or no pair of ints.
        ValueError: an image index is no integer in ``[0, N)`` (on the CPU; on CUDA such a RoI gives
            zeros, and raises after ``opzoo.set_debug(True)``), ``boxes`` is a list of another length
            than N, ``spatial_scales`` has not one number per map, or a number is out of its range.
        RuntimeError: a tensor has the wrong rank, shape, dtype or device, there are more than 8 maps or
            none, or there are boxes but a map has no pixels.

    A box of zero area takes the first map, one of infinite area the last, and gives zeros there as any
    box with an infinite coordinate does. With several maps a box whose area is negative (inverted along
    one axis) or NaN gives zeros, as in torchvision; what else a box can be is as in :func:`roi_align`.

    fp64, fp32, fp16 and bf16; coordinates, levels, weights and sums are fp32 (fp64 for fp64).
    Differentiable any number of times in ``inputs``, in both modes, and once in ``boxes``, in reverse mode,
    level and number of samples held constant; see :func:`roi_align`. vmap-able.
    Deterministic, forward and backward, on every device.

    Source: Lin et al., "Feature Pyramid Networks for Object Detection", 2017, equation 1.

    Example:
        >>> fine, coarse = torch.ones(1, 1, 64, 64), torch.full((1, 1, 32, 32), 2.0)
        >>> boxes = torch.tensor([[8.0, 8.0, 40.0, 40.0], [0.0, 0.0, 250.0, 250.0]])
        >>> pooled = opzoo.multi_scale_roi_align([fine, coarse], [boxes], 2, [1 / 8, 1 / 16])
        >>> pooled[:, 0, 0, 0]
        tensor([1., 2.])
    """
    scales = _numbers("spatial_scales", spatial_scales)
    first = _number_of_map(scales[0]) if scales else 0
    last = first + len(scales) - 1
    return _pool(
        inputs, boxes, output_size, scales, sampling_ratio, aligned, canonical_scale, canonical_level, first, last
    )


class MultiScaleRoIAlign(nn.Module):
    """:func:`multi_scale_roi_align` as a module, with torchvision's constructor and results.

    Args:
        featmap_names: the names, in the dict of feature maps, of those to pool from. A name that the dict
            lacks is passed over, as in torchvision.
        output_size: ``(height, width)`` of the result, or one int for both.
        sampling_ratio: samples per bin and axis; zero or negative for an adaptive number.
        canonical_scale: side in image pixels of a square box that belongs to ``canonical_level``.
        canonical_level: number of the map for a box of that side.
        spatial_scales: map pixels per image pixel, one number per map. Without it they are inferred on
            every call: the height of the map over that of the highest image, to the nearest power of two.
        aligned: shift the maps by half a pixel, see :func:`roi_align`.
    """

    def __init__(
        self,
        featmap_names: Sequence[str],
        output_size: int | Sequence[int],
        sampling_ratio: int,
        *,
        canonical_scale: float = 224,
        canonical_level: float = 4,
        spatial_scales: Sequence[float] | None = None,
        aligned: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(featmap_names, str):
            raise TypeError(f"opzoo::{_OP}: featmap_names must be a list of names, got the str {featmap_names!r}")
        self.featmap_names = featmap_names
        self.output_size = pair(_OP, "output_size", output_size)
        self.sampling_ratio = sampling_ratio
        self.canonical_scale = canonical_scale
        self.canonical_level = canonical_level
        self.spatial_scales = spatial_scales
        self.aligned = aligned

    def forward(
        self,
        x: Mapping[str, Tensor],
        boxes: Tensor | Sequence[Tensor],
        image_shapes: Sequence[tuple[int, int]] | None = None,
    ) -> Tensor:
        """``Tensor[K, C, height, width]``; see :func:`multi_scale_roi_align`.

        Args:
            x: feature maps by name, in order of the pyramid. Names not in ``featmap_names`` are left out.
            boxes: one ``Tensor[L, 4]`` per image, or ``Tensor[K, 5]``.
            image_shapes: ``(height, width)`` of each image before the batch was padded. Needed unless
                ``spatial_scales`` is given.
        """
        if not isinstance(x, Mapping):
            raise TypeError(f"opzoo::{_OP}: x must be a dict of feature maps, got {type(x).__name__}")
        inputs = [t for name, t in x.items() if name in self.featmap_names]
        if not inputs:
            raise ValueError(f"opzoo::{_OP}: x must hold one of {list(self.featmap_names)}, got {list(x)}")
        if self.spatial_scales is None:
            scales = _infer_scales(inputs, image_shapes)
            # torchvision's bounds. They differ from a count of the maps where the pyramid skips a level.
            first, last = _number_of_map(scales[0]), _number_of_map(scales[-1])
        else:
            scales = _numbers("spatial_scales", self.spatial_scales)
            first = _number_of_map(scales[0]) if scales else 0
            last = first + len(scales) - 1
        return _pool(
            inputs,
            boxes,
            self.output_size,
            scales,
            self.sampling_ratio,
            self.aligned,
            self.canonical_scale,
            self.canonical_level,
            first,
            last,
        )

    def extra_repr(self) -> str:
        text = (
            f"featmap_names={self.featmap_names}, output_size={self.output_size}, sampling_ratio={self.sampling_ratio}"
        )
        if self.canonical_scale != 224 or self.canonical_level != 4:
            text += f", canonical_scale={self.canonical_scale}, canonical_level={self.canonical_level}"
        if self.spatial_scales is not None:
            text += f", spatial_scales={self.spatial_scales}"
        return f"{text}, aligned=True" if self.aligned else text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


def _numbers(name: str, values: Any) -> list[float]:
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"opzoo::{_OP}: {name} must be a list of numbers, got {type(values).__name__}")
    for i, value in enumerate(values):
        require_number(_OP, f"{name}[{i}]", value)
    return list(values)


def _number_of_map(scale: float) -> int:
    """The level of a map in the whole pyramid, the image being 0. The operator refuses what has none."""
    return round(-math.log2(scale)) if 0 < scale < math.inf else 0


def _infer_scales(inputs: Sequence[Tensor], image_shapes: Sequence[tuple[int, int]] | None) -> list[float]:
    """torchvision's guess: heights alone, and a scale is a power of two."""
    if not image_shapes:
        raise ValueError(f"opzoo::{_OP}: image_shapes must hold a (height, width) per image, got {image_shapes}")
    image_height = max(shape[0] for shape in image_shapes)
    scales = []
    for i, t in enumerate(inputs):
        require_tensor(_OP, f"inputs[{i}]", t)
        height = t.shape[-2] if t.dim() >= 2 else 0
        if image_height <= 0 or height <= 0:
            raise ValueError(
                f"opzoo::{_OP}: no scale to infer from a map of shape {list(t.shape)} and images {list(image_shapes)}; "
                "give spatial_scales"
            )
        scales.append(2.0 ** round(math.log2(height / image_height)))
    return scales


def _pool(
    inputs: Sequence[Tensor],
    boxes: Tensor | Sequence[Tensor],
    output_size: int | Sequence[int],
    scales: list[float],
    sampling_ratio: int,
    aligned: bool,
    canonical_scale: float,
    canonical_level: float,
    first: int,
    last: int,
) -> Tensor:
    if not isinstance(inputs, (list, tuple)):
        raise TypeError(f"opzoo::{_OP}: inputs must be a list of tensors, got {type(inputs).__name__}")
    if not inputs:
        raise RuntimeError(f"opzoo::{_OP}: inputs must hold 1 to {MAX_LEVELS} maps, got 0")
    for i, t in enumerate(inputs):
        require_tensor(_OP, f"inputs[{i}]", t)
    height, width = pair(_OP, "output_size", output_size)
    require_number(_OP, "sampling_ratio", sampling_ratio, "__index__")
    require_number(_OP, "canonical_scale", canonical_scale)
    require_number(_OP, "canonical_level", canonical_level)
    dtype = inputs[0].dtype
    batch_index = None
    if not isinstance(boxes, Tensor):
        boxes, batch_index = _concatenate(_OP, inputs[0], boxes)
    maps = list(inputs)
    if _autocast_enabled(inputs[0].device.type):
        # Layers choose their own dtypes there. The widest loses nothing; the result is the first's.
        widest = functools.reduce(torch.promote_types, [t.dtype for t in maps])
        maps = [t.to(widest) for t in maps]
    aligned = require_flag(_OP, "aligned", aligned)
    options = (scales, sampling_ratio, aligned, canonical_scale, canonical_level, first, last)
    return _average(maps, boxes, batch_index, height, width, *options).to(dtype)
