"""What becomes of the numbers: a table on stdout, CSV rows, a chart."""

from __future__ import annotations

import csv
import datetime
import subprocess
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, TextIO

import torch

import opzoo
from opzoo.bench.machine import Machine, floor_seconds, is_arithmetic_bound
from opzoo.bench.runner import Result, Timing

COLUMNS = (
    *("op", "impl", "pass", "case", "metric", "unit", "p50", "p20", "p80", "ratio", "floor_share"),
    *("peak_bytes", "gate_error", "device", "torch", "cuda", "commit", "time"),
)


def commit() -> str:
    """opzoo's version; in a git checkout also the commit, and whether files were changed since."""
    root = Path(opzoo.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return opzoo.__version__

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout

    try:
        sha = git("rev-parse", "--short=10", "HEAD").strip()
        changed = ".dirty" if git("status", "--porcelain", "--untracked-files=no").strip() else ""
    except (OSError, subprocess.CalledProcessError):
        return opzoo.__version__
    return f"{opzoo.__version__}+g{sha}{changed}"


def throughput(machine: Machine, timing: Timing) -> tuple[float, str]:
    """Useful work per second at the median: TFLOP/s where arithmetic bounds the pass, else GB/s."""
    assert timing.work is not None
    if is_arithmetic_bound(machine, timing.work):
        return timing.work.flops / timing.seconds.p50 / 1e12, "TFLOP/s"
    return timing.work.bytes / timing.seconds.p50 / 1e9, "GB/s"


def floor_share(machine: Machine, timing: Timing) -> float | None:
    return floor_seconds(machine, timing.work) / timing.seconds.p50 if timing.work else None


def _rows_of(timing: Timing, machine: Machine) -> list[dict[str, Any]]:
    seconds = timing.seconds
    shared: dict[str, Any] = {
        "impl": timing.impl,
        "pass": timing.what,
        "ratio": timing.ratio,
        "floor_share": floor_share(machine, timing),
        "peak_bytes": timing.peak_bytes,
    }
    time_us = {name: getattr(seconds, name) * 1e6 for name in ("p50", "p20", "p80")}
    rows = [{**shared, "metric": "time", "unit": "us", **time_us}]
    if timing.work:
        p50, unit = throughput(machine, timing)
        # The quick end of the time is the high end of the rate.
        rates = {"p50": p50, "p20": p50 * seconds.p50 / seconds.p80, "p80": p50 * seconds.p50 / seconds.p20}
        rows.append({**shared, "metric": "throughput", "unit": unit, **rates})
    return rows


def csv_rows(result: Result, machine: Machine, origin: str) -> list[dict[str, Any]]:
    """One row per implementation, pass and metric; a case without numbers has one row that says so."""
    rows = [row for timing in result.timings for row in _rows_of(timing, machine)]
    if not rows:
        rows = [{"impl": "opzoo", "pass": "gate", "metric": result.status}]
    for row in rows:
        row.update(
            op=result.op,
            case=result.case,
            gate_error=result.gate_error,
            device=machine.name,
            torch=torch.__version__,
            cuda=torch.version.cuda,
            commit=origin,
            time=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        )
    return rows


class CsvFile:
    """Rows reach the disk case by case: an interrupted run keeps what it had.

    ``instead_of``: the (operator, case) pairs of this run, to keep what the file has of others. None: a new file.
    """

    def __init__(self, path: Path, instead_of: Collection[tuple[str, str]] | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept: list[dict[str, Any]] = []
        if instead_of is not None and path.exists():
            with path.open(newline="") as file:
                kept = [row for row in csv.DictReader(file) if (row["op"], row["case"]) not in instead_of]
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS, restval="")
        self._writer.writeheader()
        self.write(kept)

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        self._writer.writerows(rows)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _microseconds(value: float) -> str:
    us = value * 1e6
    return f"{us:,.0f}" if us >= 1000 else f"{us:.1f}"


def _scaled(rate: float, unit: str) -> str:
    """Three digits and the unit of a size that suits them."""
    if unit == "TFLOP/s" and rate < 1:
        rate, unit = rate * 1000, "GFLOP/s"
    return f"{rate:.0f} {unit}" if rate >= 100 else f"{rate:.3g} {unit}"


class Table:
    """Prints a line per case and pass, as soon as it is known.

    The columns after the pass are: opzoo's median and its p20 to p80, useful work per second, share of
    the floor, the peer's median, how many times opzoo's time the peer takes, extra memory (opzoo's,
    the peer's), the gate's error.
    """

    HEADINGS = (("opzoo us", 11), ("p20..p80", 23), ("rate", 17), ("floor", 7), ("peer us", 11), ("ratio", 8))
    MEMORY = (("extra MiB", 11), ("peer MiB", 11))

    def __init__(self, out: TextIO, case_width: int, machine: Machine, *, overhead: bool, memory: bool) -> None:
        self._out = out
        self._case_width = max(case_width, len("case"))
        self._machine = machine
        self._op = ""
        self._headings = [h for h in self.HEADINGS if not (overhead and h[0] in ("rate", "floor"))]
        if memory and not overhead:
            self._headings += self.MEMORY

    def _line(self, case: str, what: str, cells: dict[str, str], tail: str) -> None:
        body = "".join(f"{cells.get(name, ''):>{width}}" for name, width in self._headings)
        print(f"  {case:<{self._case_width}}  {what:<8}{body}  {tail}".rstrip(), file=self._out, flush=True)

    def add(self, result: Result) -> None:
        if result.op != self._op:
            self._op = result.op
            print(f"\n{result.op}", file=self._out)
            self._line("case", "pass", {name: name for name, _ in self._headings}, "gate error, notes")
        if result.status != "ok":
            self._line(result.case, result.status, {}, result.message)
            return
        peers = {timing.what: timing for timing in result.timings if timing.impl != "opzoo"}
        for timing in result.timings:
            if timing.impl == "opzoo":
                self._line(result.case, timing.what, *self._cells(timing, peers.get(timing.what), result))

    def _cells(self, ours: Timing, peer: Timing | None, result: Result) -> tuple[dict[str, str], str]:
        seconds = ours.seconds
        cells = {
            "opzoo us": _microseconds(seconds.p50),
            "p20..p80": f"{_microseconds(seconds.p20)}..{_microseconds(seconds.p80)}",
        }
        if ours.work:
            cells["rate"] = _scaled(*throughput(self._machine, ours))
            cells["floor"] = f"{floor_share(self._machine, ours):.1%}"
        if ours.peak_bytes is not None:
            cells["extra MiB"] = f"{ours.peak_bytes / 2**20:,.1f}"
        note = result.message
        if peer:
            cells["peer us"] = _microseconds(peer.seconds.p50)
            cells["ratio"] = f"{ours.ratio:.2f}x"
            note = f"vs {peer.impl}"
            if peer.peak_bytes is not None:
                cells["peer MiB"] = f"{peer.peak_bytes / 2**20:,.1f}"
        return cells, f"{result.gate_error:.1e}  {note}"


def plot(results: list[Result], target: Path, machine: Machine) -> list[Path]:
    """Bars of the ratios, grouped by case: one figure per operator in a folder, or all in one file.

    Args:
        results: of one run; cases without a ratio are left out.
        target: a folder (existing, or a name without suffix) or a file in a format matplotlib knows.
        machine: named in the title.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_op: dict[str, list[Result]] = {}
    for result in results:
        if any(timing.ratio for timing in result.timings):
            by_op.setdefault(result.op, []).append(result)
    folder = target.is_dir() or not target.suffix
    figures = [(target / f"{op}.svg", [op]) for op in by_op] if folder else [(target, list(by_op))]
    written = []
    for path, ops in figures:
        if not ops:
            continue
        heights = [1.2 + 0.35 * len(by_op[op]) for op in ops]
        figure, axes = pyplot.subplots(
            len(ops), figsize=(9, sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
        )
        for axis, op in zip(axes[:, 0], ops, strict=True):
            _bars(axis, op, by_op[op])
        figure.suptitle(f"{machine.name}, torch {torch.__version__}")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        pyplot.close(figure)
        written.append(path)
    return written


def _bars(axis: Any, op: str, results: list[Result]) -> None:
    passes = list(dict.fromkeys(t.what for result in results for t in result.timings))
    thickness = 0.8 / len(passes)
    for i, what in enumerate(passes):
        ratios = [next((t.ratio for t in r.timings if t.what == what and t.ratio), 0.0) for r in results]
        bars = axis.barh([y + i * thickness for y in range(len(results))], ratios, thickness, label=what)
        axis.bar_label(bars, labels=[f" {ratio:.2f}x" if ratio else "" for ratio in ratios], fontsize=7)
    axis.set_yticks([y + 0.4 - thickness / 2 for y in range(len(results))], [r.case for r in results], fontsize=8)
    axis.invert_yaxis()
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_xlabel("peer's time / opzoo's time")
    axis.set_title(op)
    axis.margins(x=0.08)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
