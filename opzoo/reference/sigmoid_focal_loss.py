"""``sigmoid_focal_loss`` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def sigmoid_focal_loss(
    inputs: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2.0, reduction: str = "none"
) -> Tensor:
    """Cross-entropy of independent sigmoids, times ``(1 - p_t) ** gamma`` and the class balance ``alpha``.

    Args:
        inputs: logits, ``Tensor[*]``; ``Tensor[*, C]`` for class ids.
        targets: labels in [0, 1], ``Tensor[*]``; or integer class ids, ``Tensor[*]`` without the axis C.
        alpha: weight of the label 1, ``1 - alpha`` that of 0; -1 for no weights.
        gamma: exponent of the factor that fades out what is already right.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
    """
    if targets.dim() == inputs.dim() - 1 and not targets.is_floating_point():
        targets = targets.unsqueeze(-1) == torch.arange(inputs.shape[-1], device=inputs.device)
    t = targets.to(inputs.dtype)
    p = torch.sigmoid(inputs)
    # -log(p) and -log(1 - p); softplus would drop exp(-x) beyond 20.
    cross_entropy = -F.logsigmoid(inputs) * t - F.logsigmoid(-inputs) * (1 - t)
    loss = cross_entropy * (p * (1 - t) + torch.sigmoid(-inputs) * t) ** gamma
    if alpha >= 0:
        loss = loss * (alpha * t + (1 - alpha) * (1 - t))
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss
