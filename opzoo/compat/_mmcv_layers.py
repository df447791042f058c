"""mmcv's layers: deformable and masked convolution, attention, content-aware upsampling.

Called by mmcv below autograd with results allocated beforehand; see :mod:`opzoo.compat._mmcv_ext`.
"""

from __future__ import annotations

import torch
from torch import Tensor

import opzoo
from opzoo.compat._mmcv_checks import (
    as_given,
    require_equal,
    require_finite,
    require_floats,
    require_indices,
    require_integers,
    require_rank,
    require_shape,
    require_tensors,
    write,
)

_ops = torch.ops.opzoo


def deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    output: Tensor,
    columns: Tensor,
    ones: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: int,
) -> None:
    """Deformable convolution without a mask."""
    op = "deform_conv_forward"
    require_tensors(op, input=input, weight=weight, offset=offset, output=output)
    _check_kernel(op, input, weight, offset, None, {"kH": kH, "kW": kW}, group, deformable_group)
    geometry = (dH, dW, padH, padW, dilationH, dilationW)
    with as_given(input):
        write(op, output=(output, _ops.deform_conv2d(input, offset, weight, None, None, *geometry)))


def deform_conv_backward_input(
    input: Tensor,
    offset: Tensor,
    gradOutput: Tensor,
    gradInput: Tensor,
    gradOffset: Tensor,
    weight: Tensor,
    columns: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: int,
) -> None:
    """Gradients of :func:`deform_conv_forward` to ``input`` and ``offset``."""
    op = "deform_conv_backward_input"
    require_tensors(op, input=input, offset=offset, gradOutput=gradOutput, weight=weight)
    _check_kernel(op, input, weight, offset, None, {"kH": kH, "kW": kW}, group, deformable_group)
    geometry = (dH, dW, padH, padW, dilationH, dilationW)
    to_input, to_offset, _, _ = _ops._deform_conv2d_backward(
        gradOutput, input, offset, weight, None, *geometry, True, True, False, False
    )
    write(op, gradInput=(gradInput, to_input), gradOffset=(gradOffset, to_offset))


def deform_conv_backward_parameters(
    input: Tensor,
    offset: Tensor,
    gradOutput: Tensor,
    gradWeight: Tensor,
    columns: Tensor,
    ones: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    scale: float,
    im2col_step: int,
) -> None:
    """Gradient of :func:`deform_conv_forward` to ``weight``, times ``scale``, added to ``gradWeight``."""
    op = "deform_conv_backward_parameters"
    require_tensors(op, input=input, offset=offset, gradOutput=gradOutput, gradWeight=gradWeight)
    _check_kernel(op, input, gradWeight, offset, None, {"kH": kH, "kW": kW}, group, deformable_group)
    require_finite(op, scale=scale)
    geometry = (dH, dW, padH, padW, dilationH, dilationW)
    _, _, to_weight, _ = _ops._deform_conv2d_backward(
        gradOutput, input, offset, gradWeight, None, *geometry, False, False, True, False
    )
    write(op, gradWeight=(gradWeight, gradWeight + to_weight * float(scale)))


