"""mmcv's functions of boxes: NMS and pooling.

Called by mmcv below autograd with results allocated beforehand; see :mod:`opzoo.compat._mmcv_ext`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import opzoo
from opzoo.compat._mmcv_checks import (
    require_device,
    require_finite,
    require_floats,
    require_indices,
    require_integers,
    require_shape,
    require_tensors,
    write,
)

_ops = torch.ops.opzoo
_NUMBERS = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)
_METHODS = ("naive", "linear", "gaussian")  # of soft-NMS, by mmcv's numbers


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Indices of the kept boxes; with ``offset`` 1 a box's right and lower edge are its last pixels."""
    require_tensors("nms", boxes=boxes, scores=scores)
    return opzoo.nms(_to_edges("nms", boxes, offset), scores, iou_threshold)


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
    op = "softnms"
    require_tensors(op, boxes=boxes, scores=scores, dets=dets)
    require_shape(op, (None, 4), boxes=boxes)
    require_shape(op, (len(boxes), 5), dets=dets)
    require_floats(op, boxes=boxes, scores=scores)  # an integer of dets would cut a lowered score off
    require_integers(op, 0, method=method)
    if method >= len(_METHODS):
        raise ValueError(f"mmcv._ext.{op}: method must be 0 (naive), 1 (linear) or 2 (gaussian), got {method}")
    edges = _to_edges(op, boxes, offset)
    lowered, indices = opzoo.soft_nms(edges, scores, iou_threshold, sigma, min_score, _METHODS[method])
    selected = torch.cat([boxes[indices], lowered[:, None].to(boxes.dtype)], 1)
    write(op, dets=(dets[: len(indices)], selected))
    return indices


def nms_match(dets: Tensor, iou_threshold: float) -> list[list[int]]:
    """Groups of indices: a kept box, then those it dropped, an IoU of ``iou_threshold`` among them."""
    op = "nms_match"
    require_tensors(op, dets=dets)
    require_shape(op, (None, 5), dets=dets)
    require_floats(op, dets=dets)
    require_finite(op, iou_threshold=iou_threshold)
    # The next number down: above it is at least the threshold.
    dtype = torch.float64 if dets.dtype == torch.float64 else torch.float32
    below = torch.nextafter(torch.tensor(float(iou_threshold), dtype=dtype), torch.tensor(-math.inf, dtype=dtype))
    if below < 0:
        raise ValueError(f"mmcv._ext.{op}: iou_threshold must be above 0, got {iou_threshold}")
    groups = opzoo.nms_match(dets[:, :4].to(dtype), dets[:, 4], min(below.item(), 1.0))
    return [group.tolist() for group in groups]


def _to_edges(op: str, boxes: Tensor, offset: int) -> Tensor:
    """Boxes whose right and lower edges are edges; ``offset`` 1: they are the last pixels inside."""
    if isinstance(offset, Tensor) or offset not in (0, 1):
        raise ValueError(f"mmcv._ext.{op}: offset must be 0 or 1, got {offset}")
    if offset == 0 or boxes.dim() != 2 or boxes.shape[1] != 4 or boxes.dtype not in _NUMBERS:
        return boxes  # what nms takes, or refuses itself
    # In a dtype with room for one more: uint8 ends at 255, float16 is even from 2048 on.
    wide = boxes.to(torch.promote_types(boxes.dtype, torch.float32 if boxes.is_floating_point() else torch.int64))
    return wide + wide.new_tensor([0, 0, offset, offset])


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
    op = "roi_align_forward"
    require_tensors(op, input=input, rois=rois, output=output)
    numbers = (aligned_height, aligned_width, spatial_scale, sampling_ratio, bool(aligned))
    if _is_average(op, pool_mode):
        write(op, output=(output, _ops.roi_align(input, rois, None, *numbers)))
        return
    require_tensors(op, argmax_y=argmax_y, argmax_x=argmax_x)
    result, argmax = _ops._roi_align_max(input, rois, None, *numbers)
    base = _digit_base(result)
    if argmax.numel() and int(argmax.max()) >= base * base:
        raise ValueError(
            f"mmcv._ext.{op}: sampling_ratio must give at most {base * base} samples per bin in {result.dtype}"
        )
    digits = argmax.div(base, rounding_mode="floor").to(result.dtype), argmax.remainder(base).to(result.dtype)
    write(op, output=(output, result), argmax_y=(argmax_y, digits[0]), argmax_x=(argmax_x, digits[1]))


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
    op = "roi_align_backward"
    require_tensors(op, grad_output=grad_output, rois=rois, grad_input=grad_input)
    require_shape(op, (None, None, aligned_height, aligned_width), grad_output=grad_output)
    require_shape(op, (None, grad_output.shape[1], None, None), grad_input=grad_input)
    numbers = (*grad_input.shape, spatial_scale, sampling_ratio, bool(aligned), False)
    if _is_average(op, pool_mode):
        write(op, grad_input=(grad_input, _ops._roi_align_backward(grad_output, rois, None, *numbers)))
        return
    require_tensors(op, argmax_y=argmax_y, argmax_x=argmax_x)
    require_shape(op, grad_output.shape, argmax_y=argmax_y, argmax_x=argmax_x)
    require_floats(op, grad_output=grad_output, argmax_y=argmax_y, argmax_x=argmax_x)
    argmax = argmax_y.to(torch.int64) * _digit_base(argmax_y) + argmax_x.to(torch.int64)
    write(op, grad_input=(grad_input, _ops._roi_align_max_backward(grad_output, argmax, rois, None, *numbers)))


