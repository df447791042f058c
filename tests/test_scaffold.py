"""``python -m opzoo.new_op``: what it writes builds, and passes its own tests and the shared ones, unchanged.

The new sources are compiled into a library of their own beside the ``_C`` that is there, for the CPU:
a build of the whole extension would take minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from opzoo.new_op import FILES, problem, with_export

ROOT = Path(__file__).parents[1]
NAME = "scaffold_probe"

# What module.cpp gives the operators; its symbols are hidden in _C.
STUB = "namespace opzoo { bool debug_mode() { return false; } bool poison_allocations() { return false; } }\n"
PLUGIN = f"""
import torch
torch.ops.load_library("{{library}}")
import opzoo
assert opzoo.__file__.startswith("{{tree}}") and callable(opzoo.{NAME})
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LeakyReLU", "snake_case"),
        ("a__b", "snake_case"),
        ("9lives", "snake_case"),
        ("../escape", "snake_case"),
        ("lambda", "keyword"),
        ("add", "exists already"),
        ("info", "exists already"),
        ("nms_match", "exists already"),
        ("contract", "exists already"),
        ("torch", "choose another NAME"),
    ],
)
def test_names_that_cannot_be(name: str, message: str) -> None:
    assert message in (problem(name, ROOT) or "")


def test_outside_a_checkout(tmp_path: Path) -> None:
    assert "is not a source checkout" in (problem(NAME, tmp_path) or "")


def test_exports_stay_sorted() -> None:
    text = (ROOT / "opzoo" / "__init__.py").read_text(encoding="utf-8")
    for name in ("aaa", "many", "zzz"):
        lines = with_export(text, "opzoo.ops", name).splitlines()
        imports = [line.split()[1] for line in lines if line.startswith("from opzoo.ops.")]
        public = [line.strip(' ",') for line in lines[lines.index("__all__ = [") + 1 : -1]]
        lower = [entry for entry in public if entry[0].islower()]
        assert imports == sorted(imports) and lower == sorted(lower) and name in lower


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_new_operator_works_at_once(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    skipped = shutil.ignore_patterns("build", "dist", ".*", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, tree, ignore=skipped)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{tree}"}

    def run(*command: str) -> None:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    run(sys.executable, "-m", "opzoo.new_op", NAME)
    assert all((tree / target.format(NAME)).is_file() for target in FILES.values())

    (tmp_path / "stub.cpp").write_text(STUB)
    library = tmp_path / "libprobe.so"
    csrc = tree / "opzoo" / "csrc"
    run(
        *("g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas"),
        *("-DTORCH_TARGET_VERSION=0x020a000000000000ULL", f"-I{csrc}", *(f"-I{path}" for path in include_paths())),
        *(str(csrc / NAME / f"{NAME}{suffix}.cpp") for suffix in ("", "_cpu")),
        *(str(tmp_path / "stub.cpp"), f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-o", str(library)),
    )
    (tmp_path / "probe_plugin.py").write_text(PLUGIN.format(library=library, tree=tree))
    # Hostile calls run in a process of their own, without the library; the CUDA kernels are not in it.
    chosen = f"({NAME} or operator_folder or has_every_part or no_part or toctree) and not (hostile or registrations)"
    files = (
        "test_repo",
        f"test_{NAME}",
        "test_contract",
        "test_contract_transforms",
        "test_mutants",
        "test_docs",
        "test_facts",
    )
    run(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "probe_plugin", "-k", chosen),
        *(f"tests/{name}.py" for name in files),
    )
