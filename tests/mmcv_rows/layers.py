"""Rows of the layers: deformable and masked convolution, attention, content-aware upsampling."""

from __future__ import annotations

import sys
from typing import Any

import torch
from peers import torchvision
from torch import Tensor
from torch.nn import functional

import opzoo
from mmcv_rows.row import ROWS, Call, Row, gradients, normal, nothing, row, uniform, unwritten

CONV = {"kW": 2, "kH": 3, "dW": 1, "dH": 2, "padW": 2, "padH": 1, "dilationW": 3, "dilationH": 1}
GROUPS = {"group": 2, "deformable_group": 2}


def conv(input: Tensor, offset: Tensor, weight: Tensor) -> Tensor:
    return torchvision.ops.deform_conv2d(input, offset, weight, None, (2, 1), (1, 2), (1, 3))


def conv_tensors(dtype: torch.dtype) -> Call:
    return {
        "input": normal(3, 4, 9, 8, dtype=dtype),
        "offset": normal(3, 24, 5, 9, dtype=dtype),
        "weight": normal(6, 2, 3, 2, dtype=dtype),
    }


BUFFERS = ("columns", "ones", "im2col_step")


@row(
    "deform_conv_forward",
    oracle="torchvision",
    draw=lambda dtype: {
        **conv_tensors(dtype),
        "output": unwritten(3, 6, 5, 9, dtype=dtype),
        "columns": nothing(dtype),
        "ones": nothing(dtype),
        **CONV,
        **GROUPS,
        "im2col_step": 2,
    },
    outputs=("output",),
    ignored=BUFFERS,
)
def _deform_conv_forward(input: Tensor, offset: Tensor, weight: Tensor, **others: Any) -> Call:
    return {"output": conv(input, offset, weight)}


@row(
    "deform_conv_backward_input",
    oracle="torchvision",
    draw=lambda dtype: {
        **conv_tensors(dtype),
        "gradOutput": normal(3, 6, 5, 9, dtype=dtype),
        "gradInput": unwritten(3, 4, 9, 8, dtype=dtype),
        "gradOffset": unwritten(3, 24, 5, 9, dtype=dtype),
        "columns": nothing(dtype),
        **CONV,
        **GROUPS,
        "im2col_step": 2,
    },
    outputs=("gradInput", "gradOffset"),
    ignored=BUFFERS,
)
def _deform_conv_backward_input(input: Tensor, offset: Tensor, weight: Tensor, gradOutput: Tensor, **_: Any) -> Call:
    found = gradients(conv, gradOutput, input, offset, weight)
    return {"gradInput": found[0], "gradOffset": found[1]}


@row(
    "deform_conv_backward_parameters",
    oracle="torchvision",
    draw=lambda dtype: {
        "input": normal(3, 4, 9, 8, dtype=dtype),
        "offset": normal(3, 24, 5, 9, dtype=dtype),
        "gradOutput": normal(3, 6, 5, 9, dtype=dtype),
        "gradWeight": normal(6, 2, 3, 2, dtype=dtype),
        "columns": nothing(dtype),
        "ones": nothing(dtype),
        **CONV,
        **GROUPS,
        "scale": 0.5,
        "im2col_step": 2,
    },
    outputs=("gradWeight",),
    ignored=BUFFERS,
)
def _deform_conv_backward_parameters(
    input: Tensor, offset: Tensor, gradOutput: Tensor, gradWeight: Tensor, scale: float, **_: Any
) -> Call:
    found = gradients(lambda w: conv(input, offset, w), gradOutput, torch.zeros_like(gradWeight))
    return {"gradWeight": gradWeight + scale * found[0]}


MODULATED = {"kernel_h": 3, "kernel_w": 2, "stride_h": 2, "stride_w": 1, "pad_h": 1, "pad_w": 2, "dilation_h": 1,
             "dilation_w": 3, **GROUPS, "with_bias": True}  # fmt: skip


def modulated(input: Tensor, weight: Tensor, bias: Tensor, offset: Tensor, mask: Tensor) -> Tensor:
    """The maps are larger than the result: its size of the first numbers of each item is read."""
    read = [t.flatten(1)[:, : c * 45].reshape(3, c, 5, 9) for t, c in ((offset, 24), (mask, 12))]
    return torchvision.ops.deform_conv2d(input, read[0], weight, bias, (2, 1), (1, 2), (1, 3), read[1])


def modulated_tensors(dtype: torch.dtype) -> Call:
    return {
        "input": normal(3, 4, 9, 8, dtype=dtype),
        "weight": normal(6, 2, 3, 2, dtype=dtype),
        "bias": normal(6, dtype=dtype),
        "ones": nothing(dtype),
        "offset": normal(3, 24, 6, 10, dtype=dtype),
        "mask": uniform(3, 12, 6, 10, dtype=dtype),
    }