def _is_average(op: str, pool_mode: int) -> bool:
    if isinstance(pool_mode, Tensor) or pool_mode not in (0, 1):
        raise ValueError(f"mmcv._ext.{op}: pool_mode must be 0 (maximum) or 1 (average), got {pool_mode}")
    return pool_mode == 1


def _digit_base(t: Tensor) -> int:
    """Integers up to this number are exact in the tensor's dtype."""
    return 256 if t.dtype == torch.bfloat16 else 2048


def roi_pool_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    """Maximum of whole pixels by mmcv's rule: the corners of a RoI are not rounded, the edges of its bins are."""
    op = "roi_pool_forward"
    require_tensors(op, input=input, rois=rois, output=output, argmax=argmax)
    boxes = _coordinates(op, rois, input)
    found, where = _ops.roi_pool(input, boxes, pooled_height, pooled_width, spatial_scale, False)
    if where.shape[0] and input.shape[2] * input.shape[3] >= 1 << 31:
        raise RuntimeError(f"mmcv._ext.{op}: input must have less than 2**31 pixels, got {list(input.shape)}")
    write(op, output=(output, found), argmax=(argmax, where.to(torch.int32)))


def roi_pool_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax: Tensor,
    grad_input: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    """Gradient of :func:`roi_pool_forward` to ``input``."""
    op = "roi_pool_backward"
    require_tensors(op, grad_output=grad_output, rois=rois, argmax=argmax, grad_input=grad_input)
    require_shape(op, (None, None, pooled_height, pooled_width), grad_output=grad_output)
    require_shape(op, (None, grad_output.shape[1], None, None), grad_input=grad_input)
    require_indices(op, grad_output.device, argmax=argmax)
    boxes = _coordinates(op, rois, grad_output)
    pixels = grad_input.shape[2] * grad_input.shape[3]
    if argmax.device.type == "cpu" and argmax.numel() and int(argmax.max()) >= pixels:  # on CUDA a wait; skipped there
        raise ValueError(f"mmcv._ext.{op}: argmax must be below {pixels}, got {int(argmax.max())}")
    grad = _ops._roi_pool_backward(grad_output, argmax.long(), boxes, *grad_input.shape)
    write(op, grad_input=(grad_input, grad))


def deform_roi_pool_forward(
    input: Tensor,
    rois: Tensor,
    offset: Tensor,
    output: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    gamma: float,
) -> None:
    """RoIAlign whose bins move by ``offset``, in parts ``gamma`` of the RoI's size."""
    op = "deform_roi_pool_forward"
    require_tensors(op, input=input, rois=rois, offset=offset, output=output)
    size = (pooled_height, pooled_width)
    write(op, output=(output, _pool_moved_bins(op, input, rois, offset, size, spatial_scale, sampling_ratio, gamma)))


