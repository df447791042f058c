"""What the pictures share: colours, and files that come out alike on every run, with their words as text."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams.update(
    {
        "svg.hashsalt": "opzoo",
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)

BLUE, ORANGE, GREEN, GREY = "#2a6fbb", "#d9731a", "#3a9a5b", "#9aa0a6"


def save(figure, name: str, folder: Path) -> Path:
    """Write ``<folder>/<name>.svg`` on a white ground, without the date."""
    path = folder / f"{name}.svg"
    figure.savefig(path, facecolor="white", metadata={"Date": None})
    matplotlib.pyplot.close(figure)
    return path
