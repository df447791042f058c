"""RoIAlign: a window of a feature map, pooled to a fixed size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opzoo._library import LIBRARY
from opzoo.ops._common import differentiable, pair, require_number, require_tensor
from opzoo.ops._roi_fold import Batched, Folded, axis_after, largest_exact_index

MAX_SAMPLING_RATIO = 32767


def roi_align(
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | Sequence[int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    aligned: bool = False,
    pool_mode: str = "avg",
) -> Tensor:
    """Pool the window of each box to ``output_size`` by bilinear sampling.

    A box is scaled to the feature map, cut into ``output_size`` bins, and each bin is the average (or
    the maximum) of a regular grid of bilinear samples. Nothing is rounded to whole pixels.

    Args:
        input: feature map, ``Tensor[N, C, H, W]``, floating.
        boxes: ``Tensor[K, 5]`` of ``(image index, x1, y1, x2, y2)``, or one ``Tensor[L, 4]`` of
            ``(x1, y1, x2, y2)`` per image, in image pixels. Any floating or integer dtype.
        output_size: ``(height, width)`` of the result, or one int for both. Positive.
        spatial_scale: map pixels per image pixel, 0.25 for a map of stride 4. Finite and positive.
        sampling_ratio: samples per bin and axis, at most 32767. Zero or negative: as many as the bin
            has map pixels, rounded up.
        aligned: shift the map by half a pixel, so that pixel (0, 0) has its centre there and not its
            corner. Without it a RoI is at least one pixel wide and high.
        pool_mode: ``"avg"`` or ``"max"``, over the samples of a bin.

    Returns:
        ``Tensor[K, C, height, width]`` of ``input``'s dtype, channels_last if ``input`` is. A list of
        boxes is pooled in its order, image by image.

    Raises:
        TypeError: an argument is no tensor, no number, or no pair of ints.
        ValueError: an image index is no integer in ``[0, N)`` (on the CPU; on CUDA such a RoI gives
            zeros, and raises after ``opzoo.set_debug(True)``), ``boxes`` is a list of another length
            than N, or a number is out of its range.
        RuntimeError: a tensor has the wrong rank, shape, dtype or device, there are boxes but the map
            has no pixels, or the dtype of ``Tensor[K, 5]`` cannot hold the image indices.

    A sample further than one pixel outside the map has the value 0. A box with a NaN or infinite
    coordinate gives zeros. An inverted box (x2 < x1) with ``aligned=True`` gives zeros on an adaptive
    grid and the mirrored window on a fixed one.

    fp64, fp32, fp16 and bf16; coordinates, weights and sums are fp32 (fp64 for fp64), whatever the
    dtype of ``boxes``. Under autocast the result keeps ``input``'s dtype.
    Differentiable any number of times in ``input``, in both modes; ``boxes`` gets no gradient.
    vmap-able. Deterministic, forward and backward, on every device.

    Source: He et al., "Mask R-CNN", 2017; ``aligned=True`` as in Detectron2.

    Example:
        >>> image = torch.arange(16.0).reshape(1, 1, 4, 4)
        >>> opzoo.roi_align(image, [torch.tensor([[0.0, 0.0, 4.0, 4.0]])], 2, aligned=True)
        tensor([[[[ 2.5000,  4.5000],
                  [10.5000, 12.5000]]]])
    """
    require_tensor("roi_align", "input", input)
    height, width = pair("roi_align", "output_size", output_size)
    require_number("roi_align", "spatial_scale", spatial_scale)
    require_number("roi_align", "sampling_ratio", sampling_ratio, "__index__")
    aligned = bool(aligned)
    batch_index = None
    if not isinstance(boxes, Tensor):
        boxes, batch_index = _concatenate("roi_align", input, boxes)
    if pool_mode == "avg":
        return _average(input, boxes, batch_index, height, width, spatial_scale, sampling_ratio, aligned)
    if pool_mode == "max":
        return _maximum(input, boxes, batch_index, height, width, spatial_scale, sampling_ratio, aligned)[0]
    raise ValueError(f"opzoo::roi_align: pool_mode must be 'avg' or 'max', got {pool_mode!r}")


class RoIAlign(nn.Module):
    """:func:`roi_align` as a module.

    Args:
        output_size: ``(height, width)`` of the result, or one int for both.
        spatial_scale: map pixels per image pixel.
        sampling_ratio: samples per bin and axis; zero or negative for an adaptive number.
        aligned: shift the map by half a pixel.
        pool_mode: ``"avg"`` or ``"max"``.
    """

    def __init__(
        self,
        output_size: int | Sequence[int],
        spatial_scale: float,
        sampling_ratio: int,
        aligned: bool = False,
        pool_mode: str = "avg",
    ) -> None:
        super().__init__()
        self.output_size = output_size
        self.spatial_scale = spatial_scale
        self.sampling_ratio = sampling_ratio
        self.aligned = aligned
        self.pool_mode = pool_mode

    def forward(self, input: Tensor, boxes: Tensor | Sequence[Tensor]) -> Tensor:
        """``Tensor[K, C, height, width]``; see :func:`roi_align`."""
        return roi_align(
            input, boxes, self.output_size, self.spatial_scale, self.sampling_ratio, self.aligned, self.pool_mode
        )

    def extra_repr(self) -> str:
        text = (
            f"output_size={self.output_size}, spatial_scale={self.spatial_scale}, "
            f"sampling_ratio={self.sampling_ratio}, aligned={self.aligned}"
        )
        return text if self.pool_mode == "avg" else f"{text}, pool_mode={self.pool_mode!r}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


def _concatenate(op: str, input: Tensor, boxes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One ``Tensor[L, 4]`` per image to ``Tensor[K, 4]`` and an int64 image index ``Tensor[K]``."""
    if not isinstance(boxes, (list, tuple)):
        raise TypeError(f"opzoo::{op}: boxes must be a tensor or a list of tensors, got {type(boxes).__name__}")
    for i, t in enumerate(boxes):
        if not isinstance(t, Tensor):
            raise TypeError(f"opzoo::{op}: boxes[{i}] must be a tensor, got {type(t).__name__}")
        if t.dim() != 2 or t.shape[1] != 4:
            raise RuntimeError(f"opzoo::{op}: boxes[{i}] must have shape [L, 4], got {list(t.shape)}")
        if t.device != input.device:
            raise RuntimeError(
                f"opzoo::{op}: boxes[{i}] must be on the device of input, {input.device}, got {t.device}"
            )
    if input.dim() == 4 and len(boxes) != input.shape[0]:
        raise ValueError(
            f"opzoo::{op}: boxes must hold one tensor per image of input, {input.shape[0]}, got {len(boxes)}"
        )
    if not boxes:
        return input.new_zeros((0, 4)), input.new_zeros((0,), dtype=torch.int64)
    if len(boxes) == 1:
        return boxes[0], boxes[0].new_zeros((boxes[0].shape[0],), dtype=torch.int64)
    index = [t.new_full((t.shape[0],), i, dtype=torch.int64) for i, t in enumerate(boxes)]
    return torch.cat(list(boxes)), torch.cat(index)


