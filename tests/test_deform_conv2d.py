"""deform_conv2d against the reference, torchvision and conv2d: geometry, dtypes, layouts, limits."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from deform_layers import CPU, LAYERS, Layer, by_layer, call, gradients, masked
from helpers import FLOATS, HALVES, assert_as_good_as
from hypothesis import assume, given
from hypothesis import strategies as st
from peers import torchvision

import opzoo

BACKWARD = torch.ops.opzoo._deform_conv2d_backward


@by_layer
@masked
def test_values(layer, masked, device):
    tensors = layer.tensors(device)
    output = call(opzoo.deform_conv2d, tensors, layer, masked)
    assert output.shape == (layer.N, layer.K, *layer.output)
    torch.testing.assert_close(output, call(opzoo.reference.deform_conv2d, tensors, layer, masked))
    torch.testing.assert_close(output, call(torchvision.ops.deform_conv2d, tensors, layer, masked))
    single = [t.float() for t in tensors]
    torch.testing.assert_close(call(opzoo.deform_conv2d, single, layer, masked).double(), output, rtol=1e-4, atol=1e-4)


@by_layer
@masked
def test_gradients(layer, masked, device):
    tensors = layer.tensors(device)
    found = gradients(opzoo.deform_conv2d, tensors, layer, masked)
    for peer in (opzoo.reference.deform_conv2d, torchvision.ops.deform_conv2d):
        for ours, theirs in zip(found, gradients(peer, tensors, layer, masked), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["3x3", "1x1", "5x3", "offset groups", "depthwise"])
@masked
def test_gradcheck(name, masked, device):
    layer = Layer(**{**LAYERS[name].__dict__, "N": 1, "C": 3 if "offset" in name else 4, "H": 3, "W": 3, "K": 4})
    tensors = [t.requires_grad_() for t in layer.tensors(device, reach=4)]
    wanted = tensors if masked else tensors[:4]
    # fast_mode: a random projection of the Jacobian, as every element is compared in test_gradients.
    assert torch.autograd.gradcheck(
        lambda *t: call(opzoo.deform_conv2d, [*t, None][:5], layer, masked), wanted, nondet_tol=1e-10, fast_mode=True
    )


@by_layer
def test_zero_offsets_are_conv2d(layer, device):
    input, offset, weight, bias, _ = layer.tensors(device)
    output = opzoo.deform_conv2d(input, torch.zeros_like(offset), weight, bias, **layer.options)
    expected = torch.nn.functional.conv2d(input, weight, bias, **layer.options, groups=layer.groups)
    torch.testing.assert_close(output, expected)


sizes = st.integers(1, 6)
steps = st.tuples(st.integers(1, 3), st.integers(1, 3))


@given(
    shape=st.tuples(st.integers(1, 3), sizes, sizes),
    kernel=steps,
    stride=steps,
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=steps,
    groups=st.integers(1, 3),
    offset_groups=st.integers(1, 3),
    masked=st.booleans(),
)
def test_any_geometry(shape, kernel, stride, padding, dilation, groups, offset_groups, masked):
    N, H, W = shape
    layer = Layer(N, 6, H, W, 6, kernel, groups, offset_groups, stride, padding, dilation)
    assume(min(layer.output) > 0)
    tensors = layer.tensors()
    output = call(opzoo.deform_conv2d, tensors, layer, masked)
    torch.testing.assert_close(output, call(opzoo.reference.deform_conv2d, tensors, layer, masked))
    found = gradients(opzoo.deform_conv2d, tensors, layer, masked)
    expected = gradients(opzoo.reference.deform_conv2d, tensors, layer, masked)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


# --- dtypes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["3x3", "all", "many channels"])
def test_half_accuracy(name, dtype, device):
    layer = LAYERS[name]
    tensors = layer.tensors(device, dtype)
    exact = [t.double().cpu() for t in tensors]
    single = [t.float().cpu() for t in tensors]
    peer = torchvision.ops.deform_conv2d
    output = call(opzoo.deform_conv2d, tensors, layer)
    assert output.dtype == dtype
    assert_as_good_as(output, call(peer, single, layer).to(dtype), call(peer, exact, layer))
    grad = torch.randn(output.shape).to(dtype)
    found = gradients(opzoo.deform_conv2d, tensors, layer, grad=grad)
    rounded = [g.to(dtype) for g in gradients(peer, single, layer, grad=grad)]
    for ours, theirs, truth in zip(found, rounded, gradients(peer, exact, layer, grad=grad), strict=True):
        assert ours.dtype == dtype
        assert_as_good_as(ours, theirs, truth)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_coordinates_are_not_half(dtype, device):
    """In fp16 a coordinate near 1500 would move by whole pixels."""
    layer = Layer(N=1, C=2, H=3, W=1500, K=2)
    tensors = layer.tensors(device, dtype, reach=1)
    exact = call(opzoo.reference.deform_conv2d, [t.double() for t in tensors], layer)
    single = call(opzoo.reference.deform_conv2d, [t.float() for t in tensors], layer)
    assert_as_good_as(call(opzoo.deform_conv2d, tensors, layer), single.to(dtype), exact)


@pytest.mark.parametrize("offset_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mask_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_offset_and_mask_have_their_own_dtype(dtype, offset_dtype, mask_dtype, device):
    layer = LAYERS["offset groups"]
    input, offset, weight, bias, mask = layer.tensors(device, dtype)
    offset, mask = offset.to(offset_dtype), mask.to(mask_dtype)
    tensors = [input, offset, weight, bias, mask]
    output = call(opzoo.deform_conv2d, tensors, layer)
    expected = call(opzoo.reference.deform_conv2d, tensors, layer)
    close = {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(output, expected, **close)
    found = gradients(opzoo.deform_conv2d, tensors, layer)
    assert [g.dtype for g in found] == [t.dtype for t in tensors]
    for ours, theirs in zip(found, gradients(opzoo.reference.deform_conv2d, tensors, layer), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=1e-1)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast(dtype, device):
    layer = LAYERS["all"]
    tensors = layer.tensors(device, torch.float32)
    input, offset, weight, bias, mask = tensors
    cast = [input.to(dtype), offset, weight.to(dtype), bias.to(dtype), mask]
    expected = call(opzoo.deform_conv2d, cast, layer)
    leaves = [t.clone().requires_grad_() for t in tensors]
    with torch.autocast(device.type, dtype):
        output = call(opzoo.deform_conv2d, leaves, layer)
        assert output.dtype == dtype and torch.equal(output, expected)
        # Also here: the products inside the backward must not be cast a second time.
        output.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in leaves)
    inside = [t.grad for t in leaves]
    outside = gradients(opzoo.deform_conv2d, cast, layer, grad=torch.ones(output.shape))
    for ours, theirs in zip(inside, outside, strict=True):
        torch.testing.assert_close(ours, theirs.float())


# --- layouts ------------------------------------------------------------------------------------

VIEWS = {
    "channels_last": lambda t: t.to(memory_format=torch.channels_last),
    "transposed": lambda t: t.mT.contiguous().mT,
    "sliced": lambda t: torch.stack((t, t + 1), -1).flatten(-2)[..., ::2],
    "offset": lambda t: torch.cat((t[:1], t))[1:],
    "batch last": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_strides(view, device):
    layer = LAYERS["all"]
    tensors = layer.tensors(device)
    input, offset, weight, bias, mask = tensors
    strided = [view(input), view(offset), view(weight), torch.stack((bias, bias), 1)[:, 0], view(mask)]
    output = call(opzoo.deform_conv2d, tensors, layer)
    assert torch.equal(call(opzoo.deform_conv2d, strided, layer), output)
    grad = torch.randn_like(output)
    expected = gradients(opzoo.deform_conv2d, tensors, layer, grad=grad)
    for ours, theirs in zip(gradients(opzoo.deform_conv2d, strided, layer, grad=view(grad)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_channels_last_is_kept(device):
    layer = Layer(N=2)
    input, offset, weight, bias, mask = layer.tensors(device)
    last = input.to(memory_format=torch.channels_last).requires_grad_()
    output = call(opzoo.deform_conv2d, [last, offset, weight, bias, mask], layer)
    assert output.is_contiguous(memory_format=torch.channels_last) and not output.is_contiguous()
    output.sum().backward()
    assert last.grad.is_contiguous(memory_format=torch.channels_last)
    assert call(opzoo.deform_conv2d, [input, offset, weight, bias, mask], layer).is_contiguous()


def test_expanded_operands_and_gradient(device):
    layer = Layer(N=3)
    input, offset, weight, bias, mask = layer.tensors(device)
    tensors = [input[:1].expand_as(input), offset[:1].expand_as(offset), weight, bias, mask[:, :1].expand_as(mask)]
    dense = [t.clone(memory_format=torch.contiguous_format) for t in tensors]
    assert torch.equal(call(opzoo.deform_conv2d, tensors, layer), call(opzoo.deform_conv2d, dense, layer))
    one = torch.ones((), dtype=input.dtype, device=device).expand(3, 4, *layer.output)
    found = gradients(opzoo.deform_conv2d, dense, layer, grad=one)
    expected = gradients(opzoo.deform_conv2d, dense, layer, grad=one.contiguous())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


# --- borders and special values -----------------------------------------------------------------


def test_derivative_at_minus_one(device):
    """Zero offsets with padding put samples at exactly -1, where the original's derivative is 0."""
    input = torch.arange(1.0, 10, device=device, dtype=torch.float64).view(1, 1, 3, 3)
    weight = torch.zeros(1, 1, 3, 3, device=device, dtype=torch.float64)
    weight[0, 0, 0, 1] = 1  # the tap above the output pixel
    at_zero = torch.zeros(1, 18, 3, 3, device=device, dtype=torch.float64, requires_grad=True)

    def dy_of(function):
        (grad,) = torch.autograd.grad(function(input, at_zero, weight, padding=(1, 1)).sum(), at_zero)
        return grad[0, 2]

    ours = dy_of(opzoo.deform_conv2d)
    assert torch.equal(ours, dy_of(opzoo.reference.deform_conv2d))
    assert ours[0].tolist() == [0, 0, 0]
    theirs = dy_of(torchvision.ops.deform_conv2d)
    assert theirs[0].tolist() == input[0, 0, 0].tolist()  # torchvision: the derivative from the right
    assert torch.equal(ours[1:], theirs[1:])


