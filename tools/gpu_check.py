"""What CI cannot run: everything that needs a GPU, and the tables it leaves.

    python tools/gpu_check.py [--out FOLDER] [STEP ...]

    suite        the tests of CUDA kernels, on --workers processes
    memcheck, racecheck, initcheck, synccheck
                 compute-sanitizer's tool over tests/every_kernel.py
    coverage     whether tests/every_kernel.py launches every kernel of the binary
    campaign     50,000 random calls on CUDA
    determinism  every operator 100 times, to the last bit
    large        tensors above 2^31 elements
    bench        every case of opzoo.bench beside its peer

Without STEP, all of them. Each leaves its output in FOLDER/<step>.txt and, where a page is written from it, a row in a
copy of the CSV file of docs/ in FOLDER. A step that outlasts its limit counts as failed. Prints a line per step;
exit status 1 if one failed. Afterwards: copy the CSV files to docs/benchmarks and docs/reliability, and run
tools/benchmark_tables.py, tools/reliability.py and ``make pictures``.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
REPORTS = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)")
FIELDS = ("date", "commit", "device", "tool", "calls", "reports")


@dataclass
class Step:
    command: list[str]
    limit: int  # seconds


def steps(out: Path, workers: int, scale: float) -> dict[str, Step]:
    python, tests = sys.executable, "tests/"
    spread = ["-n", str(workers)] if workers > 1 and importlib.util.find_spec("xdist") else []
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    found = {"suite": Step([*pytest, *spread, "--durations=10", tests], 900)}
    for tool in SANITIZERS:
        sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", "--print-limit", "20"]
        found[tool] = Step([*sanitizer, python, f"{tests}every_kernel.py"], 900)
    report = ["--report", str(out / "campaign.csv")]
    cases = str(int(50_000 * scale))
    found["coverage"] = Step([python, f"{tests}every_kernel.py", "--coverage"], 300)
    found["campaign"] = Step([python, f"{tests}campaign.py", "--device", "cuda", "--cases", cases, *report], 1800)
    report = ["--report", str(out / "determinism.csv")]
    found["determinism"] = Step([python, f"{tests}determinism.py", "--device", "cuda", *report], 900)
    found["large"] = Step([*pytest, "--runslow", f"{tests}test_large.py"], 1800)
    found["bench"] = Step([python, "-m", "opzoo.bench", "--csv", str(out / "benchmark.csv")], 1800)
    return found


def device_and_commit() -> tuple[str, str]:
    sys.path.insert(0, str(ROOT / "tests"))
    import torch
    from campaign import commit

    return torch.cuda.get_device_name(), commit()


def write_row(path: Path, tool: str, text: str) -> None:
    """The counts of a sanitizer's run, as docs/reliability/compute_sanitizer.csv has them."""
    reports, calls = REPORTS.findall(text), re.findall(r"^(\d+) calls on", text, re.MULTILINE)
    if not reports or not calls:
        return  # it did not get to the end; the step has failed
    device, commit = device_and_commit()
    row = (datetime.date.today().isoformat(), commit, device, tool, calls[-1], str(sum(map(int, reports))))
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(FIELDS)
        writer.writerow(row)


def run(name: str, step: Step, out: Path) -> bool:
    started = time.monotonic()
    log = out / f"{name}.txt"
    with log.open("w") as file:
        try:
            status = subprocess.run(
                step.command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=step.limit,
            ).returncode
        except subprocess.TimeoutExpired:
            file.write(f"\nended after its limit of {step.limit} s\n")
            status = -1
    text = log.read_text(errors="replace")
    if name in SANITIZERS:
        write_row(out / "compute_sanitizer.csv", name, text)
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "no output")
    print(f"{name:12} {'ok' if status == 0 else 'FAILED':6} {time.monotonic() - started:6.0f} s  {last}", flush=True)
    return status == 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("steps", nargs="*", metavar="STEP")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the campaign's cases")
    args = parser.parse_args(argv)
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    known = steps(args.out, args.workers, args.scale)
    wrong = [name for name in args.steps if name not in known]
    if wrong:
        parser.error(f"STEP must be one of {', '.join(known)}, got {wrong[0]}")
    if missing := [tool for tool in ("compute-sanitizer", "cuobjdump") if shutil.which(tool) is None]:
        print(f"not on PATH: {', '.join(missing)}; it comes with the CUDA toolkit", file=sys.stderr)
    failed = [name for name in args.steps or known if not run(name, known[name], args.out)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
