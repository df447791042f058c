"""mmcv's functions of boxes: NMS and pooling.

Called by mmcv below autograd with results allocated beforehand; see :mod:`opzoo.compat._mmcv_ext`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import opzoo

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
    found, where = _ops.roi_pool(input, _coordinates(rois, input), pooled_height, pooled_width, spatial_scale, False)
    output.copy_(found)
    argmax.copy_(where)


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
    boxes = _coordinates(rois, grad_output)
    grad_input.copy_(_ops._roi_pool_backward(grad_output, argmax.long(), boxes, *grad_input.shape))


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
    size = (pooled_height, pooled_width)
    output.copy_(_pool_moved_bins(input, rois, offset, size, spatial_scale, sampling_ratio, gamma))


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
    leaves = [input.detach().requires_grad_(), offset.detach().requires_grad_()]
    size = (pooled_height, pooled_width)
    with torch.enable_grad():
        output = _pool_moved_bins(leaves[0], rois, leaves[1], size, spatial_scale, sampling_ratio, gamma)
        moved = bool(offset.numel())
        grads = torch.autograd.grad(output, leaves if moved else leaves[:1], grad_output)
    grad_input.copy_(grads[0])
    if moved:
        grad_offset.copy_(grads[1])


def _pool_moved_bins(
    input: Tensor, rois: Tensor, offset: Tensor, size: tuple[int, int], scale: float, ratio: int, gamma: float
) -> Tensor:
    """Each bin is a RoI of its own, pooled to one number; its gradient to the box is that to the offset."""
    boxes = _coordinates(rois, input)
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
    images = index[:, None, None].expand(*first.shape[:3], 1)
    bins = torch.cat([images, first, last], -1).reshape(-1, 5)
    pooled = opzoo.roi_align(input, bins, 1, scale, ratio, True)
    return pooled.reshape(len(rois), *size, input.shape[1]).permute(0, 3, 1, 2)


def _coordinates(rois: Tensor, features: Tensor) -> Tensor:
    return rois.to(torch.float64 if features.dtype == torch.float64 else torch.float32)
