"""``add``: alpha, promotion, and the sum over broadcast axes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mutants import Mutant


def ignores_alpha(a: Tensor, b: Tensor, *, alpha: float = 1) -> Tensor:
    return a + b


def scales_the_sum(a: Tensor, b: Tensor, *, alpha: float = 1) -> Tensor:
    return (a + b) * alpha


def scales_a(a: Tensor, b: Tensor, *, alpha: float = 1) -> Tensor:
    return a * alpha + b


def keeps_dtype_of_a(a: Tensor, b: Tensor, *, alpha: float = 1) -> Tensor:
    return (a + b * alpha).to(a.dtype)


def adds_in_bfloat16(a: Tensor, b: Tensor, *, alpha: float = 1) -> Tensor:
    return (a.bfloat16() + b.bfloat16() * alpha).to(a.dtype)


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, alpha: float, defect: str) -> Tensor:
        ctx.a_shape, ctx.b_shape, ctx.alpha, ctx.defect = a.shape, b.shape, alpha, defect
        return a + b * alpha

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad_a, grad_b = grad.sum_to_size(ctx.a_shape), (grad * ctx.alpha).sum_to_size(ctx.b_shape)
        if ctx.defect == "broadcast":
            missing = grad.dim() - len(ctx.b_shape)
            grad_b = (grad * ctx.alpha)[(0,) * missing]
            for axis, size in enumerate(ctx.b_shape):
                grad_b = grad_b.narrow(axis, 0, size)
        elif ctx.defect == "alpha":
            grad_b = grad.sum_to_size(ctx.b_shape)
        elif ctx.defect == "mean":
            grad_b = grad_b * (grad_b.numel() / grad.numel())
        return grad_a, grad_b, None, None


def backward_forgets_broadcast_sum(a: Tensor, b: Tensor, *, alpha: float = 1) -> Tensor:
    return _Wrong.apply(a, b, alpha, "broadcast")


def backward_forgets_alpha(a: Tensor, b: Tensor, *, alpha: float = 1) -> Tensor:
    return _Wrong.apply(a, b, alpha, "alpha")


def backward_averages_broadcast(a: Tensor, b: Tensor, *, alpha: float = 1) -> Tensor:
    return _Wrong.apply(a, b, alpha, "mean")


def _floats() -> Any:
    return (torch.randn(3, 4, 5), torch.randn(4, 1)), {"alpha": 2.5}


def _mixed() -> Any:
    return (torch.arange(6), torch.randn(2, 6)), {"alpha": 2.5}


MUTANTS = [
    Mutant("add-ignores-alpha", "add", ignores_alpha, _floats),
    Mutant("add-scales-the-sum", "add", scales_the_sum, _floats),
    Mutant("add-scales-a", "add", scales_a, _floats),
    Mutant("add-keeps-dtype-of-a", "add", keeps_dtype_of_a, _mixed),
    Mutant("add-in-bfloat16", "add", adds_in_bfloat16, _floats, torch.float32),
    Mutant("add-in-bfloat16-for-half", "add", adds_in_bfloat16, _floats, torch.float16),
    Mutant("add-backward-forgets-broadcast-sum", "add", backward_forgets_broadcast_sum, _floats),
    Mutant("add-backward-forgets-alpha", "add", backward_forgets_alpha, _floats),
    Mutant("add-backward-averages-broadcast", "add", backward_averages_broadcast, _floats),
]
