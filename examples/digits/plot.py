"""A picture of what the detector found."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from torch import Tensor

from digits.data import SIZE, Scenes
from digits.evaluate import IOU, match
from digits.model import Detections

RIGHT, WRONG, TRUTH = "#39ff6a", "#ff5a4d", "white"
MIN_SCORE = 0.5
PAPER = "#15171c"
OUTLINE = [patheffects.withStroke(linewidth=2.5, foreground="black")]


def plot_detections(path: Path, scenes: Scenes, found: list[Detections], title: str, columns: int = 4) -> None:
    """Write a picture: every scene given, its detections from score ``MIN_SCORE`` on, its ground truth dashed."""
    rows = -(-len(scenes) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.3 * columns, 3.3 * rows + 0.9), squeeze=False, facecolor=PAPER
    )
    for axis in axes.flat:
        axis.axis("off")
    for i, axis in zip(range(len(scenes)), axes.flat, strict=False):
        axis.imshow(scenes.images[i].permute(1, 2, 0).numpy(), interpolation="bilinear")
        _draw(axis, found[i], scenes.boxes[i], scenes.labels[i])

    key = [
        Line2D([], [], color=RIGHT, lw=2, label="detected: digit and score"),
        Line2D([], [], color=WRONG, lw=2, label=f"wrong: other digit, or IoU below {IOU}"),
        Line2D([], [], color=TRUTH, lw=1.2, ls=(0, (2, 2)), label="ground truth; alone: missed"),
    ]
    figure.suptitle(title, color=TRUTH, fontsize=13, y=1 - 0.17 / figure.get_figheight(), va="top")
    figure.legend(handles=key, loc="lower center", ncols=3, frameon=False, labelcolor=TRUTH, fontsize=11)
    inches = figure.get_figheight()
    figure.subplots_adjust(0.01, 0.42 / inches, 0.99, 1 - 0.5 / inches, 0.03, 0.03)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw(axis: Axes, found: Detections, truth: Tensor, labels: Tensor) -> None:
    shown = Detections(*(field[found.scores >= MIN_SCORE] for field in found))
    for box in truth.tolist():
        _rectangle(axis, box, TRUTH, width=1.0, style=(0, (2, 2)))
    matched = match(shown, truth, labels)
    for box, score, label, partner in zip(*(field.tolist() for field in (*shown, matched)), strict=True):
        colour = RIGHT if partner >= 0 else WRONG
        _rectangle(axis, box, colour, width=1.8)
        # Right ones above their box, wrong ones below it, so that two on one digit can both be read.
        above = box[1] > 9 if partner >= 0 else box[3] > SIZE - 9
        axis.text(
            box[0],
            box[1] - 1.5 if above else box[3] + 1.5,
            f"{label}  {score:.2f}",
            color=colour,
            fontsize=9,
            fontweight="bold",
            va="bottom" if above else "top",
            path_effects=OUTLINE,
        )


def _rectangle(axis: Axes, box: list[float], colour: str, width: float, style: object = "-") -> None:
    x1, y1, x2, y2 = (value - 0.5 for value in box)  # imshow puts the centre of the first pixel at 0
    axis.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, ec=colour, lw=width, ls=style))
