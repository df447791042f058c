"""deform_conv2d: bad input, empties, transforms, the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deform_layers import LAYERS, Layer, call, gradients
from helpers import FLOATS
from peers import torchvision
from torch._subclasses.fake_tensor import FakeTensorMode

import opzoo

BACKWARD = torch.ops.opzoo._deform_conv2d_backward


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


def test_second_derivative_by_functional_transforms_raises(device):
    layer = LAYERS["3x3"]
    input, *others = layer.tensors(device)
    first = torch.func.grad(lambda x: loss_of(opzoo.deform_conv2d, layer)(x, *others))
    with pytest.raises(RuntimeError, match=r"backward of opzoo\.deform_conv2d cannot be differentiated here"):
        torch.func.grad(lambda x: first(x).sum())(input)


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
