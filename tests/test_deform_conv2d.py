"""deform_conv2d against the reference, torchvision and conv2d: geometry, dtypes, layouts, limits."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchvision
from helpers import FLOATS, HALVES, assert_as_good_as
from hypothesis import assume, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import opzoo

CPU = torch.device("cpu")
BACKWARD = torch.ops.opzoo._deform_conv2d_backward


@dataclass(frozen=True)
class Layer:
    """One configuration of the operator and the tensors it takes."""

    N: int = 2
    C: int = 6
    H: int = 7
    W: int = 8
    K: int = 4
    kernel: tuple[int, int] = (3, 3)
    groups: int = 1
    offset_groups: int = 1
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)

    @property
    def options(self) -> dict[str, Any]:
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}

    @property
    def output(self) -> tuple[int, int]:
        sizes = zip((self.H, self.W), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        height, width = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes)
        return height, width

    def tensors(self, device: torch.device = CPU, dtype: torch.dtype = torch.float64, reach: int = 3):
        """input, offset, weight, bias, mask. Offsets keep away from whole pixels, where derivatives jump."""
        taps = self.kernel[0] * self.kernel[1]
        offset_shape = (self.N, 2 * self.offset_groups * taps, *self.output)
        whole = torch.randint(-reach, reach + 1, offset_shape)
        tensors = (
            torch.randn(self.N, self.C, self.H, self.W),
            whole + 0.1 + 0.8 * torch.rand(offset_shape),
            torch.randn(self.K, self.C // self.groups, *self.kernel),
            torch.randn(self.K),
            torch.rand(self.N, self.offset_groups * taps, *self.output),
        )
        return [t.to(device, dtype) for t in tensors]


LAYERS = {
    "3x3": Layer(),
    "1x1": Layer(kernel=(1, 1), padding=(0, 0), N=5),
    "5x3": Layer(kernel=(5, 3), padding=(2, 0)),
    "stride": Layer(stride=(2, 3)),
    "dilation": Layer(dilation=(2, 1), padding=(3, 0)),
    "groups": Layer(groups=2),
    "depthwise": Layer(C=4, K=8, groups=4, offset_groups=2),
    "offset groups": Layer(offset_groups=3),
    "all": Layer(
        N=3, C=12, K=8, groups=4, offset_groups=3, kernel=(2, 4), stride=(2, 1), padding=(0, 3), dilation=(3, 1)
    ),
    "one pixel": Layer(H=1, W=1, N=1, C=1, K=1),
    "many channels": Layer(N=1, C=37, K=33),
}
by_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
masked = pytest.mark.parametrize("masked", [False, True], ids=["v1", "v2"])


def call(function, tensors, layer: Layer, masked: bool = True):
    input, offset, weight, bias, mask = tensors
    return function(input, offset, weight, bias, mask=mask if masked else None, **layer.options)


def gradients(function, tensors, layer: Layer, masked: bool = True, grad: torch.Tensor | None = None):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    output = call(function, leaves, layer, masked)
    if grad is None:
        grad = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
    wanted = leaves if masked else leaves[:4]
    return torch.autograd.grad(output, wanted, grad.to(output))


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


# --- bad input ----------------------------------------------------------------------------------


def arguments(**changes: Any) -> tuple[Any, ...]:
    """Of the raw operator, valid but for the changes."""
    values = {
        "input": torch.zeros(2, 4, 5, 5),
        "offset": torch.zeros(2, 18, 5, 5),
        "weight": torch.zeros(6, 2, 3, 3),
        "bias": torch.zeros(6),
        "mask": torch.zeros(2, 9, 5, 5),
        **dict.fromkeys(("stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w"), 1),
    }
    assert changes.keys() <= values.keys()
    return tuple((values | changes).values())


BAD = {
    "input rank": (RuntimeError, "input must have 4 axes, got 3", {"input": torch.zeros(4, 5, 5)}),
    "offset rank": (RuntimeError, "offset must have 4 axes, got 1", {"offset": torch.zeros(3)}),
    "weight rank": (RuntimeError, "weight must have 4 axes, got 2", {"weight": torch.zeros(6, 2)}),
    "bias rank": (RuntimeError, "bias must have 1 axes, got 2", {"bias": torch.zeros(6, 1)}),
    "mask rank": (RuntimeError, "mask must have 4 axes, got 0", {"mask": torch.zeros(())}),
    "bias length": (RuntimeError, r"bias must have shape \[6\], got \[5\]", {"bias": torch.zeros(5)}),
    "offset batch": (RuntimeError, r"offset must have shape \[2, 18, 5, 5\]", {"offset": torch.zeros(1, 18, 5, 5)}),
    "offset height": (RuntimeError, r"offset must have shape \[2, 18, 5, 5\]", {"offset": torch.zeros(2, 18, 4, 5)}),
    "offset larger": (RuntimeError, r"offset must have shape \[2, 18, 5, 5\]", {"offset": torch.zeros(2, 18, 10, 10)}),
    "mask width": (RuntimeError, r"mask must have shape \[2, 9, 5, 5\]", {"mask": torch.zeros(2, 9, 5, 6)}),
    "mask channels": (RuntimeError, r"mask must have shape \[2, 9, 5, 5\]", {"mask": torch.zeros(2, 18, 5, 5)}),
    "offset channels": (RuntimeError, "offset.shape.1. must be a positive", {"offset": torch.zeros(2, 17, 5, 5)}),
    "no offset channels": (RuntimeError, "offset.shape.1. must be a positive", {"offset": torch.zeros(2, 0, 5, 5)}),
    "offset groups": (RuntimeError, "multiple of the 3 offset groups, got 4", {"offset": torch.zeros(2, 54, 5, 5)}),
    "channels": (RuntimeError, r"multiple of weight.shape\[1\] = 3, got 4", {"weight": torch.zeros(6, 3, 3, 3)}),
    "groups": (RuntimeError, "multiple of the 2 groups, got 5", {"weight": torch.zeros(5, 2, 3, 3)}),
    "no channels": (RuntimeError, "at least one input channel", {"input": torch.zeros(2, 0, 5, 5)}),
    "no weight channels": (RuntimeError, "at least one input channel", {"weight": torch.zeros(6, 0, 3, 3)}),
    "no height": (RuntimeError, "along height, got 0", {"input": torch.zeros(2, 4, 0, 5)}),
    "no width": (RuntimeError, "along width, got 0", {"input": torch.zeros(2, 4, 5, 0)}),
    "no kernel": (RuntimeError, "along height, got 5 and 0", {"weight": torch.zeros(6, 2, 0, 3)}),
    "weight dtype": (RuntimeError, "weight must have the dtype of input", {"weight": torch.zeros(6, 2, 3, 3).half()}),
    "bias dtype": (RuntimeError, "bias must have the dtype of input", {"bias": torch.zeros(6).double()}),
    "integers": (RuntimeError, "offset must be float64, float32", {"offset": torch.zeros(2, 18, 5, 5).int()}),
    "complex": (RuntimeError, "mask must be float64, float32", {"mask": torch.zeros(2, 9, 5, 5).cfloat()}),
    "stride 0": (ValueError, "stride_h must be in .1, 2147483647., got 0", {"stride_h": 0}),
    "stride -1": (ValueError, "stride_w must be in .1, 2147483647., got -1", {"stride_w": -1}),
    "padding -1": (ValueError, "pad_w must be in .0, 2147483647., got -1", {"pad_w": -1}),
    "dilation 0": (ValueError, "dilation_h must be in .1, 2147483647., got 0", {"dilation_h": 0}),
    "huge padding": (ValueError, "pad_h must be in", {"pad_h": 2**62}),
    "huge stride": (ValueError, "stride_h must be in", {"stride_h": 2**63 - 1}),
    "huge dilation": (ValueError, "dilation_w must be in", {"dilation_w": 2**63 - 1}),
    "large dilation": (ValueError, "output would be empty along width", {"dilation_w": 2**31 - 1}),
    "small input": (ValueError, "empty along height: input 1", {"input": torch.zeros(2, 4, 1, 5), "pad_h": 0}),
}  # fmt: skip
bad = pytest.mark.parametrize(("error", "message", "changes"), BAD.values(), ids=BAD.keys())


@bad
def test_bad_input(error, message, changes):
    with pytest.raises(error, match=rf"opzoo::deform_conv2d: .*{message}"):
        torch.ops.opzoo.deform_conv2d(*arguments(**changes))


@bad
def test_bad_input_while_tracing(error, message, changes):
    with FakeTensorMode() as mode, pytest.raises(error, match=rf"opzoo::deform_conv2d: .*{message}"):
        fake = (mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments(**changes))
        torch.ops.opzoo.deform_conv2d(*fake)


@bad
def test_bad_input_of_the_backward(error, message, changes):
    if "bias" in changes:
        pytest.skip("the backward takes no bias")
    input, offset, weight, _, *rest = arguments(**changes)
    with pytest.raises(error, match=rf"opzoo::_deform_conv2d_backward: .*{message}"):
        BACKWARD(torch.zeros(2, 6, 5, 5), input, offset, weight, *rest, True, True, True, True)


@pytest.mark.parametrize(
    ("grad", "message"),
    [
        (torch.zeros(2, 6, 5, 4), r"grad must have shape \[2, 6, 5, 5\], got \[2, 6, 5, 4\]"),
        (torch.zeros(6, 5, 5), "grad must have 4 axes, got 3"),
        (torch.zeros(2, 6, 5, 5).half(), "grad must have the dtype of input, float32, got float16"),
    ],
    ids=["shape", "rank", "dtype"],
)
def test_bad_grad(grad, message):
    input, offset, weight, _, *rest = arguments()
    with pytest.raises(RuntimeError, match=message):
        BACKWARD(grad, input, offset, weight, *rest, True, True, True, True)


def test_sizes_that_overflow():
    kernel = torch.zeros(0, 1, 2**31 - 1, 2**31 - 1)
    with pytest.raises(ValueError, match="output would be empty"):
        opzoo.deform_conv2d(torch.zeros(1, 1, 5, 5), torch.zeros(1, 2, 1, 1), kernel)
    with pytest.raises(RuntimeError, match="pixels along height"):
        opzoo.deform_conv2d(torch.zeros(1, 1, 5, 5), torch.zeros(1, 2, 1, 1), torch.zeros(0, 1, 2**40, 1))
    with pytest.raises(ValueError, match="sizes are too large"):
        wide = torch.zeros(1, 1, 1, 1).expand(1, 1, 2**30, 2**30)
        opzoo.deform_conv2d(wide, torch.zeros(1, 2, 1, 1), torch.zeros(2**5, 1, 1, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("position", range(5), ids=["input", "offset", "weight", "bias", "mask"])
def test_tensor_left_on_the_cpu(position):
    layer = Layer()
    tensors = layer.tensors(torch.device("cuda"))
    tensors[position] = tensors[position].cpu()
    with pytest.raises(RuntimeError, match="must be on the device of input"):
        call(opzoo.deform_conv2d, tensors, layer)


@pytest.mark.gpu
def test_device_that_is_not_current(device):
    if device.type != "cuda":
        pytest.skip("about CUDA devices")
    layer = LAYERS["all"]
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    tensors = layer.tensors(last)
    with torch.cuda.device(0):
        output = call(opzoo.deform_conv2d, tensors, layer)
        grads = gradients(opzoo.deform_conv2d, tensors, layer)
    assert output.device == last and all(g.device == last for g in grads)
    torch.testing.assert_close(output, call(opzoo.reference.deform_conv2d, tensors, layer))


@pytest.mark.gpu
def test_deterministic_mode_on_cuda():
    layer = LAYERS["3x3"]
    tensors = [t.requires_grad_() for t in layer.tensors(torch.device("cuda"))]
    loss = call(opzoo.deform_conv2d, tensors, layer).sum()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            loss.backward()
    finally:
        torch.use_deterministic_algorithms(False)


# --- empties ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [Layer(N=0), Layer(K=0), Layer(N=0, K=0)], ids=["batch", "outputs", "both"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_empty(layer, dtype, device):
    tensors = layer.tensors(device, dtype)
    output = call(opzoo.deform_conv2d, tensors, layer)
    assert output.shape == (layer.N, layer.K, *layer.output) and output.dtype == dtype
    for grad, t in zip(gradients(opzoo.deform_conv2d, tensors, layer), tensors, strict=True):
        assert grad.shape == t.shape and not grad.any()


@pytest.mark.parametrize("needed", [0, 1, 2, 3], ids=["input", "offset", "weight", "mask"])
def test_one_gradient_alone(needed, device):
    layer = LAYERS["all"]
    tensors = layer.tensors(device)
    position = (0, 1, 2, 4)[needed]
    expected = gradients(opzoo.deform_conv2d, tensors, layer)[position]
    grad = torch.linspace(-1, 1, expected.new_empty(layer.N, layer.K, *layer.output).numel(), dtype=torch.float64)
    grad = grad.view(layer.N, layer.K, *layer.output).to(device)
    input, offset, weight, _, mask = tensors
    geometry = (*layer.stride, *layer.padding, *layer.dilation)
    found = BACKWARD(grad, input, offset, weight, mask, *geometry, *(i == needed for i in range(4)))
    torch.testing.assert_close(found[needed], expected)
    assert all(g.shape == (0,) for i, g in enumerate(found) if i != needed)


def test_mask_gradient_without_a_mask():
    input, offset, weight, _, _, *geometry = arguments()
    with pytest.raises(ValueError, match="need_mask is true, but there is no mask"):
        BACKWARD(torch.zeros(2, 6, 5, 5), input, offset, weight, None, *geometry, True, True, True, True)


# --- transforms ---------------------------------------------------------------------------------


def loss_of(function, layer: Layer):
    return lambda *tensors: call(function, tensors, layer).square().sum()


def test_func_grad(device):
    layer = LAYERS["all"]
    tensors = layer.tensors(device)
    found, expected = (
        torch.func.grad(loss_of(f, layer), argnums=(0, 1, 2, 3, 4))(*tensors)
        for f in (opzoo.deform_conv2d, opzoo.reference.deform_conv2d)
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


IN_DIMS = {
    "input": (0, None, None, None, None),
    "input, offset, mask": (0, 1, None, None, 2),
    "offset": (None, 0, None, None, None),
    "weight": (None, None, 0, None, None),
    "bias": (None, None, None, 0, None),
    "all": (1, 0, 2, 0, 4),
}


@pytest.mark.parametrize("in_dims", IN_DIMS.values(), ids=IN_DIMS.keys())
def test_vmap(in_dims, device):
    layer = Layer(N=2, H=4, W=5, offset_groups=2)
    samples = [layer.tensors(device) for _ in range(3)]
    batched = [
        samples[0][i] if dim is None else torch.stack([s[i] for s in samples], dim) for i, dim in enumerate(in_dims)
    ]
    each = [[s[i] if dim is not None else samples[0][i] for i, dim in enumerate(in_dims)] for s in samples]
    output = torch.vmap(lambda *t: call(opzoo.deform_conv2d, t, layer), in_dims)(*batched)
    torch.testing.assert_close(output, torch.stack([call(opzoo.deform_conv2d, t, layer) for t in each]))
    gradient = torch.func.grad(loss_of(opzoo.deform_conv2d, layer), argnums=(0, 1, 2, 3, 4))
    for i, found in enumerate(torch.vmap(gradient, in_dims)(*batched)):
        torch.testing.assert_close(found, torch.stack([gradient(*t)[i] for t in each]))


def test_vmap_of_a_gradient_without_weight(device):
    layer = Layer(N=2, H=4, W=5)
    samples = [layer.tensors(device) for _ in range(3)]
    weight, bias = samples[0][2:4]
    gradient = torch.func.grad(
        lambda input, offset, mask: loss_of(opzoo.deform_conv2d, layer)(input, offset, weight, bias, mask),
        argnums=(0, 1, 2),
    )
    each = [(s[0], s[1], s[4]) for s in samples]
    found = torch.vmap(gradient)(*(torch.stack(ts) for ts in zip(*each, strict=True)))
    for i, grads in enumerate(found):
        torch.testing.assert_close(grads, torch.stack([gradient(*t)[i] for t in each]))


def test_forward_mode_raises(device):
    layer = LAYERS["3x3"]
    tensors = layer.tensors(device)
    with pytest.raises(NotImplementedError, match="deform_conv2d has no forward-mode derivative"):
        input = tensors[0]
        torch.func.jvp(lambda x: call(opzoo.deform_conv2d, [x, *tensors[1:]], layer), (input,), (input,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        dual = torch.autograd.forward_ad.make_dual(tensors[0], tensors[0])
        call(opzoo.deform_conv2d, [dual, *tensors[1:]], layer)


@pytest.mark.parametrize("transform", ["autograd", "func"])
def test_second_derivative_raises(transform, device):
    layer = LAYERS["3x3"]
    input, *others = layer.tensors(device)
    with pytest.raises(RuntimeError, match="deform_conv2d has no second derivative"):
        if transform == "func":
            first = torch.func.grad(lambda x: loss_of(opzoo.deform_conv2d, layer)(x, *others))
            torch.func.grad(lambda x: first(x).sum())(input)
        else:
            input.requires_grad_()
            loss = loss_of(opzoo.deform_conv2d, layer)(input, *others)
            (grad,) = torch.autograd.grad(loss, input, create_graph=True)
            grad.sum().backward()


def test_reference_has_second_derivatives(device):
    layer = Layer(N=1, C=2, H=3, W=3, K=2, kernel=(2, 2), padding=(0, 0))
    tensors = [t.requires_grad_() for t in layer.tensors(device, reach=1)]
    assert torch.autograd.gradgradcheck(lambda *t: call(opzoo.reference.deform_conv2d, t, layer), tensors)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile(device):
    layer = LAYERS["all"]
    tensors = layer.tensors(device, torch.float32)
    compiled = torch.compile(opzoo.deform_conv2d, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(compiled, tensors, layer), call(opzoo.deform_conv2d, tensors, layer))
    for ours, theirs in zip(
        gradients(compiled, tensors, layer), gradients(opzoo.deform_conv2d, tensors, layer), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


# --- module -------------------------------------------------------------------------------------

MODULES = {
    "plain": {"kernel_size": 3},
    "no bias": {"kernel_size": 1, "bias": False},
    "everything": {"kernel_size": (5, 3), "stride": 2, "padding": (2, 1), "dilation": (1, 2), "groups": 2},
}


@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES.keys())
def test_module_is_torchvisions(options, device):
    modules = []
    for module in (opzoo.DeformConv2d, torchvision.ops.DeformConv2d):
        torch.manual_seed(3)
        modules.append(module(4, 6, **options).to(device))
    ours, theirs = modules
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    layer = Layer(C=4, K=6, groups=ours.groups, kernel=ours.kernel_size, stride=ours.stride,
                  padding=ours.padding, dilation=ours.dilation)  # fmt: skip
    input, offset, _, _, mask = layer.tensors(device, torch.float32)
    torch.testing.assert_close(ours(input, offset, mask), theirs(input, offset, mask), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours(input, offset), theirs(input, offset), rtol=1e-4, atol=1e-5)


def test_module_arguments():
    with pytest.raises(ValueError, match="in_channels must be divisible by groups, got 5 and 2"):
        opzoo.DeformConv2d(5, 4, 3, groups=2)
    with pytest.raises(ValueError, match="out_channels must be divisible by groups, got 5 and 2"):
        opzoo.DeformConv2d(4, 5, 3, groups=2)
    with pytest.raises(ValueError, match="stride must be an int or a pair"):
        opzoo.deform_conv2d(*arguments()[:3], stride=(1, 2, 3))
