"""One wheel in many environments: the promise of the stable ABI, tried.

    python tools/matrix.py [--wheel FILE] [PYTHON/TORCH ...]

Each PYTHON/TORCH, ``3.11/torch==2.13.0`` for example, becomes a clean virtual environment with that
torch and the wheel (``--no-deps``), in which ``tools/smoke.py`` runs from an empty directory. PYTHON
is a version found as ``python3.11`` on PATH, or a path. Prints a table; exit status 1 on any failure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEFAULTS = ("3.11/torch==2.14.1", "3.11/torch==2.13.0", "3.12/torch==2.11.0")


@dataclass
class Row:
    python: str
    torch: str
    result: str = "not run"
    ok: bool = False
    seconds: float = 0.0


def parse(spec: str) -> Row:
    """``3.11/torch==2.13.0``; the path of an interpreter may hold slashes itself."""
    python, slash, torch = spec.rpartition("/")
    if not slash or not python or not torch.startswith("torch"):
        raise argparse.ArgumentTypeError(f"expected PYTHON/TORCH, such as 3.11/torch==2.14.1, got {spec!r}")
    return Row(python, torch)


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


def try_one(row: Row, wheel: Path, folder: Path, pip_options: list[str]) -> None:
    python = interpreter(row.python)
    if python is None:
        row.result = f"no python {row.python} here; a path works too"
        return
    home, empty = folder / "venv", folder / "empty"
    empty.mkdir(parents=True)
    inside = str(home / "bin" / "python")
    smoke = shutil.copy(ROOT / "tools" / "smoke.py", folder / "smoke.py")  # a script's folder is on its path
    pip = [inside, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    steps = [
        ("venv", [python, "-m", "venv", str(home)]),
        ("install torch", [*pip, *pip_options, row.torch]),
        ("install wheel", [*pip, "--no-deps", "--no-index", str(wheel)]),
        ("smoke", [inside, str(smoke)]),
    ]
    for step, command in steps:
        run = subprocess.run(command, cwd=empty, env=clean_environment(), capture_output=True, text=True)
        lines = (run.stdout if step == "smoke" and run.stdout.strip() else run.stderr).strip().splitlines()
        if run.returncode != 0:
            print(f"--- {row.python} {row.torch}, {step}:\n{run.stdout[-3000:]}{run.stderr[-3000:]}", file=sys.stderr)
            row.result = f"{step}: {lines[-1] if lines else f'exit status {run.returncode}'}"
            return
    row.ok, row.result = True, lines[-1]


def table(rows: list[Row]) -> str:
    lines = ["| python | torch | | seconds | result |", "|---|---|---|---:|---|"]
    for row in rows:
        verdict = "ok" if row.ok else "FAIL"
        lines.append(f"| {row.python} | {row.torch} | {verdict} | {row.seconds:.0f} | {row.result} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Install one wheel beside several versions of torch and Python")
    parser.add_argument("rows", nargs="*", type=parse, metavar="PYTHON/TORCH", help=f"default: {' '.join(DEFAULTS)}")
    parser.add_argument("--wheel", type=Path, help="use this wheel instead of building one")
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
            try_one(row, wheel, work / str(number), options.pip)
            row.seconds = time.monotonic() - start
            shutil.rmtree(work / str(number), ignore_errors=True)
    print(table(rows))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
