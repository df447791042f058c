"""Which box suppresses which, and what greedy NMS makes of it: docs/pictures/nms_graph.svg."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from _style import BLUE, GREEN, GREY, ORANGE, save
from matplotlib import pyplot
from matplotlib.patches import Rectangle

import opzoo

BOXES = torch.tensor(
    [[0.0, 0, 10, 10], [3, 0, 13, 10], [6, 0, 16, 10], [20, 1, 30, 12], [21, 2, 31, 12], [22.0, 15, 28, 21]]
)
SCORES = torch.tensor([0.95, 0.90, 0.85, 0.80, 0.75, 0.70])  # descending: a box's number is its rank
THRESHOLD = 0.5


def iou(a: torch.Tensor, b: torch.Tensor) -> float:
    sides = (torch.minimum(a[2:], b[2:]) - torch.maximum(a[:2], b[:2])).clamp(min=0)
    inter = sides.prod()
    return float(inter / ((a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod() - inter))


def draw(folder: Path) -> Path:
    kept = set(opzoo.nms(BOXES, SCORES, THRESHOLD).tolist())
    figure, (plane, graph) = pyplot.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for i, (x1, y1, x2, y2) in enumerate(BOXES.tolist()):
        style = {"edgecolor": GREEN, "linewidth": 2} if i in kept else {"edgecolor": GREY, "linestyle": "--"}
        plane.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, **style))
        plane.text(x1 + 0.3, y1 + 0.3, str(i), color=style["edgecolor"], va="top")
    plane.set(title="boxes, numbered by score", xlim=(-1, 33), ylim=(23, -1), aspect="equal")
    plane.axis("off")

    for i in range(len(BOXES)):
        for j in range(i + 1, len(BOXES)):
            overlap = iou(BOXES[i], BOXES[j])
            if overlap <= THRESHOLD:
                continue
            works = i in kept
            arrow = {"arrowstyle": "-|>", "color": ORANGE if works else GREY, "linestyle": "-" if works else ":"}
            graph.annotate("", (j - 0.18, 0), (i + 0.18, 0), arrowprops={**arrow, "lw": 1.5})
            graph.text((i + j) / 2, 0.18, f"{overlap:.2f}", ha="center", color=BLUE, fontsize=8)
        graph.scatter(i, 0, s=320, color="white", edgecolor=GREEN if i in kept else GREY, linewidth=2, zorder=3)
        graph.text(i, 0, str(i), ha="center", va="center", zorder=4)
        graph.text(i, -0.3, "kept" if i in kept else "dropped", ha="center", color=GREEN if i in kept else GREY)
    graph.set(title=f"IoU > {THRESHOLD}; a dropped box drops none")
    graph.set(xlim=(-0.6, 5.6), ylim=(-1.2, 1.2))
    graph.axis("off")
    return save(figure, "nms_graph", folder)


if __name__ == "__main__":
    print(draw(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent))
