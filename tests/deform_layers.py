"""Configurations of deform_conv2d and their tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layer:
    """One configuration of the operator and the tensors it takes."""

    N: int = 2
    C: int = 6
    H: int = 7
    W: int = 8
    K: int = 4
    kernel: tuple[int, int] = (3, 3)
    groups: int = 1
    offset_groups: int = 1
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)

    @property
    def options(self) -> dict[str, Any]:
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}

    @property
    def output(self) -> tuple[int, int]:
        sizes = zip((self.H, self.W), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        height, width = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes)
        return height, width

    def tensors(self, device: torch.device = CPU, dtype: torch.dtype = torch.float64, reach: int = 3):
        """input, offset, weight, bias, mask. Offsets keep away from whole pixels, where derivatives jump."""
        taps = self.kernel[0] * self.kernel[1]
        offset_shape = (self.N, 2 * self.offset_groups * taps, *self.output)
        whole = torch.randint(-reach, reach + 1, offset_shape)
        tensors = (
            torch.randn(self.N, self.C, self.H, self.W),
            whole + 0.1 + 0.8 * torch.rand(offset_shape),
            torch.randn(self.K, self.C // self.groups, *self.kernel),
            torch.randn(self.K),
            torch.rand(self.N, self.offset_groups * taps, *self.output),
        )
        return [t.to(device, dtype) for t in tensors]


LAYERS = {
    "3x3": Layer(),
    "1x1": Layer(kernel=(1, 1), padding=(0, 0), N=5),
    "5x3": Layer(kernel=(5, 3), padding=(2, 0)),
    "stride": Layer(stride=(2, 3)),
    "dilation": Layer(dilation=(2, 1), padding=(3, 0)),
    "groups": Layer(groups=2),
    "depthwise": Layer(C=4, K=8, groups=4, offset_groups=2),
    "offset groups": Layer(offset_groups=3),
    "all": Layer(
        N=3, C=12, K=8, groups=4, offset_groups=3, kernel=(2, 4), stride=(2, 1), padding=(0, 3), dilation=(3, 1)
    ),
    "one pixel": Layer(H=1, W=1, N=1, C=1, K=1),
    "many channels": Layer(N=1, C=37, K=33),
}
by_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
masked = pytest.mark.parametrize("masked", [False, True], ids=["v1", "v2"])


def call(function, tensors, layer: Layer, masked: bool = True):
    input, offset, weight, bias, mask = tensors
    return function(input, offset, weight, bias, mask=mask if masked else None, **layer.options)


def gradients(function, tensors, layer: Layer, masked: bool = True, grad: torch.Tensor | None = None):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    output = call(function, leaves, layer, masked)
    if grad is None:
        grad = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
    wanted = leaves if masked else leaves[:4]
    return torch.autograd.grad(output, wanted, grad.to(output))