def deform_roi_pool_backward(
    grad_output: Tensor,
    input: Tensor,
    rois: Tensor,
    offset: Tensor,
    grad_input: Tensor,
    grad_offset: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    gamma: float,
) -> None:
    """Gradients of :func:`deform_roi_pool_forward` to ``input`` and, where there is one, ``offset``."""
    op = "deform_roi_pool_backward"
    require_tensors(op, grad_output=grad_output, input=input, rois=rois, offset=offset)
    require_floats(op, grad_output=grad_output, input=input, offset=offset)
    coordinates = offset.detach().to(torch.float64 if input.dtype == torch.float64 else torch.float32)
    leaves = [input.detach().requires_grad_(), coordinates.requires_grad_()]
    size = (pooled_height, pooled_width)
    with torch.enable_grad():
        output = _pool_moved_bins(op, leaves[0], rois, leaves[1], size, spatial_scale, sampling_ratio, gamma)
    require_shape(op, output.shape, grad_output=grad_output)
    moved = bool(offset.numel())
    grads = torch.autograd.grad(output, leaves if moved else leaves[:1], grad_output)
    results = {"grad_input": (grad_input, grads[0])}
    if moved:  # mmcv allocates the gradient of an offset of another dtype in that of grad_output
        same = isinstance(grad_offset, Tensor) and grad_offset.dtype == grad_output.dtype
        results["grad_offset"] = (grad_offset, grads[1].to(grad_output.dtype if same else offset.dtype))
    write(op, **results)


def _pool_moved_bins(
    op: str, input: Tensor, rois: Tensor, offset: Tensor, size: tuple[int, int], scale: float, ratio: int, gamma: float
) -> Tensor:
    """Each bin is a RoI of its own, pooled to one number; its gradient to the box is that to the offset."""
    require_integers(op, 1, pooled_height=size[0], pooled_width=size[1])
    require_finite(op, gamma=gamma, spatial_scale=scale)
    if scale <= 0:
        raise ValueError(f"mmcv._ext.{op}: spatial_scale must be positive, got {scale}")
    require_shape(op, (None, None, None, None), input=input)
    boxes = _coordinates(op, rois, input)
    if offset.shape != (0,):
        require_shape(op, (len(rois), 2, *size), offset=offset)
    require_floats(op, input=input, offset=offset)
    index, corners = boxes[:, :1], boxes[:, 1:]
    extent = corners[:, 2:] - corners[:, :2]  # width, height
    bin = extent / extent.new_tensor([size[1], size[0]])
    step = torch.stack(
        torch.meshgrid(*(torch.arange(n, device=boxes.device, dtype=boxes.dtype) for n in size), indexing="ij")[::-1],
        -1,
    )  # [height, width, 2] of (x, y)
    first = corners[:, None, None, :2] + step * bin[:, None, None]
    if offset.numel():
        moved = offset.to(boxes.dtype).reshape(len(rois), 2, *size).permute(0, 2, 3, 1)
        first = first + gamma * extent[:, None, None] * moved
    last = first + bin[:, None, None]
    if ratio <= 0:  # one sample per started pixel: where a bin is n pixels, rounding must not start another
        reach = torch.maximum(first.detach().abs(), last.detach().abs()) + 1 / scale
        last = last - 4 * torch.finfo(boxes.dtype).eps * reach
    images = index[:, None, None].expand(*first.shape[:3], 1)
    bins = torch.cat([images, first, last], -1).reshape(-1, 5)
    pooled = opzoo.roi_align(input, bins, 1, scale, ratio, True)
    return pooled.reshape(len(rois), *size, input.shape[1]).permute(0, 3, 1, 2)


def _coordinates(op: str, rois: Tensor, features: Tensor) -> Tensor:
    """RoIs in the dtype of sums."""
    require_shape(op, (None, 5), rois=rois)
    require_floats(op, rois=rois)
    require_device(op, features.device, rois=rois)
    return rois.to(torch.float64 if features.dtype == torch.float64 else torch.float32)