@pytest.mark.parametrize("coordinate", [-1.5, -1.0, -0.75, 0.0, 2.0, 2.25, 2.75, 3.0, 3.5])
@pytest.mark.parametrize("axis", [0, 1], ids=["y", "x"])
def test_fade_over_the_border(coordinate, axis, device):
    """A column of ones, sampled along one axis: full inside [0, 2], fading to 0 at -1 and 3."""
    input = torch.ones(1, 1, 3, 3, device=device)
    offset = torch.zeros(1, 2, 3, 3, device=device)
    offset[0, axis, 0, 0] = coordinate
    output = opzoo.deform_conv2d(input, offset, torch.ones(1, 1, 1, 1, device=device))
    expected = max(0.0, min(1.0, coordinate + 1, 3 - coordinate))
    assert output[0, 0, 0, 0].item() == expected


def test_inf_pixels_stay_at_their_side(device):
    """The zero weight of a missing neighbour must not meet an inf at the other end of the map."""
    input = torch.ones(1, 1, 4, 4, device=device)
    input[..., 0, :] = input[..., 0] = float("inf")
    offset = torch.full((1, 2, 4, 4), 0.5, device=device)
    output = opzoo.deform_conv2d(input, offset, torch.ones(1, 1, 1, 1, device=device))
    assert output[0, 0, 1:, 1:].tolist() == [[1, 1, 0.5], [1, 1, 0.5], [0.5, 0.5, 0.25]]


