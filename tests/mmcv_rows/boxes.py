"""Rows of the functions of boxes: NMS and pooling."""

from __future__ import annotations

import math
from typing import Any

import torch
from helpers import FLOATS
from peers import torchvision
from torch import Tensor

import opzoo
from mmcv_rows.row import Call, gradients, normal, nothing, row, uniform, unwritten


def boxes_and_scores(dtype: torch.dtype, count: int = 40) -> Call:
    boxes = uniform(count, 4, dtype=torch.float64) * 20
    boxes[:, 2:] += boxes[:, :2] + 4
    scores = torch.randperm(count).double().add(1) / (count + 1)  # no two equal, in bfloat16 as well
    return {"boxes": boxes.to(dtype), "scores": scores.to(dtype)}


def moved(boxes: Tensor, offset: int) -> Tensor:
    return boxes + torch.tensor([0, 0, offset, offset]).to(boxes)


@row("nms", oracle="torchvision", draw=lambda dtype: {**boxes_and_scores(dtype), "iou_threshold": 0.4, "offset": 1})
def _nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Call:
    return {"return": torchvision.ops.nms(moved(boxes, offset), scores, iou_threshold)}


def draw_softnms(dtype: torch.dtype) -> Call:
    numbers = {"iou_threshold": 0.3, "sigma": 0.5, "min_score": 1e-3, "method": 1, "offset": 0}
    return {**boxes_and_scores(dtype), "dets": unwritten(40, 5, dtype=dtype), **numbers}


@row("softnms", oracle="opzoo.reference", draw=draw_softnms, outputs=("dets",), dtypes=FLOATS[:2])
def _softnms(
    boxes: Tensor,
    scores: Tensor,
    dets: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> Call:
    name = ("naive", "linear", "gaussian")[method]
    lowered, order = opzoo.reference.soft_nms(moved(boxes, offset), scores, iou_threshold, sigma, min_score, name)
    dets = dets.clone()
    dets[: len(order)] = torch.cat([boxes[order], lowered[:, None]], 1)
    return {"return": order, "dets": dets}


@row(
    "nms_match",
    oracle="a loop over pairs",
    draw=lambda dtype: {"dets": torch.cat([t.reshape(40, -1) for t in boxes_and_scores(dtype).values()], 1),
                        "iou_threshold": 0.5},
)  # fmt: skip
def _nms_match(dets: Tensor, iou_threshold: float) -> Call:
    return {"return": nms_match_by_pairs(dets, iou_threshold)}


ROIS = torch.tensor([[0, 2.0, 4, 20, 14], [1, 4, 0, 10, 22], [1, 8, 8, 12, 12]], dtype=torch.float64)
ALIGN = {"aligned_height": 2, "aligned_width": 3, "spatial_scale": 0.5, "sampling_ratio": 2}


def align(input: Tensor, rois: Tensor, numbers: Call) -> Tensor:
    size = (numbers["aligned_height"], numbers["aligned_width"])
    options = (numbers["spatial_scale"], numbers["sampling_ratio"], numbers["aligned"])
    if numbers["pool_mode"] == 1:
        return torchvision.ops.roi_align(input, rois, size, *options)
    return opzoo.reference.roi_align(input, rois, size, *options, "max")


@row(
    "roi_align_forward",
    oracle="torchvision",
    draw=lambda dtype: {
        "input": normal(2, 3, 12, 10, dtype=dtype),
        "rois": ROIS.to(dtype),
        "output": unwritten(3, 3, 2, 3, dtype=dtype),
        "argmax_y": nothing(dtype),
        "argmax_x": nothing(dtype),
        **ALIGN,
        "pool_mode": 1,
        "aligned": True,
    },
    outputs=("output",),
    ignored=("argmax_y", "argmax_x"),
)
def _roi_align_forward(input: Tensor, rois: Tensor, output: Tensor, **numbers: Any) -> Call:
    return {"output": align(input, rois, numbers)}


@row(
    "roi_align_backward",
    oracle="torchvision",
    draw=lambda dtype: {
        "grad_output": normal(3, 3, 2, 3, dtype=dtype),
        "rois": ROIS.to(dtype),
        "argmax_y": nothing(dtype),
        "argmax_x": nothing(dtype),
        "grad_input": unwritten(2, 3, 12, 10, dtype=dtype),
        **ALIGN,
        "pool_mode": 1,
        "aligned": True,
    },
    outputs=("grad_input",),
    ignored=("argmax_y", "argmax_x"),
)
def _roi_align_backward(grad_output: Tensor, rois: Tensor, grad_input: Tensor, **numbers: Any) -> Call:
    (grad,) = gradients(lambda input: align(input, rois, numbers), grad_output, torch.zeros_like(grad_input))
    return {"grad_input": grad}


POOL = {"pooled_height": 2, "pooled_width": 2, "spatial_scale": 0.5}


@row(
    "roi_pool_forward",
    oracle="a loop over pixels",
    draw=lambda dtype: {
        "input": normal(2, 3, 12, 10, dtype=dtype),
        "rois": ROIS.to(dtype),
        "output": unwritten(3, 3, 2, 2, dtype=dtype),
        "argmax": unwritten(3, 3, 2, 2, dtype=torch.int32),
        **POOL,
    },
    outputs=("output", "argmax"),
)
def _roi_pool_forward(input: Tensor, rois: Tensor, output: Tensor, argmax: Tensor, **numbers: Any) -> Call:
    found, where = roi_pool_by_pixels(input, rois, *numbers.values())
    return {"output": found, "argmax": where}


@row(
    "roi_pool_backward",
    oracle="by hand",
    draw=lambda dtype: {
        "grad_output": normal(3, 3, 2, 2, dtype=dtype),
        "rois": ROIS.to(dtype),
        "argmax": torch.randint(-1, 120, (3, 3, 2, 2), dtype=torch.int32),
        "grad_input": unwritten(2, 3, 12, 10, dtype=dtype),
        **POOL,
    },
    outputs=("grad_input",),
)
def _roi_pool_backward(grad_output: Tensor, rois: Tensor, argmax: Tensor, grad_input: Tensor, **numbers: Any) -> Call:
    flat = torch.zeros_like(grad_input).flatten(2)
    for k, image in enumerate(rois[:, 0].long().tolist()):
        for channel in range(3):
            for where, grad in zip(
                argmax[k, channel].flatten().tolist(), grad_output[k, channel].flatten(), strict=True
            ):
                if where >= 0:
                    flat[image, channel, where] += grad
    return {"grad_input": flat.view(grad_input.shape)}


MOVED = {"pooled_height": 2, "pooled_width": 3, "spatial_scale": 0.5, "sampling_ratio": 2, "gamma": 0.1}


def pool_moved(input: Tensor, offset: Tensor, rois: Tensor, numbers: Call) -> Tensor:
    """Bin by bin, torchvision's RoIAlign of the bin's own moved box."""
    height, width, scale, ratio, gamma = numbers.values()
    full = 1 - 1e-9 if ratio <= 0 else 1  # or rounding starts another pixel
    results = []
    for k, roi in enumerate(rois):
        w, h = roi[3] - roi[1], roi[4] - roi[2]
        for y in range(height):
            for x in range(width):
                left = roi[1] + x * w / width + gamma * w * offset[k, 0, y, x]
                top = roi[2] + y * h / height + gamma * h * offset[k, 1, y, x]
                box = torch.stack([roi[0], left, top, left + full * w / width, top + full * h / height])
                results.append(torchvision.ops.roi_align(input, box[None], 1, scale, ratio, True).flatten())
    return torch.stack(results).view(len(rois), height, width, -1).permute(0, 3, 1, 2)


@row(
    "deform_roi_pool_forward",
    oracle="torchvision, a bin at a time",
    draw=lambda dtype: {
        "input": normal(2, 3, 12, 10, dtype=dtype),
        "rois": ROIS.to(dtype),
        "offset": normal(3, 2, 2, 3, dtype=dtype),
        "output": unwritten(3, 3, 2, 3, dtype=dtype),
        **MOVED,
    },
    outputs=("output",),
)
def _deform_roi_pool_forward(input: Tensor, rois: Tensor, offset: Tensor, output: Tensor, **numbers: Any) -> Call:
    return {"output": pool_moved(input, offset, rois, numbers)}


@row(
    "deform_roi_pool_backward",
    oracle="torchvision, a bin at a time; differences for the offsets",
    draw=lambda dtype: {
        "grad_output": normal(3, 3, 2, 3, dtype=dtype),
        "input": normal(2, 3, 12, 10, dtype=dtype),
        "rois": ROIS.to(dtype),
        "offset": normal(3, 2, 2, 3, dtype=dtype),
        "grad_input": unwritten(2, 3, 12, 10, dtype=dtype),
        "grad_offset": unwritten(3, 2, 2, 3, dtype=dtype),
        **MOVED,
    },
    outputs=("grad_input", "grad_offset"),
    near=1e-7,
)
def _deform_roi_pool_backward(
    grad_output: Tensor,
    input: Tensor,
    rois: Tensor,
    offset: Tensor,
    grad_input: Tensor,
    grad_offset: Tensor,
    **numbers: Any,
) -> Call:
    (to_input,) = gradients(lambda input: pool_moved(input, offset, rois, numbers), grad_output, input)
    to_offset, step = torch.zeros_like(offset), 1e-6
    for axis in range(2):  # a bin moves alone
        change = torch.zeros_like(offset)
        change[:, axis] = step
        ahead, behind = (pool_moved(input, offset + sign * change, rois, numbers) for sign in (1, -1))
        to_offset[:, axis] = ((ahead - behind) / (2 * step) * grad_output).sum(1)
    return {"grad_input": to_input, "grad_offset": to_offset}


def nms_match_by_pairs(dets: Tensor, iou_threshold: float) -> list[list[int]]:
    """Best first, every box joins the first kept one that it overlaps enough."""
    overlaps = torchvision.ops.box_iou(dets[:, :4], dets[:, :4])
    groups: list[list[int]] = []
    for box in dets[:, 4].argsort(descending=True, stable=True).tolist():
        for group in groups:
            if overlaps[group[0], box] >= iou_threshold:
                group.append(box)
                break
        else:
            groups.append([box])
    return groups


def roi_pool_by_pixels(input: Tensor, rois: Tensor, height: int, width: int, scale: float) -> tuple[Tensor, Tensor]:
    """The last column and row of a RoI are inside it; a bin is every pixel that it touches."""
    found = input.new_zeros(len(rois), input.shape[1], height, width)
    where = torch.full(found.shape, -1, dtype=torch.int32)
    for k, (image, *corners) in enumerate(rois.tolist()):
        left, top, right, bottom = (c * scale for c in (*corners[:2], corners[2] + 1, corners[3] + 1))
        for y in range(height):
            for x in range(width):
                steps = (bottom - top) / height, (right - left) / width
                y0, y1 = math.floor(top + y * steps[0]), math.ceil(top + (y + 1) * steps[0])
                x0, x1 = math.floor(left + x * steps[1]), math.ceil(left + (x + 1) * steps[1])
                inside = torch.zeros(input.shape[2:], dtype=torch.bool)
                inside[max(y0, 0) : max(y1, 0), max(x0, 0) : max(x1, 0)] = True
                if inside.any():
                    plane = torch.where(inside, input[int(image)], -math.inf).flatten(1)
                    found[k, :, y, x], place = plane.max(1)
                    where[k, :, y, x] = place.int()
    return found, where