def _check_kernel(
    op: str,
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    kernel: dict[str, int],
    group: int,
    deformable_group: int,
) -> None:
    """What mmcv passes beside the tensors is what their shapes say."""
    require_rank(op, 4, input=input, weight=weight, offset=offset)
    height, width = kernel
    _, per_group, kh, kw = weight.shape
    require_equal(op, **{height: (kernel[height], kh), width: (kernel[width], kw)})
    if per_group and input.shape[1] % per_group == 0:  # the operator refuses the others
        require_equal(op, group=(group, input.shape[1] // per_group))
    require_integers(op, 1, deformable_group=deformable_group)
    taps = deformable_group * kh * kw
    if offset.shape[1] != 2 * taps:
        require_shape(op, (None, 2 * taps, None, None), offset=offset)
    if mask is not None and (mask.dim() != 4 or mask.shape[1] != taps):
        require_shape(op, (None, taps, None, None), mask=mask)


def modulated_deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    output: Tensor,
    columns: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None:
    """Deformable convolution with a mask.

    ``offset`` and ``mask`` may be larger than the result, as DyHead's are: as in mmcv, an item's first
    numbers are read, as many as the result needs.
    """
    op = "modulated_deform_conv_forward"
    require_tensors(op, input=input, weight=weight, bias=bias, offset=offset, mask=mask, output=output)
    kernel = {"kernel_h": kernel_h, "kernel_w": kernel_w}
    _check_kernel(op, input, weight, offset, mask, kernel, group, deformable_group)
    require_rank(op, 4, output=output)
    geometry = (stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w)
    offset, mask = _first_numbers(op, output, offset=offset, mask=mask)
    with as_given(input):
        found = _ops.deform_conv2d(input, offset, weight, bias if with_bias else None, mask, *geometry)
    write(op, output=(output, found))


def modulated_deform_conv_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    columns: Tensor,
    grad_input: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    grad_offset: Tensor,
    grad_mask: Tensor,
    grad_output: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None:
    """Gradients of :func:`modulated_deform_conv_forward`; numbers it did not read get none."""
    op = "modulated_deform_conv_backward"
    require_tensors(op, input=input, weight=weight, bias=bias, offset=offset, mask=mask, grad_output=grad_output)
    kernel = {"kernel_h": kernel_h, "kernel_w": kernel_w}
    _check_kernel(op, input, weight, offset, mask, kernel, group, deformable_group)
    require_rank(op, 4, grad_output=grad_output)
    geometry = (stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w)
    read = _first_numbers(op, grad_output, offset=offset, mask=mask)
    to_input, to_offset, to_weight, to_mask = _ops._deform_conv2d_backward(
        grad_output, input, read[0], weight, read[1], *geometry, True, True, True, True
    )
    results = {
        "grad_input": (grad_input, to_input),
        "grad_weight": (grad_weight, to_weight),
        "grad_offset": (grad_offset, _followed_by_zeros(to_offset, offset)),
        "grad_mask": (grad_mask, _followed_by_zeros(to_mask, mask)),
    }
    if with_bias:
        require_shape(op, (len(weight),), bias=bias)
        require_floats(op, grad_output=grad_output, bias=bias)
        to_bias = grad_output.sum((0, 2, 3), dtype=torch.promote_types(bias.dtype, torch.float32))
        results["grad_bias"] = (grad_bias, to_bias.to(bias.dtype))
    write(op, **results)


def _first_numbers(op: str, output: Tensor, **maps: Tensor) -> list[Tensor]:
    """``[N, C, height, width]`` of the result from the first numbers of each item of ``maps``."""
    size = output.shape[2:]
    read = []
    for name, whole in maps.items():
        if whole.shape[2:] == size:
            read.append(whole)
            continue
        flat = whole.flatten(1)
        count = whole.shape[1] * size.numel()
        if count > flat.shape[1]:
            raise RuntimeError(
                f"mmcv._ext.{op}: {name} must cover the result's {list(size)} pixels, got {list(whole.shape[2:])}"
            )
        read.append(flat[:, :count].unflatten(1, (whole.shape[1], *size)))
    return read


def _followed_by_zeros(part: Tensor, whole: Tensor) -> Tensor:
    """The gradient to all of ``whole`` from that to the numbers that were read."""
    if part.shape == whole.shape:
        return part
    grad = torch.zeros(whole.shape, dtype=part.dtype, device=part.device)
    grad.view(len(whole), -1)[:, : part[0].numel()] = part.flatten(1)
    return grad


def ms_deform_attn_forward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    """Multi-scale deformable attention."""
    tensors = {
        "value": value,
        "value_spatial_shapes": value_spatial_shapes,
        "value_level_start_index": value_level_start_index,
        "sampling_locations": sampling_locations,
        "attention_weights": attention_weights,
    }
    require_tensors("ms_deform_attn_forward", **tensors)
    with as_given(value):
        return opzoo.ms_deform_attn(*tensors.values())


def ms_deform_attn_backward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    grad_output: Tensor,
    grad_value: Tensor,
    grad_sampling_loc: Tensor,
    grad_attn_weight: Tensor,
    im2col_step: int,
) -> None:
    """Gradients of :func:`ms_deform_attn_forward`."""
    op = "ms_deform_attn_backward"
    tensors = {
        "grad_output": grad_output,
        "value": value,
        "value_spatial_shapes": value_spatial_shapes,
        "value_level_start_index": value_level_start_index,
        "sampling_locations": sampling_locations,
        "attention_weights": attention_weights,
    }
    require_tensors(op, **tensors)
    to_value, to_locations, to_weights = _ops._ms_deform_attn_backward(*tensors.values(), True)
    write(
        op,
        grad_value=(grad_value, to_value),
        grad_sampling_loc=(grad_sampling_loc, to_locations),
        grad_attn_weight=(grad_attn_weight, to_weights),
    )


def masked_im2col_forward(
    im: Tensor,
    mask_h_idx: Tensor,
    mask_w_idx: Tensor,
    col: Tensor,
    kernel_h: int,
    kernel_w: int,
    pad_h: int,
    pad_w: int,
) -> None:
    """``col[C * kernel_h * kernel_w, n]``: the windows of the one image ``im`` at these n pixels of the result.

    A pixel beyond the image is 0, wherever the window is.
    """
    op = "masked_im2col_forward"
    require_tensors(op, im=im, mask_h_idx=mask_h_idx, mask_w_idx=mask_w_idx)
    require_shape(op, (1, None, None, None), im=im)
    require_floats(op, im=im)
    require_shape(op, (len(mask_h_idx) if mask_h_idx.dim() else None,), mask_h_idx=mask_h_idx, mask_w_idx=mask_w_idx)
    require_indices(op, im.device, mask_h_idx=mask_h_idx, mask_w_idx=mask_w_idx)
    require_integers(op, 1, kernel_h=kernel_h, kernel_w=kernel_w)
    require_integers(op, 0, pad_h=pad_h, pad_w=pad_w)
    _, C, H, W = im.shape
    rows = mask_h_idx.long() - pad_h + torch.arange(kernel_h, device=im.device)[:, None]  # [kernel_h, n]
    columns = mask_w_idx.long() - pad_w + torch.arange(kernel_w, device=im.device)[:, None]
    inside = ((rows >= 0) & (rows < H))[:, None] & ((columns >= 0) & (columns < W))
    if H and W:
        windows = im[0][:, rows.clamp(0, H - 1)[:, None], columns.clamp(0, W - 1)]
    else:
        windows = im.new_zeros(C, *inside.shape)
    windows = torch.where(inside, windows, 0)  # [C, kernel_h, kernel_w, n]
    write(op, col=(col, windows.reshape(C * kernel_h * kernel_w, len(mask_h_idx))))


def masked_col2im_forward(
    col: Tensor, mask_h_idx: Tensor, mask_w_idx: Tensor, im: Tensor, height: int, width: int, channels: int
) -> None:
    """Columns ``[channels, n]`` to these n pixels of the one image ``im``; the others stay as they are."""
    op = "masked_col2im_forward"
    require_tensors(op, col=col, mask_h_idx=mask_h_idx, mask_w_idx=mask_w_idx, im=im)
    require_shape(op, (1, None, None, None), im=im)
    require_equal(op, channels=(channels, im.shape[1]), height=(height, im.shape[2]), width=(width, im.shape[3]))
    require_shape(op, (channels, None), col=col)
    require_shape(op, col.shape[1:], mask_h_idx=mask_h_idx, mask_w_idx=mask_w_idx)
    require_floats(op, im=im, col=col)
    if col.dtype != im.dtype:
        raise RuntimeError(f"mmcv._ext.{op}: col must have the dtype of im, {im.dtype}, got {col.dtype}")
    require_indices(op, im.device, mask_h_idx=mask_h_idx, mask_w_idx=mask_w_idx)
    for name, index, size in (("mask_h_idx", mask_h_idx, height), ("mask_w_idx", mask_w_idx, width)):
        if index.numel():
            least, most = (int(bound) for bound in index.aminmax())
            if least < 0 or most >= size:
                raise ValueError(f"mmcv._ext.{op}: {name} must be in [0, {size}), got {least} to {most}")
    found = im.clone()
    found[0][:, mask_h_idx.long(), mask_w_idx.long()] = col
    write(op, im=(im, found))


def carafe_forward(
    features: Tensor,
    masks: Tensor,
    rfeatures: Tensor,
    routput: Tensor,
    rmasks: Tensor,
    output: Tensor,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> None:
    """Upsampling by kernels that are data. ``rfeatures`` is what mmcv gives back to the backward."""
    op = "carafe_forward"
    found = _upsample(op, features, masks, kernel_size, group_size, scale_factor)
    write(op, rfeatures=(rfeatures, features), output=(output, found))


def carafe_backward(
    top_grad: Tensor,
    rfeatures: Tensor,
    masks: Tensor,
    rtop_grad: Tensor,
    rbottom_grad_hs: Tensor,
    rbottom_grad: Tensor,
    rmask_grad: Tensor,
    bottom_grad: Tensor,
    mask_grad: Tensor,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> None:
    """Gradients of :func:`carafe_forward` to ``features`` and ``masks``."""
    op = "carafe_backward"
    to_features, to_masks = _upsample_backward(op, top_grad, rfeatures, masks, kernel_size, group_size, scale_factor)
    write(op, bottom_grad=(bottom_grad, to_features), mask_grad=(mask_grad, to_masks))


def carafe_naive_forward(
    features: Tensor, masks: Tensor, output: Tensor, kernel_size: int, group_size: int, scale_factor: int
) -> None:
    """:func:`carafe_forward` without buffers."""
    op = "carafe_naive_forward"
    write(op, output=(output, _upsample(op, features, masks, kernel_size, group_size, scale_factor)))


def carafe_naive_backward(
    top_grad: Tensor,
    features: Tensor,
    masks: Tensor,
    bottom_grad: Tensor,
    mask_grad: Tensor,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> None:
    """:func:`carafe_backward` without buffers."""
    op = "carafe_naive_backward"
    to_features, to_masks = _upsample_backward(op, top_grad, features, masks, kernel_size, group_size, scale_factor)
    write(op, bottom_grad=(bottom_grad, to_features), mask_grad=(mask_grad, to_masks))


def _upsample(op: str, features: Tensor, masks: Tensor, *numbers: int) -> Tensor:
    require_tensors(op, features=features, masks=masks)
    require_floats(op, features=features, masks=masks)
    with as_given(features):
        found: Tensor = _ops.carafe(features, masks.to(features.dtype), *numbers)
    return found


def _upsample_backward(op: str, grad: Tensor, features: Tensor, masks: Tensor, *numbers: int) -> tuple[Tensor, Tensor]:
    require_tensors(op, top_grad=grad, features=features, masks=masks)
    require_floats(op, features=features, top_grad=grad, masks=masks)
    to_features, to_masks = _ops._carafe_backward(grad, features, masks.to(features.dtype), *numbers)
    return to_features, to_masks.to(masks.dtype)