# Fake kernels. Their checks are those of roi_align.cpp, as far as a shape can tell.


def _check_boxes(
    op: str, name: str, features: Tensor, boxes: Tensor, batch_index: Tensor | None, batch: Any, empty_map: bool
) -> None:
    columns = 5 if batch_index is None else 4
    torch._check(
        boxes.dim() == 2 and boxes.shape[1] == columns,
        lambda: f"opzoo::{op}: boxes must have shape [K, {columns}], got {list(boxes.shape)}",
    )
    torch._check(
        not boxes.dtype.is_complex and boxes.dtype != torch.bool,
        lambda: f"opzoo::{op}: boxes must have a floating or integer dtype, got {boxes.dtype}",
    )
    torch._check(
        boxes.device == features.device and (batch_index is None or batch_index.device == features.device),
        lambda: f"opzoo::{op}: boxes and batch_index must be on the device of {name}, {features.device}",
    )
    if empty_map:
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


def _check_features(op: str, name: str, t: Tensor) -> None:
    torch._check(t.dim() == 4, lambda: f"opzoo::{op}: {name} must have 4 axes, got {t.dim()}")
    torch._check(t.dtype.is_floating_point, lambda: f"opzoo::{op}: {name} must be floating, got {t.dtype}")


def _check_numbers(op: str, height: Any, width: Any, spatial_scale: float, sampling_ratio: int) -> None:
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


