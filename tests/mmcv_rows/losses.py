"""Rows of the focal losses and of the two functions that tell what built the module."""

from __future__ import annotations

import torch
from peers import torchvision
from torch import Tensor

from mmcv_rows.row import ROWS, Call, Row, normal, row, uniform, unwritten
from opzoo._library import build_info

NUMBERS = {"gamma": 1.5, "alpha": 0.3}


def loss_tensors(dtype: torch.dtype) -> Call:
    target = torch.randint(0, 5, (11,))
    target[3] = 5  # the background
    return {"input": normal(11, 5, dtype=dtype), "target": target, "weight": uniform(5, dtype=dtype)}


def sigmoid_loss(input: Tensor, target: Tensor, weight: Tensor, gamma: float, alpha: float) -> Tensor:
    """The background is no class, and has the weight 1."""
    labels = torch.nn.functional.one_hot(target, 6)[:, :5].to(input.dtype)
    factor = torch.cat([weight, weight.new_ones(1)])[target] if weight.numel() else weight.new_ones(len(target))
    return torchvision.ops.sigmoid_focal_loss(input, labels, alpha, gamma) * factor[:, None]


@row(
    "sigmoid_focal_loss_forward",
    oracle="torchvision",
    draw=lambda dtype: {**loss_tensors(dtype), "output": unwritten(11, 5, dtype=dtype), **NUMBERS},
    outputs=("output",),
)
def _sigmoid_forward(input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float) -> Call:
    return {"output": sigmoid_loss(input, target, weight, gamma, alpha)}


@row(
    "sigmoid_focal_loss_backward",
    oracle="torchvision",
    draw=lambda dtype: {**loss_tensors(dtype), "grad_input": unwritten(11, 5, dtype=dtype), **NUMBERS},
    outputs=("grad_input",),
)
def _sigmoid_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> Call:
    leaf = input.clone().requires_grad_()
    with torch.enable_grad():
        (grad,) = torch.autograd.grad(sigmoid_loss(leaf, target, weight, gamma, alpha).sum(), leaf)
    return {"grad_input": grad}


def softmax_tensors(dtype: torch.dtype) -> Call:
    target = torch.randint(0, 5, (11,))
    target[4] = -1  # of no class: no loss
    softmax = normal(11, 5, dtype=torch.float64).softmax(1).to(dtype)
    softmax[2] = torch.eye(5)[target[2]]  # certain and right
    return {"input": softmax, "target": target, "weight": uniform(5, dtype=dtype)}


def class_weight(weight: Tensor, target: Tensor) -> Tensor:
    factor = weight[target.clamp(min=0)] if weight.numel() else torch.ones(len(target))
    return factor * (target >= 0)


def softmax_loss(p: Tensor, target: Tensor, weight: Tensor, gamma: float, alpha: float) -> Tensor:
    p = p[torch.arange(11), target.clamp(min=0)].clamp(min=torch.finfo(torch.float32).tiny)
    return -alpha * (1 - p) ** gamma * p.log() * class_weight(weight, target)


@row(
    "softmax_focal_loss_forward",
    oracle="the formula",
    draw=lambda dtype: {**softmax_tensors(dtype), "output": unwritten(11, dtype=dtype), **NUMBERS},
    outputs=("output",),
)
def _softmax_forward(input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float) -> Call:
    return {"output": softmax_loss(input, target, weight, gamma, alpha)}


@row(
    "softmax_focal_loss_backward",
    oracle="the formula, differentiated by torch",
    draw=lambda dtype: {
        **softmax_tensors(dtype),
        "buff": unwritten(11, dtype=dtype),
        "grad_input": unwritten(11, 5, dtype=dtype),
        "gamma": 0.5,  # its derivative at a certain probability is 0 times infinity
        "alpha": 0.3,
    },
    outputs=("buff", "grad_input"),
)
def _softmax_backward(
    input: Tensor, target: Tensor, weight: Tensor, buff: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> Call:
    """``buff`` is the derivative in the logarithm of the probability."""
    rows, known = torch.arange(11), target.clamp(min=0)
    leaf = input[rows, known].clamp(min=torch.finfo(torch.float32).tiny).log().requires_grad_()
    with torch.enable_grad():
        loss = -alpha * (1 - leaf.exp()) ** gamma * leaf * class_weight(weight, target)
        (shared,) = torch.autograd.grad(loss.sum(), leaf)
    shared = torch.where((leaf == 0) & (gamma > 0), 0, shared)  # the limit
    hit = torch.nn.functional.one_hot(known, 5)
    return {"buff": shared, "grad_input": shared[:, None] * (hit - input)}


for _name, _key in (("get_compiler_version", "compiler"), ("get_compiling_cuda_version", "cuda")):
    ROWS[_name] = Row(
        "the build information of the binary",
        lambda dtype: {},
        lambda key=_key: {"return": str(build_info()[key] or "not available")},
        dtypes=(torch.float32,),
    )