@row(
    "modulated_deform_conv_forward",
    oracle="torchvision",
    draw=lambda dtype: {
        **modulated_tensors(dtype),
        "output": unwritten(3, 6, 5, 9, dtype=dtype),
        "columns": nothing(dtype),
        **MODULATED,
    },
    outputs=("output",),
    ignored=BUFFERS,
)
def _modulated_deform_conv_forward(
    input: Tensor, weight: Tensor, bias: Tensor, offset: Tensor, mask: Tensor, with_bias: bool, **_: Any
) -> Call:
    return {"output": modulated(input, weight, bias if with_bias else bias * 0, offset, mask)}


@row(
    "modulated_deform_conv_backward",
    oracle="torchvision",
    draw=lambda dtype: {
        **modulated_tensors(dtype),
        "columns": nothing(dtype),
        "grad_input": unwritten(3, 4, 9, 8, dtype=dtype),
        "grad_weight": unwritten(6, 2, 3, 2, dtype=dtype),
        "grad_bias": unwritten(6, dtype=dtype),
        "grad_offset": unwritten(3, 24, 6, 10, dtype=dtype),
        "grad_mask": unwritten(3, 12, 6, 10, dtype=dtype),
        "grad_output": normal(3, 6, 5, 9, dtype=dtype),
        **MODULATED,
    },
    outputs=("grad_input", "grad_weight", "grad_bias", "grad_offset", "grad_mask"),
    ignored=BUFFERS,
)
def _modulated_deform_conv_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    offset: Tensor,
    mask: Tensor,
    grad_output: Tensor,
    grad_bias: Tensor,
    with_bias: bool,
    **_: Any,
) -> Call:
    found = gradients(modulated, grad_output, input, weight, bias, offset, mask)
    result = dict(zip(("grad_input", "grad_weight", "grad_bias", "grad_offset", "grad_mask"), found, strict=True))
    return result | ({} if with_bias else {"grad_bias": grad_bias})


def attention(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    """mmcv's function takes the levels one behind the other."""
    sizes = shapes.prod(1).tolist()
    value = torch.cat([value[:, start : start + n] for start, n in zip(starts.tolist(), sizes, strict=True)], 1)
    grid_sample = sys.modules["mmcv.ops.multi_scale_deform_attn"].multi_scale_deformable_attn_pytorch
    return grid_sample(value, shapes, locations, weights)


def attention_tensors(dtype: torch.dtype) -> Call:
    return {
        "value": normal(2, 26, 2, 8, dtype=dtype),
        "value_spatial_shapes": torch.tensor([[4, 5], [2, 3]]),
        "value_level_start_index": torch.tensor([0, 20]),
        "sampling_locations": uniform(2, 3, 2, 2, 4, 2, dtype=dtype),
        "attention_weights": uniform(2, 3, 2, 2, 4, dtype=dtype),
    }


@row(
    "ms_deform_attn_forward",
    oracle="mmcv's grid_sample",
    draw=lambda dtype: {**attention_tensors(dtype), "im2col_step": 64},
    ignored=BUFFERS,
)
def _ms_deform_attn_forward(**tensors: Any) -> Call:
    return {"return": attention(*list(tensors.values())[:5])}


@row(
    "ms_deform_attn_backward",
    oracle="mmcv's grid_sample",
    draw=lambda dtype: {
        **attention_tensors(dtype),
        "grad_output": normal(2, 3, 16, dtype=dtype),
        "grad_value": unwritten(2, 26, 2, 8, dtype=dtype),
        "grad_sampling_loc": unwritten(2, 3, 2, 2, 4, 2, dtype=dtype),
        "grad_attn_weight": unwritten(2, 3, 2, 2, 4, dtype=dtype),
        "im2col_step": 64,
    },
    outputs=("grad_value", "grad_sampling_loc", "grad_attn_weight"),
    ignored=BUFFERS,
)
def _ms_deform_attn_backward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    grad_output: Tensor,
    **_: Any,
) -> Call:
    found = gradients(
        lambda v, locations, weights: attention(v, value_spatial_shapes, value_level_start_index, locations, weights),
        grad_output,
        value,
        sampling_locations,
        attention_weights,
    )
    return dict(zip(("grad_value", "grad_sampling_loc", "grad_attn_weight"), found, strict=True))


PIXELS = {"mask_h_idx": torch.tensor([0, 3, 5, 6]), "mask_w_idx": torch.tensor([8, 0, 2, 7])}


