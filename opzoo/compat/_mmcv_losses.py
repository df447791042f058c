"""mmcv's focal losses.

Called by mmcv below autograd with results allocated beforehand; see :mod:`opzoo.compat._mmcv_ext`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opzoo.compat._mmcv_checks import (
    require_device,
    require_finite,
    require_floats,
    require_shape,
    require_tensors,
    write,
)

_ops = torch.ops.opzoo


def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Loss of every logit against class ids; ``weight`` has one factor per class, or no element."""
    op = "sigmoid_focal_loss_forward"
    _check(op, input, target, weight, gamma, alpha)
    loss = _ops.sigmoid_focal_loss(input, target, alpha, gamma)
    write(op, output=(output, loss.mul_(_factors(weight, target)[:, None]) if weight.numel() else loss))


def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Derivative of every loss of :func:`sigmoid_focal_loss_forward` in its own logit."""
    op = "sigmoid_focal_loss_backward"
    _check(op, input, target, weight, gamma, alpha)
    ones = torch.ones((), dtype=input.dtype, device=input.device).expand(input.shape)
    grad = _ops._sigmoid_focal_loss_backward(ones, input, target, alpha, gamma)
    write(op, grad_input=(grad_input, grad.mul_(_factors(weight, target)[:, None]) if weight.numel() else grad))


def softmax_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Loss of every row of probabilities, ``input``; a negative class id has none."""
    op = "softmax_focal_loss_forward"
    _check(op, input, target, weight, gamma, alpha)
    p, factor = _probability(op, input, target, weight)
    loss = -alpha * (1 - p).clamp(min=0) ** gamma * _log(p) * factor
    write(op, output=(output, loss.to(input.dtype)))


def softmax_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, buff: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Derivative of the loss of each row in its input; ``buff`` keeps the part that a row shares."""
    op = "softmax_focal_loss_backward"
    _check(op, input, target, weight, gamma, alpha)
    p, factor = _probability(op, input, target, weight)
    # Towards p = 1 the power may grow without bound, the logarithm takes the product to 0.
    rest = (1 - p).clamp(min=0)
    slope = torch.where(p < 1, gamma * rest ** (gamma - 1) * p * _log(p), 0)
    shared = alpha * (slope - rest**gamma) * factor
    hit = target[:, None] == torch.arange(input.shape[1], device=input.device)
    grad = shared[:, None] * (hit.to(shared.dtype) - input.to(shared.dtype))
    write(op, buff=(buff, shared.to(input.dtype)), grad_input=(grad_input, grad.to(input.dtype)))


def _check(op: str, input: Tensor, target: Tensor, weight: Tensor, gamma: float, alpha: float) -> None:
    require_tensors(op, input=input, target=target, weight=weight)
    require_shape(op, (None, None), input=input)
    require_shape(op, (len(input),), target=target)
    if weight.shape != (0,):
        require_shape(op, (input.shape[1],), weight=weight)
    require_floats(op, input=input, weight=weight)
    if target.dtype != torch.int64:
        raise RuntimeError(f"mmcv._ext.{op}: target must be int64, got {str(target.dtype).removeprefix('torch.')}")
    require_device(op, input.device, target=target)
    require_finite(op, gamma=gamma, alpha=alpha)
    if gamma < 0 or not 0 <= alpha <= 1:  # -1 means something else to mmcv than to opzoo
        raise ValueError(f"mmcv._ext.{op}: gamma must not be negative and alpha in [0, 1], got {gamma} and {alpha}")


def _factors(weight: Tensor, target: Tensor) -> Tensor:
    """The weight of each row's class; 1 for the background, where mmcv reads beyond the weights."""
    known = (target >= 0) & (target < len(weight))
    return torch.where(known, weight[target.clamp(0, len(weight) - 1)], 1)


def _probability(op: str, softmax: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """In at least fp32: the probability of each row's class, and its weight, 0 for a negative id."""
    if target.numel() and not softmax.shape[1]:
        raise RuntimeError(f"mmcv._ext.{op}: input must have classes, got shape {list(softmax.shape)}")
    if target.numel() and int(target.max()) >= softmax.shape[1]:
        raise ValueError(f"mmcv._ext.{op}: target must be below {softmax.shape[1]}, got {int(target.max())}")
    dtype = torch.promote_types(softmax.dtype, torch.float32)
    p = softmax.gather(1, target.clamp(min=0)[:, None])[:, 0].to(dtype)
    factor = _factors(weight, target).to(dtype) if weight.numel() else torch.ones_like(p)
    return p, torch.where(target >= 0, factor, 0)


def _log(p: Tensor) -> Tensor:
    return p.clamp(min=torch.finfo(torch.float32).tiny).log()
