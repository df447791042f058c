"""docs/learn/lltm builds on its own with opzoo's headers, passes its tests, and keeps the promises of one wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_repo import ROOT, _nvcc

SOURCE = ROOT / "docs" / "learn" / "lltm"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "MAX_JOBS": "2", **variables}
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, env=environment)


def build(folder: Path, **variables: str) -> Path:
    result = run(folder, "setup.py", "-q", "build_ext", "--inplace", **variables)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    (library,) = (folder / "lltm").glob("_C*.so")
    assert library.name == "_C.abi3.so"
    return library


def own_tests(folder: Path) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "pytest", "-q", "--show-capture=no", "-p", "no:cacheprovider", "test_lltm.py")


def copy(folder: Path) -> Path:
    return Path(shutil.copytree(SOURCE, folder / "lltm", ignore=shutil.ignore_patterns("build", "*.so", "__pycache__")))


@needs_compiler
def test_cpu_build_passes_its_tests(tmp_path: Path) -> None:
    folder = copy(tmp_path)
    build(folder, LLTM_CUDA="0")
    result = own_tests(folder)
    passed = re.search(r"(\d+) passed", result.stdout)
    assert result.returncode == 0 and passed and "skipped" not in result.stdout, result.stdout[-4000:]
    assert int(passed[1]) >= 20, "fewer tests than the lesson names"


@needs_compiler
def test_a_wrong_gradient_is_rejected(tmp_path: Path) -> None:
    """The extension's tests themselves: the derivative of tanh left out."""
    folder = copy(tmp_path)
    header = folder / "csrc" / "lltm.h"
    right = header.read_text(encoding="utf-8")
    wrong = right.replace("(1 - squashed * squashed)", "(1 - squashed)")
    assert wrong != right
    header.write_text(wrong, encoding="utf-8")
    build(folder, LLTM_CUDA="0")
    result = own_tests(folder)
    assert result.returncode == 1 and "test_gradcheck" in result.stdout, result.stdout[-4000:]


@needs_compiler
@pytest.mark.skipif(_nvcc() is None, reason="needs nvcc, the CUDA compiler")
def test_cuda_build_keeps_the_promises(tmp_path: Path) -> None:
    """Compiled for sm_90a; loads without a GPU, and asks nothing of torch but C functions. On a GPU it also runs."""
    folder = copy(tmp_path)
    library = build(folder, TORCH_CUDA_ARCH_LIST="9.0a", CUDA_HOME=str(Path(str(_nvcc())).parents[1]))
    symbols = run(folder, str(ROOT / "tools" / "check_symbols.py"), str(library))
    assert symbols.returncode == 0 and re.search(r"\([1-9]\d* of CUDA, weak\)", symbols.stdout), symbols.stdout
    registered = "print(torch._C._dispatch_has_kernel_for_dispatch_key('lltm::cell_backward', 'CUDA'))"
    assert run(folder, "-c", f"import torch, lltm; {registered}").stdout.strip() == "True"
    result = own_tests(folder)
    assert result.returncode == 0, result.stdout[-4000:]
