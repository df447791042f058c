"""Targets of the campaign that sample maps: RoIs, deformable convolution and attention."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from campaign_draw import INTEGERS, Arguments, Draw, both
from campaign_expected import Expected, Near, adjoint, linear, work
from campaign_targets import with_grad
from helpers import FLOATS
from torch import Tensor

import opzoo
from opzoo.reference.roi_align import _bilinear, _sample_positions

reference = opzoo.reference
ops = torch.ops.opzoo
LIMIT = 300  # pixels of a box on an adaptive grid, beyond which the reference would need gigabytes

# RoIs


def draw_rois(draw: Draw, listed: bool = True, whole: bool = True) -> Arguments:
    n, c, h, w = draw.size(3, 4), draw.size(5, 40), draw.size(9, 20), draw.size(9, 20)
    input = draw.normal(n, c, h, w, dtype=draw.dtype())
    count = draw.size(4, 12) if n and h and w else 0
    dtype = draw.choice((torch.float32, *FLOATS, *(INTEGERS if whole else ())))
    boxes: Any = draw.boxes(count, dtype=dtype)
    if listed and draw.random() < 0.3 and n:
        cut = sorted(draw.randint(0, count) for _ in range(n - 1))
        boxes = [part.contiguous() for part in boxes.tensor_split(cut)]
    else:
        boxes = torch.cat([draw.integers(0, max(n - 1, 0), count, 1).to(dtype), boxes], 1)
    return {"input": input, "boxes": boxes, "output_size": draw.pair(1, 4)}


def draw_roi_align(draw: Draw) -> Arguments:
    args = draw_rois(draw)
    args |= {"spatial_scale": draw.choice((1.0, 0.5, 0.25, 0.7)), "sampling_ratio": draw.choice((-1, 0, 1, 2, 3))}
    return {**args, "aligned": draw.random() < 0.5, "pool_mode": draw.choice(("avg", "avg", "max"))}


def draw_raw_roi(draw: Draw) -> Arguments:
    """Positional names of the operator, an image index beside the boxes or in them."""
    args = draw_roi_align(draw)
    boxes, index, (height, width) = args["boxes"], None, both(args["output_size"])
    if isinstance(boxes, list):
        index = torch.tensor([i for i, t in enumerate(boxes) for _ in t], dtype=torch.int64, device=draw.device)
        boxes = torch.cat(boxes)
    numbers = {name: args[name] for name in ("spatial_scale", "sampling_ratio", "aligned")}
    sizes = {"pooled_height": height, "pooled_width": width}
    return {"input": args["input"], "boxes": boxes, "batch_index": index, **sizes, **numbers}


def _joined(boxes: Any, index: Tensor | None, features: Tensor) -> Any:
    """Boxes in the arithmetic of the map, with the image index in front."""
    dtype = torch.float64 if features.dtype == torch.float64 else torch.float32
    if isinstance(boxes, (list, tuple)):
        return [t.to(dtype) for t in boxes]
    return boxes.to(dtype) if index is None else torch.cat([index[:, None].to(dtype), boxes.to(dtype)], 1)


def too_large(boxes: Any, scale: float, ratio: int) -> bool:
    """Whether the reference would need gigabytes."""
    parts = boxes if isinstance(boxes, (list, tuple)) else [boxes]
    sides = [t[:, -4:].double().abs() * scale for t in parts]
    return ratio <= 0 and any(bool((s[s.isfinite()] > LIMIT).any()) for s in sides)


def spread(reference: Any, maps: Any) -> Expected:
    """``reference(maps)``, an average: a NaN or infinite pixel reaches what gives it a weight other than 0."""
    maps = [maps] if isinstance(maps, Tensor) else maps
    call = lambda change: reference([change(t) for t in maps])  # noqa: E731
    value = call(lambda t: t.nan_to_num(0, 0, 0))
    scale = call(lambda t: t.abs().nan_to_num(0, 0, 0))
    if not all(bool(t.isfinite().all()) for t in maps):
        missing = call(lambda t: t.isnan().to(t.dtype)) > 0
        up = call(lambda t: (t == math.inf).to(t.dtype)) > 0
        down = call(lambda t: (t == -math.inf).to(t.dtype)) > 0
        value = (
            value.masked_fill(up, math.inf).masked_fill(down, -math.inf).masked_fill(missing | (up & down), math.nan)
        )
    return [Near(value, scale)]


def expect_roi_align(
    input: Tensor,
    boxes: Any,
    output_size: Any,
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    aligned: bool = False,
    pool_mode: str = "avg",
) -> Expected | None:
    if too_large(boxes, spatial_scale, sampling_ratio):
        return None
    input, boxes = work(input), _joined(work(boxes), None, input)
    numbers = (boxes, output_size, spatial_scale, sampling_ratio, aligned, pool_mode)
    if pool_mode == "max":
        value = reference.roi_align(input, *numbers)
        return [Near(value, value.abs() if bool(input.isfinite().all()) else torch.full_like(value, math.inf))]
    return spread(lambda maps: reference.roi_align(maps[0], *numbers), input)


def expect_raw_roi(
    input: Tensor, boxes: Tensor, batch_index: Any, pooled_height: int, pooled_width: int, **numbers: Any
) -> Expected | None:
    joined = _joined(work(boxes), batch_index, input)
    return expect_roi_align(input, joined, (pooled_height, pooled_width), **numbers)


def expect_raw_max(**args: Any) -> Expected | None:
    found = expect_raw_roi(**args, pool_mode="max")
    return found and [*found, None]


def sample(
    input: Tensor, argmax: Tensor, boxes: Tensor, spatial_scale: float, sampling_ratio: int, aligned: bool
) -> Tensor:
    """``_roi_align_max_sample`` in plain PyTorch: of each bin the sample of number ``argmax``, 0 for none."""
    _, C, PH, PW = argmax.shape
    rows = []
    for k, (image, x1, y1, x2, y2) in enumerate(boxes.to(input.dtype)):
        ys = _sample_positions(y1, y2, PH, spatial_scale, sampling_ratio, aligned)
        xs = _sample_positions(x1, x2, PW, spatial_scale, sampling_ratio, aligned)
        samples = _bilinear(input[int(image)], ys.flatten(), xs.flatten())
        samples = samples.reshape(C, *ys.shape, *xs.shape).permute(0, 1, 3, 2, 4).flatten(3)
        samples = torch.nn.functional.pad(samples, (1, 0))  # number -1: no sample
        known = (argmax[k] >= 0) & (argmax[k] < samples.shape[-1] - 1)
        rows.append(samples.gather(3, torch.where(known, argmax[k] + 1, 0).unsqueeze(3)).squeeze(3))
    return torch.stack(rows) if rows else input.new_zeros(argmax.shape)


def draw_sample(draw: Draw) -> Arguments:
    args = draw_raw_roi(draw)
    _, argmax = ops._roi_align_max(**args)
    args = {name: value for name, value in args.items() if not name.startswith("pooled")}
    return {"input": args.pop("input"), "argmax": argmax, **args}


def expect_sample(input: Tensor, argmax: Tensor, boxes: Tensor, batch_index: Any, **numbers: Any) -> Expected | None:
    if too_large(boxes, numbers["spatial_scale"], numbers["sampling_ratio"]):
        return None
    joined = _joined(work(boxes), work(batch_index), input)
    return linear(sample, {"input": input, "argmax": argmax, "boxes": joined, **numbers}, ("input",))


SIZES = ("batch", "channels", "height", "width")


def draw_backward(draw: Draw) -> Arguments:
    args = draw_raw_roi(draw)
    out = ops.roi_align(**args)
    input = args.pop("input")
    sizes = dict(zip(SIZES, input.shape, strict=True))
    args = {name: value for name, value in args.items() if not name.startswith("pooled")}
    boxes = {"boxes": args.pop("boxes"), "batch_index": args.pop("batch_index")}
    grad = draw.normal(*out.shape, dtype=out.dtype)
    return {"grad": grad, **boxes, **sizes, **args, "channels_last": draw.random() < 0.3}


def expect_backward(grad: Tensor, boxes: Tensor, batch_index: Any, channels_last: bool, **args: Any) -> Expected | None:
    sizes, numbers = [args[name] for name in SIZES], {k: v for k, v in args.items() if k not in SIZES}
    if too_large(boxes, numbers["spatial_scale"], numbers["sampling_ratio"]) or math.prod(sizes) > 1 << 20:
        return None
    grad, joined = work(grad), _joined(work(boxes), work(batch_index), grad)
    map = grad.new_zeros(sizes)
    numbers |= {"boxes": joined, "output_size": tuple(grad.shape[2:])}
    return adjoint(reference.roi_align, {"input": map, **numbers}, ("input",), ("input",), grad)


def draw_max_backward(draw: Draw) -> Arguments:
    args = draw_sample(draw)
    input = args.pop("input")
    boxes = {name: args.pop(name) for name in ("argmax", "boxes", "batch_index")}
    grad = draw.normal(*boxes["argmax"].shape, dtype=input.dtype)
    sizes = dict(zip(SIZES, input.shape, strict=True))
    return {"grad": grad, **boxes, **sizes, **args, "channels_last": draw.random() < 0.3}


def expect_max_backward(
    grad: Tensor, argmax: Tensor, boxes: Tensor, batch_index: Any, channels_last: bool, **args: Any
) -> Expected | None:
    sizes, numbers = [args[name] for name in SIZES], {k: v for k, v in args.items() if k not in SIZES}
    if too_large(boxes, numbers["spatial_scale"], numbers["sampling_ratio"]) or math.prod(sizes) > 1 << 20:
        return None
    grad, joined = work(grad), _joined(work(boxes), work(batch_index), grad)
    args = {"input": grad.new_zeros(sizes), "argmax": argmax, "boxes": joined, **numbers}
    return adjoint(sample, args, ("input",), ("input",), grad)


def draw_boxes_backward(draw: Draw) -> Arguments:
    args = with_grad(draw, draw_raw_roi(draw), ops.roi_align)
    return {name: value for name, value in args.items() if not name.startswith("pooled")}


def expect_boxes_backward(
    grad: Tensor, input: Tensor, boxes: Tensor, batch_index: Any, **numbers: Any
) -> Expected | None:
    if too_large(boxes, numbers["spatial_scale"], numbers["sampling_ratio"]):
        return None
    joined = _joined(work(boxes), work(batch_index), input)
    args = {"input": input, "boxes": joined, **numbers, "output_size": tuple(grad.shape[2:])}
    found = adjoint(reference.roi_align, args, ("boxes",), ("input",), grad, coordinates=("boxes",))[0]
    assert isinstance(found, Near)
    value = found.value if batch_index is None else found.value[:, 1:]
    side = 1 + float(joined.double().abs().nan_to_num(0, 0, 0).max()) if joined.numel() else 1
    scale = found.scale if batch_index is None else found.scale[:, 1:]
    return [replace(found, value=value, scale=scale * side)]


def draw_roi_pool(draw: Draw) -> Arguments:
    return {**draw_rois(draw), "spatial_scale": draw.choice((1.0, 0.5, 0.25, 0.7))}


def draw_raw_pool(draw: Draw) -> Arguments:
    args = draw_rois(draw, listed=False, whole=False)
    dtype = torch.float64 if args["input"].dtype == torch.float64 else torch.float32
    height, width = both(args["output_size"])
    sizes = {"pooled_height": height, "pooled_width": width}
    return {"input": args["input"], "boxes": args["boxes"].to(dtype), **sizes, "spatial_scale": 0.5, "rounded": True}


def expect_roi_pool(input: Tensor, boxes: Any, output_size: Any, spatial_scale: float = 1.0) -> Expected:
    input, boxes = work(input), work(boxes)
    if isinstance(boxes, (list, tuple)):
        index = [torch.full((len(t), 1), float(i)) for i, t in enumerate(boxes)]
        boxes = torch.cat([torch.cat(index).to(torch.float64), torch.cat([t.double() for t in boxes])], 1)
    boxes = _joined(boxes, None, input)
    value = reference.roi_pool(input, boxes, both(output_size), spatial_scale)
    return [Near(value, value.abs())]


def expect_raw_pool(
    input: Tensor, boxes: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float, rounded: bool
) -> Expected | None:
    size = (pooled_height, pooled_width)
    return [*expect_roi_pool(input, boxes, size, spatial_scale), None] if rounded else None


def draw_pool_backward(draw: Draw) -> Arguments:
    args = draw_raw_pool(draw)
    out, argmax = ops.roi_pool(**args)
    sizes = dict(zip(SIZES, args["input"].shape, strict=True))
    return {"grad": draw.normal(*out.shape, dtype=out.dtype), "argmax": argmax, "boxes": args["boxes"], **sizes}


def expect_pool_backward(grad: Tensor, argmax: Tensor, boxes: Tensor, **sizes: int) -> Expected | None:
    n, c, h, w = (sizes[name] for name in SIZES)
    if n * c * h * w > 1 << 20:
        return None
    grad, argmax, map = work(grad), work(argmax), []
    for values in (grad, grad.abs()):
        out = grad.new_zeros(n, c, h * w)
        for k, image in enumerate(boxes[:, 0].long().tolist()):
            known = (argmax[k] >= 0) & (argmax[k] < h * w)
            found = torch.where(known, values[k], 0).flatten(1)
            out[image].scatter_add_(1, torch.where(known, argmax[k], 0).flatten(1), found)
        map.append(out.view(n, c, h, w))
    return [Near(*map)]


# Pyramids


def draw_pyramid(draw: Draw) -> Arguments:
    args = draw_rois(draw)
    first, count = args.pop("input"), draw.randint(1, 3)
    maps = [first]
    for _ in range(count - 1):
        n, c, h, w = maps[-1].shape
        maps.append(draw.normal(n, c, (h + 1) // 2, (w + 1) // 2, dtype=first.dtype))
    scales = [1.0 / 2**i for i in range(count)]
    args |= {"inputs": maps, "spatial_scales": scales, "sampling_ratio": draw.choice((-1, 1, 2))}
    return {**args, "aligned": draw.random() < 0.5, "canonical_scale": draw.choice((4, 8.0)), "canonical_level": 1}


def expect_pyramid(inputs: list[Tensor], boxes: Any, spatial_scales: list[float], **args: Any) -> Expected | None:
    if too_large(boxes, max(spatial_scales), args["sampling_ratio"]):
        return None
    boxes = _joined(work(boxes), None, inputs[0])
    call = lambda maps: reference.multi_scale_roi_align(maps, boxes, spatial_scales=spatial_scales, **args)  # noqa: E731
    return spread(call, work(list(inputs)))


def draw_raw_pyramid(draw: Draw) -> Arguments:
    args = draw_pyramid(draw)
    boxes, index, (height, width) = args["boxes"], None, both(args["output_size"])
    if isinstance(boxes, list):
        index = torch.tensor([i for i, t in enumerate(boxes) for _ in t], dtype=torch.int64, device=draw.device)
        boxes = torch.cat(boxes)
    names = ("spatial_scales", "sampling_ratio", "aligned", "canonical_scale", "canonical_level")
    sizes = {"batch_index": index, "pooled_height": height, "pooled_width": width}
    levels = {"min_level": 0, "max_level": len(args["inputs"]) - 1}
    return {"inputs": args["inputs"], "boxes": boxes, **sizes, **{name: args[name] for name in names}, **levels}


def _plain_levels(spatial_scales: list[float], min_level: int, max_level: int) -> bool:
    return min_level == round(-math.log2(spatial_scales[0])) and max_level == min_level + len(spatial_scales) - 1


def expect_raw_pyramid(
    boxes: Tensor, batch_index: Any, pooled_height: int, pooled_width: int, min_level: int, max_level: int, **args: Any
) -> Expected | None:
    if not _plain_levels(args["spatial_scales"], min_level, max_level):
        return None
    joined = _joined(work(boxes), work(batch_index), args["inputs"][0])
    return expect_pyramid(boxes=joined, output_size=(pooled_height, pooled_width), **args)


def draw_pyramid_backward(draw: Draw) -> Arguments:
    args = draw_raw_pyramid(draw)
    out, maps = ops.multi_scale_roi_align(**args), args.pop("inputs")
    shape = {"batch": maps[0].shape[0], "channels": maps[0].shape[1]}
    shape |= {"heights": [t.shape[2] for t in maps], "widths": [t.shape[3] for t in maps]}
    boxes = {"boxes": args.pop("boxes"), "batch_index": args.pop("batch_index")}
    args = {name: value for name, value in args.items() if not name.startswith("pooled")}
    grad = draw.normal(*out.shape, dtype=out.dtype)
    return {"grad": grad, **boxes, **shape, **args, "channels_last": draw.random() < 0.3}


def expect_pyramid_backward(
    grad: Tensor, boxes: Tensor, batch_index: Any, channels_last: bool, min_level: int, max_level: int, **args: Any
) -> Expected | None:
    n, c, heights, widths = (args.pop(name) for name in ("batch", "channels", "heights", "widths"))
    pixels = [n * c * h * w for h, w in zip(heights, widths, strict=True)]
    if too_large(boxes, max(args["spatial_scales"]), args["sampling_ratio"]) or max(pixels) > 1 << 20:
        return None
    if not _plain_levels(args["spatial_scales"], min_level, max_level):
        return None
    grad = work(grad)
    maps = [grad.new_zeros(n, c, h, w) for h, w in zip(heights, widths, strict=True)]
    joined = _joined(work(boxes), work(batch_index), grad)
    args |= {"inputs": maps, "boxes": joined, "output_size": tuple(grad.shape[2:])}
    return adjoint(reference.multi_scale_roi_align, args, ("inputs",), ("inputs",), grad)


# Deformable convolution and attention


def draw_deform(draw: Draw) -> Arguments:
    D, G, per_group, per_out = draw.randint(1, 2), draw.randint(1, 2), draw.size(3, 20), draw.size(3, 20)
    kh, kw, stride, pad, dilation = (
        draw.randint(1, 3),
        draw.randint(1, 3),
        draw.pair(1, 2),
        draw.pair(0, 2),
        draw.pair(1, 2),
    )
    C, K, N = 2 * max(per_group, 1), G * per_out, draw.size(3, 3)
    low = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(both(dilation), (kh, kw), both(pad), strict=True)]
    H, W = (max(least, 1) + draw.randint(0, 7) for least in low)
    OH, OW = (
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, p, d, k, s in zip((H, W), both(pad), both(dilation), (kh, kw), both(stride), strict=True)
    )
    dtype, other = draw.dtype(), draw.choice((torch.float32, *FLOATS))
    offset = draw.normal(N, 2 * D * kh * kw, OH, OW) * draw.choice((0, 1, 3))
    return {
        "input": draw.normal(N, C, H, W, dtype=dtype),
        "offset": (offset.round() if draw.random() < 0.3 else offset).to(other),
        "weight": draw.normal(K, C // G, kh, kw, dtype=dtype),
        "bias": draw.normal(K, dtype=dtype) if draw.random() < 0.5 else None,
        "stride": stride,
        "padding": pad,
        "dilation": dilation,
        "mask": draw.uniform(N, D * kh * kw, OH, OW, dtype=draw.dtype()) if draw.random() < 0.5 else None,
    }


def _deform(input: Tensor, offset: Tensor, mask: Any = None, **args: Any) -> Tensor:
    """The reference in the arithmetic of ``input``."""
    mask = None if mask is None else mask.to(input.dtype)
    return reference.deform_conv2d(input, offset.to(input.dtype), mask=mask, **args)


LINEAR = ("input", "weight", "bias", "mask")


def near_pixels(found: Expected, offset: Tensor) -> Expected:
    """Coordinates are rounded too: by more units the further the samples lie from the origin."""
    far = offset.detach().double().abs().nan_to_num(0, 0, 0).clamp(max=1e4)
    side = 1 + (float(far.max()) / 16 if far.numel() else 0)

    def scale(t: Tensor) -> Tensor:
        # A sample at the border of the map has a small weight, and all of a coordinate's error.
        finite = t[t.isfinite()]
        return (t + 0.1 * finite.max()) * side if finite.numel() else t

    return [replace(near, scale=scale(near.scale)) if isinstance(near, Near) else near for near in found]


def expect_deform(**args: Any) -> Expected:
    return near_pixels(linear(_deform, args, LINEAR, loose=True), args["offset"])


def raw_deform(args: Arguments) -> Arguments:
    numbers = {}
    for short, name in (("stride", "stride"), ("pad", "padding"), ("dilation", "dilation")):
        numbers[f"{short}_h"], numbers[f"{short}_w"] = both(args[name])
    return {name: args[name] for name in ("input", "offset", "weight", "bias", "mask")} | numbers


def _sugar(args: Arguments) -> Arguments:
    pairs = (("stride", "stride"), ("padding", "pad"), ("dilation", "dilation"))
    given = {name: value for name, value in args.items() if not name.endswith(("_h", "_w"))}
    return given | {name: (args[f"{short}_h"], args[f"{short}_w"]) for name, short in pairs}


def draw_deform_backward(draw: Draw) -> Arguments:
    args = with_grad(draw, raw_deform(draw_deform(draw)), ops.deform_conv2d)
    del args["bias"]
    needs = {f"need_{name}": draw.random() < 0.7 for name in ("input", "offset", "weight")}
    return {**args, **needs, "need_mask": args["mask"] is not None and draw.random() < 0.7}


def expect_deform_backward(grad: Tensor, **args: Any) -> Expected:
    names = ("input", "offset", "weight", "mask")
    needs = [args.pop(f"need_{name}") for name in names]
    wanted = [name for name, need in zip(names, needs, strict=True) if need]
    found = iter(adjoint(_deform, _sugar(args), wanted, LINEAR, grad, coordinates=("offset",)))
    results: Expected = [next(found) if need else None for need in needs]
    dtype = work(args["input"]).dtype
    results = [near and replace(near, value=near.value.to(dtype)) for near in results]
    return near_pixels(results, args["offset"])


def draw_attention(draw: Draw) -> Arguments:
    B, M, D, Q = draw.size(2, 3), draw.size(3, 8), draw.choice((1, 2, 4, 5, 8, 16, 32)), draw.size(4, 20)
    L, P = draw.randint(1, 3), draw.size(3, 4)
    shapes = [(draw.randint(1, 5), draw.randint(1, 5)) for _ in range(L)]
    starts, at = [], 0
    for h, w in shapes:
        starts.append(at)
        at += h * w + draw.choice((0, 0, 2))
    dtype = draw.dtype()
    other = draw.choice((dtype, torch.float32)) if dtype in (torch.float16, torch.bfloat16) else dtype
    return {
        "value": draw.normal(B, at, M, D, dtype=dtype),
        "spatial_shapes": torch.tensor(shapes, device=draw.device),
        "level_start_index": torch.tensor(starts, device=draw.device),
        "sampling_locations": draw.uniform(B, Q, M, L, P, 2, low=-0.2, high=1.2, dtype=other),
        "attention_weights": draw.uniform(B, Q, M, L, P, dtype=other),
    }


NAMES = ("value", "attention_weights")


def expect_attention(**args: Any) -> Expected:
    args = work(args)
    weights = args["attention_weights"]
    found = linear(
        attention, {**args, "attention_weights": torch.where(weights.isfinite(), weights, 0)}, NAMES, loose=True
    )
    if not bool(weights.isfinite().all()) and isinstance(found[0], Near):
        # A weight of a sample outside the map counts for nothing, were it infinite.
        odd = ~weights.isfinite().flatten(3).all(3).repeat_interleave(args["value"].shape[3], 2)
        found[0].scale.masked_fill_(odd, math.inf)
    return near_pixels(found, 100 * args["sampling_locations"])


def attention(sampling_locations: Tensor, attention_weights: Tensor, value: Tensor, **levels: Any) -> Tensor:
    locations, weights = sampling_locations.to(value.dtype), attention_weights.to(value.dtype)
    return reference.ms_deform_attn(value, sampling_locations=locations, attention_weights=weights, **levels)


def expect_attention_backward(grad: Tensor, need_value: bool, **args: Any) -> Expected:
    wanted = ("value", "sampling_locations", "attention_weights")
    found = adjoint(attention, args, wanted, NAMES, grad, coordinates=("sampling_locations",))
    found = near_pixels(found, 100 * args["sampling_locations"])
    sides = args["spatial_shapes"].double().abs().max() if args["spatial_shapes"].numel() else 1
    value, locations = found[:2]
    assert isinstance(value, Near) and isinstance(locations, Near)
    if not bool(args["sampling_locations"].isfinite().all()):
        value.scale.fill_(math.inf)  # a NaN location gives NaN to pixels, where grid_sample's gives them nothing
    return [value if need_value else None, replace(locations, scale=locations.scale * sides), found[2]]
