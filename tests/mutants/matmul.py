"""``matmul``: what it accumulates in, what it transposes, what it forgets at the edges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mutants import Mutant


def accumulates_in_storage_dtype(a: Tensor, b: Tensor) -> Tensor:
    out = a.new_zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        out = out + a[:, k, None] * b[None, k, :]
    return out


def rounds_each_block(a: Tensor, b: Tensor) -> Tensor:
    """Partial sums of 16 terms are stored in the result's dtype: split-K without an fp32 buffer."""
    parts = [(a[:, k : k + 16].float() @ b[k : k + 16].float()).to(a.dtype) for k in range(0, a.shape[1], 16)]
    out = parts[0]
    for part in parts[1:]:
        out = out + part
    return out


def _ten_bits(t: Tensor) -> Tensor:
    """float32 cut to the ten mantissa bits of TF32."""
    return (t.detach().view(torch.int32) & ~0x1FFF).view(torch.float32) + (t - t.detach())


def multiplies_in_tf32(a: Tensor, b: Tensor) -> Tensor:
    return _ten_bits(a) @ _ten_bits(b)


def drops_the_tail(a: Tensor, b: Tensor) -> Tensor:
    """The last K that do not fill a tile of 8 are forgotten."""
    full = a.shape[1] // 8 * 8
    return a[:, :full] @ b[:full]


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return grad @ b, a.mT @ grad


def backward_forgets_transpose(a: Tensor, b: Tensor) -> Tensor:
    return _Wrong.apply(a, b)


def _long() -> Any:
    return (torch.randn(5, 1027), torch.randn(1027, 7)), {}


def _same_sign() -> Any:
    return (torch.rand(5, 1027), torch.rand(1027, 7)), {}


def _longer() -> Any:
    return (torch.rand(5, 6007), torch.rand(6007, 7)), {}


def _square() -> Any:
    return (torch.randn(6, 6), torch.randn(6, 6)), {}


MUTANTS = [
    Mutant("matmul-accumulates-in-half", "matmul", accumulates_in_storage_dtype, _same_sign, torch.float16),
    Mutant("matmul-accumulates-in-bfloat16", "matmul", accumulates_in_storage_dtype, _same_sign, torch.bfloat16),
    Mutant("matmul-rounds-each-block", "matmul", rounds_each_block, _longer, torch.bfloat16),
    Mutant("matmul-in-tf32", "matmul", multiplies_in_tf32, _long, torch.float32),
    Mutant("matmul-drops-the-tail", "matmul", drops_the_tail, _long),
    Mutant("matmul-backward-forgets-transpose", "matmul", backward_forgets_transpose, _square),
]
