"""ms_deform_attn against the reference: values, gradients, levels, borders, dtypes, sizes, errors; the module."""

from __future__ import annotations

import pytest
import torch
from helpers import HALVES, assert_as_good_as

import opzoo

LEVELS = ((7, 9), (4, 5), (2, 3), (1, 1))


def make(device, dtype=torch.float32, *, B=2, Q=11, M=3, D=8, P=4, levels=LEVELS, spread=1.4):
    shapes = torch.tensor(levels, device=device).reshape(-1, 2)
    sizes = shapes.prod(1)
    starts = sizes.cumsum(0) - sizes
    value = torch.randn(B, int(sizes.sum()), M, D, device=device).to(dtype)
    exact = torch.promote_types(dtype, torch.float32)
    locations = (torch.rand(B, Q, M, len(levels), P, 2, device=device, dtype=exact) - 0.5) * spread + 0.5
    weights = torch.randn(B, Q, M, len(levels), P, device=device, dtype=exact)
    return value, shapes, starts, locations, weights


def loss_and_gradients(function, value, shapes, starts, locations, weights):
    leaves = [t.detach().requires_grad_() for t in (value, locations, weights)]
    out = function(leaves[0], shapes, starts, *leaves[1:])
    along = torch.arange(out.numel(), device=out.device).remainder(7).sub(3).reshape(out.shape).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, along)


