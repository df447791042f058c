"""The report on an installation, above all on broken ones."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import opzoo
from opzoo import info
from opzoo._diagnosis import diagnose, holds_kernels

PACKAGE = Path(opzoo.__file__).parent


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The package up to where it loads ``_C``: its own modules, no compiled part, no operators."""
    (tmp_path / "opzoo" / "reference").mkdir(parents=True)
    (tmp_path / "opzoo" / "reference" / "__init__.py").touch()
    for path in PACKAGE.glob("*.py"):
        shutil.copy(path, tmp_path / "opzoo")
    return tmp_path


@pytest.fixture
def tree(bare: Path) -> Path:
    """``bare`` beside a torch that is recent enough and quick to import."""
    add_torch_stub(bare, "__version__ = '2.14.0'")
    return bare


def run(tree: Path, *options: str, command: tuple[str, ...] = ("-m", "opzoo.info", "--json")) -> Any:
    """Exit code and parsed output of a Python started in the tree."""
    child = subprocess.run([sys.executable, *options, *command], cwd=tree, capture_output=True, text=True, timeout=120)
    if "--json" not in command:
        return child
    assert child.stdout.startswith("{"), child.stderr
    return child.returncode, json.loads(child.stdout)


def add_torch_stub(tree: Path, text: str) -> None:
    (tree / "torch").mkdir()
    (tree / "torch" / "__init__.py").write_text(text)


def test_keys_of_a_working_installation() -> None:
    code, facts = run(PACKAGE.parent, command=("-mopzoo.info", "--json"))
    assert set(facts) == {
        *("opzoo", "python", "torch", "torchvision", "numpy", "driver", "gpu_on_bus", "nvcc", "devices", "problems"),
    }
    assert facts["opzoo"]["loads"] and facts["opzoo"]["build"] == opzoo.build_info()
    assert facts["opzoo"]["version"] == opzoo.__version__
    assert Path(facts["opzoo"]["library"]).parent == PACKAGE
    assert code == (1 if facts["problems"] else 0)


def test_text_from_within_python(capsys: pytest.CaptureFixture[str]) -> None:
    info.main([])
    printed = capsys.readouterr().out
    assert re.search(r"^loads +yes$", printed, re.MULTILINE) and "stable_abi_target" in printed


def test_not_built(tree: Path) -> None:
    code, facts = run(tree)
    assert code == 1 and not facts["opzoo"]["loads"] and facts["opzoo"]["library"] is None
    assert facts["problems"][0]["what"].startswith("The compiled part of opzoo is missing")


def test_text_of_a_broken_installation(tree: Path) -> None:
    child = run(tree, command=("-m", "opzoo.info"))
    assert child.returncode == 1 and "PROBLEM: " in child.stdout and "\nDO:  " in child.stdout
    assert child.stderr == ""


def test_users_still_get_the_import_error(tree: Path) -> None:
    for command in (("-c", "import opzoo"), ("-m", "opzoo.bench", "opzoo.info")):
        # Without site-packages: an editable installation's import hook would lend the copy its own _C.
        child = run(tree, "-S", command=command)
        assert child.returncode == 1 and "ImportError: The compiled part of opzoo is missing" in child.stderr


def test_users_of_an_old_torch_get_one_sentence(bare: Path) -> None:
    """Before ``_C``, which may well load in a torch that lacks what is called later."""
    add_torch_stub(bare, "__version__ = '2.10.0+cu128'")
    child = run(bare, "-S", command=("-c", "import opzoo._library"))
    assert child.stderr.splitlines()[-1] == "ImportError: opzoo needs torch 2.11 or newer, found 2.10.0+cu128."


@pytest.mark.parametrize(
    ("vendor", "kind", "found"),
    [("0x10de", "0x030200", True), ("0x10de", "0x040300", False), ("0x1002", "0x030000", False)],
    ids=["gpu", "its sound", "another vendor's"],
)
def test_gpu_on_bus(vendor: str, kind: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "vendor").write_text(f"{vendor}\n")
    (tmp_path / "0000:01:00.0" / "class").write_text(f"{kind}\n")
    monkeypatch.setattr(info, "PCI", tmp_path)
    assert info._gpu_on_bus() == found


def test_damaged(tree: Path) -> None:
    (tree / "opzoo" / "_C.abi3.so").write_bytes(b"not a library")
    code, facts = run(tree)
    assert code == 1 and facts["opzoo"]["library"].endswith("_C.abi3.so")
    assert facts["problems"][0]["what"] == "The file of _C is damaged or of another platform."


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "extern void* opzoo_absent(void); void* PyInit__C(void) { return opzoo_absent(); }",
            "_C needs the symbol opzoo_absent, which torch ",
        ),
        (
            "#include <stdlib.h>\nvoid* PyInit__C(void) { abort(); }",
            "opzoo does not import: the process died of SIGABRT.",
        ),
    ],
    ids=["undefined-symbol", "crash"],
)
def test_loads_into_the_wrong_torch(source: str, says: str, tree: Path) -> None:
    (tree / "c.c").write_text(source)
    library = tree / "opzoo" / "_C.abi3.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", str(library), str(tree / "c.c")], check=True)
    code, facts = run(tree)
    assert code == 1 and facts["problems"][0]["what"].startswith(says)


