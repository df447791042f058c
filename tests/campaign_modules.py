"""Targets of the campaign: the table of what samples maps, and every module.

A module is held against itself in float64 with the reference in the place of its operator.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from campaign_draw import Arguments, Draw, both
from campaign_expected import Expected, Near, is_finite, work
from campaign_sampling import (
    attention,
    draw_attention,
    draw_backward,
    draw_boxes_backward,
    draw_deform,
    draw_deform_backward,
    draw_max_backward,
    draw_pool_backward,
    draw_pyramid,
    draw_pyramid_backward,
    draw_raw_pool,
    draw_raw_pyramid,
    draw_raw_roi,
    draw_roi_align,
    draw_roi_pool,
    draw_sample,
    expect_attention,
    expect_attention_backward,
    expect_backward,
    expect_boxes_backward,
    expect_deform,
    expect_deform_backward,
    expect_max_backward,
    expect_pool_backward,
    expect_pyramid,
    expect_pyramid_backward,
    expect_raw_max,
    expect_raw_pool,
    expect_raw_pyramid,
    expect_raw_roi,
    expect_roi_align,
    expect_roi_pool,
    expect_sample,
    raw_deform,
)
from campaign_targets import Target, simple_targets, with_grad
from helpers import FLOATS
from torch import Tensor, nn

import opzoo

ops = torch.ops.opzoo


def _seeded(make: Any, like: Tensor) -> nn.Module:
    """The module ``make()`` with parameters that are the same each time, none of them 0, in the dtype of ``like``."""
    generator = torch.Generator().manual_seed(1)
    module: nn.Module = make()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return module.to(like.device, like.dtype if like.dtype in FLOATS else torch.float32).eval()


def _exact(make: Any, like: Tensor, tensors: Arguments) -> Expected:
    """The module in float64 over the reference; its parameters rounded as those of the module under test."""
    with (
        mock.patch("opzoo.ops.deform_conv2d.deform_conv2d", opzoo.reference.deform_conv2d),
        mock.patch("opzoo.ops.ms_deform_attn.ms_deform_attn", opzoo.reference.ms_deform_attn),
        torch.no_grad(),
    ):
        module = _seeded(make, work(like).to(like.dtype)).double()
        given = {
            k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in work(tensors).items()
        }
        value = module(**given)
    # Layers of torch round between the operators, in the dtype of the parameters.
    arithmetic = work(like).dtype
    units = torch.finfo(like.dtype).eps / torch.finfo(arithmetic).eps
    scale = value.abs().max() * 100 * units if value.numel() else torch.zeros(())
    return [Near(value.to(arithmetic), scale)]


def _deform_module(kernel: Any, stride: Any, padding: Any, dilation: Any, groups: int, sizes: Any, bias: bool) -> Any:
    return lambda: opzoo.DeformConv2d(*sizes, kernel, stride, padding, dilation, groups, bias)


def draw_deform_module(draw: Draw) -> Arguments:
    args = draw_deform(draw)
    weight, C = args["weight"], args["input"].shape[1]
    if not weight.shape[0]:
        return draw_deform_module(draw)
    make = (both(weight.shape[2:]), args["stride"], args["padding"], args["dilation"], C // weight.shape[1])
    make = (*make, (C, weight.shape[0]), args["bias"] is not None)
    return {name: args[name] for name in ("input", "offset", "mask")} | {"make": _deform_module(*make)}


def _like(tensors: Arguments) -> Tensor:
    floating = (t for t in tensors.values() if isinstance(t, Tensor) and t.is_floating_point())
    return next(floating, torch.empty(0))


def call_module(make: Any, **tensors: Any) -> Any:
    return _seeded(make, _like(tensors))(**tensors)


def expect_module(make: Any, **tensors: Any) -> Expected | None:
    # Of infinity and NaN the layers of torch between the operators decide.
    return _exact(make, _like(tensors), tensors) if is_finite(tensors) else None


def draw_pack(draw: Draw) -> Arguments:
    kind = draw.choice((opzoo.DeformConv2dPack, opzoo.ModulatedDeformConv2dPack))
    kernel, stride, groups = draw.randint(1, 3), draw.pair(1, 2), draw.randint(1, 2)
    input = draw.normal(draw.size(3, 3), 4, 3 + draw.randint(0, 5), 3 + draw.randint(0, 5))
    padding = draw.pair(0, 1)
    return {"input": input, "make": lambda: kind(4, 6, kernel, stride, padding, groups=groups)}


def draw_layer(draw: Draw) -> Arguments:
    heads, points, queries, batch = draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 5), draw.size(3, 3)
    shapes = [(draw.randint(1, 4), draw.randint(1, 4)) for _ in range(draw.randint(1, 2))]
    sizes = [h * w for h, w in shapes]
    dims, levels = 4 * heads, len(shapes)
    return {
        "query": draw.normal(queries, batch, dims),
        "value": draw.normal(sum(sizes), batch, dims),
        "reference_points": draw.uniform(batch, queries, levels, draw.choice((2, 4))),
        "spatial_shapes": torch.tensor(shapes, device=draw.device),
        "level_start_index": torch.tensor([sum(sizes[:i]) for i in range(levels)], device=draw.device),
        "make": lambda: opzoo.MultiScaleDeformableAttention(dims, heads, levels, points),
    }


def _named_maps(inputs: list[Tensor], boxes: Any, output_size: Any, sampling_ratio: Any, **numbers: Any) -> Tensor:
    named = {str(i): t for i, t in enumerate(inputs)} if isinstance(inputs, list) else inputs
    module = opzoo.MultiScaleRoIAlign([str(i) for i in range(3)], output_size, sampling_ratio, **numbers)
    return module(named, boxes)


def targets() -> list[Target]:
    roi = ("input", "boxes")
    deformable = ("input", "offset", "weight", "bias", "mask")
    attended = ("value", "sampling_locations", "attention_weights")

    def roi_module(input: Tensor, boxes: Any, **numbers: Any) -> Tensor:
        return opzoo.RoIAlign(**numbers)(input, boxes)

    return [
        *simple_targets(),
        Target(
            "roi_align", opzoo.roi_align, draw_roi_align, expect_roi_align, roi, ("boxes",), opzoo.reference.roi_align
        ),
        Target("roi_align", roi_module, draw_roi_align, expect_roi_align),
        Target("roi_align", ops.roi_align, draw_raw_roi, expect_raw_roi),
        Target("_roi_align_max", ops._roi_align_max, draw_raw_roi, expect_raw_max),
        Target("_roi_align_max_sample", ops._roi_align_max_sample, draw_sample, expect_sample),
        Target("_roi_align_backward", ops._roi_align_backward, draw_backward, expect_backward),
        Target("_roi_align_max_backward", ops._roi_align_max_backward, draw_max_backward, expect_max_backward),
        Target("_roi_align_boxes_backward", ops._roi_align_boxes_backward, draw_boxes_backward, expect_boxes_backward),
        Target("roi_pool", opzoo.roi_pool, draw_roi_pool, expect_roi_pool),
        Target(
            "roi_pool",
            lambda input, boxes, output_size, spatial_scale: opzoo.RoIPool(output_size, spatial_scale)(input, boxes),
            draw_roi_pool,
            expect_roi_pool,
        ),
        Target("roi_pool", ops.roi_pool, draw_raw_pool, expect_raw_pool),
        Target("_roi_pool_backward", ops._roi_pool_backward, draw_pool_backward, expect_pool_backward),
        Target(
            "multi_scale_roi_align",
            opzoo.multi_scale_roi_align,
            draw_pyramid,
            expect_pyramid,
            ("inputs",),
            (),
            opzoo.reference.multi_scale_roi_align,
        ),
        Target("multi_scale_roi_align", _named_maps, draw_pyramid, expect_pyramid),
        Target("multi_scale_roi_align", ops.multi_scale_roi_align, draw_raw_pyramid, expect_raw_pyramid),
        Target(
            "_multi_scale_roi_align_backward",
            ops._multi_scale_roi_align_backward,
            draw_pyramid_backward,
            expect_pyramid_backward,
        ),
        Target(
            "deform_conv2d",
            opzoo.deform_conv2d,
            draw_deform,
            expect_deform,
            deformable,
            ("offset",),
            opzoo.reference.deform_conv2d,
        ),
        Target(
            "deform_conv2d", ops.deform_conv2d, lambda d: raw_deform(draw_deform(d)), lambda **a: expect_raw_deform(a)
        ),
        Target("_deform_conv2d_backward", ops._deform_conv2d_backward, draw_deform_backward, expect_deform_backward),
        Target("deform_conv2d", call_module, draw_deform_module, expect_module),
        Target("deform_conv2d", call_module, draw_pack, expect_module),
        Target(
            "ms_deform_attn",
            opzoo.ms_deform_attn,
            draw_attention,
            expect_attention,
            attended,
            ("sampling_locations",),
            attention,
        ),
        Target("ms_deform_attn", ops.ms_deform_attn, draw_attention, expect_attention),
        Target(
            "_ms_deform_attn_backward",
            ops._ms_deform_attn_backward,
            lambda d: {**with_grad(d, draw_attention(d), ops.ms_deform_attn), "need_value": d.random() < 0.8},
            expect_attention_backward,
        ),
        Target("ms_deform_attn", call_module, draw_layer, expect_module),
    ]


def expect_raw_deform(args: Arguments) -> Expected:
    pairs = (("stride", "stride"), ("padding", "pad"), ("dilation", "dilation"))
    given = {name: args[name] for name in ("input", "offset", "weight", "bias", "mask")}
    return expect_deform(**given, **{name: (args[f"{short}_h"], args[f"{short}_w"]) for name, short in pairs})