@row(
    "masked_im2col_forward",
    oracle="windows of the padded image",
    draw=lambda dtype: {
        "im": normal(1, 3, 7, 9, dtype=dtype),
        **PIXELS,
        "col": unwritten(18, 4, dtype=dtype),
        "kernel_h": 3,
        "kernel_w": 2,
        "pad_h": 1,
        "pad_w": 2,
    },
    outputs=("col",),
)
def _masked_im2col_forward(
    im: Tensor, mask_h_idx: Tensor, mask_w_idx: Tensor, col: Tensor, kernel_h: int, kernel_w: int, **pads: int
) -> Call:
    border = 20  # as far as any window reaches
    padded = functional.pad(im[0], (border,) * 4)
    windows = []
    for y, x in zip(mask_h_idx.tolist(), mask_w_idx.tolist(), strict=True):
        top, left = y - pads["pad_h"] + border, x - pads["pad_w"] + border
        windows.append(padded[:, top : top + kernel_h, left : left + kernel_w].flatten())
    return {"col": torch.stack(windows, 1)}


@row(
    "masked_col2im_forward",
    oracle="by hand",
    draw=lambda dtype: {
        "col": normal(3, 4, dtype=dtype),
        **PIXELS,
        "im": unwritten(1, 3, 7, 9, dtype=dtype),
        "height": 7,
        "width": 9,
        "channels": 3,
    },
    outputs=("im",),
)
def _masked_col2im_forward(col: Tensor, mask_h_idx: Tensor, mask_w_idx: Tensor, im: Tensor, **_: Any) -> Call:
    im = im.clone()
    for n, (y, x) in enumerate(zip(mask_h_idx.tolist(), mask_w_idx.tolist(), strict=True)):
        im[0, :, y, x] = col[:, n]
    return {"im": im}


UPSAMPLING = {"kernel_size": 3, "group_size": 2, "scale_factor": 2}


def upsample(features: Tensor, masks: Tensor) -> Tensor:
    return opzoo.reference.carafe(features, masks, 3, 2, 2)


def draw_carafe(dtype: torch.dtype, naive: bool) -> Call:
    features, masks = normal(2, 4, 3, 5, dtype=dtype), uniform(2, 18, 6, 10, dtype=dtype)
    output = unwritten(2, 4, 6, 10, dtype=dtype)
    if naive:
        return {"features": features, "masks": masks, "output": output, **UPSAMPLING}
    buffers = {"rfeatures": torch.zeros_like(features), "routput": torch.zeros_like(output)}
    call = {"features": features, "masks": masks, **buffers, "rmasks": torch.zeros_like(masks)}
    return {**call, "output": output, **UPSAMPLING}


def draw_carafe_backward(dtype: torch.dtype, naive: bool) -> Call:
    features, masks = normal(2, 4, 3, 5, dtype=dtype), uniform(2, 18, 6, 10, dtype=dtype)
    grad = normal(2, 4, 6, 10, dtype=dtype)
    results = {"bottom_grad": unwritten(2, 4, 3, 5, dtype=dtype), "mask_grad": unwritten(2, 18, 6, 10, dtype=dtype)}
    if naive:
        return {"top_grad": grad, "features": features, "masks": masks, **results, **UPSAMPLING}
    buffers = {"rtop_grad": torch.zeros_like(grad), "rbottom_grad_hs": torch.zeros_like(grad)}
    buffers |= {"rbottom_grad": torch.zeros_like(features), "rmask_grad": torch.zeros_like(masks)}
    return {"top_grad": grad, "rfeatures": features, "masks": masks, **buffers, **results, **UPSAMPLING}


def _carafe_forward(features: Tensor, masks: Tensor, **others: Any) -> Call:
    return {"output": upsample(features, masks)} | ({"rfeatures": features} if "rfeatures" in others else {})


def _carafe_backward(top_grad: Tensor, masks: Tensor, **others: Any) -> Call:
    features = others.get("features", others.get("rfeatures"))
    found = gradients(upsample, top_grad, features, masks)
    return {"bottom_grad": found[0], "mask_grad": found[1]}


for _naive in (True, False):
    _end, _oracle = "_naive" * _naive, "opzoo.reference"
    _forward_buffers = () if _naive else ("routput", "rmasks")
    _backward_buffers = () if _naive else ("rtop_grad", "rbottom_grad_hs", "rbottom_grad", "rmask_grad")
    _written = ("output",) if _naive else ("rfeatures", "output")
    ROWS[f"carafe{_end}_forward"] = Row(
        _oracle,
        lambda dtype, naive=_naive: draw_carafe(dtype, naive),
        _carafe_forward,
        _written,
        ignored=_forward_buffers,
    )
    ROWS[f"carafe{_end}_backward"] = Row(
        _oracle,
        lambda dtype, naive=_naive: draw_carafe_backward(dtype, naive),
        _carafe_backward,
        ("bottom_grad", "mask_grad"),
        ignored=_backward_buffers,
    )
