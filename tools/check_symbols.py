"""What ``opzoo/_C.abi3.so`` asks of the machine it loads on, held to the promise of one binary for all.

    python tools/check_symbols.py [path to the .so]

The binary may need C functions of torch (``aoti_torch_*``, ``torch_*``), one of Python
(``PyModuleDef_Init``) and the C and C++ libraries. It may offer ``PyInit__C``. The CUDA functions of
torch must be weak, because a CPU-only torch lacks them. Exit status 1 and the offending symbols otherwise.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT = Path(__file__).resolve().parents[1] / "opzoo" / "_C.abi3.so"

SHIM = re.compile(r"(aoti_)?torch_[a-z0-9_]+$", re.IGNORECASE)
CUDA_SHIM = re.compile(r"aoti_torch_(get_current_cuda|cuda_|.*_cuda_stream)|torch_c10_cuda_|torch_get_.*cuda")
PYTHON = {"PyModuleDef_Init"}
# Resolved in every process, or absent in every process: the loader's and the profiler's own hooks.
LOADER = {"_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__", "__cxa_finalize"}
SYSTEM_VERSION = re.compile(r"@+(GLIBC|GLIBCXX|CXXABI|GCC)_")
# Mangled names of namespace std, of the C++ runtime and of operator new and delete.
STANDARD_CPP = re.compile(r"_Z(T[VISTC]|GV|GR|Z|L)*(N[VKOR]*)?(S[tabsiod]|10__cxxabiv1|9__gnu_cxx)|_Zn[wa]|_Zd[la]")
TORCH_CPP = re.compile(r"_Z.*(?:2at|3c10|5torch)(?:\d|[A-Z])")
NEEDED = {"libtorch.so"}
NEEDED_OK = re.compile(r"lib(torch|torch_cpu|stdc\+\+|gcc_s|m|c|rt|dl|pthread)\.so|ld-linux")
GLIBC = re.compile(r"@GLIBC_(\d+)\.(\d+)")


@dataclass
class Report:
    """Counts of what is fine, lines about what is not."""

    shims: int = 0
    system: int = 0
    weak_shims: int = 0
    unversioned: int = 0
    glibc: tuple[int, int] = (0, 0)
    problems: list[str] = field(default_factory=list)


def _undefined(report: Report, kind: str, name: str) -> None:
    bare, weak = name.partition("@")[0], kind in "wv"
    if SYSTEM_VERSION.search(name):
        report.system += 1
        if version := GLIBC.search(name):
            report.glibc = max(report.glibc, (int(version[1]), int(version[2])))
    elif bare in PYTHON or bare in LOADER:
        report.system += 1
    elif SHIM.match(bare):
        report.shims += 1
        if CUDA_SHIM.match(bare):
            report.weak_shims += weak
            if not weak:
                report.problems.append(f"must be weak, a CPU-only torch lacks it: {bare}")
    elif bare.startswith("_Z") and TORCH_CPP.match(bare):
        report.problems.append(f"C++ symbol of torch, its ABI changes between releases: {bare}")
    elif STANDARD_CPP.match(bare):
        report.unversioned += 1  # the linker took them from libtorch_cpu, which exports copies
    elif bare.startswith(("Py", "_Py")):
        report.problems.append(f"Python symbol: {bare}")
    elif bare.startswith(("cuda", "cu", "__cuda")):
        report.problems.append(f"CUDA runtime symbol, cudart must be linked statically: {bare}")
    else:
        report.problems.append(f"unknown undefined symbol: {bare}")


def _exported(report: Report, kind: str, name: str) -> None:
    bare = name.partition("@")[0]
    # Templates of the standard library are emitted weak into every binary that uses them.
    standard = kind in "WVu" and STANDARD_CPP.match(bare) and not TORCH_CPP.match(bare)
    if bare != "PyInit__C" and not standard:
        report.problems.append(f"exported: {bare}")


def check(symbols: str, needed: list[str]) -> Report:
    """Judge the text of ``nm -D`` and the NEEDED entries of the dynamic section."""
    report, exports = Report(), set()
    for line in symbols.splitlines():
        *_, kind, name = line.split()
        if kind in "Uwv" and len(line.split()) == 2:
            _undefined(report, kind, name)
        else:
            exports.add(name.partition("@")[0])
            _exported(report, kind, name)
    if "PyInit__C" not in exports:
        report.problems.append("PyInit__C is not exported: Python cannot import this file")
    report.problems += [f"NEEDED lacks {library}" for library in sorted(NEEDED - set(needed))]
    report.problems += [f"NEEDED must not hold {library}" for library in needed if not NEEDED_OK.match(library)]
    return report


def read(binary: Path) -> tuple[str, list[str]]:
    symbols = subprocess.run(["nm", "-D", str(binary)], check=True, capture_output=True, text=True).stdout
    dynamic = subprocess.run(["readelf", "-dW", str(binary)], check=True, capture_output=True, text=True).stdout
    return symbols, re.findall(r"\(NEEDED\).*\[(.+?)\]", dynamic)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check the dynamic symbols of opzoo._C")
    parser.add_argument("binary", nargs="?", type=Path, default=DEFAULT)
    binary = parser.parse_args(arguments).binary
    if not binary.exists():
        print(f"{binary} does not exist: build first")
        return 1
    symbols, needed = read(binary)
    report = check(symbols, needed)
    print(f"{binary.name}: {binary.stat().st_size / 1024:.0f} KiB, needs {' '.join(needed)}")
    print(
        f"{report.shims} C functions of torch ({report.weak_shims} of CUDA, weak), {report.system} of the system, "
        f"glibc {report.glibc[0]}.{report.glibc[1]} or newer, {report.unversioned} of libstdc++ without a version"
    )
    for problem in report.problems:
        print(f"  {problem}")
    print("symbols: ok" if not report.problems else f"symbols: {len(report.problems)} problems")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
