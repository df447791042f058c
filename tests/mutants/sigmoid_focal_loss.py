"""``sigmoid_focal_loss``: the focusing factor, the weights, the label, and ids that are no class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mutants import Mutant


def _loss(inputs: Tensor, targets: Tensor, alpha: float, gamma: float, *, q: Any = None, clip: bool = False) -> Tensor:
    if not targets.is_floating_point():
        ids = targets.clamp(0, inputs.shape[-1] - 1) if clip else targets
        targets = ids.unsqueeze(-1) == torch.arange(inputs.shape[-1], device=inputs.device)
    t = targets.to(inputs.dtype)
    p = torch.sigmoid(inputs)
    p_t = p * t + (1 - p) * (1 - t)
    entropy = F.binary_cross_entropy_with_logits(inputs, t, reduction="none")
    weight = alpha * t + (1 - alpha) * (1 - t)
    return weight * (1 - p_t if q is None else q(p_t)) ** gamma * entropy


def focuses_on_the_right(inputs: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    return _loss(inputs, targets, alpha, gamma, q=lambda p_t: p_t)


def swaps_weights(inputs: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    return _loss(inputs, targets, 1 - alpha, gamma)


def ignores_gamma(inputs: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    return _loss(inputs, targets, alpha, 2.0)


def background_is_the_last_class(inputs: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    return _loss(inputs, targets, alpha, gamma, clip=True)


def _labels() -> Any:
    return (torch.randn(3, 4), torch.rand(3, 4), 0.3, 1.5), {}


def _ids() -> Any:
    return (torch.randn(4, 3), torch.tensor([0, 2, 3, -1]), 0.3, 2.0), {}


MUTANTS = [
    Mutant("sigmoid_focal_loss-focuses-on-the-right", "sigmoid_focal_loss", focuses_on_the_right, _labels),
    Mutant("sigmoid_focal_loss-swaps-weights", "sigmoid_focal_loss", swaps_weights, _labels),
    Mutant("sigmoid_focal_loss-ignores-gamma", "sigmoid_focal_loss", ignores_gamma, _labels),
    Mutant("sigmoid_focal_loss-clips-ids", "sigmoid_focal_loss", background_is_the_last_class, _ids),
]
