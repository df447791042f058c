"""Layers of whole chunks of 128 bytes of channels: what tensor cores multiply without columns."""

from __future__ import annotations

import itertools

import pytest
import torch
from deform_layers import Layer
from helpers import HALVES, assert_as_good_as

import opzoo
from opzoo import reference

LAYERS = {
    "narrow": Layer(N=2, C=64, H=9, W=21, K=128),
    "wide": Layer(N=2, C=128, H=9, W=21, K=256),
    "one output": Layer(N=1, C=64, H=7, W=5, K=1),
    "odd outputs": Layer(N=2, C=64, H=6, W=33, K=131),
    "three blocks": Layer(N=1, C=64, H=5, W=5, K=520),
    "offset groups": Layer(N=2, C=192, H=8, W=8, K=64, offset_groups=3),
    "two chunks a group": Layer(N=1, C=256, H=11, W=12, K=136, offset_groups=2),
    "1x1": Layer(N=3, C=64, H=4, W=9, K=24, kernel=(1, 1), padding=(0, 0)),
    "5x5": Layer(N=1, C=64, H=12, W=10, K=40, kernel=(5, 5), padding=(2, 2)),
    "too many taps": Layer(N=1, C=64, H=12, W=12, K=16, kernel=(7, 7), padding=(3, 3)),
    "geometry": Layer(N=2, C=64, H=19, W=23, K=80, stride=(2, 3), padding=(3, 0), dilation=(2, 1)),
    "one pixel": Layer(N=5, C=64, H=1, W=1, K=16),
    "long row": Layer(N=1, C=64, H=1, W=300, K=16),
    "split": Layer(N=2, C=512, H=13, W=19, K=300),
    "split offset groups": Layer(N=1, C=448, H=9, W=9, K=96, offset_groups=7),
    "part of a chunk": Layer(N=1, C=96, H=9, W=9, K=64, offset_groups=3),
}
# Numbers of the operator: the best method, the one for any GPU with tensor cores, columns.
METHODS = {"best": 0, "portable": 1, "columns": 2}
by_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "sliced": lambda t: torch.cat([t, t], 3)[..., : t.shape[3]],
    "off the boundary": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
}


def call(function, tensors, layer):
    x, offset, weight, bias, mask = tensors
    return function(x, offset, weight, bias, mask=mask, **layer.options)


def forward(tensors, layer, precision=0, method=0):
    numbers = *layer.stride, *layer.padding, *layer.dilation, precision, method
    return torch.ops.opzoo.deform_conv2d(*tensors, *numbers)


def rounded(layer, device, dtype):
    """Tensors of the dtype, but offsets in float32: a half offset is another place."""
    x, offset, weight, bias, mask = layer.tensors(device, torch.float32)
    return x.to(dtype), offset, (weight / 16).to(dtype), bias.to(dtype), mask.to(dtype)


def check(tensors, layer, method=0):
    output = forward(tensors, layer, method=method)
    exact = call(reference.deform_conv2d, [t if t is None else t.double() for t in tensors], layer)
    single = call(reference.deform_conv2d, [t if t is None else t.float() for t in tensors], layer)
    # A column is rounded once to the storage type, as in every implementation that multiplies halves.
    x, offset, weight, _, mask = tensors
    columns = call(reference.deform_conv2d, (x.double(), offset.double(), weight.double().abs(), None, mask), layer)
    unit = torch.finfo(output.dtype).eps
    slack = unit / 2 * (columns.abs() + exact.abs()) + single.to(output.dtype).double().sub(exact).abs() + unit
    assert output.dtype == x.dtype
    assert ((output.double() - exact).abs() <= 4 * slack).all()
    return output


