"""roi_pool against torchvision and the reference: values, gradients, borders, bad boxes, dtypes, errors."""

from __future__ import annotations

import pytest
import torch
from helpers import FLOATS, detector_boxes
from peers import torchvision

import opzoo

INF, NAN = float("inf"), float("nan")


def make(device, dtype=torch.float32, count=40):
    x = torch.randn(2, 5, 23, 31, device=device).to(dtype)
    boxes = detector_boxes(count, 92, 124)
    boxes[0] = torch.tensor([-40.0, -30, 300, 200])
    boxes[1] = torch.tensor([500.0, 500, 600, 600])
    boxes[2] = torch.tensor([40.0, 40, 20, 10])
    rois = torch.cat([torch.arange(count)[:, None] % 2, boxes], 1)
    return x, rois.to(device)


@pytest.mark.parametrize("size", [1, (7, 7), (2, 11)], ids=str)
@pytest.mark.parametrize("scale", [0.25, 1.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_torchvision(dtype, scale, size, device):
    x, rois = make(device, dtype)
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = opzoo.roi_pool(leaf, rois, size, scale)
    expected = torchvision.ops.roi_pool(other, rois.to(dtype), size, scale)
    assert torch.equal(out, expected)
    along = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, leaf, along)[0], torch.autograd.grad(expected, other, along)[0])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_equals_the_reference(dtype, device):
    x, rois = make(device, dtype, 12)
    out = opzoo.roi_pool(x, rois, (3, 4), 0.25)
    assert out.dtype == dtype
    assert torch.equal(out, opzoo.reference.roi_pool(x, rois, (3, 4), 0.25))
    listed = [rois[rois[:, 0] == image][:, 1:] for image in range(2)]
    order = torch.cat([torch.where(rois[:, 0] == image)[0] for image in range(2)])
    assert torch.equal(opzoo.roi_pool(x, listed, (3, 4), 0.25), out[order])
    assert torch.equal(opzoo.RoIPool((3, 4), 0.25)(x, rois), out)


def test_any_strides(device):
    x, rois = make(device)
    expected = opzoo.roi_pool(x, rois, 4, 0.25)
    for view in (
        x.contiguous(memory_format=torch.channels_last),
        x.repeat_interleave(2, 3)[..., ::2],
        x.mT.contiguous().mT,
    ):
        assert torch.equal(opzoo.roi_pool(view, rois, 4, 0.25), expected)


def test_gradients(device):
    x, rois = make(device, torch.float64, 6)
    x = x[:, :2].contiguous().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: opzoo.roi_pool(x, rois, 3, 0.25), x)
    assert torch.autograd.gradgradcheck(lambda x: opzoo.roi_pool(x, rois, 3, 0.25), x)


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30])
def test_bad_coordinates(value, device):
    x, rois = make(device, count=8)
    for column in range(1, 5):
        wrong = rois.clone()
        wrong[3, column] = value
        out = opzoo.roi_pool(x, wrong, 3, 0.25)
        assert out.isfinite().all()
        rest = torch.arange(8) != 3
        assert torch.equal(out[rest], opzoo.roi_pool(x, rois, 3, 0.25)[rest])
        if value != 1e30:
            assert not out[3].any()


def test_bad_image_indices(device):
    x, rois = make(device, count=8)
    for index in (-1, 2, 0.5, NAN, INF, 1e30):
        wrong = rois.clone()
        wrong[3, 0] = index
        if device.type == "cpu":
            with pytest.raises(ValueError, match=r"image index of box 3 must be an integer in \[0, 2\)"):
                opzoo.roi_pool(x, wrong, 3, 0.25)
        else:
            assert not opzoo.roi_pool(x, wrong, 3, 0.25)[3].any()


def test_a_nan_pixel_wins_and_infinities_stay(device):
    x = torch.zeros(1, 1, 4, 4, device=device)
    x[0, 0, 1, 1], x[0, 0, :2, 2:], x[0, 0, 3, 3] = NAN, -INF, INF
    out = opzoo.roi_pool(x, [torch.tensor([[0.0, 0, 3, 3]], device=device)], 2)
    assert out[0, 0, 0, 0].isnan() and out.flatten()[1:].tolist() == [-INF, 0, INF]


def test_foreign_argmax_is_skipped(device):
    """The raw backward with an argmax from elsewhere adds nothing outside the map."""
    boxes = torch.tensor([[0.0, 0, 0, 3, 3]], device=device)
    grad = torch.ones(1, 1, 1, 4, device=device)
    argmax = torch.tensor([-1, 3, 16, 2**62], device=device).reshape(1, 1, 1, 4)
    out = torch.ops.opzoo._roi_pool_backward(grad, argmax, boxes, 1, 1, 4, 4)
    assert out.sum() == 1 and out[0, 0, 0, 3] == 1


def test_errors(device):
    x, rois = make(device)
    with pytest.raises(ValueError, match=r"opzoo::roi_pool: output_size must be positive, got \(0, 2\)"):
        opzoo.roi_pool(x, rois, (0, 2))
    with pytest.raises(ValueError, match="opzoo::roi_pool: spatial_scale must be finite and positive, got -1"):
        opzoo.roi_pool(x, rois, 2, -1.0)
    with pytest.raises(ValueError, match="opzoo::roi_pool: output_size is too large for 40 boxes"):
        opzoo.roi_pool(x, rois, 2**40)
    with pytest.raises(RuntimeError, match=r"opzoo::roi_pool: boxes must have shape \[K, 5\]"):
        opzoo.roi_pool(x, rois[:, 1:], 2)
    with pytest.raises(RuntimeError, match="opzoo::roi_pool: input must have 4 axes, got 3"):
        opzoo.roi_pool(x[0], rois, 2)
    with pytest.raises(RuntimeError, match="opzoo::roi_pool: boxes must be empty for a map of shape"):
        opzoo.roi_pool(x[:, :, :0], rois, 2)
