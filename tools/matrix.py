"""One wheel in many environments: the promise of the stable ABI, tried.

    python tools/matrix.py [--wheel FILE] [--suite] [--csv FILE] [PYTHON/TORCH[/NUMPY] ...]

Each row, ``3.11/torch==2.13.0`` or ``3.10/torch==2.11.0/numpy<2`` for example, becomes a clean virtual
environment with that torch, that numpy or none, and the wheel (``--no-deps``), in which ``tools/smoke.py``
runs from an empty directory. PYTHON is a version found as ``python3.11`` on PATH, or a path. With
``--suite`` the tests of the installed package run there too, beside torchvision where there is a numpy.
An environment is deleted before the next is made. Prints a table; exit status 1 on any failure.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEFAULTS = (
    "3.10/torch==2.11.0/numpy<2",
    "3.11/torch==2.14.1/numpy>=2",
    "3.11/torch==2.13.0",
    "3.12/torch==2.12.0/numpy>=2",
    "3.13/torch==2.14.1/numpy>=2",
)
# Tests of the checkout, not of the package in it.
CHECKOUT = {"repo", "docs", "learn", "scaffold", "tools", "bench", "demo", "demo_processes"}
SUITE_NEEDS = ["pytest", "pytest-timeout", "hypothesis", "expecttest"]


@dataclass
class Row:
    python: str
    torch: str
    numpy: str = ""
    result: str = "not run"
    ok: bool = False
    seconds: float = 0.0
    passed: int = 0
    failed: int = 0
    skipped: int = 0


def parse(spec: str) -> Row:
    """``3.11/torch==2.13.0/numpy<2``; the path of an interpreter may hold slashes itself."""
    found = re.fullmatch(r"(.+?)/(torch[^/]*)(?:/(numpy[^/]*))?", spec)
    if not found:
        raise argparse.ArgumentTypeError(f"expected PYTHON/TORCH, such as 3.11/torch==2.14.1, got {spec!r}")
    return Row(found[1], found[2], found[3] or "")


def interpreter(python: str) -> str | None:
    """The interpreter behind a version or a path, if it starts and is of that version."""
    is_version = python.replace(".", "").isdigit()
    found = shutil.which(f"python{python}" if is_version else python)
    if found is None:
        return None
    probe = [found, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    run = subprocess.run(probe, capture_output=True, text=True)
    return found if run.returncode == 0 and (not is_version or run.stdout.strip() == python) else None


def build_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    subprocess.run(command, cwd=ROOT, check=True)
    (wheel,) = folder.glob("opzoo-*.whl")
    return wheel


def clean_environment() -> dict[str, str]:
    """Nothing of the checkout or of this interpreter reaches the environments."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {key: value for key, value in os.environ.items() if key not in hidden} | {"PYTHONNOUSERSITE": "1"}


def suite(folder: Path) -> list[str]:
    """Copy the tests away from the checkout, whose ``opzoo`` would be found before the wheel's; pytest's arguments."""
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    files = sorted(path.name for path in (folder / "tests").glob("test_*.py"))
    chosen = [f"tests/{name}" for name in files if name.removeprefix("test_").removesuffix(".py") not in CHECKOUT]
    return ["-q", "-p", "no:cacheprovider", "--no-header", "-m", "not gpu", *chosen]


def counts(output: str) -> dict[str, int]:
    """Of pytest's last line; an error of collection is a failure."""
    lines = output.strip().splitlines()
    found = {name: int(number) for number, name in re.findall(r"(\d+) (\w+)", lines[-1] if lines else "")}
    failed = found.get("failed", 0) + found.get("error", 0) + found.get("errors", 0)
    return {"passed": found.get("passed", 0), "failed": failed, "skipped": found.get("skipped", 0)}