@pytest.mark.parametrize("channel", [0, 1, None], ids=["y", "x", "both"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_offset(channel, dtype, device):
    layer = Layer(N=1, C=2, H=6, W=6, K=2, kernel=(1, 1), padding=(0, 0))
    tensors = layer.tensors(device, dtype, reach=0)
    clean = call(opzoo.deform_conv2d, tensors, layer)
    tensors[1][0, slice(None) if channel is None else channel, 2, 3] = float("nan")
    output = call(opzoo.deform_conv2d, tensors, layer)
    where = torch.zeros(6, 6, dtype=torch.bool, device=device)
    where[2, 3] = True
    assert output[0, :, where].isnan().all()
    assert torch.equal(output[0, :, ~where], clean[0, :, ~where])
    grad_offset = gradients(opzoo.deform_conv2d, tensors, layer)[1]
    assert grad_offset[0, :, where].isnan().all() and not grad_offset[0, :, ~where].isnan().any()


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), 1e30, -1e30], ids=str)
def test_infinite_offset_samples_zero(value, device):
    layer = Layer(N=1, C=2, K=2)
    tensors = layer.tensors(device, torch.float32)
    tensors[1].fill_(value)
    output = call(opzoo.deform_conv2d, tensors, layer)
    assert torch.equal(output, tensors[3].view(1, -1, 1, 1).expand_as(output))
    grads = gradients(opzoo.deform_conv2d, tensors, layer)
    for grad in (*grads[:3], grads[4]):
        assert not grad.any()


def test_order_of_offset_channels(device):
    """Per offset group and tap: dy, then dx. Maps of dy and dx interleave by stack, not by cat."""
    layer = Layer(N=1, C=4, K=4, kernel=(1, 2), padding=(0, 0), offset_groups=2, groups=4)
    input, _, _, _, _ = layer.tensors(device)
    dy = torch.tensor([[1, 0], [0, -2]], device=device)  # [offset group, tap]
    dx = torch.tensor([[0, 2], [-1, 3]], device=device)
    offset = torch.stack((dy, dx), 2).flatten().double().view(1, -1, 1, 1).expand(1, 8, *layer.output)
    weight = torch.tensor([1.0, 10.0], device=device, dtype=torch.float64).view(1, 1, 1, 2).expand(4, 1, 1, 2)
    output = opzoo.deform_conv2d(input, offset, weight)
    y, x = 3, 2
    for channel in range(4):
        group = channel // 2
        taps = [input[0, channel, y + dy[group, j], x + j + dx[group, j]] for j in range(2)]
        torch.testing.assert_close(output[0, channel, y, x], taps[0] + 10 * taps[1])


