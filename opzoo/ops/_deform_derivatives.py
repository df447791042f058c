"""deform_conv2d while tracing, under autograd, autocast and vmap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import alert_not_deterministic

from opzoo.ops._common import (
    autocast_tensor,
    differentiable,
    move_batch_first,
    register_autocast,
    register_fake,
)
from opzoo.ops._deform_checks import check_all, check_value, empty_image
from opzoo.reference.deform_conv2d import deform_conv2d as _reference


def _fake(
    input: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, *geometry: int
) -> Tensor:
    shape = check_all("deform_conv2d", input, offset, weight, geometry[:6], bias=bias, mask=mask)
    return empty_image(shape, input)


def _fake_backward(
    grad: Tensor, input: Tensor, offset: Tensor, weight: Tensor, mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    op = "_deform_conv2d_backward"
    geometry, (need_input, need_offset, need_weight, need_mask) = rest[:6], rest[6:]
    check_all(op, input, offset, weight, geometry, mask=mask, grad=grad)
    check_value(op, mask is not None or not need_mask, "need_mask is true, but there is no mask")

    def result(needed: bool, t: Tensor) -> Tensor:
        return empty_image(tuple(t.shape), t) if needed else t.new_empty(0)

    return (
        result(need_input, input),
        result(need_offset, offset),
        weight.new_empty(weight.shape if need_weight else 0),
        result(need_mask, offset if mask is None else mask),
    )


def _save(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
    # What is at its default is left out when an operator is called through the dispatcher.
    input, offset, weight, bias, mask, *geometry = args[:11]
    ctx.arguments = len(args)
    ctx.save_for_backward(input, offset, weight, mask)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.geometry = geometry


def _differentiable_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """The gradients by the reference, so that they can be differentiated again: for ``create_graph=True``."""
    # Views of their own: offset may be computed from input, and only what reaches input here is its gradient.
    views: Any = [None if t is None else t.view_as(t) for t in ctx.saved_tensors]
    input, offset, weight, mask = views
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w = ctx.geometry
    needed = [t for t, need in zip((input, offset, weight, mask), _needs(ctx), strict=True) if need]
    out = _reference(input, offset, weight, None, (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w), mask)
    found = iter(torch.autograd.grad(out, needed, grad, create_graph=True)) if needed else iter(())
    return tuple(next(found) if need else None for need in _needs(ctx))


def _needs(ctx: Any) -> tuple[bool, ...]:
    """Whether input, offset, weight and mask want a gradient."""
    return (*ctx.needs_input_grad[:3], ctx.needs_input_grad[4])


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    input, offset, weight, mask = ctx.saved_tensors
    need_input, need_offset, need_weight, need_bias, need_mask = ctx.needs_input_grad[:5]
    grads: tuple[Tensor | None, ...] = (None,) * 4
    needs = need_input, need_offset, need_weight, need_mask
    if any(needs) and torch.is_grad_enabled() and getattr(ctx, "eager", False):
        grads = _differentiable_backward(ctx, grad)
    elif any(needs):
        if need_input and grad.is_cuda:
            alert_not_deterministic("opzoo.deform_conv2d backward to input on CUDA")
        found = _deform_conv2d_backward(grad, input, offset, weight, mask, *ctx.geometry, *needs)
        grads = tuple(g if needed else None for g, needed in zip(found, needs, strict=True))
    grad_bias = None
    if need_bias:
        dtype = ctx.bias_dtype
        grad_bias = grad.sum((0, 2, 3), dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
    return (*grads[:3], grad_bias, grads[3], *(None,) * (ctx.arguments - 5))


def _refuse_double_backward(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "the backward of opzoo.deform_conv2d cannot be differentiated here; torch.autograd.grad with "
        "create_graph=True can, and opzoo.reference.deform_conv2d everywhere"
    )


def _stack_calls(call: Any, info: Any, in_dims: Any, args: tuple[Any, ...]) -> list[Any]:
    """The call once per element of the batch: for what no single call can compute."""
    batched = [move_batch_first(a, dim) for a, dim in zip(args, in_dims, strict=True)]
    return [
        call(*(a if dim is None else a[i] for a, dim in zip(batched, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]


def _fold(info: Any, in_dims: Any, args: tuple[Any, ...], positions: Sequence[int]) -> list[Any]:
    """Merge vmap's axis into N for the arguments at these positions, expanding those that lack it."""
    folded = list(args)
    for position in positions:
        t = folded[position]
        if t is not None:
            dim = in_dims[position]
            t = t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            folded[position] = t.flatten(0, 1)
    return folded


def _vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    if in_dims[2] is not None or in_dims[3] is not None:
        return torch.stack(_stack_calls(_deform_conv2d, info, in_dims, args)), 0
    output = _deform_conv2d(*_fold(info, in_dims, args, (0, 1, 4)))
    return output.unflatten(0, (info.batch_size, output.shape[0] // info.batch_size)), 0


def _vmap_backward(info: Any, in_dims: Any, *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    need_weight = args[13]
    if in_dims[3] is not None or need_weight:
        calls = _stack_calls(_deform_conv2d_backward, info, in_dims, args)
        return tuple(torch.stack(grads) for grads in zip(*calls, strict=True)), (0,) * 4
    grads = _deform_conv2d_backward(*_fold(info, in_dims, args, (0, 1, 2, 4)))
    return tuple(
        g.unflatten(0, (info.batch_size, -1)) if g.dim() == 4 else g.expand(info.batch_size, *g.shape) for g in grads
    ), (0,) * 4


register_fake("deform_conv2d", _fake)
register_fake("_deform_conv2d_backward", _fake_backward)
register_autocast(
    torch.ops.opzoo.deform_conv2d.default,
    lambda dtype, input, offset, weight, bias, *rest: (
        autocast_tensor(input, dtype),
        offset,
        autocast_tensor(weight, dtype),
        autocast_tensor(bias, dtype),
        *rest,
    ),
)
# The backward computes in the dtypes it is given, also when it runs inside an autocast region.
register_autocast(torch.ops.opzoo._deform_conv2d_backward.default, lambda dtype, *args: args)
_deform_conv2d_backward = differentiable(
    torch.ops.opzoo._deform_conv2d_backward.default,
    inputs=(0, 1, 2, 3, 4),
    save=lambda ctx, args, output: None,
    backward=_refuse_double_backward,
    vmap=_vmap_backward,
    autocast=True,
)
_deform_conv2d = differentiable(
    torch.ops.opzoo.deform_conv2d.default,
    inputs=(0, 1, 2, 3, 4),
    save=_save,
    backward=_backward,
    vmap=_vmap,
    autocast=True,
)
