"""Deformable convolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import alert_not_deterministic

from opzoo._library import LIBRARY
from opzoo.ops._common import autocast_tensor, differentiable, move_batch_first, pair, register_autocast, require_tensor
from opzoo.ops.matmul import _torch_precision

Pair = int | Sequence[int]


def deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    mask: Tensor | None = None,
) -> Tensor:
    """Convolve with taps that are moved by ``offset`` and scaled by ``mask``.

    Every tap (i, j) of every output pixel samples the input bilinearly at its regular place plus its
    own (dy, dx). Without ``mask`` this is Deformable ConvNets (https://arxiv.org/abs/1703.06211), with
    it Deformable ConvNets v2 (https://arxiv.org/abs/1811.11168).

    Args:
        input: ``Tensor[N, C, H, W]``, float64, float32, float16 or bfloat16.
        offset: ``Tensor[N, 2*D*kh*kw, OH, OW]`` in input pixels, any of these dtypes. Channel
            ``2*((d*kh + i)*kw + j)`` is dy of tap (i, j) in offset group d, the next one its dx. D
            follows from the shape and divides C.
        weight: ``Tensor[K, C/G, kh, kw]`` with input's dtype; the number of groups G follows from it.
        bias: ``Tensor[K]`` with input's dtype.
        stride: step between output pixels, in input pixels: one int, or (vertical, horizontal).
        padding: zeros around the input, likewise.
        dilation: step between taps, likewise.
        mask: ``Tensor[N, D*kh*kw, OH, OW]`` of any float dtype; each sample is multiplied with its value.

    Returns:
        ``Tensor[N, K, OH, OW]`` with input's dtype, channels_last when input is, where
        ``OH = (H + 2*padding - dilation*(kh - 1) - 1) // stride + 1`` and OW alike.

    Raises:
        TypeError: an argument is no tensor or no pair of ints.
        RuntimeError: a tensor has the wrong rank, shape, dtype or device, or the input has no
            channels or pixels.
        ValueError: a stride, padding or dilation is out of range, or the output would be empty.

    Pixels outside the map are zero. A sample at or beyond -1 or the size is zero with derivative zero,
    the rule of the original implementation and mmcv; torchvision differs in the derivative exactly at
    -1. An infinite offset samples zero, a NaN offset gives NaN.

    Coordinates, interpolation and sums are float32 (float64 for float64 input) whatever the dtypes;
    float32 products on CUDA are TF32 where ``torch.backends.cuda.matmul.fp32_precision`` permits it.
    Under autocast ``input``, ``weight`` and ``bias`` are cast to autocast's dtype, which the output
    has; ``offset`` and ``mask`` are used as given. (torchvision computes in float32 there.)
    Differentiable once, in reverse mode, by all five tensors; vmap-able. Deterministic but for
    the gradient of ``input`` on CUDA, which sums in a varying order and raises under
    :func:`torch.use_deterministic_algorithms`.

    Example:
        >>> input, weight = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3)
        >>> offset = torch.zeros(1, 2 * 3 * 3, 2, 2)
        >>> opzoo.deform_conv2d(input, offset, weight)
        tensor([[[[9., 9.],
                  [9., 9.]]]])
    """
    for name, t in (("input", input), ("offset", offset), ("weight", weight)):
        require_tensor("deform_conv2d", name, t)
    for name, optional in (("bias", bias), ("mask", mask)):
        if optional is not None:
            require_tensor("deform_conv2d", name, optional)
    stride_h, stride_w = pair("deform_conv2d", "stride", stride)
    pad_h, pad_w = pair("deform_conv2d", "padding", padding)
    dilation_h, dilation_w = pair("deform_conv2d", "dilation", dilation)
    geometry = stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w
    return _deform_conv2d(input, offset, weight, bias, mask, *geometry, _precision_of(input))


class DeformConv2d(nn.Module):
    """:func:`deform_conv2d` with a weight and a bias of its own.

    Args:
        in_channels: channels C of the input.
        out_channels: channels K of the output.
        kernel_size: one int, or (height, width).
        stride: one int, or (vertical, horizontal).
        padding: likewise.
        dilation: likewise.
        groups: weight groups; divides both numbers of channels.
        bias: whether to add a learned bias.

    Parameters:
        weight: ``Tensor[K, C/groups, kh, kw]``, initialised as that of :class:`torch.nn.Conv2d`.
        bias: ``Tensor[K]`` or None, likewise.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__()
        kernel = pair("deform_conv2d", "kernel_size", kernel_size)
        for name, value in (
            ("in_channels", in_channels),
            ("out_channels", out_channels),
            ("groups", groups),
            ("kernel_size", min(kernel)),
        ):
            if value < 1:
                raise ValueError(f"opzoo::deform_conv2d: {name} must be at least 1, got {value}")
        for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            if channels % groups != 0:
                raise ValueError(
                    f"opzoo::deform_conv2d: {name} must be divisible by groups, got {channels} and {groups}"
                )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel
        self.stride = pair("deform_conv2d", "stride", stride)
        self.padding = pair("deform_conv2d", "padding", padding)
        self.dilation = pair("deform_conv2d", "dilation", dilation)
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *self.kernel_size))
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_channels))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as :class:`torch.nn.Conv2d` does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            fan_in = math.prod(self.weight.shape[1:])
            bound = 1 / math.sqrt(fan_in)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor, offset: Tensor, mask: Tensor | None = None) -> Tensor:
        """``Tensor[N, K, OH, OW]``; see :func:`deform_conv2d`."""
        return deform_conv2d(input, offset, self.weight, self.bias, self.stride, self.padding, self.dilation, mask)

    def extra_repr(self) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"]
        parts += [f"padding={self.padding}"] if self.padding != (0, 0) else []
        parts += [f"dilation={self.dilation}"] if self.dilation != (1, 1) else []
        parts += [f"groups={self.groups}"] if self.groups != 1 else []
        parts += ["bias=False"] if self.bias is None else []
        return ", ".join(parts)


