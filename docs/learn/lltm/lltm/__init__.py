"""An LLTM cell: the matrix product by torch, everything after it in one kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lltm import _C as _C  # registers torch.ops.lltm
from lltm import reference as reference

_cell = torch.ops.lltm.cell.default
_cell_backward = torch.ops.lltm.cell_backward.default


# [fake
@torch.library.register_fake("lltm::cell")
def _(gates: Tensor, old_cell: Tensor) -> tuple[Tensor, Tensor]:
    shape = old_cell.shape
    torch._check(gates.shape == (shape[0], 3 * shape[1]), lambda: "lltm: gates must be [N, 3*S] for a cell [N, S]")
    return old_cell.new_empty(shape), old_cell.new_empty(shape)


@torch.library.register_fake("lltm::cell_backward")
def _(grad_h: Tensor, grad_new_cell: Tensor, gates: Tensor, new_cell: Tensor) -> tuple[Tensor, Tensor]:
    return gates.new_empty(gates.shape), new_cell.new_empty(new_cell.shape)


# fake]


# [autograd
def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    gates, _ = inputs
    _, new_cell = output
    ctx.save_for_backward(gates, new_cell)


def _backward(ctx: Any, grad_h: Tensor, grad_new_cell: Tensor) -> tuple[Tensor, Tensor]:
    return _cell_backward(grad_h, grad_new_cell, *ctx.saved_tensors)


def _no_second(ctx: Any, *grads: Tensor) -> Any:
    raise NotImplementedError("lltm has no second derivative; lltm.reference.lltm has")


torch.library.register_autograd("lltm::cell", _backward, setup_context=_save)
torch.library.register_autograd("lltm::cell_backward", _no_second)
# autograd]


def lltm(x: Tensor, weight: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor) -> tuple[Tensor, Tensor]:
    """``[N, F], [3*S, S + F], [3*S], [N, S], [N, S]`` to the new h and the new cell, both ``[N, S]``."""
    gates = F.linear(torch.cat([old_h, x], dim=1), weight, bias)
    return _cell(gates, old_cell)


class LLTM(torch.nn.Module):
    """One step of the cell: ``h, cell = LLTM(features, state)(x, (h, cell))``."""

    def __init__(self, features: int, state: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(3 * state, state + features))
        self.bias = torch.nn.Parameter(torch.zeros(3 * state))
        torch.nn.init.uniform_(self.weight, -1 / math.sqrt(state), 1 / math.sqrt(state))

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return lltm(x, self.weight, self.bias, *state)
