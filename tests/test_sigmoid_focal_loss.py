"""sigmoid_focal_loss against the reference and torchvision: values, gradients, limits, layouts, errors."""

from __future__ import annotations

import pytest
import torch
from helpers import FLOATS, ODD_SIZES, error_against
from peers import torchvision

import opzoo

INF = float("inf")


def make(rows, classes, dtype, device, kind):
    inputs = (torch.randn(rows, classes, device=device) * 4).to(dtype)
    if kind == "classes":
        return inputs, torch.randint(-1, classes + 1, (rows,), device=device)
    labels = torch.rand(rows, classes, device=device)
    return inputs, (labels if kind == "soft" else labels.round()).to(dtype)


def as_labels(inputs, targets):
    if targets.dtype != torch.int64:
        return targets
    return (targets[:, None] == torch.arange(inputs.shape[1], device=inputs.device)).to(inputs.dtype)


def loss_and_gradient(function, inputs, *args):
    leaf = inputs.detach().requires_grad_()
    loss = function(leaf, *args)
    return loss.detach(), torch.autograd.grad(loss, leaf, torch.ones_like(loss))[0]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 3.7])
@pytest.mark.parametrize("alpha", [-1, 0.0, 0.25, 1.0])
@pytest.mark.parametrize("kind", ["classes", "hard", "soft"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_and_gradients(dtype, kind, alpha, gamma, device):
    inputs, targets = make(37, 19, dtype, device, kind)
    found = loss_and_gradient(opzoo.sigmoid_focal_loss, inputs, targets, alpha, gamma)
    labels = as_labels(inputs, targets)
    peer = loss_and_gradient(torchvision.ops.sigmoid_focal_loss, inputs, labels, alpha, gamma)
    exact = loss_and_gradient(torchvision.ops.sigmoid_focal_loss, inputs.double(), labels.double(), alpha, gamma)
    for ours, theirs, truth in zip(found, peer, exact, strict=True):
        assert ours.dtype == dtype and ours.shape == inputs.shape and ours.is_contiguous()
        if dtype == torch.float64:
            torch.testing.assert_close(ours, truth, rtol=1e-11, atol=1e-13)
        else:
            unit = torch.finfo(dtype).eps * float(truth.abs().max())  # its sigmoid is rounded once, ours twice
            assert error_against(truth, ours) <= 4 * max(error_against(truth, theirs), unit)


@pytest.mark.parametrize("kind", ["classes", "hard"])
def test_small_losses_are_right_to_the_last_digits(kind, device):
    """Where p is near its label, 1 - p cancels: torchvision's fp32 loss has no digit left."""
    inputs = torch.linspace(-80, 80, 322, device=device).repeat(2, 1)
    targets = torch.tensor([0, 400], device=device)
    targets = targets if kind == "classes" else torch.tensor([[0.0], [1.0]], device=device).expand_as(inputs)
    found = loss_and_gradient(opzoo.sigmoid_focal_loss, inputs, targets, 0.25, 0.0)
    exact = loss_and_gradient(opzoo.reference.sigmoid_focal_loss, inputs.double(), targets, 0.25, 0.0)
    for ours, truth in zip(found, exact, strict=True):
        relative = ((ours.double() - truth) / truth).abs()
        assert relative.max() < 2e-6


@pytest.mark.parametrize("size", ODD_SIZES)
@pytest.mark.parametrize("classes", [1, 3, 8, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_class_ids_equal_labels(size, classes, dtype, device):
    inputs, ids = make(size, classes, dtype, device, "classes")
    by_id = loss_and_gradient(opzoo.sigmoid_focal_loss, inputs, ids)
    by_label = loss_and_gradient(opzoo.sigmoid_focal_loss, inputs, as_labels(inputs, ids))
    for ours, theirs in zip(by_id, by_label, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.bool], ids=str)
def test_integer_targets(dtype, device):
    inputs = torch.randn(6, 2, device=device)
    ids = torch.tensor([0, 1, 1, 0, 1, 0], device=device)
    expected = opzoo.sigmoid_focal_loss(inputs, ids)
    torch.testing.assert_close(opzoo.sigmoid_focal_loss(inputs, ids.to(dtype)), expected)
    labels = torch.nn.functional.one_hot(ids, 2).to(dtype)
    torch.testing.assert_close(opzoo.sigmoid_focal_loss(inputs, labels), expected)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_reductions(reduction, device):
    inputs, targets = make(9, 7, torch.float64, device, "soft")
    expected = torchvision.ops.sigmoid_focal_loss(inputs, targets, reduction=reduction)
    torch.testing.assert_close(opzoo.sigmoid_focal_loss(inputs, targets, reduction=reduction), expected)
    module = opzoo.SigmoidFocalLoss(reduction=reduction)
    torch.testing.assert_close(module(inputs, targets), expected)


@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.0, 2.5])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_infinite_logits_have_the_limit(dtype, gamma, device):
    inputs = torch.tensor([INF, -INF, INF, -INF], device=device, dtype=dtype)
    targets = torch.tensor([1.0, 0.0, 0.0, 1.0], device=device, dtype=dtype)
    loss, grad = loss_and_gradient(opzoo.sigmoid_focal_loss, inputs, targets, -1, gamma)
    assert loss.tolist() == [0, 0, INF, INF]
    assert grad.tolist() == [0, 0, 1, -1]


def test_nan_stays_nan_and_to_itself(device):
    inputs = torch.tensor([0.5, float("nan"), -0.5], device=device)
    targets = torch.tensor([1.0, 1.0, float("nan")], device=device)
    for result in loss_and_gradient(opzoo.sigmoid_focal_loss, inputs, targets):
        assert result.isnan().tolist() == [False, True, True]


def test_any_layout(device):
    base = torch.randn(4, 6, 8, device=device)
    labels = torch.rand(4, 6, 8, device=device)
    for view in (lambda t: t.mT, lambda t: t[..., ::2], lambda t: t[1:], lambda t: t[:1].expand(4, 6, 8)):
        inputs, targets = view(base), view(labels)
        for ours, theirs in zip(
            loss_and_gradient(opzoo.sigmoid_focal_loss, inputs, targets),
            loss_and_gradient(opzoo.reference.sigmoid_focal_loss, inputs, targets),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)
        ids = torch.randint(0, 4, (3, *inputs.shape[:-1]), device=device)[0]
        torch.testing.assert_close(
            opzoo.sigmoid_focal_loss(inputs, ids), opzoo.reference.sigmoid_focal_loss(inputs, ids)
        )


def test_labels_that_require_a_gradient(device):
    inputs = torch.randn(5, 3, device=device, dtype=torch.float64, requires_grad=True)
    labels = torch.rand(5, 3, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(opzoo.sigmoid_focal_loss, (inputs, labels))


def test_errors(device):
    x = torch.randn(4, 3, device=device)
    with pytest.raises(TypeError, match="opzoo::sigmoid_focal_loss: targets must be a tensor, got int"):
        opzoo.sigmoid_focal_loss(x, 1)
    with pytest.raises(TypeError, match="opzoo::sigmoid_focal_loss: gamma must be a number"):
        opzoo.sigmoid_focal_loss(x, x, gamma="2")
    with pytest.raises(ValueError, match=r"opzoo::sigmoid_focal_loss: alpha must be in \[0, 1\] or -1, got 1.5"):
        opzoo.sigmoid_focal_loss(x, x, alpha=1.5)
    with pytest.raises(ValueError, match="opzoo::sigmoid_focal_loss: gamma must be finite and not negative, got -1"):
        opzoo.sigmoid_focal_loss(x, x, gamma=-1.0)
    with pytest.raises(ValueError, match=r"opzoo::sigmoid_focal_loss: reduction must be .* got 'max'"):
        opzoo.sigmoid_focal_loss(x, x, reduction="max")
    with pytest.raises(RuntimeError, match=r"opzoo::sigmoid_focal_loss: targets must have shape \[4, 3\], got \[3\]"):
        opzoo.sigmoid_focal_loss(x, x[0])
    with pytest.raises(RuntimeError, match=r"opzoo::sigmoid_focal_loss: targets must have shape \[4\], got \[3\]"):
        opzoo.sigmoid_focal_loss(x, torch.zeros(3, dtype=torch.int64, device=device))
    with pytest.raises(RuntimeError, match=r"opzoo::sigmoid_focal_loss: inputs must be float64, .* got int64"):
        opzoo.sigmoid_focal_loss(torch.zeros(3, dtype=torch.int64, device=device), x)
    with pytest.raises(RuntimeError, match="opzoo::sigmoid_focal_loss: inputs must have an axis of classes"):
        opzoo.sigmoid_focal_loss(x.sum(), torch.zeros(3, dtype=torch.int64, device=device))


def test_large_logits_keep_their_digits():
    """Labels between 0 and 1: beyond x = 20 exp(-x) still counts in float64, in the reference and twice derived."""
    x = torch.tensor([21.0, -23.0], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([0.5, 0.5], dtype=torch.float64)
    exact = torch.log1p(torch.exp(-x.abs())) + 0.5 * x.abs()
    for loss in (opzoo.reference.sigmoid_focal_loss, opzoo.sigmoid_focal_loss):
        torch.testing.assert_close(loss(x, t, -1, 0), exact, rtol=1e-14, atol=0)
    first = torch.autograd.grad(opzoo.sigmoid_focal_loss(x, t, -1, 2.0).sum(), x, create_graph=True)[0]
    kernel = torch.autograd.grad(opzoo.sigmoid_focal_loss(x, t, -1, 2.0).sum(), x)[0]
    torch.testing.assert_close(first, kernel, rtol=1e-13, atol=0)


def test_fake_kernel_wants_floats():
    meta = torch.empty(2, 3, device="meta", dtype=torch.int64)
    with pytest.raises(RuntimeError, match="opzoo::sigmoid_focal_loss: inputs must be float64, float32"):
        opzoo.sigmoid_focal_loss(meta, meta)