def _precision_of(input: Tensor) -> int:
    """The operator's number for the precision of float32 products: torch's switch, where it matters."""
    if input.is_cuda and input.dtype == torch.float32:
        return _torch_precision()
    return 0


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MAX_EXTENT = 2**31 - 1


def _check(op: str, condition: Any, message: str) -> None:
    torch._check(condition, lambda: f"opzoo::{op}: {message}")


def _check_value(op: str, condition: Any, message: str) -> None:
    torch._check_value(condition, lambda: f"opzoo::{op}: {message}")


def _check_geometry(op: str, geometry: tuple[int, ...]) -> None:
    names = ("stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w")
    for name, value in zip(names, geometry, strict=True):
        least = 0 if name.startswith("pad") else 1
        in_range = value >= least and value <= _MAX_EXTENT
        _check_value(op, in_range, f"{name} must be in [{least}, {_MAX_EXTENT}], got {value}")


def _check_operands(op: str, input: Tensor, tensors: dict[str, Tensor | None]) -> None:
    for name, t in tensors.items():
        if t is None:
            continue
        rank = 1 if name == "bias" else 4
        _check(op, t.dim() == rank, f"{name} must have {rank} axes, got {t.dim()} (shape {list(t.shape)})")
        _check(op, t.dtype in _FLOATS, f"{name} must be float64, float32, float16 or bfloat16, got {t.dtype}")
        same_device = t.device == input.device
        _check(op, same_device, f"{name} must be on the device of input, {input.device}, got {t.device}")
        same_dtype = name in ("offset", "mask") or t.dtype == input.dtype
        _check(op, same_dtype, f"{name} must have the dtype of input, {input.dtype}, got {t.dtype}")


def _output_size(op: str, axis: str, size: int, kernel: int, stride: int, pad: int, dilation: int) -> int:
    _check(
        op,
        size > 0 and size <= _MAX_EXTENT and kernel > 0 and kernel <= _MAX_EXTENT,
        f"input and weight must have between 1 and {_MAX_EXTENT} pixels along {axis}, got {size} and {kernel}",
    )
    room = size + 2 * pad - dilation * (kernel - 1) - 1
    _check_value(
        op,
        room >= 0,
        f"the output would be empty along {axis}: input {size}, kernel {kernel}, padding {pad}, dilation {dilation}",
    )
    return room // stride + 1


