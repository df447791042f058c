"""A ResNet-50 whose 3x3 convolutions of the stages c3 to c5 are deformable, with masks: one training step.

On the peer the same layers call ``torchvision.ops.deform_conv2d``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import opzoo
from opzoo.bench.data import seeded
from opzoo.bench.models import Model, ModelCase, autocast, model_id

OFFSET_PX = 2.0


def make_model() -> nn.Module:
    from torchvision.models import resnet50

    torch.manual_seed(0)
    model: nn.Module = resnet50(weights=None)
    for stage in (model.layer2, model.layer3, model.layer4):
        assert isinstance(stage, nn.Module)
        for block in stage.children():
            assert isinstance(block.conv2, nn.Conv2d) and isinstance(block.bn3, nn.BatchNorm2d)
            block.conv2 = opzoo.ModulatedDeformConv2dPack.from_conv(block.conv2)
            # Not zero, as a branch begins: trained offsets are spread, and reads along with them. Behind a batch
            # norm and a ReLU the mean square is a half.
            fan_in = block.conv2.conv_offset.weight[0].numel()
            nn.init.normal_(block.conv2.conv_offset.weight, std=OFFSET_PX / math.sqrt(0.5 * fan_in))
            # As in trained networks a block adds a little to what passes it by. With weights of 1 each one would
            # multiply the roundings of those before, offsets above all.
            nn.init.constant_(block.bn3.weight, 0.2)
    return model


@contextlib.contextmanager
def on_torchvision() -> Iterator[None]:
    """The layers of opzoo call torchvision's operator."""
    import torchvision

    module = importlib.import_module("opzoo.ops.deform_conv2d")
    ours = vars(module)["deform_conv2d"]
    vars(module)["deform_conv2d"] = torchvision.ops.deform_conv2d
    try:
        yield
    finally:
        vars(module)["deform_conv2d"] = ours


def build(device: torch.device, dtype: torch.dtype, images: int, side: int, channels_last: bool) -> Model:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    module = make_model().to(device).to(memory_format=layout)
    generator = seeded(device)
    batch = torch.randn(images, 3, side, side, generator=generator, device=device).contiguous(memory_format=layout)
    labels = torch.randint(1000, (images,), generator=generator, device=device)
    # A rate of zero: every step costs the same and does the same.
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0, momentum=0.9)

    def loss(dtype: torch.dtype) -> Tensor:
        with autocast(device, dtype):
            return nn.functional.cross_entropy(module(batch.double() if dtype == torch.float64 else batch), labels)

    def train() -> None:
        loss(dtype).backward()
        optimizer.step()
        optimizer.zero_grad()

    layers: dict[str, nn.Module] = {
        name: layer for name, layer in module.named_modules() if isinstance(layer, opzoo.ModulatedDeformConv2dPack)
    }
    return Model(module, loss, {"train": train}, contextlib.nullcontext, on_torchvision, layers)


def _case(dtype: torch.dtype, images: int, side: int, channels_last: bool) -> ModelCase:
    name = f"resnet50-dcnv2 {'NHWC' if channels_last else 'NCHW'}"
    make = functools.partial(build, dtype=dtype, images=images, side=side, channels_last=channels_last)
    return ModelCase(model_id(name, dtype, images, side), dtype, make)


def cases(device_type: str) -> list[ModelCase]:
    if device_type == "cpu":
        return quick()
    return [_case(torch.bfloat16, 8, 512, True), _case(torch.float32, 8, 512, False)]


def quick() -> list[ModelCase]:
    return [_case(torch.float32, 1, 128, False)]
