"""Rows of the parts of synchronised batch norm, against torch's batch norm and its derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmcv_rows.row import Call, gradients, normal, row, uniform, unwritten

EPS = 1e-3


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def channels(dtype: torch.dtype, *names: str) -> Call:
    return {name: uniform(3, dtype=statistics_dtype(dtype)) + 0.5 for name in names}


def results(dtype: torch.dtype, *names: str) -> Call:
    return {name: unwritten(3, dtype=statistics_dtype(dtype)) for name in names}


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.batch_norm(x, None, None, weight, bias, True, 0.0, EPS)


@row(
    "sync_bn_forward_mean",
    oracle="torch's mean",
    draw=lambda dtype: {"input": normal(2, 3, 7, dtype=dtype), **results(dtype, "mean")},
    outputs=("mean",),
)
def _mean(input: Tensor, mean: Tensor) -> Call:
    return {"mean": input.mean((0, 2))}


@row(
    "sync_bn_forward_var",
    oracle="torch's variance about its own mean, moved to the given one",
    draw=lambda dtype: {"input": normal(2, 3, 7, dtype=dtype), **channels(dtype, "mean"), **results(dtype, "var")},
    outputs=("var",),
)
def _var(input: Tensor, mean: Tensor, var: Tensor) -> Call:
    return {"var": input.var((0, 2), correction=0) + (input.mean((0, 2)) - mean) ** 2}


def draw_output(dtype: torch.dtype) -> Call:
    x = normal(2, 3, 7, dtype=dtype)
    wide = x.to(statistics_dtype(dtype))
    return {
        "input": x,
        "mean": wide.mean((0, 2)),
        "var": wide.var((0, 2), correction=0),
        **channels(dtype, "weight", "bias", "running_mean", "running_var"),
        "norm": unwritten(2, 3, 7, dtype=statistics_dtype(dtype)),
        **results(dtype, "std"),
        "output": unwritten(2, 3, 7, dtype=dtype),
        "eps": EPS,
        "momentum": 0.1,
        "group_size": 1,
    }


@row(
    "sync_bn_forward_output",
    oracle="torch's batch_norm",
    draw=draw_output,
    outputs=("running_mean", "running_var", "norm", "std", "output"),
)
def _output(
    input: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    eps: float,
    momentum: float,
    group_size: int,
    **_: Any,
) -> Call:
    """Statistics of all processes are given; the running variance is the unbiased one of all their numbers."""
    mean, var, weight, bias = (t.detach() for t in (mean, var, weight, bias))
    count = input[:, 0].numel() * group_size
    return {
        "running_mean": running_mean.detach() * (1 - momentum) + mean * momentum,
        "running_var": running_var.detach() * (1 - momentum) + var * count / max(count - 1, 1) * momentum,
        "norm": functional.batch_norm(input, mean, var, None, None, False, 0.0, eps),
        "std": (var + eps) ** 0.5,
        "output": functional.batch_norm(input, mean, var, weight, bias, False, 0.0, eps),
    }


def draw_backward(dtype: torch.dtype) -> Call:
    wide = statistics_dtype(dtype)
    return {"grad_output": normal(2, 3, 7, dtype=dtype), "norm": batch_norm(normal(2, 3, 7, dtype=wide), None, None)}


@row(
    "sync_bn_backward_param",
    oracle="torch's derivative of norm * weight + bias",
    draw=lambda dtype: {**draw_backward(dtype), **results(dtype, "grad_weight", "grad_bias")},
    outputs=("grad_weight", "grad_bias"),
    near=1e-6,  # sums near 0 of numbers near 1
)
def _param(grad_output: Tensor, norm: Tensor, grad_weight: Tensor, grad_bias: Tensor) -> Call:
    zeros = torch.zeros(3, dtype=norm.dtype)
    scale = lambda weight, bias: norm * weight[:, None] + bias[:, None]  # noqa: E731
    return dict(zip(("grad_weight", "grad_bias"), gradients(scale, grad_output, zeros, zeros), strict=True))


def draw_data(dtype: torch.dtype) -> Call:
    x, grad = normal(2, 3, 7, dtype=statistics_dtype(dtype)), normal(2, 3, 7, dtype=dtype)
    norm = batch_norm(x, None, None)
    return {
        "grad_output": grad,
        **channels(dtype, "weight"),
        "grad_weight": (grad.to(norm.dtype) * norm).sum((0, 2)),
        "grad_bias": grad.to(norm.dtype).sum((0, 2)),
        "norm": norm,
        "std": (x.var((0, 2), correction=0) + EPS).sqrt(),
        "grad_input": unwritten(2, 3, 7, dtype=dtype),
    }


@row("sync_bn_backward_data", oracle="the formula", draw=draw_data, outputs=("grad_input",))
def _data(
    grad_output: Tensor,
    weight: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    norm: Tensor,
    std: Tensor,
    grad_input: Tensor,
) -> Call:
    """The whole layer against torch's: ``test_mm_sync_bn_is_batch_norm``."""
    n, shared = 14, grad_weight[:, None] * norm + grad_bias[:, None]
    return {"grad_input": (grad_output - shared / n) * (weight / std)[:, None]}