def _check_channels(op: str, input: Tensor, offset: Tensor, weight: Tensor) -> None:
    C, K, per_group, channels = input.shape[1], weight.shape[0], weight.shape[1], offset.shape[1]
    _check(
        op,
        C > 0 and per_group > 0,
        f"input and weight must have at least one input channel, got shapes {list(input.shape)} and "
        f"{list(weight.shape)}",
    )
    _check(op, C % per_group == 0, f"input channels must be a multiple of weight.shape[1] = {per_group}, got {C}")
    groups = C // per_group
    _check(op, K % groups == 0, f"weight.shape[0] must be a multiple of the {groups} groups, got {K}")
    step = 2 * weight.shape[2] * weight.shape[3]
    _check(
        op,
        channels > 0 and channels % step == 0,
        f"offset.shape[1] must be a positive multiple of 2 * kernel height * kernel width = {step}, got {channels}",
    )
    groups = channels // step
    _check(op, C % groups == 0, f"input channels must be a multiple of the {groups} offset groups, got {C}")


def _check_all(
    op: str, input: Tensor, offset: Tensor, weight: Tensor, geometry: tuple[int, ...], **others: Tensor | None
) -> tuple[int, int, int, int]:
    """The kernels' own checks; returns the output's shape."""
    _check_geometry(op, geometry)
    _check_operands(op, input, {"input": input, "offset": offset, "weight": weight, **others})
    N, _, H, W = input.shape
    K, _, kh, kw = weight.shape
    OH = _output_size(op, "height", H, kh, *geometry[0::2])
    OW = _output_size(op, "width", W, kw, *geometry[1::2])
    _check_channels(op, input, offset, weight)
    channels = offset.shape[1]
    expected: tuple[tuple[str, Tensor | None, tuple[int, ...]], ...] = (
        ("offset", offset, (N, channels, OH, OW)),
        ("mask", others.get("mask"), (N, channels // 2, OH, OW)),
        ("bias", others.get("bias"), (K,)),
        ("grad", others.get("grad"), (N, K, OH, OW)),
    )
    for name, t, shape in expected:
        if t is not None:
            for given, size in zip(t.shape, shape, strict=True):
                _check(op, given == size, f"{name} must have shape {list(shape)}, got {list(t.shape)}")
    return N, K, OH, OW


def _empty_image(shape: tuple[int, ...], like: Tensor) -> Tensor:
    channels_last = not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if channels_last and shape[1] > 0 else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=memory_format)


def _fake(
    input: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, *geometry: int
) -> Tensor:
    shape = _check_all("deform_conv2d", input, offset, weight, geometry[:6], bias=bias, mask=mask)
    return _empty_image(shape, input)


def _fake_backward(
    grad: Tensor, input: Tensor, offset: Tensor, weight: Tensor, mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    op = "_deform_conv2d_backward"
    geometry, (need_input, need_offset, need_weight, need_mask) = rest[:6], rest[6:]
    _check_all(op, input, offset, weight, geometry, mask=mask, grad=grad)
    _check_value(op, mask is not None or not need_mask, "need_mask is true, but there is no mask")

    def result(needed: bool, t: Tensor) -> Tensor:
        return _empty_image(tuple(t.shape), t) if needed else t.new_empty(0)

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


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    input, offset, weight, mask = ctx.saved_tensors
    need_input, need_offset, need_weight, need_bias, need_mask = ctx.needs_input_grad[:5]
    grads: tuple[Tensor | None, ...] = (None,) * 4
    needs = need_input, need_offset, need_weight, need_mask
    if any(needs):
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
    raise RuntimeError("opzoo.deform_conv2d has no second derivative; opzoo.reference.deform_conv2d has")


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


torch.library.register_fake("opzoo::deform_conv2d", _fake, lib=LIBRARY)
torch.library.register_fake("opzoo::_deform_conv2d_backward", _fake_backward, lib=LIBRARY)
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
