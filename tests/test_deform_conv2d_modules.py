"""Deformable convolutions with an offset branch of their own, taken over from a convolution; second derivatives."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import opzoo

PACKS = (opzoo.DeformConv2dPack, opzoo.ModulatedDeformConv2dPack)


def convolutions():
    return [
        nn.Conv2d(4, 6, 3, padding=1),
        nn.Conv2d(4, 6, (3, 1), (2, 1), (1, 0), (2, 1), groups=2, bias=False),
        nn.Conv2d(4, 4, 3, padding="same", dilation=2),
        nn.Conv2d(4, 4, 2, padding="valid").double(),
    ]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("pack", PACKS)
def test_from_conv_continues_its_function(pack, number, device):
    conv = convolutions()[number].to(device)
    x = torch.randn(2, 4, 9, 8, device=device, dtype=conv.weight.dtype)
    module = pack.from_conv(conv, offset_groups=2)
    assert module.bias is conv.bias and (module.weight is conv.weight or pack is PACKS[1])
    torch.testing.assert_close(module(x), conv(x), rtol=1e-5, atol=1e-5)
    plain = opzoo.DeformConv2d.from_conv(conv)
    assert plain.weight is conv.weight
    offset = module.conv_offset(x)[:, : 4 * conv.weight[0, 0].numel()]
    torch.testing.assert_close(plain(x, offset), conv(x), rtol=1e-5, atol=1e-5)


def test_from_conv_refuses_what_it_cannot_continue():
    with pytest.raises(ValueError, match="padding_mode of conv must be 'zeros', got 'reflect'"):
        opzoo.DeformConv2d.from_conv(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"))
    with pytest.raises(ValueError, match="padding='same' of conv must be even"):
        opzoo.DeformConv2dPack.from_conv(nn.Conv2d(2, 2, 2, padding="same"))
    with pytest.raises(ValueError, match="in_channels must be divisible by offset_groups, got 4 and 3"):
        opzoo.DeformConv2dPack(4, 4, 3, offset_groups=3)


@pytest.mark.parametrize("pack", PACKS)
def test_packs_compute_what_their_branch_says(pack, device):
    torch.manual_seed(0)
    module = pack(4, 6, 3, padding=1, offset_groups=2).to(device)
    assert list(module.state_dict()) == ["weight", "bias", "conv_offset.weight", "conv_offset.bias"]  # as mmcv's
    assert not module.conv_offset.weight.any() and not module.conv_offset.bias.any()
    nn.init.normal_(module.conv_offset.weight, std=0.2)
    x = torch.randn(2, 4, 9, 8, device=device)
    maps = module.conv_offset(x)
    mask = maps[:, 36:].sigmoid() if pack is PACKS[1] else None
    expected = opzoo.reference.deform_conv2d(x, maps[:, :36], module.weight, module.bias, 1, 1, 1, mask)
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-4)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(other(x), module(x))
    torch.testing.assert_close(torch.compile(module, backend="aot_eager", fullgraph=True)(x), module(x))
    for parameter in module.parameters():
        assert torch.autograd.grad(module(x).square().sum(), parameter)[0].any()


@pytest.mark.parametrize("pack", PACKS)
def test_offsets_stay_fp32_under_autocast(pack, device):
    module = pack(4, 6, 3, padding=1).to(device)
    seen = []
    module.conv_offset.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].dtype, output.dtype)))
    with torch.autocast(device.type, torch.bfloat16):
        assert module(torch.randn(1, 4, 5, 5, device=device, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert seen == [(torch.float32, torch.float32)]


def test_make_offset(device):
    dy, dx = torch.randn(2, 9, 4, 5, device=device), torch.randn(2, 9, 4, 5, device=device)
    offset = opzoo.make_offset(dy, dx)
    assert torch.equal(offset[:, 0::2], dy) and torch.equal(offset[:, 1::2], dx)
    with pytest.raises(RuntimeError, match="opzoo::make_offset: dy and dx must have 4 axes, the same"):
        opzoo.make_offset(dy, dx[:1])


def operands(device):
    torch.manual_seed(1)
    shapes = ((1, 4, 4, 5), (1, 16, 3, 4), (2, 2, 2, 2), (2,), (1, 8, 3, 4))
    tensors = [torch.randn(shape, device=device, dtype=torch.float64) for shape in shapes]
    tensors[1] = 0.3 + 0.4 * torch.rand_like(tensors[1])  # between pixels: no kink nearby
    return [t.requires_grad_() for t in tensors]


def convolve(x, offset, weight, bias, mask):
    return opzoo.deform_conv2d(x, offset, weight, bias, mask=mask)


def test_second_derivatives(device):
    assert torch.autograd.gradgradcheck(convolve, operands(device))


def test_second_derivatives_without_mask(device):
    assert torch.autograd.gradgradcheck(lambda *tensors: convolve(*tensors, None), operands(device)[:4])


def test_first_derivatives_do_not_depend_on_create_graph(device):
    tensors = operands(device)
    out = convolve(*tensors)
    along = torch.randn_like(out)
    once = torch.autograd.grad(out, tensors, along, retain_graph=True)
    twice = torch.autograd.grad(out, tensors, along, create_graph=True)
    for position, (left, right) in enumerate(zip(once, twice, strict=True)):
        assert not left.requires_grad and right.requires_grad == (position != 3)  # that of the bias is a plain sum
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("pack", PACKS)
def test_offsets_made_from_the_input_count_once(pack, device):
    """Their gradient to the input is autograd's to add, also where the reference makes the gradients."""
    torch.manual_seed(0)
    before = nn.Conv2d(4, 4, 3, padding=1).to(device, torch.float64)
    module = pack(4, 6, 3, padding=1).to(device, torch.float64)
    nn.init.normal_(module.conv_offset.weight, std=0.2)
    x = torch.randn(2, 4, 9, 8, device=device, dtype=torch.float64, requires_grad=True)
    wanted = [x, *before.parameters(), *module.parameters()]
    once = torch.autograd.grad(module(before(x)).square().sum(), wanted)
    twice = torch.autograd.grad(module(before(x)).square().sum(), wanted, create_graph=True)
    for left, right in zip(once, twice, strict=True):
        assert right.requires_grad
        torch.testing.assert_close(left, right)


