"""Seeded random inputs. Never zeros: they hide unwritten outputs, and matrix units run quicker on them."""

from __future__ import annotations

import torch
from torch import Tensor

IMAGE_WIDTH, IMAGE_HEIGHT = 1333, 800
BOXES_PER_CLUSTER = 20


def seeded(device: torch.device, seed: int = 0) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def normal(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, *, channels_last: bool = False
) -> Tensor:
    t = torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)
    return t.contiguous(memory_format=torch.channels_last) if channels_last else t


def detector_boxes(
    count: int, generator: torch.Generator, width: float = IMAGE_WIDTH, height: float = IMAGE_HEIGHT
) -> Tensor:
    """Boxes like a detector's proposals.

    About ``BOXES_PER_CLUSTER`` around each object; objects have sides of 10 to 250 px, evenly in the
    logarithm, and their boxes a jitter of a tenth of the side. Made on the CPU's generator stream of
    the caller, clipped to the image.

    Returns:
        ``Tensor[count, 4]``, float32, ``(x1, y1, x2, y2)`` in pixels.
    """
    device = generator.device
    objects = max(1, count // BOXES_PER_CLUSTER)
    centre = torch.rand(objects, 2, generator=generator, device=device) * torch.tensor([width, height], device=device)
    side = 10 * 25 ** torch.rand(objects, 2, generator=generator, device=device)
    pick = torch.randint(objects, (count,), generator=generator, device=device)
    jitter = 0.1 * torch.randn(count, 4, generator=generator, device=device)
    centre = centre[pick] + side[pick] * jitter[:, :2]
    half = 0.5 * side[pick] * jitter[:, 2:].exp()
    boxes = torch.cat([centre - half, centre + half], 1)
    boxes[:, 0::2].clamp_(0, width)
    boxes[:, 1::2].clamp_(0, height)
    return boxes
