"""``python tools/sanitize.py``: the CPU tests and the hostile-input campaigns under ASan and UBSan.

Builds ``_C`` for the CPU into ``build/sanitize``, beside the one that is installed, and runs with it,
for every operator or those named:

    1. the operator's own tests and its part of the contract suite;
    2. ``tests/hostility.py``: every attempt with one argument wrong;

and, over all operators, ``--cases`` random calls of ``tests/campaign.py``, whose answers are compared as well.

Python and torch are not instrumented, so the runtime of AddressSanitizer is preloaded. It replaces
malloc, which lets it see a read or write of ``_C`` beyond any tensor that torch allocated. Leaks are not
looked for (Python keeps memory until it ends). A report ends its process, and any report, failed test
or failed attempt ends this script with status 1.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "sanitize"
LIBRARY = BUILD / "lib"
# Left out: what compiles with inductor (processes of its own compilers run under the preload), what
# reads the tracebacks of children, and the attempts and poisoned runs, which are processes of their own.
LEFT_OUT = "not compile and not export and not inductor and not hostile and not poisoned and not dynamo"


def operators() -> list[str]:
    csrc = ROOT / "opzoo" / "csrc"
    return sorted(folder.name for folder in csrc.iterdir() if folder.is_dir() and folder.name != "common")


def runtime() -> str:
    """The preloaded libraries. libstdc++ comes along: ASan looks up the real __cxa_throw when it starts."""
    compiler = os.environ.get("CXX", "g++")
    paths = []
    for name in ("libasan.so", "libstdc++.so.6"):
        path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        if not Path(path.stdout.strip()).is_absolute():
            sys.exit(f"{compiler} has no {name}: install the sanitizer runtimes of GCC, or set CXX to a g++ with them.")
        paths.append(path.stdout.strip())
    return " ".join(paths)


def build() -> None:
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(BUILD), "--build-lib", str(LIBRARY)]
    # Stale Python files would be tested instead of the tree's; the objects are kept.
    shutil.rmtree(LIBRARY, ignore_errors=True)
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "OPZOO_SANITIZE": "1"}, capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stdout[-8000:] + run.stderr[-4000:])


def environment(reports: Path) -> dict[str, str]:
    """Of a process that loads the sanitized ``_C``. ASan's reports go to files, whatever becomes of stderr.

    GCC's UBSan writes to stderr alone; the status of the process that died of a report is non-zero in any case.
    """
    log = f"log_path={reports / 'report'}"
    return {
        **os.environ,
        "PYTHONPATH": str(LIBRARY),
        "LD_PRELOAD": runtime(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_SHOW_CPP_STACKTRACES": "0",
        # A size no machine has is refused as malloc refuses it, which torch turns into an error.
        "ASAN_OPTIONS": f"detect_leaks=0:allocator_may_return_null=1:exitcode=99:{log}",
        "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=99",
    }


def commands(ops: list[str], cases: int, seed: int) -> list[list[str]]:
    tests = ROOT / "tests"
    own = sorted(str(path) for op in ops for path in tests.glob(f"test_{op}*.py"))
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    chosen = f"({' or '.join(ops)}) and {LEFT_OUT}"
    suite = [*pytest, "-c", str(ROOT / "pyproject.toml"), "-k", chosen, *own, str(tests / "test_contract.py")]
    hostility = [[sys.executable, str(tests / "hostility.py"), op, "cpu"] for op in ops]
    campaign = [sys.executable, str(tests / "campaign.py"), "--cases", str(cases), "--seed", str(seed)]
    return [suite, *hostility, campaign]


def write_report(path: Path, ops: int, cases: int, reports: int, failed: int) -> None:
    """One more row."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    row = {"date": datetime.date.today().isoformat(), "commit": head.stdout.strip(), "operators": ops}
    row |= {"campaign cases": cases, "reports": reports, "failed commands": failed}
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def is_report(text: str) -> bool:
    return "ERROR: AddressSanitizer" in text or "runtime error:" in text or "CHECK failed" in text


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", help="operators (default: all)")
    parser.add_argument("--cases", type=int, default=20_000, help="random calls of the campaign")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="CSV file to add the counts to")
    options = parser.parse_args(arguments)
    unknown = set(options.ops) - set(operators())
    if unknown:
        parser.error(f"no such operator: {sorted(unknown)}; there are {operators()}")
    build()
    failed = 0
    with tempfile.TemporaryDirectory() as reports:
        for command in commands(options.ops or operators(), options.cases, options.seed):
            # From the build's folder: `python -m pytest` looks for opzoo where it stands.
            failed += subprocess.run(command, cwd=LIBRARY, env=environment(Path(reports))).returncode != 0
        # A refused allocation leaves a file as well, with one warning in it.
        texts = [path.read_text(errors="replace") for path in sorted(Path(reports).iterdir())]
        found = [text for text in texts if is_report(text)]
    print("\n".join(found))
    print(f"{len(found)} reports in files, {failed} commands failed")
    if options.report:
        write_report(options.report, len(options.ops or operators()), options.cases, len(found), failed)
    return 1 if found or failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