# --- size and memory ----------------------------------------------------------------------------


def test_chunks_meet(device):
    """More pixels than one workspace holds, chunks that end within images: each image as if alone."""
    layer = Layer(N=7, C=512, H=19, W=29, K=3, offset_groups=2)
    tensors = layer.tensors(device, torch.float32)
    output = call(opzoo.deform_conv2d, tensors, layer)
    found = gradients(opzoo.deform_conv2d, tensors, layer, grad=torch.ones(output.shape))
    weight_sum = torch.zeros_like(tensors[2], dtype=torch.float64)
    alone = Layer(**{**layer.__dict__, "N": 1})
    for n in range(layer.N):
        one = [tensors[0][n : n + 1], tensors[1][n : n + 1], tensors[2], tensors[3], tensors[4][n : n + 1]]
        torch.testing.assert_close(output[n : n + 1], call(opzoo.deform_conv2d, one, alone), rtol=1e-4, atol=1e-3)
        grads = gradients(opzoo.deform_conv2d, one, alone, grad=torch.ones(1, *output.shape[1:]))
        weight_sum += grads[2].double()
        for position in (0, 1, 4):
            torch.testing.assert_close(found[position][n : n + 1], grads[position], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found[2].double(), weight_sum, rtol=1e-4, atol=1e-2)


PEAK = """
import resource, torch, opzoo
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
torch.set_num_threads(2)
def step(n):
    x = torch.ones(n, 32, 48, 48, requires_grad=True)
    weight = torch.ones(4, 32, 3, 3, requires_grad=True)
    opzoo.deform_conv2d(x, torch.zeros(n, 18, 48, 48), weight, padding=1).sum().backward()
step(4)
before = peak()
step(61)
print(peak() - before)
"""


def test_memory_is_bounded():
    """Batch 61, a prime: the columns alone would be 154 MiB, and twice that in the backward."""
    result = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    tensors = 61 * (2 * 32 + 18 + 4) * 48 * 48 * 4 / 2**20
    assert float(result.stdout) < tensors + 100


@pytest.mark.gpu
def test_memory_is_bounded_on_cuda():
    x = torch.ones(61, 64, 64, 64, device="cuda", requires_grad=True)
    weight = torch.ones(64, 64, 3, 3, device="cuda", requires_grad=True)
    offset = torch.zeros(61, 18, 64, 64, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    opzoo.deform_conv2d(x, offset, weight, padding=1).sum().backward()
    results = 2 * x.numel() * 4  # output and gradient of input; the columns would be 550 MiB
    assert torch.cuda.max_memory_allocated() - before < results + (100 << 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_map_above_a_megapixel(dtype, device):
    """Offset groups on a large map: whole-pixel offsets shift each half of the channels exactly."""
    size = 1040
    input = torch.randn(1, 2, size, size, device=device).to(dtype)
    offset = torch.zeros(1, 4, size, size, device=device, dtype=torch.float32)
    offset[:, 0], offset[:, 3] = 3, -5
    weight = torch.eye(2, device=device, dtype=dtype).view(2, 2, 1, 1)
    output = opzoo.deform_conv2d(input, offset, weight)
    expected = torch.zeros_like(input)
    expected[:, 0, :-3] = input[:, 0, 3:]
    expected[:, 1, :, 5:] = input[:, 1, :, :-5]
    assert torch.equal(output, expected)


@pytest.mark.slow
def test_input_above_2_to_31_elements(device):
    input = torch.zeros(2, 1, 32768, 40000, dtype=torch.float16, device=device)
    input[1, 0, -1, -1] = 7
    offset = torch.zeros(2, 2, 1, 1, device=device)
    offset[:, 0], offset[:, 1] = 32767, 39999
    weight = torch.ones(1, 1, 1, 1, dtype=torch.float16, device=device)
    output = opzoo.deform_conv2d(input, offset, weight, stride=(32768, 40000))
    assert output.flatten().tolist() == [0, 7]


def test_threads_do_not_matter():
    layer = Layer(N=3, C=32, H=20, W=20, K=16, offset_groups=2)
    tensors = layer.tensors(CPU, torch.float32)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append([call(opzoo.deform_conv2d, tensors, layer), *gradients(opzoo.deform_conv2d, tensors, layer)])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)  # the GEMM may split its sums