def test_one_tensor_as_two_operands(device):
    both = torch.randn(3, 3, 3, 3, device=device, dtype=torch.float64, requires_grad=True)
    offset = 0.3 + 0.4 * torch.rand(3, 18, 3, 3, device=device, dtype=torch.float64)
    out = opzoo.deform_conv2d(both, offset, both, padding=1).square().sum()
    (once,) = torch.autograd.grad(out, both, retain_graph=True)
    (twice,) = torch.autograd.grad(out, both, create_graph=True)
    torch.testing.assert_close(once, twice)


@pytest.mark.parametrize("part", [(slice(None), slice(None), slice(1, 5), slice(1, None, 2)), (slice(None, None, 2),)])
def test_second_derivatives_of_strided_operands(part, device):
    """No stride that the kernels take is refused by the reference."""
    _, offset, weight, *_ = operands(device)
    wide = torch.randn(2, 4, 6, 11, device=device, dtype=torch.float64)[part]
    wide = wide.transpose(2, 3).detach().requires_grad_()
    out = torch.autograd.grad(opzoo.deform_conv2d(wide, *like(wide, offset, weight)).square().sum(), wide)
    again = torch.autograd.grad(
        opzoo.deform_conv2d(wide, *like(wide, offset, weight)).square().sum(), wide, create_graph=True
    )
    torch.testing.assert_close(out[0], again[0])


def like(x, offset, weight):
    """Offsets all alike, and the weight, for a map of this size."""
    N, _, H, W = x.shape
    return offset.detach().mean().expand(N, offset.shape[1], H - 1, W - 1), weight.detach()


@pytest.mark.parametrize("pack", PACKS)
def test_packs_on_meta_and_their_errors(pack):
    module = pack(4, 6, 3)
    assert module.to("meta")(torch.empty(2, 4, 5, 6, device="meta")).shape == (2, 6, 3, 4)
    module = pack(4, 6, 3)
    for input, words in (
        (torch.ones(4, 5, 5), "input must be dense of shape"),
        (torch.ones(1, 3, 5, 5), "input must be dense of shape"),
        (torch.ones(1, 4, 5, 5).long(), "input must be floating and on the device of the parameters"),
        (torch.ones(1, 4, 5, 5, device="meta"), "input must be floating and on the device of the parameters"),
        (torch.ones(1, 4, 0, 5), "input and weight must have between 1 and"),
    ):
        with pytest.raises(RuntimeError, match=f"opzoo::deform_conv2d: {words}"):
            module(input)


def test_make_offset_refuses():
    half = torch.ones(1, 2, 1, 1)
    for odd in (half.to("meta"), half.to_sparse(), half.long(), half.to(torch.float8_e4m3fn)):
        with pytest.raises(RuntimeError, match="opzoo::make_offset: dx must be dense, float64"):
            opzoo.make_offset(half, odd)
