"""RoIAlign over a feature pyramid: every box is pooled from the map that suits its size."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opzoo.ops._common import (
    _autocast_enabled,
    differentiable,
    pair,
    register_fake,
    require_flag,
    require_number,
    require_tensor,
)
from opzoo.ops._roi_checks import check_boxes, empty_map, is_channels_last
from opzoo.ops._roi_fold import Batched, Folded, axis_after
from opzoo.ops.roi_align import _boxes_backward, _concatenate, _fake_grad_input, _fake_output

MAX_LEVELS = 8
_OP = "multi_scale_roi_align"


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


# Fake kernels. Their checks are those of multi_scale_roi_align.cpp, as far as a shape can tell.


def _check_pyramid(op: str, levels: int, scales: Sequence[float], options: Sequence[Any]) -> None:
    _, _, canonical_scale, canonical_level, _, _ = options
    torch._check(1 <= levels <= MAX_LEVELS, lambda: f"opzoo::{op}: inputs must hold 1 to 8 maps, got {levels}")
    torch._check_value(
        len(scales) == levels,
        lambda: f"opzoo::{op}: spatial_scales must hold one number per map, {levels}, got {len(scales)}",
    )
    for scale in scales:
        torch._check_value(
            math.isfinite(scale) and scale > 0,
            lambda: f"opzoo::{op}: spatial_scales must be finite and positive, got {scales}",
        )
    torch._check_value(
        math.isfinite(canonical_scale) and canonical_scale > 0,
        lambda: f"opzoo::{op}: canonical_scale must be finite and positive, got {canonical_scale}",
    )
    torch._check_value(
        math.isfinite(canonical_level),
        lambda: f"opzoo::{op}: canonical_level must be finite, got {canonical_level}",
    )


def _check_map(name: str, t: Tensor, first: Tensor) -> None:
    torch._check(t.dim() == 4, lambda: f"opzoo::{_OP}: {name} must have 4 axes, got {t.dim()}")
    torch._check(
        t.dtype == first.dtype and t.device == first.device,
        lambda: (
            f"opzoo::{_OP}: {name} must have the dtype and the device of inputs[0], "
            f"{first.dtype} on {first.device}, got {t.dtype} on {t.device}"
        ),
    )
    for axis in (0, 1):
        torch._check(
            t.shape[axis] == first.shape[axis],
            lambda: (
                f"opzoo::{_OP}: {name} must have the batch and the channels of inputs[0], "
                f"{list(first.shape)}, got {list(t.shape)}"
            ),
        )


def _fake_forward(
    inputs: Sequence[Tensor],
    boxes: Tensor,
    batch_index: Tensor | None,
    height: Any,
    width: Any,
    scales: Sequence[float],
    *options: Any,
) -> Tensor:
    _check_pyramid(_OP, len(inputs), scales, options)
    for i, t in enumerate(inputs):
        _check_map(f"inputs[{i}]", t, inputs[0])
        n, _, h, w = t.shape
        check_boxes(_OP, f"inputs[{i}]", t, boxes, batch_index, n, empty_map(n, h, w))
    return _fake_output(_OP, inputs[0], boxes, batch_index, height, width, scales[0], options[0])


def _fake_backward(
    grad: Tensor,
    boxes: Tensor,
    batch_index: Tensor | None,
    n: Any,
    c: Any,
    heights: Sequence[Any],
    widths: Sequence[Any],
    scales: Sequence[float],
    *options: Any,
) -> list[Tensor]:
    op = "_multi_scale_roi_align_backward"
    _check_pyramid(op, len(heights), scales, options[:-1])
    torch._check_value(
        len(widths) == len(heights),
        lambda: f"opzoo::{op}: widths must hold one number per map, {len(heights)}, got {len(widths)}",
    )
    return [
        _fake_grad_input(op, grad, boxes, batch_index, (n, c, h, w), (scale, *options[:2], options[-1]))
        for h, w, scale in zip(heights, widths, scales, strict=True)
    ]


# Derivatives. For given boxes the operator is linear in its maps, and the backward is its adjoint. Each
# box has its gradient from the map it takes, as roi_align gives it: with g of the pooled shape and m of
# the maps', both <g, average(m)> and <m, backward(g)> are the one sum that boxes_backward(g, m)
# differentiates.

_FORWARD_TAIL = 11  # arguments behind the maps
_BACKWARD_ARGUMENTS = 15


def _keep(ctx: Any, args: tuple[Any, ...], features: Sequence[Tensor], adjoint: Sequence[Any]) -> None:
    ctx.own, ctx.adjoint = args[3:], adjoint
    tensors = (*args[1:3], *features)
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


def _refuse_forward_mode() -> None:
    raise NotImplementedError(f"opzoo.{_OP} has no forward-mode derivative in boxes; detach them")


def _with_zeros(tensors: Sequence[Tensor | None], backward_numbers: Sequence[Any]) -> list[Tensor] | None:
    """A missing gradient or tangent of one map beside those of others; None where all are missing."""
    given = next((t for t in tensors if t is not None), None)
    if given is None:
        return None
    n, c, heights, widths, *_ = backward_numbers
    shapes = zip(heights, widths, strict=True)
    return [given.new_zeros((n, c, h, w)) if t is None else t for t, (h, w) in zip(tensors, shapes, strict=True)]


def _map_of_each(maps: Sequence[Tensor], boxes: Tensor, index: Tensor | None, bounds: Sequence[Any]) -> Tensor:
    """``Tensor[K]``: 1 for a box of the first map, 2 for one of the second, ..., 0 for one of none.

    The operator's own answer, pooled from maps of one pixel that hold their number. The scale is so small
    that every finite box lies on that pixel.
    """
    numbers = [t.new_full((t.shape[0], 1, 1, 1), i + 1) for i, t in enumerate(maps)]
    return _average(numbers, boxes.detach(), index, 1, 1, [1e-30] * len(maps), 1, False, *bounds).flatten()


def _to_boxes(
    grad: Tensor, maps: Sequence[Tensor], boxes: Tensor, index: Tensor | None, geometry: Sequence[Any]
) -> Tensor:
    scales, ratio, aligned, *bounds = geometry
    if len(maps) == 1:
        return _boxes_backward(grad, maps[0], boxes, index, scales[0], ratio, aligned)
    number = _map_of_each(maps, boxes, index, bounds)
    total = None
    for i, (t, scale) in enumerate(zip(maps, scales, strict=True)):
        # A box of NaN has no samples: its gradient is 0 and nothing is read for it.
        own = torch.where((number == i + 1).unsqueeze(1), boxes[:, -4:], math.nan)
        if index is None:
            own = torch.cat([boxes[:, :1], own], 1)
        part = _boxes_backward(grad, t, own, index, scale, ratio, aligned)
        total = part if total is None else total + part
    assert total is not None
    return total


def _save_forward(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
    maps = args[0]
    n, c, _, _ = maps[0].shape
    # Under vmap an axis of the map is hidden, and torch does not answer for its layout.
    channels_last = not torch._C._are_functorch_transforms_active() and is_channels_last(maps[0])
    sizes = [t.shape[2] for t in maps], [t.shape[3] for t in maps]
    features = maps if ctx.needs_input_grad[len(maps)] else ()  # kept for the boxes alone
    _keep(ctx, args, features, (n, c, *sizes, *args[5:], channels_last))


def _forward_grad(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    boxes, index, *maps = ctx.saved_tensors
    levels = len(ctx.adjoint[2])
    grads: list[Any] = [None] * levels
    grad_boxes = None
    if grad is not None and any(ctx.needs_input_grad[:levels]):
        grads = list(_backward(grad, boxes, index, *ctx.adjoint))
    if grad is not None and ctx.needs_input_grad[levels]:
        grad_boxes = _to_boxes(grad, maps, boxes, index, ctx.own[2:])
    return grads, grad_boxes, *(None,) * (_FORWARD_TAIL - 1)


def _forward_jvp(ctx: Any, tangents: list[Tensor | None], *others: Tensor | None) -> Tensor | None:
    if any(other is not None for other in others):
        _refuse_forward_mode()
    maps = _with_zeros(tangents, ctx.adjoint)
    return None if maps is None else _average(maps, *ctx.saved_tensors[:2], *ctx.own)


def _forward_vmap(
    info: Any, dims: Any, maps: list[Tensor], boxes: Tensor, index: Tensor | None, *rest: Any
) -> tuple[Tensor, int]:
    batched: list[Batched] = list(zip(maps, dims[0], strict=True))
    images = axis_after(maps[0], dims[0][0], 0)
    shared = all(dim is None for dim in dims[0])
    f = Folded(
        info.batch_size,
        images,
        (boxes, dims[1]),
        (index, dims[2]),
        () if shared else batched,
        (maps[0], None) if shared else (None, None),
        op=_OP,
    )
    return f.unfold(_average(maps if shared else f.pooled, f.boxes, f.batch_index, *rest)), f.axis


def _save_backward(ctx: Any, args: tuple[Any, ...], output: Any) -> None:
    features = (args[0],) if ctx.needs_input_grad[1] else ()
    _keep(ctx, args, features, (*args[0].shape[-2:], *args[7:14]))


def _backward_grad(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    boxes, index, *features = ctx.saved_tensors
    maps = _with_zeros(grads, ctx.own)
    grad = grad_boxes = None
    if maps is not None and ctx.needs_input_grad[0]:
        grad = _average(maps, boxes, index, *ctx.adjoint)
    if maps is not None and ctx.needs_input_grad[1]:
        grad_boxes = _to_boxes(features[0], maps, boxes, index, ctx.adjoint[2:])
    return grad, grad_boxes, *(None,) * (_BACKWARD_ARGUMENTS - 2)


def _backward_jvp(ctx: Any, tangent: Tensor | None, *others: Tensor | None) -> Any:
    if any(other is not None for other in others):
        _refuse_forward_mode()
    if tangent is None:
        return (None,) * len(ctx.own[2])
    return tuple(_backward(tangent, *ctx.saved_tensors[:2], *ctx.own))


def _backward_vmap(
    info: Any, dims: Any, grad: Tensor, boxes: Tensor, index: Tensor | None, n: Any, c: Any, *rest: Any
) -> tuple[Any, Any]:
    f = Folded(info.batch_size, n, (boxes, dims[1]), (index, dims[2]), ((grad, dims[0]),), (None, None), op=_OP)
    n, c = (n * info.batch_size, c) if f.axis == 0 else (n, c * info.batch_size)
    grads = tuple(f.unfold(t) for t in _backward(*f.pooled, f.boxes, f.batch_index, n, c, *rest))
    return grads, (f.axis,) * len(grads)


register_fake("multi_scale_roi_align", _fake_forward)
register_fake("_multi_scale_roi_align_backward", _fake_backward)

_average = differentiable(
    torch.ops.opzoo.multi_scale_roi_align.default,
    inputs=(0, 1),
    save=_save_forward,
    backward=_forward_grad,
    jvp=_forward_jvp,
    vmap=_forward_vmap,
)
_backward = differentiable(
    torch.ops.opzoo._multi_scale_roi_align_backward.default,
    inputs=(0, 1),
    save=_save_backward,
    backward=_backward_grad,
    jvp=_backward_jvp,
    vmap=_backward_vmap,
)