@by_method
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_values(layer, dtype, method, device):
    check(rounded(layer, device, dtype), layer, method)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_single_precision(layer, device):
    tensors = rounded(layer, device, torch.float32)
    exact = call(reference.deform_conv2d, [t.double() for t in tensors], layer)
    single = call(reference.deform_conv2d, tensors, layer)
    error, peer = ((t.double() - exact).abs() for t in (forward(tensors, layer), single))
    unit = torch.finfo(torch.float32).eps
    assert error.mean() <= 2 * peer.mean() + unit / 4
    assert error.max() <= 4 * peer.max() + unit
    # tf32 keeps 10 bits of fraction of each factor.
    x, offset, weight, _, mask = tensors
    columns = call(reference.deform_conv2d, (x.double(), offset.double(), weight.double().abs(), None, mask), layer)
    sizes = columns.abs() + exact.abs() + columns.abs().max() / 8
    assert ((forward(tensors, layer, precision=1).double() - exact).abs() <= sizes / 512).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["narrow", "wide", "odd outputs", "one pixel"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts(layout, name, dtype, device):
    layer = LAYERS[name]
    x, offset, weight, bias, mask = rounded(layer, device, dtype)
    expected = call(opzoo.deform_conv2d, (x, offset, weight, bias, mask), layer)
    moved = [layout(t) for t in (x, offset, weight)]
    output = call(opzoo.deform_conv2d, (*moved, torch.stack([bias, bias], 1)[:, 0], layout(mask)), layer)
    assert torch.equal(output, expected)
    if moved[0].is_contiguous(memory_format=torch.channels_last) and not moved[0].is_contiguous():
        assert output.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("has_bias, has_mask", list(itertools.product([False, True], repeat=2)))
def test_without_bias_or_mask(has_bias, has_mask, device):
    layer = LAYERS["odd outputs"]
    x, offset, weight, bias, mask = rounded(layer, device, torch.bfloat16)
    ones, zeros = torch.ones_like(mask), torch.zeros_like(bias)
    output = call(
        opzoo.deform_conv2d, (x, offset, weight, bias if has_bias else None, mask if has_mask else None), layer
    )
    filled = (x, offset, weight, bias if has_bias else zeros, mask if has_mask else ones)
    assert torch.equal(output, check(filled, layer))


@pytest.mark.parametrize("method", [0, 1], ids=["best", "portable"])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["narrow", "split"])
def test_special_values_stay_where_they_are(name, dtype, method, device):
    layer = LAYERS[name]
    x, offset, weight, bias, mask = rounded(layer, device, dtype)
    x[0, 3, 4, 10] = float("inf")
    offset[1, 0, 2, 3] = float("nan")
    offset[1, 4, 5, 6] = float("inf")
    mask[0, 1, 8, 18] = float("nan")
    output = forward((x, offset, weight, bias, mask), layer, method=method)
    expected = call(reference.deform_conv2d, [t.double() for t in (x, offset, weight, bias, mask)], layer)
    assert torch.equal(output.isnan(), expected.isnan())
    assert torch.equal(output.isfinite(), expected.isfinite())
    assert torch.equal(output[output.isinf()], expected.to(dtype)[expected.isinf()])
    assert output[1, :, 2, 3].isnan().all()
    finite = expected.isfinite()
    unit = max(torch.finfo(dtype).eps, 2**-20)
    assert_as_good_as(output[finite], expected.to(dtype)[finite] * (1 + 4 * unit), expected[finite])


@pytest.mark.parametrize("where", ["input", "weight"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30, 1e-40])
@pytest.mark.parametrize("name", ["narrow", "split", "geometry"])
def test_single_precision_of_any_size(name, value, where, device):
    layer = LAYERS[name]
    tensors = rounded(layer, device, torch.float32)
    tensors[0 if where == "input" else 2][0, 3, 1, 1] = value
    output = forward(tensors, layer)
    exact = call(reference.deform_conv2d, [t.double() for t in tensors], layer)
    assert torch.equal(output.isnan(), exact.isnan())
    assert torch.equal(output[output.isinf()], exact.float()[exact.isinf()])
    finite = exact.isfinite()
    x, offset, weight, _, mask = (t.double() for t in tensors)
    sizes = 1 + call(reference.deform_conv2d, (x.abs(), offset, weight.abs(), None, mask), layer)[finite]
    assert ((output.double() - exact)[finite].abs() <= 1e-5 * sizes).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("pixels", [(40, 41), (9, 10)], ids=str)
def test_runs_agree_bit_for_bit(pixels, dtype, device):
    layer = Layer(N=2, C=256, H=pixels[0], W=pixels[1], K=256)
    tensors = rounded(layer, device, dtype)
    first = call(opzoo.deform_conv2d, tensors, layer)
    assert all(torch.equal(call(opzoo.deform_conv2d, tensors, layer), first) for _ in range(5))


@pytest.mark.gpu
def test_no_columns_in_memory():
    layer = Layer(N=4, C=256, H=64, W=64, K=256)
    tensors = rounded(layer, torch.device("cuda"), torch.float16)
    x = tensors[0].contiguous(memory_format=torch.channels_last)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = call(opzoo.deform_conv2d, (x, *tensors[1:]), layer)
    extra = torch.cuda.max_memory_allocated() - before - output.numel() * 2
    if torch.cuda.get_device_capability() == (9, 0):
        assert extra < 4 << 20  # a copy of the weight
    assert extra < 70 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_copy_of_a_few_images_at_a_time(dtype):
    """A contiguous input is copied to channels_last, but never more than 32 MB of it."""
    layer = Layer(N=7, C=256, H=96, W=97, K=64)
    tensors = rounded(layer, torch.device("cuda"), dtype)
    x = tensors[0].contiguous(memory_format=torch.channels_last)
    expected = call(opzoo.deform_conv2d, (x, *tensors[1:]), layer)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = call(opzoo.deform_conv2d, tensors, layer)
    extra = torch.cuda.max_memory_allocated() - before - output.numel() * output.element_size()
    assert torch.equal(output, expected)
    assert extra < 50 << 20
