"""roi_align while tracing, under autograd and vmap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from opzoo.ops._common import differentiable, register_fake
from opzoo.ops._roi_checks import (
    check_argmax,
    check_boxes,
    check_features,
    check_numbers,
    check_shape,
    empty_map,
    is_channels_last,
)
from opzoo.ops._roi_fold import Batched, Folded, axis_after

# Fake kernels. Their checks are those of roi_align.cpp, as far as a shape can tell.


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
    check_features(op, "input", input)
    check_numbers(op, height, width, spatial_scale, sampling_ratio)
    n, c, h, w = input.shape
    check_boxes(op, "input", input, boxes, batch_index, n, empty_map(n, h, w))
    layout = torch.channels_last if is_channels_last(input) else torch.contiguous_format
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


def _fake_sample(
    input: Tensor, argmax: Tensor, boxes: Tensor, batch_index: Tensor | None, scale: float, ratio: int, _: bool
) -> Tensor:
    op = "_roi_align_max_sample"
    torch._check(argmax.dim() == 4, lambda: f"opzoo::{op}: argmax must have 4 axes, got {argmax.dim()}")
    output = _fake_output(op, input, boxes, batch_index, argmax.shape[2], argmax.shape[3], scale, ratio)
    check_argmax(op, argmax, output.shape)
    return output


def _fake_grad_input(
    op: str, grad: Tensor, boxes: Tensor, batch_index: Tensor | None, sizes: Sequence[Any], options: Sequence[Any]
) -> Tensor:
    n, c, h, w = sizes
    scale, ratio, _, channels_last = options
    check_features(op, "grad", grad)
    check_numbers(op, grad.shape[2], grad.shape[3], scale, ratio)
    for size in sizes:
        torch._check_value(size >= 0, lambda: f"opzoo::{op}: grad_input sizes must not be negative, got {list(sizes)}")
    if all(isinstance(size, int) for size in sizes):  # torch's own words for so much are of its strides
        torch._check_value(
            math.prod(max(size, 1) for size in sizes) < 2**60,
            lambda: f"opzoo::{op}: grad_input sizes must be those of a tensor, got {list(sizes)}",
        )
    check_boxes(op, "grad", grad, boxes, batch_index, n, empty_map(n, h, w))
    check_shape(op, "grad", grad, (boxes.shape[0], c))
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
    check_argmax(op, argmax, grad.shape)
    return grad_input


def _fake_boxes_backward(
    grad: Tensor, input: Tensor, boxes: Tensor, batch_index: Tensor | None, scale: float, ratio: int, _: bool
) -> Tensor:
    op = "_roi_align_boxes_backward"
    check_features(op, "input", input)
    check_features(op, "grad", grad)
    torch._check(grad.dtype == input.dtype, lambda: f"opzoo::{op}: grad must have the dtype of input, {input.dtype}")
    torch._check(
        grad.device == input.device, lambda: f"opzoo::{op}: grad must be on the device of input, {input.device}"
    )
    check_numbers(op, grad.shape[2], grad.shape[3], scale, ratio)
    n, c, h, w = input.shape
    check_boxes(op, "input", input, boxes, batch_index, n, empty_map(n, h, w))
    check_shape(op, "grad", grad, (boxes.shape[0], c))
    return boxes.new_empty(boxes.shape, dtype=torch.float64 if input.dtype == torch.float64 else torch.float32)


# Derivatives. For given boxes (and argmax) every operator but the maximum itself is linear in its
# features, and each one's adjoint is another one: average <-> average_backward, and
# sample <-> maximum_backward. The maximum is differentiated as the sample of its argmax.
#
# The two averages have a gradient to boxes as well, from the same operator: with g of the pooled shape
# and m of the map's, both <g, average(m)> and <m, average_backward(g)> are the one sum that
# boxes_backward(g, m) differentiates.


def _keep(ctx: Any, tensors: Sequence[Tensor | None], own: Sequence[Any], adjoint: Sequence[Any]) -> None:
    """Keep tensors (boxes and batch_index last) and the numbers behind: the operator's and its adjoint's."""
    ctx.own, ctx.adjoint = own, adjoint
    ctx.save_for_backward(*tensors)
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


def _transpose(
    ctx: Any, adjoint: Callable[..., Any], to_boxes: Any, boxes: int, grad: Tensor | None, arguments: int
) -> tuple[Any, ...]:
    features, *tensors = ctx.saved_tensors
    grads: list[Tensor | None] = [None] * arguments
    if ctx.needs_input_grad[boxes] and to_boxes is None:
        raise NotImplementedError("opzoo.roi_align with pool_mode='max' is not differentiable in boxes; detach them")
    if grad is not None and ctx.needs_input_grad[0]:
        grads[0] = adjoint(grad, *tensors, *ctx.adjoint)
    if grad is not None and ctx.needs_input_grad[boxes]:
        pooled, map, geometry = to_boxes(ctx, features, grad)
        grads[boxes] = _boxes_backward(pooled, map, *tensors, *geometry)
    return tuple(grads)


def _push(ctx: Any, call: Callable[..., Any], tangent: Tensor | None, *others: Tensor | None) -> Tensor | None:
    if any(other is not None for other in others):
        raise NotImplementedError("opzoo.roi_align has no forward-mode derivative in boxes; detach them")
    return None if tangent is None else call(tangent, *ctx.saved_tensors[1:], *ctx.own)


def _linear(
    op: Any,
    tensors: int,
    adjoint: Callable[..., Any],
    adjoint_numbers: Callable[..., Any],
    vmap: Callable[..., Any],
    to_boxes: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """An operator of features, as many ``tensors`` and numbers. ``adjoint_numbers(args)`` are its adjoint's.

    ``to_boxes(ctx, features, grad)`` gives what the gradient to boxes is made of, in this order: the tensor
    of the pooled shape, the one of the map's, and the geometry. None where there is no such gradient.
    """
    arguments = len(op._schema.arguments)
    boxes = tensors - 1

    def save(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
        # The features are kept for the boxes alone.
        features = args[0] if to_boxes is not None and ctx.needs_input_grad[boxes] else None
        _keep(ctx, (features, *args[1 : 1 + tensors]), args[1 + tensors :], adjoint_numbers(args))

    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return _transpose(ctx, adjoint, to_boxes, boxes, grad, arguments)

    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        return _push(ctx, call, *tangents)

    call = differentiable(op, inputs=(0, boxes), save=save, backward=backward, jvp=jvp, vmap=vmap)
    return call


def _average_to_boxes(ctx: Any, input: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Any]:
    return grad, input, ctx.own[-3:]


def _average_backward_to_boxes(ctx: Any, grad: Tensor, grad_of_map: Tensor) -> tuple[Tensor, Tensor, Any]:
    return grad, grad_of_map, ctx.adjoint[-3:]


def _boxes_save(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
    pass  # nothing to differentiate with


def _no_second_derivative(ctx: Any, grad: Tensor) -> Any:
    raise NotImplementedError("opzoo.roi_align: the gradient to boxes cannot be differentiated again")


def _map_numbers(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What makes a gradient of the map args[0]: its sizes, the geometry, its layout."""
    # Under vmap an axis of the map is hidden, and torch does not answer for its layout.
    channels_last = not torch._C._are_functorch_transforms_active() and is_channels_last(args[0])
    return *args[0].shape, *args[-3:], channels_last


def _pooled_numbers(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return *args[0].shape[-2:], *args[-4:-1]


def _save_maximum(ctx: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    _keep(ctx, (None, output[1], *args[1:3]), args[-3:], _map_numbers(args))


def _maximum_grad(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    return _transpose(ctx, _maximum_to_map, None, 1, grad, 8)


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


def _boxes_backward_vmap(
    info: Any, dims: Any, grad: Tensor, input: Tensor, boxes: Tensor, index: Any, *rest: Any
) -> tuple[Tensor, int]:
    images = axis_after(input, dims[1], 0)
    pooled = ((grad, dims[0]),)
    f = Folded(info.batch_size, images, (boxes, dims[2]), (index, dims[3]), pooled, (input, dims[1]), per_roi=True)
    grad_boxes = f.unfold(_boxes_backward(*f.pooled, f.map, f.boxes, f.batch_index, *rest))
    # Folded moves the image index out of the boxes: its gradient, 0, has to come back.
    return torch.nn.functional.pad(grad_boxes, (1, 0)) if index is None else grad_boxes, 0


for _op, _fake in (
    ("roi_align", _fake_average),
    ("_roi_align_backward", _fake_average_backward),
    ("_roi_align_boxes_backward", _fake_boxes_backward),
    ("_roi_align_max", _fake_maximum),
    ("_roi_align_max_backward", _fake_maximum_backward),
    ("_roi_align_max_sample", _fake_sample),
):
    register_fake(_op, _fake)


def _average_to_map(*args: Any) -> Tensor:
    return _average_backward(*args)


def _maximum_to_map(*args: Any) -> Tensor:
    return _maximum_backward(*args)


def _map_to_average(*args: Any) -> Tensor:
    return _average(*args)


def _map_to_sample(*args: Any) -> Tensor:
    return _sample(*args)


_ops = torch.ops.opzoo
_average = _linear(_ops.roi_align.default, 2, _average_to_map, _map_numbers, _average_vmap, _average_to_boxes)
_average_backward = _linear(
    _ops._roi_align_backward.default,
    2,
    _map_to_average,
    _pooled_numbers,
    _average_backward_vmap,
    _average_backward_to_boxes,
)
_boxes_backward = differentiable(
    _ops._roi_align_boxes_backward.default,
    inputs=(0, 1, 2),
    save=_boxes_save,
    backward=_no_second_derivative,
    vmap=_boxes_backward_vmap,
)
_sample = _linear(_ops._roi_align_max_sample.default, 3, _maximum_to_map, _map_numbers, _sample_vmap)
_maximum_backward = _linear(
    _ops._roi_align_max_backward.default, 3, _map_to_sample, lambda args: args[-4:-1], _maximum_backward_vmap
)
_maximum = differentiable(
    _ops._roi_align_max.default,
    inputs=(0, 1),
    save=_save_maximum,
    backward=_maximum_grad,
    jvp=_maximum_jvp,
    vmap=_maximum_vmap,
)
