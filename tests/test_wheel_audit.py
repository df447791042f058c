"""What ``tools/wheel_audit.py`` lets pass, and above all what not; and that the sdist holds every source."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("wheel_audit", ROOT / "tools" / "wheel_audit.py")
assert _spec is not None and _spec.loader is not None
wheel_audit = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(wheel_audit)

GOOD = [
    *(f"opzoo/{path.relative_to(ROOT / 'opzoo')}" for path in (ROOT / "opzoo").rglob("*.py")),
    *("opzoo/_C.abi3.so", "opzoo/csrc/module.map", "opzoo-0.1.0.dist-info/METADATA"),
]
NAME = "opzoo-0.1.0-cp310-abi3-manylinux_2_34_x86_64.whl"


def make_wheel(folder: Path, names: list[str], name: str = NAME) -> Path:
    with zipfile.ZipFile(folder / name, "w") as archive:
        for member in names:
            archive.writestr(member, "")
    return folder / name


def test_a_good_wheel(tmp_path: Path) -> None:
    assert wheel_audit.problems_of_wheel(make_wheel(tmp_path, GOOD)) == []


@pytest.mark.parametrize(
    ("names", "name", "says"),
    [
        ([*GOOD, "opzoo-mmcv/src/mmcv/_ext.py"], NAME, "does not belong: opzoo-mmcv"),
        ([*GOOD, "tests/helpers.py"], NAME, "does not belong: tests/helpers.py"),
        ([*GOOD, "opzoo.libs/libtorch.so"], NAME, "does not belong: opzoo.libs/libtorch.so"),
        ([*GOOD, "opzoo/_C.cpython-311-x86_64-linux-gnu.so"], NAME, "its binaries must be opzoo/_C.abi3.so alone"),
        ([name for name in GOOD if not name.endswith(".so")], NAME, "its binaries must be opzoo/_C.abi3.so alone"),
        ([name for name in GOOD if name != "opzoo/info.py"], NAME, "lacks opzoo/info.py"),
        (GOOD, "opzoo-0.1.0-cp311-cp311-linux_x86_64.whl", "not tagged for every CPython"),
    ],
)
def test_a_wrong_wheel(names: list[str], name: str, says: str, tmp_path: Path) -> None:
    problems = wheel_audit.problems_of_wheel(make_wheel(tmp_path, names, name))
    assert any(problem.startswith(says) for problem in problems), problems


def abi_report(**result: object) -> str:
    """The form of abi3audit's."""
    found = {"name": "_C.abi3.so", "result": {"is_abi3": True, "baseline": "3.10", **result}}
    return json.dumps({"specs": {NAME: {"kind": "wheel", "wheel": [found]}}})


def test_abi_reports() -> None:
    assert wheel_audit.problems_of_abi(abi_report()) == []
    assert wheel_audit.problems_of_abi(json.dumps({"specs": {}})) == ["abi3audit saw no extension"]
    for wrong in (abi_report(is_abi3=False), abi_report(baseline="3.12")):
        assert len(wheel_audit.problems_of_abi(wrong)) == 1


def test_sdist_holds_every_source(tmp_path: Path) -> None:
    """Made without CUDA and in a copy, where no list of an earlier build lends the files that it forgets."""
    left_out = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    shutil.copytree(ROOT / "opzoo", tmp_path / "opzoo", ignore=left_out)
    shutil.copytree(ROOT / "opzoo-mmcv", tmp_path / "opzoo-mmcv", ignore=left_out)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "setup.py", "-q", "sdist"]
    made = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "OPZOO_CUDA": "0"}, capture_output=True, text=True, timeout=120
    )
    assert made.returncode == 0, made.stderr
    (sdist,) = (tmp_path / "dist").glob("opzoo-*.tar.gz")
    assert wheel_audit.problems_of_sdist(sdist) == []
    poorer = tmp_path / "poorer.tar.gz"
    with tarfile.open(sdist) as old, tarfile.open(poorer, "w:gz") as new:
        for member in old.getmembers():
            if not member.name.endswith("/nms_cuda.cu"):
                new.addfile(member, old.extractfile(member) if member.isfile() else None)
    assert wheel_audit.problems_of_sdist(poorer) == ["lacks opzoo/csrc/nms/nms_cuda.cu"]
