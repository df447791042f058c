"""Where RoIAlign reads a map, with ``aligned`` true and false: docs/pictures/roi_align_samples.svg."""

from __future__ import annotations

import sys
from pathlib import Path

from _style import BLUE, GREY, ORANGE, save
from matplotlib import pyplot
from matplotlib.patches import Rectangle

BOX, SCALE, BINS, GRID, PIXELS = (6.0, 4.0, 26.0, 20.0), 0.25, 2, 2, 8


def samples(low: float, high: float, aligned: bool) -> tuple[float, float, list[float]]:
    """Start, size and sample coordinates of an axis, as docs/ops/roi_align.md defines them."""
    offset = 0.5 if aligned else 0.0
    start = low * SCALE - offset
    size = high * SCALE - offset - start
    size = size if aligned else max(size, 1.0)
    step = size / BINS
    return start, size, [start + p * step + (i + 0.5) * step / GRID for p in range(BINS) for i in range(GRID)]


def draw(folder: Path) -> Path:
    figure, both = pyplot.subplots(1, 2, figsize=(8, 4), layout="constrained")
    for axes, aligned in zip(both, (True, False), strict=True):
        (x, width, columns), (y, height, rows) = (samples(BOX[i], BOX[i + 2], aligned) for i in (0, 1))
        for edge in range(PIXELS + 1):  # a pixel is a square around its centre, which has integer coordinates
            axes.axhline(edge - 0.5, color="#dddddd", linewidth=0.8, zorder=0)
            axes.axvline(edge - 0.5, color="#dddddd", linewidth=0.8, zorder=0)
        centres = [(i, j) for i in range(PIXELS) for j in range(PIXELS)]
        axes.scatter(*zip(*centres, strict=True), s=6, color=GREY, label="centre of a pixel")
        axes.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=BLUE, linewidth=2))
        axes.plot([x + width / 2] * 2, [y, y + height], color=BLUE, linewidth=1)
        axes.plot([x, x + width], [y + height / 2] * 2, color=BLUE, linewidth=1)
        points = [(column, row) for row in rows for column in columns]
        axes.scatter(*zip(*points, strict=True), s=28, marker="x", color=ORANGE, label="sample")
        axes.set(title=f"aligned={aligned}", xlim=(-0.5, PIXELS - 0.5), ylim=(PIXELS - 0.5, -0.5), aspect="equal")
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(f"box {BOX} of the image at spatial_scale={SCALE}, {BINS} x {BINS} bins, sampling_ratio={GRID}")
    return save(figure, "roi_align_samples", folder)


if __name__ == "__main__":
    print(draw(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent))
