"""``python -m opzoo.bench.detectors``: a training step and a detection of torchvision's detectors, with and without opzoo.

Wall time per step, the model unchanged: ``opzoo.compat.torchvision`` puts opzoo under it and takes it
away, turn by turn. Weights and images are random.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchvision.models import detection

from opzoo.compat import torchvision as compat

KINDS = ("fasterrcnn", "maskrcnn")


def make_model(kind: str, device: torch.device, channels_last: bool) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = getattr(detection, f"{kind}_resnet50_fpn")(weights=None, weights_backbone=None, num_classes=91)
    return model.to(device, memory_format=torch.channels_last if channels_last else torch.contiguous_format)


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


def median_ms(call: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, float]:
    """Without and with opzoo, taking turns."""

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1e3 * (time.perf_counter() - start)

    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 2):
        plain = once()
        with compat.installed():
            ours = once()
        if turn >= 2:
            times[0].append(plain)
            times[1].append(ours)
    return statistics.median(times[0]), statistics.median(times[1])


def measure(kind: str, device: torch.device, images: int, side: int, repeats: int, amp: bool) -> None:
    model = make_model(kind, device, amp)
    batch, targets = make_batch(images, side, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=amp)

    def train() -> None:
        with autocast:
            loss = sum(model(batch, targets).values())
        loss.backward()  # type: ignore[union-attr]
        model.zero_grad()

    def detect() -> None:
        with torch.no_grad(), autocast:
            model(batch)

    for label, step in (("training step", train), ("detection", detect)):
        model.train(label == "training step")
        plain, ours = median_ms(step, device, repeats)
        precision = "bf16 autocast" if amp else "fp32"
        print(
            f"{kind:11} {label:13} {precision:13} N{images} {side}x{side}: torchvision {plain:8.1f} ms, "
            f"opzoo {ours:8.1f} ms, {plain / ours:.2f}x",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m opzoo.bench.detectors", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, help="images of a batch; 4 on CUDA, 1 on the CPU")
    parser.add_argument("--side", type=int, help="their width and height; 800 on CUDA, 320 on the CPU")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    images, side = arguments.images or (4 if on_gpu else 1), arguments.side or (800 if on_gpu else 320)
    for amp in (False, True) if on_gpu else (False,):
        for kind in KINDS:
            measure(kind, device, images, side, arguments.repeats, amp)


if __name__ == "__main__":
    main()
