"""Charts of docs/benchmarks/h200.csv, one per operator's page: docs/pictures/benchmarks_<page>.svg."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from _style import BLUE, ORANGE, save
from matplotlib import pyplot

CSV = Path(__file__).parents[1] / "benchmarks" / "h200.csv"
PAGES = {"batched_nms": "nms"}  # measured under its own name, described on another operator's page
PASSES = {"fwd": BLUE, "bwd": ORANGE}


def ratios() -> dict[str, list[dict[str, str]]]:
    """Rows of opzoo's times that have a ratio, by page."""
    with CSV.open() as file:
        rows = [row for row in csv.DictReader(file) if row["impl"] == "opzoo" and row["metric"] == "time"]
    pages: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        if row["ratio"] and row["pass"] in PASSES:
            pages.setdefault(PAGES.get(row["op"], row["op"]), []).append(row)
    return pages


def draw(folder: Path) -> list[Path]:
    written = []
    for page, rows in ratios().items():
        commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
        measured = f"{rows[0]['device']}, torch {rows[0]['torch']}, opzoo {commits}"
        labels = [f"{row['op']} {row['case']} {row['pass']}" for row in rows]
        values = [float(row["ratio"]) for row in rows]
        figure, axes = pyplot.subplots(figsize=(7.5, 0.9 + 0.19 * len(rows)), layout="constrained")
        # From 1 outward: to the left are the cases in which the peer takes less time.
        bars = axes.barh(
            range(len(rows)), [value - 1 for value in values], left=1.0, color=[PASSES[row["pass"]] for row in rows]
        )
        axes.bar_label(bars, [f" {value:.2f}x" for value in values], fontsize=7)
        axes.set_yticks(range(len(rows)), labels, fontsize=7)
        axes.invert_yaxis()
        axes.set(
            xscale="log",
            xlabel="peer's time / opzoo's time: right of the line opzoo takes less time, left of it the peer",
        )
        axes.set_xlim(min(0.5, *values) / 1.3, max(2.0, *values) * 1.5)
        low, high = axes.get_xlim()
        ticks = [tick for tick in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if low <= tick <= high]
        axes.set_xticks(ticks, [f"{t:g}x" for t in ticks])
        axes.minorticks_off()
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.margins(y=0.01)
        figure.suptitle(measured, fontsize=8)
        written.append(save(figure, f"benchmarks_{page}", folder))
    return written


if __name__ == "__main__":
    print(*draw(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent), sep="\n")
