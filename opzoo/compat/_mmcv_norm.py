"""mmcv's synchronised batch norm, in torch's own operators: the parts between which mmcv exchanges sums.

Called by mmcv below autograd with results allocated beforehand; see :mod:`opzoo.compat._mmcv_ext`. Maps are
``[N, C, L]``; statistics and parameters are float32 of ``[C]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opzoo.compat._mmcv_checks import (
    require_finite,
    require_floats,
    require_integers,
    require_shape,
    require_tensors,
    write,
)


def sync_bn_forward_mean(input: Tensor, mean: Tensor) -> None:
    """Mean of each channel."""
    op = "sync_bn_forward_mean"
    x = _as_sums(op, input=input)
    write(op, mean=(mean, x.mean((0, 2))))


def sync_bn_forward_var(input: Tensor, mean: Tensor, var: Tensor) -> None:
    """Mean square of each channel's distance from ``mean``."""
    op = "sync_bn_forward_var"
    x = _as_sums(op, input=input)
    _require_channels(op, x, mean=mean)
    write(op, var=(var, (x - mean[:, None]).square().mean((0, 2))))


def sync_bn_forward_output(
    input: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    norm: Tensor,
    std: Tensor,
    output: Tensor,
    eps: float,
    momentum: float,
    group_size: int,
) -> None:
    """Normalise by ``mean`` and ``var`` of all ``group_size`` processes, scale, shift; move the running statistics."""
    op = "sync_bn_forward_output"
    x = _as_sums(op, input=input)
    _require_channels(
        op, x, mean=mean, var=var, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var
    )
    require_finite(op, eps=eps, momentum=momentum)
    require_integers(op, 1, group_size=group_size)
    if float(eps) < 0:
        raise ValueError(f"mmcv._ext.{op}: eps must not be negative, got {eps}")
    deviation = (var + float(eps)).sqrt()
    normal = (x - mean[:, None]) / deviation[:, None]
    count = x.shape[0] * x.shape[2] * group_size
    unbiased = var * (count / (count - 1)) if count > 1 else var
    share = float(momentum)
    write(
        op,
        running_mean=(running_mean, share * mean + (1 - share) * running_mean),
        running_var=(running_var, share * unbiased + (1 - share) * running_var),
        norm=(norm, normal),
        std=(std, deviation),
        output=(output, (normal * weight[:, None] + bias[:, None]).to(input.dtype)),
    )


def sync_bn_backward_param(grad_output: Tensor, norm: Tensor, grad_weight: Tensor, grad_bias: Tensor) -> None:
    """Gradients of this process to ``weight`` and ``bias``."""
    op = "sync_bn_backward_param"
    grad = _as_sums(op, grad_output=grad_output)
    _require_map(op, grad, norm)
    write(op, grad_weight=(grad_weight, (grad * norm).sum((0, 2))), grad_bias=(grad_bias, grad.sum((0, 2))))


def sync_bn_backward_data(
    grad_output: Tensor,
    weight: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    norm: Tensor,
    std: Tensor,
    grad_input: Tensor,
) -> None:
    """Gradient to the input from those to the parameters, means of all processes."""
    op = "sync_bn_backward_data"
    grad = _as_sums(op, grad_output=grad_output)
    _require_map(op, grad, norm)
    _require_channels(op, grad, weight=weight, grad_weight=grad_weight, grad_bias=grad_bias, std=std)
    shared = (grad_weight[:, None] * norm + grad_bias[:, None]) / (grad.shape[0] * grad.shape[2])
    found = (weight / std)[:, None] * (grad - shared)
    write(op, grad_input=(grad_input, found.to(grad_output.dtype)))


def _as_sums(op: str, **map: Tensor) -> Tensor:
    """The map in at least float32."""
    require_tensors(op, **map)
    require_shape(op, (None, None, None), **map)
    require_floats(op, **map)
    (t,) = map.values()
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _require_channels(op: str, x: Tensor, **statistics: Tensor) -> None:
    require_tensors(op, **statistics)
    require_shape(op, (x.shape[1],), **statistics)
    _require_sums(op, x, **statistics)


def _require_map(op: str, grad: Tensor, norm: Tensor) -> None:
    require_tensors(op, norm=norm)
    require_shape(op, grad.shape, norm=norm)
    _require_sums(op, grad, norm=norm)


def _require_sums(op: str, x: Tensor, **tensors: Tensor) -> None:
    require_floats(op, **tensors)
    for name, t in tensors.items():
        if t.dtype != x.dtype or t.device != x.device:
            raise RuntimeError(f"mmcv._ext.{op}: {name} must be {x.dtype} on {x.device}, got {t.dtype} on {t.device}")
