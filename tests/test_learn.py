"""The programs of docs/learn/code: plain nvcc builds each, and each checks its own result where a GPU is."""

from __future__ import annotations

import csv
import importlib.util
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from test_repo import CSRC, ROOT, _nvcc

LEARN = ROOT / "docs" / "learn"
CODE = LEARN / "code"
PROGRAMS = sorted(path.stem for path in CODE.glob("*.cu"))
PUZZLES = sorted(path.stem for path in (CODE / "puzzles").glob("*.cu"))
SKIPPED = 77

needs_nvcc = pytest.mark.skipif(_nvcc() is None, reason="needs nvcc, the CUDA compiler")


def _compile(source: Path, out: Path, *flags: str) -> str:
    nvcc = _nvcc()
    assert nvcc is not None
    command = [nvcc, "-std=c++17", "-arch=sm_90a", "-Werror", "all-warnings", f"-I{CSRC}", f"-I{CODE}", *flags]
    run = subprocess.run([*command, "-o", str(out), str(source)], capture_output=True, text=True)
    return "" if run.returncode == 0 else run.stderr[-4000:]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every program, two at a time. Without a GPU nothing runs, and the device code need not be good."""
    folder = tmp_path_factory.mktemp("learn")
    flags = ["-O3"] if torch.cuda.is_available() else ["-O1", "-Xptxas=-O1"]
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(lambda name: _compile(CODE / f"{name}.cu", folder / name, *flags), PROGRAMS))
    assert not any(errors), "\n".join(errors)
    return folder


def test_every_step_is_there() -> None:
    assert [name.split("_")[:2] for name in PROGRAMS if name.startswith("add")] == [
        ["add", str(i)] for i in range(1, 7)
    ]
    assert [name.split("_")[:2] for name in PROGRAMS if name.startswith("matmul")] == [
        ["matmul", str(i)] for i in range(1, 8)
    ]


@needs_nvcc
@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: str, built: Path) -> None:
    run = subprocess.run([str(built / program)], capture_output=True, text=True)
    if run.returncode == SKIPPED:
        assert run.stdout.startswith("SKIPPED") and "ms" not in run.stdout
        assert not torch.cuda.is_available() or "compute capability" in run.stdout
    else:
        assert run.returncode == 0 and measure().parse(program, run.stdout), run.stdout + run.stderr


@needs_nvcc
@pytest.mark.parametrize("puzzle", PUZZLES)
def test_puzzle(puzzle: str, tmp_path: Path) -> None:
    """A puzzle compiles without a warning and, where a GPU is, gives the wrong result it promises."""
    program = tmp_path / puzzle
    source = CODE / "puzzles" / f"{puzzle}.cu"
    if not torch.cuda.is_available():
        assert not _compile(source, program, "-c")
        return
    assert not _compile(source, program)
    run = subprocess.run([str(program)], capture_output=True, text=True)
    assert run.returncode == 1, run.stdout + run.stderr


@needs_nvcc
@pytest.mark.gpu
@pytest.mark.parametrize(("program", "line"), [("add_3_grid", "if (i < n) "), ("matmul_3_shared_tile", "sum += ")])
def test_a_wrong_kernel_prints_no_time(program: str, line: str, tmp_path: Path) -> None:
    """The check of the harness itself: a kernel that skips work ends with FAILED, before any time."""
    source = (CODE / f"{program}.cu").read_text(encoding="utf-8")
    wrong = source.replace(line, {"if (i < n) ": "if (i < n - 1) ", "sum += ": "if (k != 3) sum += "}[line])
    assert wrong != source
    (tmp_path / "wrong.cu").write_text(wrong, encoding="utf-8")
    nvcc = _nvcc()
    assert nvcc is not None
    flags = ["-std=c++17", "-arch=native", f"-I{CODE}", "-o", str(tmp_path / "wrong")]
    subprocess.run([nvcc, *flags, str(tmp_path / "wrong.cu")], check=True)
    run = subprocess.run([str(tmp_path / "wrong")], capture_output=True, text=True)
    assert run.returncode == 1 and "FAILED" in run.stdout and " ms " not in run.stdout


# The table of figures


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"learn_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@lru_cache
def measure() -> ModuleType:
    return _module(CODE / "measure.py")


def test_figures_are_parsed_and_written(tmp_path: Path) -> None:
    output = (
        "GPU: Some GPU, CUDA 13.0\n16 elements of fp32\n"
        "block 64                   0.5000 ms      10.00 GB/s  50.00 % of 20\n"
        "block 128                  0.2500 ms      20.00 GB/s\n"
    )
    figures = measure().parse("add_3_grid", output)
    assert [(f.variant, f.ms, f.share_percent, f.limit) for f in figures] == [
        ("block 64", "0.5000", "50.00", "20"),
        ("block 128", "0.2500", "", ""),
    ]
    measure().write(figures, "abc", tmp_path)
    page = (tmp_path / "figures.md").read_text(encoding="utf-8")
    assert "| `add_3_grid` | block 128 | 0.25 | 20 GB/s | - |" in page and "abc" in page
    assert "| `add_3_grid` | 0.5 | 0.25 | - | - | - | - |" in page
    assert measure().read(tmp_path) == (figures, "abc")
    assert len((tmp_path / "figures.csv").read_text(encoding="utf-8").splitlines()) == 3
    with pytest.raises(ValueError, match="not a line of results"):
        measure().parse("add_3_grid", output + "FAILED\n")


@pytest.mark.skipif(not (CODE / "figures.csv").exists(), reason="not measured yet")
def test_figures_are_of_these_programs() -> None:
    rows = (CODE / "figures.csv").read_text(encoding="utf-8").splitlines()
    assert {row.split(",")[0] for row in rows[1:]} == set(measure().programs())


# A figure in a lesson comes from a committed file. Tables are included from generated pages by their
# comments; one that is typed stands below a link to its CSV; of figures in words the unit is looked up.


def test_generated_tables_are_what_their_files_say() -> None:
    tables = _module(ROOT / "tools" / "benchmark_tables.py")
    again = "run python docs/learn/code/measure.py --tables and python tools/benchmark_tables.py"
    assert (CODE / "figures.md").read_text(encoding="utf-8") == measure().table(*measure().read(CODE)), again
    assert (ROOT / "docs/benchmarks/README.md").read_text(encoding="utf-8") == tables.all_rows(), again
    for page in tables.HEADINGS:
        assert (ROOT / page).read_text(encoding="utf-8") == tables.front_page(page), again


def _cells(line: str) -> list[str]:
    return [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]


def typed_tables(text: str) -> list[tuple[str, list[list[str]]]]:
    """Tables outside code: the CSV that the paragraph above links to, or nothing, and the rows, headings first."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found, above = [], ""
    for part in re.split(r"\n\s*\n", outside):
        if part.startswith("|"):
            head, _, *rows = part.strip().splitlines()
            source = re.search(r"\]\(([^)]+\.csv)\)", above)
            found.append((source[1] if source else "", [_cells(line) for line in (head, *rows)]))
        above = part
    return found