def steps_of(row: Row, python: str, wheel: Path, folder: Path, pip_options: list[str]) -> list[tuple[str, list[str]]]:
    inside = str(folder / "venv" / "bin" / "python")
    pip = [inside, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    packages = [row.torch, *([row.numpy] if row.numpy else [])]
    return [
        ("venv", [python, "-m", "venv", str(folder / "venv")]),
        ("install torch", [*pip, *pip_options, *packages]),
        ("install wheel", [*pip, "--no-deps", "--no-index", str(wheel)]),
        ("smoke", [inside, str(shutil.copy(ROOT / "tools" / "smoke.py", folder))]),
    ]


def try_one(row: Row, wheel: Path, folder: Path, pip_options: list[str], with_suite: bool) -> None:
    python = interpreter(row.python)
    if python is None:
        row.result = f"no python {row.python} here; a path works too"
        return
    (folder / "empty").mkdir(parents=True)  # a script's own folder is on its path, and so is the current one
    steps = steps_of(row, python, wheel, folder, pip_options)
    if with_suite:
        install = steps[1][1]
        install += SUITE_NEEDS + (["torchvision"] if row.numpy else [])
        steps.append(("suite", [steps[-1][1][0], "-m", "pytest", *suite(folder)]))
    for step, command in steps:
        place = folder if step == "suite" else folder / "empty"
        run = subprocess.run(command, cwd=place, env=clean_environment(), capture_output=True, text=True)
        told = step in ("smoke", "suite") and run.stdout.strip()
        lines = (run.stdout if told else run.stderr).strip().splitlines()
        if step == "suite":
            vars(row).update(counts(run.stdout))
        if run.returncode != 0:
            print(f"--- {row.python} {row.torch}, {step}:\n{run.stdout[-20000:]}{run.stderr[-3000:]}", file=sys.stderr)
            row.result = f"{step}: {lines[-1] if lines else f'exit status {run.returncode}'}"
            return
        row.result = lines[-1] if lines else ""
    row.ok = True


def table(rows: list[Row]) -> str:
    lines = ["| python | torch | numpy | | seconds | result |", "|---|---|---|---|---:|---|"]
    for row in rows:
        verdict = "ok" if row.ok else "FAIL"
        lines.append(
            f"| {row.python} | {row.torch} | {row.numpy or 'none'} | {verdict} | {row.seconds:.0f} | {row.result} |"
        )
    return "\n".join(lines)


def write_csv(path: Path, rows: list[Row]) -> None:
    """The rows of this run, and those of earlier runs for other environments."""
    key = ("python", "torch", "numpy")
    merged: dict[tuple[str, ...], dict[str, object]] = {}
    if path.exists():
        with path.open(newline="") as file:
            merged = {tuple(old[k] for k in key): dict(old) for old in csv.DictReader(file)}
    for row in rows:
        values = asdict(row) | {"numpy": row.numpy or "none", "seconds": round(row.seconds)}
        merged[tuple(str(values[k]) for k in key)] = values
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(Row("", ""))), lineterminator="\n")
        writer.writeheader()
        writer.writerows(merged[k] for k in sorted(merged))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Install one wheel beside several versions of torch and Python")
    parser.add_argument(
        "rows", nargs="*", type=parse, metavar="PYTHON/TORCH[/NUMPY]", help=f"default: {' '.join(DEFAULTS)}"
    )
    parser.add_argument("--wheel", type=Path, help="use this wheel instead of building one")
    parser.add_argument("--suite", action="store_true", help="run the tests there, not only tools/smoke.py")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there, merged with its other rows")
    parser.add_argument(
        "--pip", action="append", default=[], metavar="OPTION", help="pass to pip when installing torch"
    )
    options = parser.parse_args(arguments)
    rows = options.rows or [parse(spec) for spec in DEFAULTS]
    with tempfile.TemporaryDirectory(prefix="opzoo-matrix-") as name:
        work = Path(name)
        wheel = options.wheel.resolve() if options.wheel else build_wheel(work)
        print(f"wheel {wheel.name}, {wheel.stat().st_size / 1024:.0f} KiB")
        for number, row in enumerate(rows):
            start = time.monotonic()
            try_one(row, wheel, work / str(number), options.pip, options.suite)
            row.seconds = time.monotonic() - start
            shutil.rmtree(work / str(number), ignore_errors=True)
            if options.csv:
                write_csv(options.csv, [row])
    print(table(rows))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
