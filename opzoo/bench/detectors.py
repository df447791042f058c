"""torchvision's detectors with and without opzoo: a training step and a detection.

The model is unchanged: ``opzoo.compat.torchvision`` puts opzoo under it and takes it away, turn by turn.
Weights and images are random.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor, nn

from opzoo.bench.models import Model, ModelCase, autocast, model_id

KINDS = ("fasterrcnn", "maskrcnn")


def make_model(kind: str, device: torch.device, side: int) -> nn.Module:
    from torchvision.models import detection

    torch.manual_seed(0)
    options = {"weights": None, "weights_backbone": None, "num_classes": 91, "min_size": side, "max_size": side}
    model: nn.Module = getattr(detection, f"{kind}_resnet50_fpn")(**options)
    return model.to(device)


def make_batch(images: int, side: int, device: torch.device) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    targets = []
    for _ in range(images):
        corner = torch.rand(8, 2, generator=generator) * 0.6 * side
        boxes = torch.cat([corner, corner + (0.1 + 0.3 * torch.rand(8, 2, generator=generator)) * side], 1)
        masks = torch.zeros(8, side, side, dtype=torch.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
            mask[y1:y2, x1:x2] = 1
        labels = torch.randint(1, 91, (8,), generator=generator)
        targets.append({"boxes": boxes.to(device), "labels": labels.to(device), "masks": masks.to(device)})
    return [torch.rand(3, side, side, generator=generator).to(device) for _ in range(images)], targets


def build(device: torch.device, kind: str, dtype: torch.dtype, images: int, side: int) -> Model:
    from opzoo.compat import torchvision as compat

    module = make_model(kind, device, side)
    batch, targets = make_batch(images, side, device)

    def loss(dtype: torch.dtype) -> Tensor:
        module.train()
        images = batch
        if dtype == torch.float64:
            images = [image.double() for image in batch]
        boxes = [{**target, "boxes": target["boxes"].to(images[0].dtype)} for target in targets]
        with autocast(device, dtype):
            return torch.stack([*module(images, boxes).values()]).sum()

    def train() -> None:
        loss(dtype).backward()
        module.zero_grad()

    def detect() -> None:
        module.eval()
        with torch.no_grad(), autocast(device, dtype):
            module(batch)

    return Model(module, loss, {"train": train, "detect": detect}, compat.installed, contextlib.nullcontext)


def _case(kind: str, dtype: torch.dtype, images: int, side: int) -> ModelCase:
    make = functools.partial(build, kind=kind, dtype=dtype, images=images, side=side)
    return ModelCase(model_id(kind, dtype, images, side), dtype, make)


def cases(device_type: str) -> list[ModelCase]:
    if device_type == "cpu":
        return [_case(kind, torch.float32, 1, 320) for kind in KINDS]
    return [_case(kind, dtype, 4, 800) for dtype in (torch.float32, torch.bfloat16) for kind in KINDS]


def quick() -> list[ModelCase]:
    return [_case("fasterrcnn", torch.float32, 1, 64)]
