"""Where a deformable 3 x 3 tap window reads an image: docs/pictures/deform_conv2d_offsets.svg."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from _style import BLUE, GREY, ORANGE, save
from matplotlib import pyplot

SIZE, OUTPUTS = 40, [(12, 10), (24, 30)]  # output pixels (y, x) whose taps are shown


def image() -> torch.Tensor:
    """A soft disc, so that there is something to reach for."""
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    return torch.sigmoid(10 - torch.hypot(y - 20.0, x - 18.0))


def offsets() -> torch.Tensor:
    """[18, SIZE, SIZE] in the operator's order, dy and dx of tap after tap: each tap moves towards the disc's edge."""
    planes = torch.zeros(9, 2, SIZE, SIZE)
    for oy, ox in OUTPUTS:
        for tap in range(9):
            y, x = oy + tap // 3 - 1, ox + tap % 3 - 1
            angle = math.atan2(y - 20, x - 18) + 0.16 * (tap - 4)
            planes[tap, 0, oy, ox] = 20 + 10 * math.sin(angle) - y
            planes[tap, 1, oy, ox] = 18 + 10 * math.cos(angle) - x
    return planes.flatten(0, 1)


def draw(folder: Path) -> Path:
    offset = offsets()
    figure, axes = pyplot.subplots(figsize=(5, 5), layout="constrained")
    axes.imshow(image(), cmap="Greys", vmin=0, vmax=2.5)
    for oy, ox in OUTPUTS:
        for tap in range(9):
            y, x = oy + tap // 3 - 1, ox + tap % 3 - 1  # kernel 3, stride 1, padding 1
            dy, dx = offset[2 * tap, oy, ox].item(), offset[2 * tap + 1, oy, ox].item()
            axes.annotate("", (x + dx, y + dy), (x, y), arrowprops={"arrowstyle": "->", "color": GREY, "lw": 0.8})
            first = tap == 0 and (oy, ox) == OUTPUTS[0]
            axes.scatter(x, y, s=10, color=BLUE, label="tap of a plain convolution" if first else None)
            axes.scatter(x + dx, y + dy, s=30, marker="x", color=ORANGE, label="tap + (dy, dx)" if first else None)
    axes.set(title="two output pixels of a 3 x 3 deformable convolution")
    axes.axis("off")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return save(figure, "deform_conv2d_offsets", folder)


if __name__ == "__main__":
    print(draw(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent))
