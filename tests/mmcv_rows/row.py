"""A row of the table: a call of a function of ``mmcv._ext``, and what is right by somebody else's word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from helpers import FLOATS
from torch import Tensor

Call = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """``draw(dtype)`` makes the keyword arguments; ``expect`` takes them, floats in fp64, and answers by name."""

    oracle: str
    draw: Callable[[torch.dtype], Call]
    expect: Callable[..., Call]
    outputs: tuple[str, ...] = ()  # arguments that are written
    dtypes: tuple[torch.dtype, ...] = FLOATS
    near: float = 0.0  # how far the oracle itself may be off
    ignored: tuple[str, ...] = ()  # arguments that may be anything


ROWS: dict[str, Row] = {}


def row(*names: str, **options: Any) -> Callable[[Callable[..., Call]], Callable[..., Call]]:
    """The decorated function is ``expect``."""

    def add(expect: Callable[..., Call]) -> Callable[..., Call]:
        for name in names:
            ROWS[name] = Row(expect=expect, **options)
        return expect

    return add


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def uniform(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.rand(shape, dtype=torch.float64).to(dtype)


def nothing(dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype)


def unwritten(*shape: int, dtype: torch.dtype) -> Tensor:
    """A result before the call: a number that no test expects."""
    return torch.full(shape, 77, dtype=dtype)


def gradients(function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    with torch.enable_grad():
        return torch.autograd.grad(function(*leaves), leaves, grad)