@pytest.mark.parametrize("D", [1, 3, 4, 8, 16, 24, 32, 64, 128, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_values_and_gradients(dtype, D, device):
    inputs = make(device, dtype, D=D)
    found = loss_and_gradients(opzoo.ms_deform_attn, *inputs)
    exact = loss_and_gradients(
        opzoo.reference.ms_deform_attn, *(t.double() if i in (0, 3, 4) else t for i, t in enumerate(inputs))
    )
    peer = loss_and_gradients(opzoo.reference.ms_deform_attn, *inputs)
    for ours, theirs, truth in zip(found, peer, exact, strict=True):
        assert ours.dtype == dtype
        if dtype == torch.float64:
            torch.testing.assert_close(ours, truth)
        else:
            assert_as_good_as(ours, theirs, truth, factor=4)


@pytest.mark.parametrize("D", [3, 8, 32])
@pytest.mark.parametrize("fp32", [True, False], ids=["fp32 locations", "half locations"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_are_rounded_once(dtype, fp32, D, device):
    value, shapes, starts, locations, weights = make(device, dtype, D=D)
    if not fp32:
        locations, weights = locations.to(dtype), weights.to(dtype)
    found = loss_and_gradients(opzoo.ms_deform_attn, value, shapes, starts, locations, weights)
    exact = loss_and_gradients(
        opzoo.reference.ms_deform_attn, value.double(), shapes, starts, locations.double(), weights.double()
    )
    for ours, truth, like in zip(found, exact, (value, value, locations, weights), strict=True):
        assert ours.dtype == like.dtype
        if ours.dtype == torch.float32:
            torch.testing.assert_close(ours.double(), truth, rtol=0, atol=1e-5 * float(truth.abs().max()))
        else:
            assert_as_good_as(ours, truth.to(ours.dtype), truth)


@pytest.mark.parametrize("Q", [1, 7, 33, 129])
@pytest.mark.parametrize("B,M", [(1, 1), (3, 2), (1, 8)])
@pytest.mark.parametrize("P,levels", [(1, LEVELS[:1]), (3, LEVELS[1:3]), (5, LEVELS)], ids=str)
def test_sizes(P, levels, B, M, Q, device):
    inputs = make(device, torch.float64, B=B, Q=Q, M=M, P=P, levels=levels)
    for ours, theirs in zip(
        loss_and_gradients(opzoo.ms_deform_attn, *inputs),
        loss_and_gradients(opzoo.reference.ms_deform_attn, *inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_at_the_border(device):
    """Half a pixel outside counts half; a pixel outside nothing, and has no slope there."""
    shapes, starts = torch.tensor([[1, 2]], device=device), torch.tensor([0], device=device)
    value = torch.tensor([3.0, 5.0], device=device).reshape(1, 2, 1, 1)
    x = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, -0.25, 1.25], device=device, requires_grad=True)
    locations = torch.stack([x, torch.full_like(x, 0.5)], -1).reshape(1, 7, 1, 1, 1, 2)
    out = opzoo.ms_deform_attn(value, shapes, starts, locations, torch.ones(1, 7, 1, 1, 1, device=device))
    assert out.flatten().tolist() == [1.5, 3, 4, 5, 2.5, 0, 0]
    slopes = torch.autograd.grad(out.sum(), x)[0]
    assert slopes[[0, 2, 4, 5, 6]].tolist() == [6, 4, -10, 0, 0]


def test_nan_and_infinite_locations(device):
    value, shapes, starts, locations, weights = make(device, D=4, Q=3)
    locations[0, 0, 0, 0, 0, 0] = float("nan")
    locations[0, 1, 0, 0, 0, 1] = float("inf")
    locations[0, 2, 0, 0, 0, 1] = -1e30
    out, to_value, _, _ = loss_and_gradients(opzoo.ms_deform_attn, value, shapes, starts, locations, weights)
    assert out[0, 0, :4].isnan().all() and not out[0, 1:].isnan().any() and not out[1].isnan().any()
    assert to_value.shape == value.shape


def test_levels_outside_the_pixels(device):
    value, shapes, starts, locations, weights = make(device)
    S = value.shape[1]
    broken = [(0, [S + 1, 1]), (0, [-3, -3]), (1, [0, 4]), (2, [2**62, 2**62]), (3, [1, S])]
    for level, size in broken:
        wrong = shapes.clone()
        wrong[level] = torch.tensor(size, device=device)
        if device.type == "cpu":
            with pytest.raises(ValueError, match=f"opzoo::ms_deform_attn: level {level} of spatial_shapes must be"):
                opzoo.ms_deform_attn(value, wrong, starts, locations, weights)
            continue
        kept = weights.clone()
        kept[:, :, :, level] = 0
        expected = opzoo.ms_deform_attn(value, shapes, starts, locations, kept)
        torch.testing.assert_close(opzoo.ms_deform_attn(value, wrong, starts, locations, weights), expected)
        opzoo.set_debug(True)
        try:
            with pytest.raises(ValueError, match=f"level {level} of spatial_shapes must be"):
                opzoo.ms_deform_attn(value, wrong, starts, locations, weights)
        finally:
            opzoo.set_debug(False)
    for start in (-1, S, 2**62):
        wrong = starts.clone()
        wrong[3] = start
        if device.type == "cpu":
            with pytest.raises(ValueError, match="level 3 of spatial_shapes must be"):
                opzoo.ms_deform_attn(value, shapes, wrong, locations, weights)
        else:
            opzoo.ms_deform_attn(value, shapes, wrong, locations, weights)


def test_mixed_dtypes_of_locations(device):
    value, shapes, starts, locations, weights = make(device, torch.float16)
    expected = opzoo.ms_deform_attn(value, shapes, starts, locations, weights.half().float())
    torch.testing.assert_close(opzoo.ms_deform_attn(value, shapes, starts, locations, weights.half()), expected)
    torch.testing.assert_close(
        opzoo.ms_deform_attn(value.float(), shapes, starts, locations.double(), weights),
        opzoo.ms_deform_attn(value.float(), shapes, starts, locations, weights),
    )


def test_deterministic(device):
    inputs = make(device, Q=200)
    first = loss_and_gradients(opzoo.ms_deform_attn, *inputs)
    for _ in range(5):
        again = loss_and_gradients(opzoo.ms_deform_attn, *inputs)
        for position, (ours, theirs) in enumerate(zip(again, first, strict=True)):
            if device.type == "cpu" or position != 1:
                assert torch.equal(ours, theirs)


def test_errors(device):
    value, shapes, starts, locations, weights = make(device)
    with pytest.raises(TypeError, match="opzoo::ms_deform_attn: spatial_shapes must be a tensor, got list"):
        opzoo.ms_deform_attn(value, [[2, 2]], starts, locations, weights)
    with pytest.raises(
        RuntimeError, match=r"opzoo::ms_deform_attn: level_start_index must have shape \[4\], got \[3\]"
    ):
        opzoo.ms_deform_attn(value, shapes, starts[:3], locations, weights)
    with pytest.raises(RuntimeError, match="opzoo::ms_deform_attn: spatial_shapes must be int64, got int32"):
        opzoo.ms_deform_attn(value, shapes.int(), starts, locations, weights)
    with pytest.raises(RuntimeError, match=r"opzoo::ms_deform_attn: attention_weights must have shape"):
        opzoo.ms_deform_attn(value, shapes, starts, locations, weights[:, :-1])
    with pytest.raises(RuntimeError, match=r"opzoo::ms_deform_attn: value must have 4 axes, got 3"):
        opzoo.ms_deform_attn(value[0], shapes, starts, locations, weights)
    with pytest.raises(RuntimeError, match=r"opzoo::ms_deform_attn: sampling_locations must have shape"):
        opzoo.ms_deform_attn(value, shapes, starts, locations[..., :1], weights)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("numbers", [2, 4])
def test_module(numbers, batch_first, device):
    torch.manual_seed(4)
    module = opzoo.MultiScaleDeformableAttention(16, 4, 4, 2, dropout=0.0, batch_first=batch_first).to(device)
    torch.nn.init.normal_(module.attention_weights.weight)
    value, shapes, starts, _, _ = make(device)
    query, memory = torch.randn(2, 5, 16, device=device), torch.randn(2, value.shape[1], 16, device=device)
    points = torch.rand(2, 5, 4, numbers, device=device)
    mask = torch.rand(2, value.shape[1], device=device) < 0.2
    swap = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    levels = {"spatial_shapes": shapes, "level_start_index": starts}
    out = swap(module(swap(query), value=swap(memory), key_padding_mask=mask, reference_points=points, **levels))
    values = module.value_proj(memory).masked_fill(mask[..., None], 0).unflatten(-1, (4, 4))
    offsets = module.sampling_offsets(query).reshape(2, 5, 4, 4, 2, 2)
    if numbers == 2:
        locations = points[:, :, None, :, None] + offsets / shapes.flip(1)[None, None, None, :, None]
    else:
        locations = points[:, :, None, :, None, :2] + offsets / 2 * points[:, :, None, :, None, 2:] / 2
    weights = module.attention_weights(query).reshape(2, 5, 4, 8).softmax(-1).reshape(2, 5, 4, 4, 2)
    sampled = opzoo.reference.ms_deform_attn(values, shapes, starts, locations, weights)
    torch.testing.assert_close(out, module.output_proj(sampled) + query)


def test_first_offsets_of_the_module():
    """Eight heads look into eight directions, the points one pixel apart."""
    module = opzoo.MultiScaleDeformableAttention()
    offsets = module.sampling_offsets.bias.reshape(8, 4, 4, 2)
    corners = torch.tensor([[1, 0], [1, 1], [0, 1], [-1, 1], [-1, 0], [-1, -1], [0, -1], [1, -1]])
    torch.testing.assert_close(offsets[:, 2, 0], corners.float(), atol=1e-6, rtol=0)
    torch.testing.assert_close(offsets[:, 0, 3], 4.0 * corners, atol=1e-5, rtol=0)
    assert not module.sampling_offsets.weight.any() and not module.attention_weights.weight.any()


def test_layer_with_no_queries_and_its_errors():
    module = opzoo.MultiScaleDeformableAttention(8, 2, 1, 2, batch_first=True)
    query, memory, points = torch.randn(2, 3, 8), torch.randn(2, 6, 8), torch.rand(2, 3, 1, 2)
    levels = {"spatial_shapes": torch.tensor([[2, 3]]), "level_start_index": torch.tensor([0])}
    assert module(query[:, :0], value=memory, reference_points=points[:, :0], **levels).shape == (2, 0, 8)
    for change, words in (
        ({"query": query[..., :5]}, "query must have 3 axes, 8 channels"),
        ({"value": memory.double()}, "value must have the dtype of the parameters"),
        ({"value": memory.to("meta")}, "value must be dense and on the device of the parameters"),
        ({"reference_points": points[0]}, "reference_points must have shape"),
        ({"spatial_shapes": torch.ones(1, 2)}, "spatial_shapes must be int64 of shape"),
    ):
        with pytest.raises(RuntimeError, match=f"opzoo::ms_deform_attn: {words}"):
            module(**{"query": query, "value": memory, "reference_points": points, **levels, **change})
