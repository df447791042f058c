"""mmcv's focal losses.

Called by mmcv below autograd with results allocated beforehand; see :mod:`opzoo.compat._mmcv_ext`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ops = torch.ops.opzoo


def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Loss of every logit against class ids; ``weight`` has one factor per class, or no element."""
    output.copy_(_ops.sigmoid_focal_loss(input, target, alpha, gamma))
    if weight.numel():
        output.mul_(_factors(weight, target)[:, None])


def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Derivative of every loss of :func:`sigmoid_focal_loss_forward` in its own logit."""
    ones = torch.ones((), dtype=input.dtype, device=input.device).expand(input.shape)
    grad_input.copy_(_ops._sigmoid_focal_loss_backward(ones, input, target, alpha, gamma))
    if weight.numel():
        grad_input.mul_(_factors(weight, target)[:, None])


def softmax_focal_loss_forward(
    softmax: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Loss of every row of probabilities; a negative class id has none."""
    p, factor = _probability(softmax, target, weight)
    output.copy_(-alpha * (1 - p) ** gamma * _log(p) * factor)


def softmax_focal_loss_backward(
    softmax: Tensor, target: Tensor, weight: Tensor, buff: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Derivative of the loss of each row in its logits; ``buff`` keeps the part that a row shares."""
    p, factor = _probability(softmax, target, weight)
    shared = gamma * (1 - p) ** (gamma - 1) * p * _log(p) if gamma else torch.zeros_like(p)
    shared = alpha * (shared - (1 - p) ** gamma) * factor
    buff.copy_(shared)
    hit = target[:, None] == torch.arange(softmax.shape[1], device=softmax.device)
    grad_input.copy_(shared[:, None] * (hit.to(shared.dtype) - softmax.to(shared.dtype)))


def _factors(weight: Tensor, target: Tensor) -> Tensor:
    """The weight of each row's class; 1 for the background, where mmcv reads beyond the weights."""
    known = (target >= 0) & (target < len(weight))
    return torch.where(known, weight[target.clamp(0, len(weight) - 1)], 1)


def _probability(softmax: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """In at least fp32: the probability of each row's class, and its weight, 0 for a negative id."""
    if target.numel() and int(target.max()) >= softmax.shape[1]:
        raise ValueError(f"mmcv._ext.softmax_focal_loss: class ids must be below {softmax.shape[1]}")
    dtype = torch.promote_types(softmax.dtype, torch.float32)
    p = softmax.gather(1, target.clamp(min=0)[:, None])[:, 0].to(dtype)
    factor = _factors(weight, target).to(dtype) if weight.numel() else torch.ones_like(p)
    return p, torch.where(target >= 0, factor, 0)


def _log(p: Tensor) -> Tensor:
    return p.clamp(min=torch.finfo(torch.float32).tiny).log()
