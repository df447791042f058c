"""Runs every program of this folder on the GPU and writes figures.md and figures.csv beside itself.

python docs/learn/code/measure.py [--commit HASH] [--no-build]
python docs/learn/code/measure.py --tables    # no GPU: figures.md anew from figures.csv
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
OPERATORS = ("add", "matmul")
SKIPPED = 77  # exit status of a program that this machine cannot run
LINE = re.compile(
    r"(?P<variant>\w+ \d+) +(?P<ms>[\d.]+) ms +(?P<rate>[\d.]+) (?P<unit>\S+)"
    r"(?: +(?P<share>[\d.]+) % of (?P<limit>\d+))?"
)
BLOCKS = (64, 128, 256, 512, 1024)
COLUMNS = ("program", "problem", "variant", "ms", "rate", "unit", "share_percent", "limit", "gpu", "cuda", "commit")


@dataclass
class Figure:
    program: str
    problem: str
    variant: str
    ms: str
    rate: str
    unit: str
    share_percent: str
    limit: str
    gpu: str
    cuda: str


def programs() -> list[str]:
    return sorted(path.stem for name in OPERATORS for path in HERE.glob(f"{name}_*.cu"))


def parse(program: str, output: str) -> list[Figure]:
    """The figures in what a program printed: a line about the GPU, one about the problem, one per variant."""
    first, second, *lines = output.strip().splitlines()
    gpu, cuda = re.fullmatch(r"GPU: (.*), CUDA ([\d.]+)", first).groups()  # type: ignore[union-attr]
    figures = []
    for line in lines:
        match = LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"{program}: not a line of results: {line!r}")
        figures.append(Figure(program, second, *(value or "" for value in match.groups()), gpu, cuda))
    return figures


def run(program: str) -> list[Figure]:
    process = subprocess.run([str(HERE / "build" / program)], capture_output=True, text=True)
    print(f"== {program}\n{process.stdout}{process.stderr}", end="", flush=True)
    if process.returncode == SKIPPED:
        return []
    if process.returncode != 0:
        raise SystemExit(f"{program} failed")
    return parse(program, process.stdout)


def table(figures: list[Figure], commit: str) -> str:
    """Markdown: of each operator's programs the best variant, then all of them."""
    gpus = sorted({f"{figure.gpu}, CUDA {figure.cuda}" for figure in figures})
    lines = [
        "# Measured",
        "",
        f"{'; '.join(gpus)}, commit {commit}. Medians, nothing in the L2 cache before a call, every result",
        "checked in the same run. The limit is what the GPU could do at its highest clock: bytes per second of its",
        "memory for add, multiply-adds of the ordinary cores for fp32 and of the tensor cores for bf16.",
        "",
    ]
    by_program = {f.program: [g for g in figures if g.program == f.program] for f in figures}
    for operator in OPERATORS:  # the lessons include what lies between the comments
        lines += [f"<!-- {operator} -->", "", "| program | best | ms | rate | % |", "| --- | --- | --- | --- | --- |"]
        for program, own in by_program.items():
            if program.startswith(operator):
                lines.append(f"| `{program}` | {row(min(own, key=lambda figure: float(figure.ms)))}")
        lines += ["", f"<!-- end of {operator} -->", ""]
    lines += ["## Block sizes", ""]
    lines += ["Milliseconds by threads per block. Last column: the slowest from 128 to 512 over the quickest.", ""]
    lines += ["<!-- blocks -->", "", *blocks(by_program), "", "<!-- end of blocks -->", ""]
    lines += ["## Every variant", ""]
    for program, own in by_program.items():
        lines += [f"### {program}", "", f"{own[0].problem}.", ""]
        lines += ["| variant | ms | rate | % of the limit |", "| --- | --- | --- | --- |"]
        lines += [f"| {row(figure)}" for figure in own]
        lines.append("")
    return "\n".join(lines)


def blocks(by_program: dict[str, list[Figure]]) -> list[str]:
    """A row for each program that was measured with several block sizes, a column for each size."""
    lines = [f"| program | {' | '.join(map(str, BLOCKS))} | 128 to 512 |", "| --- |" + " ---: |" * (len(BLOCKS) + 1)]
    for program, own in by_program.items():
        ms = {int(f.variant.split()[1]): float(f.ms) for f in own if f.variant.startswith("block ")}
        if len(ms) < 2:
            continue
        usual = [value for size, value in ms.items() if 128 <= size <= 512]
        spread = f"{max(usual) / min(usual):.2f}x" if len(usual) > 1 else "-"
        cells = [f"{ms[size]:.4g}" if size in ms else "-" for size in BLOCKS]
        lines.append(f"| `{program}` | {' | '.join(cells)} | {spread} |")
    return lines


def row(figure: Figure) -> str:
    share = f"{float(figure.share_percent):.3g}" if figure.share_percent else "-"
    return f"{figure.variant} | {float(figure.ms):.4g} | {float(figure.rate):.4g} {figure.unit} | {share} |"


def write(figures: list[Figure], commit: str, folder: Path) -> None:
    (folder / "figures.md").write_text(table(figures, commit), encoding="utf-8")
    with (folder / "figures.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([*vars(figure).values(), commit] for figure in figures)


def read(folder: Path) -> tuple[list[Figure], str]:
    """What write() put into figures.csv, and the commit it named."""
    with (folder / "figures.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [Figure(*(row[column] for column in COLUMNS[:-1])) for row in rows], rows[0]["commit"]


def head() -> str:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    return git.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="the commit to name in the tables; by default git's HEAD")
    parser.add_argument("--no-build", action="store_true", help="run what lies in build/")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the tables")
    parser.add_argument("--tables", action="store_true", help="run nothing: write figures.md from figures.csv")
    arguments = parser.parse_args()
    if arguments.tables:
        write(*read(arguments.out), arguments.out)
        return
    if not arguments.no_build:
        subprocess.run(["make", "-C", str(HERE), "-s"], check=True)
    commit = arguments.commit or head()
    figures: list[Figure] = []
    for program in programs():
        figures += run(program)
        if figures:
            write(figures, commit, arguments.out)
    if not figures:
        sys.exit("nothing was run: no GPU")


if __name__ == "__main__":
    main()
