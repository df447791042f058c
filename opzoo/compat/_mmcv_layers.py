"""mmcv's layers: deformable and masked convolution, attention, content-aware upsampling.

Called by mmcv below autograd with results allocated beforehand; see :mod:`opzoo.compat._mmcv_ext`.
"""

from __future__ import annotations

import torch
from torch import Tensor

import opzoo

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
    geometry = (dH, dW, padH, padW, dilationH, dilationW)
    output.copy_(_ops.deform_conv2d(input, offset, weight, None, None, *geometry))


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
    geometry = (dH, dW, padH, padW, dilationH, dilationW)
    to_input, to_offset, _, _ = _ops._deform_conv2d_backward(
        gradOutput, input, offset, weight, None, *geometry, True, True, False, False
    )
    gradInput.copy_(to_input)
    gradOffset.copy_(to_offset)


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
    geometry = (dH, dW, padH, padW, dilationH, dilationW)
    _, _, to_weight, _ = _ops._deform_conv2d_backward(
        gradOutput, input, offset, gradWeight, None, *geometry, False, False, True, False
    )
    gradWeight.add_(to_weight, alpha=scale)


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
    geometry = (stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w)
    size = output.shape[2:]
    offset, mask = _first_numbers(offset, size), _first_numbers(mask, size)
    output.copy_(_ops.deform_conv2d(input, offset, weight, bias if with_bias else None, mask, *geometry))


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
    geometry = (stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w)
    size = grad_output.shape[2:]
    to_input, to_offset, to_weight, to_mask = _ops._deform_conv2d_backward(
        grad_output,
        input,
        _first_numbers(offset, size),
        weight,
        _first_numbers(mask, size),
        *geometry,
        True,
        True,
        True,
        True,
    )
    grad_input.copy_(to_input)
    grad_weight.copy_(to_weight)
    for whole, part in ((grad_offset, to_offset), (grad_mask, to_mask)):
        if whole.shape == part.shape:
            whole.copy_(part)
        else:
            whole.flatten(1)[:, : part[0].numel()].copy_(part.flatten(1))
    if with_bias:
        grad_bias.copy_(grad_output.sum((0, 2, 3), dtype=torch.promote_types(bias.dtype, torch.float32)))


def _first_numbers(maps: Tensor, size: torch.Size) -> Tensor:
    """``[N, C, height, width]`` from the first numbers of each item of ``maps``."""
    if maps.shape[2:] == size:
        return maps
    count = maps.shape[1] * size.numel()
    flat = maps.flatten(1)
    if count > flat.shape[1]:
        raise ValueError(
            f"mmcv._ext.modulated_deform_conv: offset and mask must cover {tuple(size)}, got {tuple(maps.shape[2:])}"
        )
    return flat[:, :count].unflatten(1, (maps.shape[1], *size))


def ms_deform_attn_forward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    """Multi-scale deformable attention."""
    return opzoo.ms_deform_attn(
        value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights
    )


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
    found = _ops._ms_deform_attn_backward(
        grad_output,
        value,
        value_spatial_shapes,
        value_level_start_index,
        sampling_locations,
        attention_weights,
        True,
    )
    for target, grad in zip((grad_value, grad_sampling_loc, grad_attn_weight), found, strict=True):
        target.copy_(grad)


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
    """``col[C * kernel_h * kernel_w, n]``: the windows of the one image ``im`` at these n pixels of the result."""
    padded = torch.nn.functional.pad(im[0], (pad_w, pad_w, pad_h, pad_h))
    rows = mask_h_idx + torch.arange(kernel_h, device=im.device)[:, None]  # [kernel_h, n]
    columns = mask_w_idx + torch.arange(kernel_w, device=im.device)[:, None]
    col.copy_(padded[:, rows[:, None], columns[None]].reshape(col.shape))


def masked_col2im_forward(
    col: Tensor, mask_h_idx: Tensor, mask_w_idx: Tensor, im: Tensor, height: int, width: int, channels: int
) -> None:
    """Columns ``[channels, n]`` to these n pixels of the one image ``im``."""
    im[0][:, mask_h_idx, mask_w_idx] = col


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
    rfeatures.copy_(features)
    output.copy_(_ops.carafe(features, masks.to(features.dtype), kernel_size, group_size, scale_factor))


def carafe_backward(
    grad_output: Tensor,
    rfeatures: Tensor,
    masks: Tensor,
    rgrad_output: Tensor,
    rgrad_input_hs: Tensor,
    rgrad_input: Tensor,
    rgrad_masks: Tensor,
    grad_input: Tensor,
    grad_masks: Tensor,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> None:
    """Gradients of :func:`carafe_forward` to ``features`` and ``masks``."""
    carafe_naive_backward(grad_output, rfeatures, masks, grad_input, grad_masks, kernel_size, group_size, scale_factor)


def carafe_naive_forward(
    features: Tensor, masks: Tensor, output: Tensor, kernel_size: int, group_size: int, scale_factor: int
) -> None:
    """:func:`carafe_forward` without buffers."""
    output.copy_(_ops.carafe(features, masks.to(features.dtype), kernel_size, group_size, scale_factor))


def carafe_naive_backward(
    grad_output: Tensor,
    features: Tensor,
    masks: Tensor,
    grad_input: Tensor,
    grad_masks: Tensor,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> None:
    """:func:`carafe_backward` without buffers."""
    to_features, to_masks = _ops._carafe_backward(
        grad_output, features, masks.to(features.dtype), kernel_size, group_size, scale_factor
    )
    grad_input.copy_(to_features)
    grad_masks.copy_(to_masks)
