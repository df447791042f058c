"""The roofline of the lessons' programs, from docs/learn/code/figures.csv and docs/benchmarks/h200.csv."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from _style import BLUE, GREEN, GREY, ORANGE, save
from matplotlib import pyplot

DOCS = Path(__file__).parents[1]
SIZE = 4096  # of the matrices
BYTES_OF = {"fp32": 4, "bf16": 2}
ADD = 1 / 12  # one addition for two numbers read and one written
LEFT_OUT = ("add_4_grid_stride", "add_6_strided")  # where add_3_grid is
CORES = {"fp32": ("ordinary cores, fp32", BLUE), "bf16": ("tensor cores, bf16", ORANGE)}


def matmul_intensity(dtype: str) -> float:
    """Operations per byte if every element of A, B and C crosses memory once."""
    return 2 * SIZE**3 / (3 * SIZE**2 * BYTES_OF[dtype])


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def best_of_each_program(figures: list[dict[str, str]]) -> list[dict[str, str]]:
    best: dict[str, dict[str, str]] = {}
    for row in figures:
        if row["program"] not in best or float(row["ms"]) < float(best[row["program"]]["ms"]):
            best[row["program"]] = row
    return list(best.values())


def limits(figures: list[dict[str, str]]) -> tuple[float, dict[str, float]]:
    """Bytes per second of memory, operations per second of the cores by dtype."""
    memory = next(float(row["limit"]) * 1e9 for row in figures if row["unit"] == "GB/s")
    cores = {row["problem"][-4:]: float(row["limit"]) * 1e12 for row in figures if row["unit"] == "TFLOP/s"}
    return memory, cores


def draw_program(axes, row: dict[str, str]) -> None:
    operator, step, *_ = row["program"].split("_")
    if operator == "add":
        x, y, color = ADD, float(row["rate"]) * 1e9 * ADD, GREEN
    else:
        dtype = row["problem"][-4:]
        x, y, color = matmul_intensity(dtype), float(row["rate"]) * 1e12, CORES[dtype][1]
    axes.plot(x, y, "o", color=color, markersize=5)
    share = float(row["share_percent"])
    label(
        axes, x, y, f"{operator} {step}: {share:.3g} %" if share else f"{operator} {step}: below 0.01 %", row["program"]
    )


# Where a label would lie on its neighbour's: to the left, or so many points up.
LEFT = ("matmul_2_coalesced", "matmul_4_register_tile", "cuBLAS")
UP = {"add_5_16_bytes": 4, "add_3_grid": -4}


def label(axes, x: float, y: float, text: str, name: str) -> None:
    axes.annotate(
        text,
        (x, y),
        xytext=(-7 if name in LEFT else 7, UP.get(name, 0)),
        textcoords="offset points",
        ha="right" if name in LEFT else "left",
        va="center",
        fontsize=7,
    )


def draw(folder: Path) -> Path:
    figures = rows(DOCS / "learn" / "code" / "figures.csv")
    bench = rows(DOCS / "benchmarks" / "h200.csv")
    memory, cores = limits(figures)
    figure, axes = pyplot.subplots(figsize=(7.5, 5), layout="constrained")
    for dtype, peak in cores.items():
        name, color = CORES[dtype]
        ridge = peak / memory
        axes.plot([ridge, 2e4], [peak, peak], color=color, linewidth=1.2)
        axes.text(2e4, peak * 1.2, f"{name}: {peak / 1e12:.0f} TFLOP/s", ha="right", fontsize=8, color=color)
    top = max(cores.values())
    axes.plot([0.02, top / memory], [0.02 * memory, top], color=GREY, linewidth=1.2, zorder=0)
    axes.text(1, memory * 1.6, f"memory: {memory / 1e9:.0f} GB/s", ha="right", fontsize=8, color=GREY)
    for row in best_of_each_program(figures):
        if row["program"] not in LEFT_OUT:
            draw_program(axes, row)
    for row in bench:
        dtype = row["case"][:4]
        is_product = row["op"] == "matmul" and row["case"] == f"{dtype} {SIZE}^3" and dtype in cores
        if is_product and (row["impl"], row["pass"], row["metric"]) == ("torch", "fwd", "throughput"):
            x, y = matmul_intensity(dtype), float(row["p50"]) * 1e12
            axes.plot(x, y, "o", color=CORES[dtype][1], markersize=6, markerfacecolor="white")
            label(axes, x, y, "cuBLAS", "cuBLAS")
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(0.02, 2e4),
        ylim=(1e7, 4e15),
        xlabel="operations per byte that the problem has to move",
        ylabel="operations per second",
    )
    first = figures[0]
    measured = f"{first['gpu']}, lessons of commit {first['commit']}, cuBLAS by torch {bench[0]['torch']}"
    figure.suptitle(f"{measured}; % of the roof", fontsize=8)
    return save(figure, "roofline", folder)


if __name__ == "__main__":
    print(draw(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent))
