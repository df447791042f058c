"""The functions of ``mmcv._ext``, by mmcv's names and argument names, over the operators of opzoo.

mmcv calls them below autograd, from its own ``autograd.Function``s, with results allocated beforehand;
each function here computes its result and copies it there. Arguments that only its own kernels need
(``columns``, ``ones``, ``im2col_step``) are taken and not looked at. ``d`` is mmcv's name for the
stride, ``W`` comes before ``H``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

import opzoo
from opzoo._library import build_info

_ops = torch.ops.opzoo
_METHODS = ("naive", "linear", "gaussian")  # of soft-NMS, by mmcv's numbers


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Indices of the kept boxes; with ``offset`` 1 a box's right and lower edge are its last pixels."""
    return opzoo.nms(_to_edges(boxes, offset), scores, iou_threshold)


def softnms(
    boxes: Tensor,
    scores: Tensor,
    dets: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> Tensor:
    """Indices in the order of selection; the first rows of ``dets`` become the boxes and lowered scores."""
    lowered, indices = opzoo.soft_nms(
        _to_edges(boxes, offset), scores, iou_threshold, sigma, min_score, _METHODS[method]
    )
    dets[: len(indices), :4] = boxes[indices]
    dets[: len(indices), 4] = lowered
    return indices


def nms_match(dets: Tensor, iou_threshold: float) -> list[list[int]]:
    """Groups of indices: a kept box, then those it dropped, an IoU of ``iou_threshold`` among them."""
    # The next number down: above it is at least the threshold.
    below = torch.nextafter(torch.tensor(float(iou_threshold)), torch.tensor(-math.inf)).item()
    if below < 0:
        raise ValueError(f"mmcv._ext.nms_match: iou_threshold must be above 0, got {iou_threshold}")
    groups = opzoo.nms_match(dets[:, :4].float(), dets[:, 4], min(below, 1.0))
    return [group.tolist() for group in groups]


def _to_edges(boxes: Tensor, offset: int) -> Tensor:
    if offset == 0:
        return boxes
    return boxes + boxes.new_tensor([0, 0, offset, offset])


def roi_align_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Average (``pool_mode`` 1) or maximum (0) of the samples of each bin.

    Of a maximum, ``argmax_y`` and ``argmax_x`` keep the number of the sample as two digits, to a base
    that their dtype holds exactly; only :func:`roi_align_backward` reads them.
    """
    numbers = (aligned_height, aligned_width, spatial_scale, sampling_ratio, bool(aligned))
    if pool_mode == 1:
        output.copy_(_ops.roi_align(input, rois, None, *numbers))
        return
    result, argmax = _ops._roi_align_max(input, rois, None, *numbers)
    base = _digit_base(argmax_y)
    if argmax.numel() and int(argmax.max()) >= base * base:
        raise ValueError(f"mmcv._ext.roi_align_forward: more than {base * base} samples per bin in {argmax_y.dtype}")
    output.copy_(result)
    argmax_y.copy_(argmax.div(base, rounding_mode="floor"))
    argmax_x.copy_(argmax.remainder(base))


def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Gradient of :func:`roi_align_forward` to ``input``."""
    numbers = (*grad_input.shape, spatial_scale, sampling_ratio, bool(aligned), False)
    if pool_mode == 1:
        grad_input.copy_(_ops._roi_align_backward(grad_output, rois, None, *numbers))
        return
    argmax = argmax_y.to(torch.int64) * _digit_base(argmax_y) + argmax_x.to(torch.int64)
    grad_input.copy_(_ops._roi_align_max_backward(grad_output, argmax, rois, None, *numbers))


def _digit_base(t: Tensor) -> int:
    """Integers up to this number are exact in the tensor's dtype."""
    return 256 if t.dtype == torch.bfloat16 else 2048


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


def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Loss of every logit against class ids; ``weight`` has one factor per class, or no element."""
    output.copy_(_ops.sigmoid_focal_loss(input, target, alpha, gamma))
    if weight.numel():
        output.mul_(_factors(weight, target)[:, None])


def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Derivative of every loss of :func:`sigmoid_focal_loss_forward` in its own logit."""
    ones = torch.ones((), dtype=input.dtype, device=input.device).expand(input.shape)
    grad_input.copy_(_ops._sigmoid_focal_loss_backward(ones, input, target, alpha, gamma))
    if weight.numel():
        grad_input.mul_(_factors(weight, target)[:, None])


def softmax_focal_loss_forward(
    softmax: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Loss of every row of probabilities; a negative class id has none."""
    p, factor = _probability(softmax, target, weight)
    output.copy_(-alpha * (1 - p) ** gamma * _log(p) * factor)


def softmax_focal_loss_backward(
    softmax: Tensor, target: Tensor, weight: Tensor, buff: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Derivative of the loss of each row in its logits; ``buff`` keeps the part that a row shares."""
    p, factor = _probability(softmax, target, weight)
    shared = gamma * (1 - p) ** (gamma - 1) * p * _log(p) if gamma else torch.zeros_like(p)
    shared = alpha * (shared - (1 - p) ** gamma) * factor
    buff.copy_(shared)
    hit = target[:, None] == torch.arange(softmax.shape[1], device=softmax.device)
    grad_input.copy_(shared[:, None] * (hit.to(shared.dtype) - softmax.to(shared.dtype)))


def _factors(weight: Tensor, target: Tensor) -> Tensor:
    """The weight of each row's class; 1 for the background, where mmcv reads beyond the weights."""
    known = (target >= 0) & (target < len(weight))
    return torch.where(known, weight[target.clamp(0, len(weight) - 1)], 1)


def _probability(softmax: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """In at least fp32: the probability of each row's class, and its weight, 0 for a negative id."""
    if target.numel() and int(target.max()) >= softmax.shape[1]:
        raise ValueError(f"mmcv._ext.softmax_focal_loss: class ids must be below {softmax.shape[1]}")
    dtype = torch.promote_types(softmax.dtype, torch.float32)
    p = softmax.gather(1, target.clamp(min=0)[:, None])[:, 0].to(dtype)
    factor = _factors(weight, target).to(dtype) if weight.numel() else torch.ones_like(p)
    return p, torch.where(target >= 0, factor, 0)


def _log(p: Tensor) -> Tensor:
    return p.clamp(min=torch.finfo(torch.float32).tiny).log()


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


def get_compiler_version() -> str:
    """The compiler that built opzoo."""
    return str(build_info()["compiler"])


def get_compiling_cuda_version() -> str:
    """The CUDA toolkit that built opzoo."""
    return str(build_info()["cuda"] or "not available")


_COVERED: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        nms,
        softnms,
        nms_match,
        roi_align_forward,
        roi_align_backward,
        deform_conv_forward,
        deform_conv_backward_input,
        deform_conv_backward_parameters,
        modulated_deform_conv_forward,
        modulated_deform_conv_backward,
        sigmoid_focal_loss_forward,
        sigmoid_focal_loss_backward,
        softmax_focal_loss_forward,
        softmax_focal_loss_backward,
        ms_deform_attn_forward,
        ms_deform_attn_backward,
        masked_im2col_forward,
        masked_col2im_forward,
        get_compiler_version,
        get_compiling_cuda_version,
    )
}
__all__ = list(_COVERED)

# The rest of what mmcv 2.0 to 2.2 asks of its compiled module when it is imported.
_NAMES = """
active_rotated_filter_backward active_rotated_filter_forward assign_score_withk_backward
assign_score_withk_forward ball_query_forward bbox_overlaps bezier_align_backward bezier_align_forward
bias_act border_align_backward border_align_forward box_iou_quadri box_iou_rotated carafe_backward
carafe_forward carafe_naive_backward carafe_naive_forward chamfer_distance_backward
chamfer_distance_forward contour_expand convex_giou convex_iou correlation_backward
correlation_forward deform_roi_pool_backward deform_roi_pool_forward
diff_iou_rotated_sort_vertices_forward dynamic_point_to_voxel_backward dynamic_point_to_voxel_forward
dynamic_voxelize_forward filtered_lrelu filtered_lrelu_act_ furthest_point_sampling_forward
furthest_point_sampling_with_dist_forward fused_bias_leakyrelu fused_indice_conv_forward
gather_points_backward gather_points_forward get_indice_pairs_2d_backward get_indice_pairs_2d_forward
get_indice_pairs_3d_backward get_indice_pairs_3d_forward get_indice_pairs_4d_forward
group_points_backward group_points_forward hard_voxelize_forward indice_conv_backward
indice_conv_forward indice_maxpool_backward indice_maxpool_forward iou3d_boxes_overlap_bev_forward
iou3d_nms3d_forward iou3d_nms3d_normal_forward knn_forward min_area_polygons nms_quadri nms_rotated
pixel_group points_in_boxes_all_forward points_in_boxes_cpu_forward points_in_boxes_part_forward
points_in_polygons_forward prroi_pool_backward prroi_pool_coor_backward prroi_pool_forward
psamask_backward psamask_forward riroi_align_rotated_backward riroi_align_rotated_forward
roi_align_rotated_backward roi_align_rotated_forward roi_pool_backward roi_pool_forward
roiaware_pool3d_backward roiaware_pool3d_forward roipoint_pool3d_forward
rotated_feature_align_backward rotated_feature_align_forward stack_ball_query_forward
stack_group_points_backward stack_group_points_forward sync_bn_backward_data sync_bn_backward_param
sync_bn_forward_mean sync_bn_forward_output sync_bn_forward_var three_interpolate_backward
three_interpolate_forward three_nn_forward tin_shift_backward tin_shift_forward upfirdn2d
"""
_UNCOVERED = frozenset(_NAMES.split()) - _COVERED.keys()


def covered() -> tuple[str, ...]:
    """Names of the functions that compute."""
    return tuple(sorted(_COVERED))


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        f"mmcv._ext.{name} is not among the functions that opzoo provides: {', '.join(covered())}. "
        "A compiled mmcv has it."
    )


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name in _UNCOVERED:
        return functools.partial(_refuse, name)
    raise AttributeError(f"module 'mmcv._ext' has no attribute {name!r}")
