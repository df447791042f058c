"""The cell in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


# [reference
def lltm(x: Tensor, weight: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor) -> tuple[Tensor, Tensor]:
    """``[N, F], [3*S, S + F], [3*S], [N, S], [N, S]`` to the new h and the new cell, both ``[N, S]``."""
    gates = F.linear(torch.cat([old_h, x], dim=1), weight, bias)
    input_gate, output_gate, candidate = gates.chunk(3, dim=1)
    new_cell = old_cell + F.elu(candidate) * torch.sigmoid(input_gate)
    return torch.tanh(new_cell) * torch.sigmoid(output_gate), new_cell
    # reference]