def _is_channels_last(t: Tensor) -> bool:
    return t.dim() == 4 and not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last)


def _empty_map(n: Any, h: Any, w: Any) -> bool:
    return bool(n == 0 or h == 0 or w == 0)


def _fake_output(
    op: str,
    input: Tensor,
    boxes: Tensor,
    batch_index: Tensor | None,
    height: Any,
    width: Any,
    spatial_scale: float,
    sampling_ratio: int,
) -> Tensor:
    _check_features(op, "input", input)
    _check_numbers(op, height, width, spatial_scale, sampling_ratio)
    n, c, h, w = input.shape
    _check_boxes(op, "input", input, boxes, batch_index, n, _empty_map(n, h, w))
    layout = torch.channels_last if _is_channels_last(input) else torch.contiguous_format
    return torch.empty((boxes.shape[0], c, height, width), dtype=input.dtype, device=input.device, memory_format=layout)


def _fake_average(
    input: Tensor, boxes: Tensor, batch_index: Tensor | None, height: Any, width: Any, scale: float, ratio: int, _: bool
) -> Tensor:
    return _fake_output("roi_align", input, boxes, batch_index, height, width, scale, ratio)


def _fake_maximum(
    input: Tensor, boxes: Tensor, batch_index: Tensor | None, height: Any, width: Any, scale: float, ratio: int, _: bool
) -> tuple[Tensor, Tensor]:
    output = _fake_output("_roi_align_max", input, boxes, batch_index, height, width, scale, ratio)
    return output, torch.empty_like(output, dtype=torch.int64)


def _check_argmax(op: str, argmax: Tensor, shape: Sequence[Any]) -> None:
    torch._check(argmax.dtype == torch.int64, lambda: f"opzoo::{op}: argmax must have dtype int64, got {argmax.dtype}")
    _check_shape(op, "argmax", argmax, shape)


def _check_shape(op: str, name: str, t: Tensor, shape: Sequence[Any]) -> None:
    for axis, size in enumerate(shape):
        torch._check(
            t.shape[axis] == size,
            lambda: f"opzoo::{op}: {name} must have shape {list(shape)}, got {list(t.shape)}",
        )


def _fake_sample(
    input: Tensor, argmax: Tensor, boxes: Tensor, batch_index: Tensor | None, scale: float, ratio: int, _: bool
) -> Tensor:
    op = "_roi_align_max_sample"
    torch._check(argmax.dim() == 4, lambda: f"opzoo::{op}: argmax must have 4 axes, got {argmax.dim()}")
    output = _fake_output(op, input, boxes, batch_index, argmax.shape[2], argmax.shape[3], scale, ratio)
    _check_argmax(op, argmax, output.shape)
    return output


def _fake_grad_input(
    op: str, grad: Tensor, boxes: Tensor, batch_index: Tensor | None, sizes: Sequence[Any], options: Sequence[Any]
) -> Tensor:
    n, c, h, w = sizes
    scale, ratio, _, channels_last = options
    _check_features(op, "grad", grad)
    _check_numbers(op, grad.shape[2], grad.shape[3], scale, ratio)
    for size in sizes:
        torch._check_value(size >= 0, lambda: f"opzoo::{op}: grad_input sizes must not be negative, got {list(sizes)}")
    _check_boxes(op, "grad", grad, boxes, batch_index, n, _empty_map(n, h, w))
    _check_shape(op, "grad", grad, (boxes.shape[0], c))
    if not channels_last:
        return grad.new_empty((n, c, h, w))
    channels, columns = torch.sym_max(c, 1), torch.sym_max(w, 1)
    row = columns * channels
    return grad.new_empty_strided((n, c, h, w), (torch.sym_max(h, 1) * row, 1, row, channels))


def _fake_average_backward(
    grad: Tensor, boxes: Tensor, batch_index: Tensor | None, n: Any, c: Any, h: Any, w: Any, *options: Any
) -> Tensor:
    return _fake_grad_input("_roi_align_backward", grad, boxes, batch_index, (n, c, h, w), options)


def _fake_maximum_backward(
    grad: Tensor,
    argmax: Tensor,
    boxes: Tensor,
    batch_index: Tensor | None,
    n: Any,
    c: Any,
    h: Any,
    w: Any,
    *options: Any,
) -> Tensor:
    op = "_roi_align_max_backward"
    grad_input = _fake_grad_input(op, grad, boxes, batch_index, (n, c, h, w), options)
    torch._check(argmax.dim() == 4, lambda: f"opzoo::{op}: argmax must have 4 axes, got {argmax.dim()}")
    _check_argmax(op, argmax, grad.shape)
    return grad_input


# Derivatives. For given boxes (and argmax) every operator but the maximum itself is linear in its
# features, and each one's adjoint is another one: average <-> average_backward, and
# sample <-> maximum_backward. The maximum is differentiated as the sample of its argmax.


def _keep(ctx: Any, tensors: Sequence[Tensor | None], own: Sequence[Any], adjoint: Sequence[Any]) -> None:
    """Keep the tensors behind the features, and the numbers behind those: the operator's and its adjoint's."""
    ctx.own, ctx.adjoint = own, adjoint
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


def _transpose(ctx: Any, adjoint: Callable[..., Any], grad: Tensor | None, arguments: int) -> tuple[Any, ...]:
    # Autograd leaves boxes.grad None, which says that there is none; torch.func would answer with zeros.
    if any(ctx.needs_input_grad[1:]) and torch._C._are_functorch_transforms_active():
        raise NotImplementedError("opzoo.roi_align is not differentiable in boxes; detach them")
    if grad is not None:
        grad = adjoint(grad, *ctx.saved_tensors, *ctx.adjoint)
    return grad, *(None,) * (arguments - 1)


def _push(ctx: Any, call: Callable[..., Any], tangent: Tensor | None, *others: Tensor | None) -> Tensor | None:
    if any(other is not None for other in others):
        raise NotImplementedError("opzoo.roi_align is not differentiable in boxes; detach them")
    return None if tangent is None else call(tangent, *ctx.saved_tensors, *ctx.own)