def test_for_another_python(tree: Path) -> None:
    (tree / "opzoo" / "_C.cpython-27-riscv64-linux-gnu.so").write_bytes(b"")
    _, facts = run(tree)
    assert facts["opzoo"]["library"] is None and len(facts["opzoo"]["other_libraries"]) == 1
    assert "is for another Python or platform" in facts["problems"][0]["what"]


def test_no_torch(bare: Path) -> None:
    code, facts = run(bare, "-S")  # without site-packages
    assert code == 1 and facts["torch"]["version"] is None
    assert facts["problems"][0]["what"].startswith("torch is not installed for ")
    assert facts["problems"][0]["do"] == "pip install 'torch>=2.11'"


def test_torch_that_does_not_import(bare: Path) -> None:
    add_torch_stub(bare, "raise OSError('libcudart.so.13: cannot open shared object file')")
    code, facts = run(bare)
    assert code == 1 and "does not import (OSError: libcudart.so.13" in facts["problems"][0]["what"]


def test_old_torch(bare: Path) -> None:
    add_torch_stub(bare, "__version__ = '2.9.1+cpu'")
    code, facts = run(bare)
    assert code == 1 and facts["torch"]["version"] == "2.9.1+cpu"
    assert facts["problems"][0]["what"] == "torch 2.9.1+cpu is too old: opzoo needs 2.11 or newer."


GPU = {"name": "NVIDIA H200", "capability": "9.0", "has_kernels": True}
HEALTHY: dict[str, Any] = {
    "opzoo": {
        "library": "_C.abi3.so",
        "other_libraries": [],
        "location": "opzoo",
        "loads": True,
        "error": None,
        "build": {"cuda": True, "cuda_archs": "9.0a", "built_with_torch": "2.14.1+cu130"},
    },
    "python": {"executable": "python"},
    "torch": {"version": "2.14.1+cu130", "cuda": "13.0", "cuda_available": True, "error": None},
    "driver": "580.159.03",
    "gpu_on_bus": True,
    "devices": [GPU],
}


def changed(**changes: Any) -> dict[str, Any]:
    """HEALTHY with values replaced; ``opzoo__build__cuda`` names a nested one."""
    facts = copy.deepcopy(HEALTHY)
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = facts
        for parent in parents:
            place = place[parent]
        place[last] = value
    return facts


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (changed(opzoo__build__cuda=False), "this build of opzoo holds CPU kernels only"),
        (changed(torch__cuda=None, torch__cuda_available=False), "is a CPU-only build"),
        (changed(driver="570.86.10", torch__cuda_available=False), "driver 570.86.10 is too old: the CUDA 13 runtime"),
        (changed(torch__cuda_available=False), "torch cannot use it"),
        (changed(devices=[], driver=None, torch__cuda_available=False), "no NVIDIA driver is loaded"),
        (
            changed(devices=[{"name": "NVIDIA A100", "capability": "8.0", "has_kernels": False}]),
            "NVIDIA A100 has compute capability 8.0, but _C was built for 9.0a",
        ),
        (
            changed(opzoo__loads=False, opzoo__error="ImportError: /lib/libc.so.6: version `GLIBC_2.99' not found"),
            "it needs GLIBC_2.99",
        ),
        (
            changed(opzoo__loads=False, opzoo__error="ImportError: libtorch.so: cannot open shared object file: No"),
            "needs the library libtorch.so",
        ),
        (changed(opzoo__loads=False, opzoo__error="ImportError: odd"), "opzoo does not import: ImportError: odd"),
    ],
)
def test_diagnosis(facts: dict[str, Any], says: str) -> None:
    (problem,) = diagnose(facts)
    assert says in problem["what"] and problem["do"]


@pytest.mark.parametrize(
    "facts",
    [
        HEALTHY,
        changed(devices=[], driver=None, opzoo__build__cuda=False),
        changed(devices=[], driver=None, torch__cuda=None),
        changed(devices=[], driver=None, gpu_on_bus=False),
        changed(devices=[]),
        changed(driver="535.10", opzoo__build__built_with_torch="2.11.0+cu128"),
    ],
)
def test_nothing_to_say(facts: dict[str, Any]) -> None:
    assert diagnose(facts) == []


@pytest.mark.parametrize(
    ("archs", "capability", "expected"),
    [
        ("9.0a", "9.0", True),
        ("9.0a", "9.1", False),
        ("9.0a+PTX", "10.0", False),
        ("8.0", "8.6", True),
        ("8.6", "8.0", False),
        ("8.0", "9.0", False),
        ("8.0+PTX", "9.0", True),
        ("7.5;8.0;8.6;9.0a;10.0;12.0+PTX", "8.9", True),
        ("7.5;8.0;8.6;9.0a;10.0;12.0+PTX", "12.1", True),
        ("7.5;8.0;8.6;9.0a;10.0;12.0+PTX", "7.0", False),
        ("7.5;8.0;8.6;9.0a;10.0;12.0+PTX", "13.0", True),
        ("", "9.0", False),
    ],
)
def test_holds_kernels(archs: str, capability: str, expected: bool) -> None:
    assert holds_kernels(archs, capability) is expected