def _untrue_rows(head: list[str], rows: list[list[str]], source: list[dict[str, str]]) -> list[list[str]]:
    """Headings are columns of the CSV."""
    known = [[row.get(column, "") for column in head] for row in source]
    return [row for row in rows if row not in known]


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


PAGES = sorted([*LEARN.glob("*.md"), *(LEARN / "zh").glob("*.md")])
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(LEARN)))


@each_page
def test_typed_tables(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for source, (head, *rows) in typed_tables(text):
        if source:
            assert not _untrue_rows(head, rows, _read(page.parent / source))
    measured = re.search(r"^## (?:Measured|实测)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if measured:
        assert all(source for source, _ in typed_tables(measured[1])), "a table without a link to its CSV above"


FIGURE = re.compile(r"(?<![\w.])(\d[\d,]*)(\.\d+)? ?(ms|us|µs|GB/s|TB/s|TFLOP/s|x)(?![\w/])")


@lru_cache
def _recorded() -> dict[str, set[float]]:
    """Every committed time, rate, limit and ratio, by unit."""
    found: dict[str, set[float]] = {unit: set() for unit in ("ms", "us", "GB/s", "TFLOP/s", "x")}
    for row in _read(CODE / "figures.csv"):
        found["ms"].add(float(row["ms"]))
        found[row["unit"]] |= {float(row[column]) for column in ("rate", "limit") if row[column]}
    for path in (ROOT / "docs" / "benchmarks").glob("*.csv"):
        for row in _read(path):
            if row["metric"] in ("time", "throughput"):
                found[row["unit"]].add(float(row["p50"]))
            if row["ratio"]:
                found["x"].add(float(row["ratio"]))
    return found


def invented(text: str, recorded: dict[str, set[float]]) -> list[str]:
    """Figures of a text that are no rounding of a recorded one. A whole number with x is a size, not a ratio."""
    wrong = []
    for match in FIGURE.finditer(text):
        whole, fraction, unit = match[1].replace(",", ""), match[2] or "", match[3].replace("µ", "u")
        if unit == "x" and not fraction:
            continue
        allowed = 0.5001 * 10.0 ** -max(len(fraction) - 1, 0)
        if not any(abs(float(whole + fraction) - value) <= allowed for value in recorded.get(unit, ())):
            wrong.append(match[0])
    return wrong


@each_page
def test_figures_in_words(page: Path) -> None:
    assert not invented(page.read_text(encoding="utf-8"), _recorded())


@each_page
def test_recorded_output(page: Path) -> None:
    """What a lesson shows as the output of a program is what was measured with it."""
    figures, _ = measure().read(CODE)
    text = page.read_text(encoding="utf-8")
    shown = re.findall(r"(.*?)^```text\n(GPU: .*?)^```", text, re.MULTILINE | re.DOTALL)
    assert shown or page.name != "add.md"
    for before, output in shown:
        program = re.findall(r"^build/(\w+)$", before, re.MULTILINE)[-1]
        assert measure().parse(program, output) == [figure for figure in figures if figure.program == program]


@pytest.mark.parametrize("program", PROGRAMS)
def test_figures_in_programs(program: str) -> None:
    """What the head of a program says it takes is what that program took."""
    recorded: dict[str, set[float]] = {}
    for row in _read(CODE / "figures.csv"):
        if row["program"] == program:
            for unit, value in (("ms", row["ms"]), (row["unit"], row["rate"])):
                recorded.setdefault(unit, set()).add(float(value))
    assert not invented((CODE / f"{program}.cu").read_text(encoding="utf-8"), recorded)


def test_wrong_figures_are_found() -> None:
    page = "See [a](b.csv):\n\n| n | ms |\n| --- | --- |\n| `2` | 5 |\n| 3 | 7 |\n\nno link\n\n| n |\n| --- |\n| 1 |\n"
    (source, (head, *rows)), (no_source, _) = typed_tables(page)
    assert source == "b.csv" and not no_source
    assert _untrue_rows(head, rows, [{"n": "2", "ms": "5", "c": "x"}, {"n": "3", "ms": "8"}]) == [["3", "7"]]
    text = "1.25 ms, 1.3 ms, 1.4 ms, 4 x 4, 2.0x, 2.1x, 4,814 GB/s, 5 TB/s, 2^31 msb"
    assert invented(text, {"ms": {1.2522}, "x": {2.04}, "GB/s": {4814.0}}) == ["1.4 ms", "2.1x", "5 TB/s"]


# The lessons


def _lessons() -> list[str]:
    return sorted(path.name for path in LEARN.glob("*.md"))


def _shape(page: Path) -> tuple[list[int], list[str], list[str]]:
    """Levels of the headings, blocks of code without comments, links to pictures and quoted sources."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(.*?)^```", text, re.MULTILINE | re.DOTALL)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    code = [re.sub(r"\s*(#|//) .*", "", b) for b in blocks if not b.startswith(("{figure", "{toctree", "text"))]
    code = [block.replace("../", "") for block in code]
    levels = [len(marks) for marks in re.findall(r"^(#+) ", outside, re.MULTILINE)]
    return levels, code, re.findall(r"pictures/[\w-]+\.svg", outside)


@pytest.mark.parametrize("name", _lessons())
def test_both_languages_agree(name: str) -> None:
    """A Chinese page has the English page's headings and code; its words are its own."""
    translated = LEARN / "zh" / name
    assert translated.exists(), f"no Chinese page of {name}"
    assert _shape(LEARN / name) == _shape(translated)
    assert len(re.findall(r"[\u4e00-\u9fff]", translated.read_text(encoding="utf-8"))) > 100


def test_no_page_without_english() -> None:
    assert {path.name for path in (LEARN / "zh").glob("*.md")} <= set(_lessons())