def _linear(
    op: Any, tensors: int, adjoint: Callable[..., Any], adjoint_numbers: Callable[..., Any], vmap: Callable[..., Any]
) -> Callable[..., Any]:
    """An operator of features, as many ``tensors`` and numbers. ``adjoint_numbers(args)`` are its adjoint's."""
    arguments = len(op._schema.arguments)

    def save(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
        _keep(ctx, args[1 : 1 + tensors], args[1 + tensors :], adjoint_numbers(args))

    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        return _transpose(ctx, adjoint, grad, arguments)

    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        return _push(ctx, call, *tangents)

    call = differentiable(op, inputs=(0,), save=save, backward=backward, jvp=jvp, vmap=vmap)
    return call


def _map_numbers(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What makes a gradient of the map args[0]: its sizes, the geometry, its layout."""
    # Under vmap an axis of the map is hidden, and torch does not answer for its layout.
    channels_last = not torch._C._are_functorch_transforms_active() and _is_channels_last(args[0])
    return *args[0].shape, *args[-3:], channels_last


def _pooled_numbers(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return *args[0].shape[-2:], *args[-4:-1]


def _save_maximum(ctx: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    _keep(ctx, (output[1], *args[1:3]), args[-3:], _map_numbers(args))


def _maximum_grad(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    return _transpose(ctx, _maximum_to_map, grad, 8)


def _maximum_jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Any, None]:
    return _push(ctx, _sample, *tangents), None


def _average_vmap(info: Any, dims: Any, input: Tensor, boxes: Tensor, index: Any, *rest: Any) -> tuple[Tensor, int]:
    images = axis_after(input, dims[0], 0)
    f = Folded(info.batch_size, images, (boxes, dims[1]), (index, dims[2]), (), (input, dims[0]))
    return f.unfold(_average(f.map, f.boxes, f.batch_index, *rest)), f.axis


def _maximum_vmap(info: Any, dims: Any, input: Tensor, boxes: Tensor, index: Any, *rest: Any) -> tuple[Any, Any]:
    images = axis_after(input, dims[0], 0)
    f = Folded(info.batch_size, images, (boxes, dims[1]), (index, dims[2]), (), (input, dims[0]))
    output, argmax = _maximum(f.map, f.boxes, f.batch_index, *rest)
    return (f.unfold(output), f.unfold(argmax)), (f.axis, f.axis)


def _sample_vmap(
    info: Any, dims: Any, input: Tensor, argmax: Tensor, boxes: Tensor, index: Any, *rest: Any
) -> tuple[Tensor, int]:
    images = axis_after(input, dims[0], 0)
    f = Folded(info.batch_size, images, (boxes, dims[2]), (index, dims[3]), ((argmax, dims[1]),), (input, dims[0]))
    return f.unfold(_sample(f.map, *f.pooled, f.boxes, f.batch_index, *rest)), f.axis


def _grad_input_vmap(
    call: Any, size: int, pooled: Sequence[Batched], boxes: Batched, index: Batched, n: Any, c: Any, rest: Any
) -> tuple[Tensor, int]:
    f = Folded(size, n, boxes, index, pooled, (None, None))
    n, c = (n * size, c) if f.axis == 0 else (n, c * size)
    return f.unfold(call(*f.pooled, f.boxes, f.batch_index, n, c, *rest)), f.axis


def _average_backward_vmap(
    info: Any, dims: Any, grad: Tensor, boxes: Tensor, index: Any, n: Any, c: Any, *rest: Any
) -> tuple[Tensor, int]:
    pooled = ((grad, dims[0]),)
    return _grad_input_vmap(_average_backward, info.batch_size, pooled, (boxes, dims[1]), (index, dims[2]), n, c, rest)


def _maximum_backward_vmap(
    info: Any, dims: Any, grad: Tensor, argmax: Tensor, boxes: Tensor, index: Any, n: Any, c: Any, *rest: Any
) -> tuple[Tensor, int]:
    pooled = (grad, dims[0]), (argmax, dims[1])
    return _grad_input_vmap(_maximum_backward, info.batch_size, pooled, (boxes, dims[2]), (index, dims[3]), n, c, rest)


for _op, _fake in (
    ("roi_align", _fake_average),
    ("_roi_align_backward", _fake_average_backward),
    ("_roi_align_max", _fake_maximum),
    ("_roi_align_max_backward", _fake_maximum_backward),
    ("_roi_align_max_sample", _fake_sample),
):
    torch.library.register_fake(f"opzoo::{_op}", _fake, lib=LIBRARY)


def _average_to_map(*args: Any) -> Tensor:
    return _average_backward(*args)


def _maximum_to_map(*args: Any) -> Tensor:
    return _maximum_backward(*args)


def _map_to_average(*args: Any) -> Tensor:
    return _average(*args)


def _map_to_sample(*args: Any) -> Tensor:
    return _sample(*args)


_ops = torch.ops.opzoo
_average = _linear(_ops.roi_align.default, 2, _average_to_map, _map_numbers, _average_vmap)
_average_backward = _linear(
    _ops._roi_align_backward.default, 2, _map_to_average, _pooled_numbers, _average_backward_vmap
)
_sample = _linear(_ops._roi_align_max_sample.default, 3, _maximum_to_map, _map_numbers, _sample_vmap)
_maximum_backward = _linear(
    _ops._roi_align_max_backward.default, 3, _map_to_sample, lambda args: args[-4:-1], _maximum_backward_vmap
)
_maximum = differentiable(
    _ops._roi_align_max.default,
    inputs=(0,),
    save=_save_maximum,
    backward=_maximum_grad,
    jvp=_maximum_jvp,
    vmap=_maximum_vmap,
)
