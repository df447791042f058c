"""The repository keeps its shape: one folder per operator, one stem everywhere, kernels without torch."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from contract import outputs, record
from helpers import contract_cases

import opzoo

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "opzoo" / "csrc"
OPERATORS = sorted(folder.name for folder in CSRC.iterdir() if folder.is_dir() and folder.name != "common")
each_operator = pytest.mark.parametrize("op", OPERATORS)

CPP_SUFFIXES = {".h", ".cpp", ".cuh", ".cu"}
MAX_LINES = 500


def _tracked() -> list[Path]:
    """Files of the repository; without git (an unpacked archive) everything that is not a build product."""
    if shutil.which("git") and (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
        if listed.returncode == 0:
            return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    ignored = {"build", "dist", ".git", "__pycache__"}
    return [path for path in ROOT.rglob("*") if path.is_file() and not ignored & set(path.relative_to(ROOT).parts)]


TRACKED = _tracked()
TORCH_FREE_COMMON = {"types", "strided", "bilinear", "boxes", "launch", "atomics", "mbarrier", "tma", "wgmma"}


def _torch_free() -> list[Path]:
    common = [path for path in (CSRC / "common").iterdir() if path.stem in TORCH_FREE_COMMON]
    own = [
        path
        for op in OPERATORS
        for path in (CSRC / op).iterdir()
        if path.suffix == ".cuh" or (path.suffix == ".h" and not path.stem.endswith("_plan"))
    ]
    return sorted(common + own)


TORCH_FREE = _torch_free()


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# One stem everywhere


def test_there_are_operators() -> None:
    assert OPERATORS, f"no operator folder below {CSRC}"


@each_operator
def test_operator_folder(op: str) -> None:
    required = {f"{op}.h", f"{op}_plan.h", f"{op}.cpp", f"{op}_cpu.cpp", f"{op}_kernel.cuh", f"{op}_cuda.cu"}
    found = {path.name for path in (CSRC / op).iterdir()}
    assert required <= found, f"missing {sorted(required - found)}"
    strangers = {name for name in found - required if not name.startswith(f"{op}_")}
    assert not strangers, f"files without the stem: {sorted(strangers)}"


@each_operator
def test_operator_has_every_part(op: str) -> None:
    parts = (
        f"opzoo/ops/{op}.py",
        f"opzoo/reference/{op}.py",
        f"opzoo/bench/cases/{op}.py",
        f"tests/test_{op}.py",
        f"tests/cases/{op}.py",
        f"docs/ops/{op}.md",
    )
    missing = [part for part in parts if not (ROOT / part).is_file()]
    assert not missing, f"missing {missing}"


@pytest.mark.parametrize(
    "pattern",
    ["opzoo/ops/*.py", "opzoo/reference/*.py", "opzoo/bench/cases/*.py", "tests/cases/*.py", "docs/ops/*.md"],
)
def test_no_part_without_operator(pattern: str) -> None:
    stems = {path.stem for path in ROOT.glob(pattern) if not path.stem.startswith("_") and path.stem != "index"}
    assert stems <= set(OPERATORS), f"without a folder in csrc: {sorted(stems - set(OPERATORS))}"


# Torch stays in its layer


def _torch_includes(path: Path) -> list[str]:
    return re.findall(r"^\s*#\s*include\s*[<\"]((?:torch|ATen|c10|caffe2)/[^>\"]+)", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", TORCH_FREE, ids=_name)
def test_no_torch_in(path: Path) -> None:
    assert not _torch_includes(path)
    reached = re.findall(r'#include "(common/(?:tensor|check|dispatch)\.h)"', path.read_text())
    assert not reached, f"reaches torch through {reached}"


def test_one_header_includes_torch() -> None:
    including = {_name(path) for path in CSRC.rglob("*") if path.suffix in CPP_SUFFIXES and _torch_includes(path)}
    assert including == {"opzoo/csrc/common/tensor.h"}


def _compile(command: list[str], path: Path) -> None:
    """Through a file that includes it twice, which also tries the include guard."""
    include = f'#include "{path.relative_to(CSRC)}"\n'
    run = subprocess.run([*command, f"-I{CSRC}", "-"], input=include * 2, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("path", [path for path in TORCH_FREE if path.suffix == ".h"], ids=_name)
def test_header_compiles_alone(path: Path) -> None:
    _compile(["g++", "-fsyntax-only", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-x", "c++"], path)


def _nvcc() -> str | None:
    default = Path("/usr/local/cuda/bin/nvcc")
    return str(default) if default.exists() else shutil.which("nvcc")


@pytest.mark.skipif(_nvcc() is None, reason="needs nvcc, the CUDA compiler")
@pytest.mark.parametrize("path", [path for path in TORCH_FREE if path.suffix == ".cuh"], ids=_name)
def test_kernels_compile_alone(path: Path, tmp_path: Path) -> None:
    nvcc = _nvcc()
    assert nvcc is not None
    flags = ["-std=c++20", "--expt-relaxed-constexpr", "-arch=sm_90a", "--cubin", "-o", str(tmp_path / "x.cubin")]
    _compile([nvcc, *flags, "-x", "cu"], path)


# Registration


def _tensor_operators() -> list[str]:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("opzoo::")}
    return sorted(name for name in names if "Tensor" in str(torch._C._get_schema(name, "")))


def _has(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


@pytest.mark.parametrize("name", _tensor_operators())
def test_registrations(name: str) -> None:
    """CPU and CUDA kernels (in a CPU build the CUDA key explains itself) and a fake kernel."""
    assert _has(name, "CPU"), "no CPU kernel"
    assert _has(name, "CUDA"), "no CUDA kernel"
    fake = torch._library.simple_registry.singleton.find(name).fake_impl
    assert fake.kernel is not None or _has(name, "Meta"), "no fake kernel"


def test_floating_results_have_autograd() -> None:
    """Without a kernel on the Autograd key a gradient would be None, with no more than a warning."""
    cpu = torch.device("cpu")
    calls = [call for case in contract_cases() for call in record(case, case.tensors(cpu, torch.float64))]
    floating = {op._schema.name for op, _, result in calls if any(t.is_floating_point() for t in outputs(result))}
    assert floating, "no case returns a float"
    assert not {name for name in floating if not _has(name, "Autograd")}


@pytest.mark.parametrize("name", [name for name in opzoo.__all__ if not name.startswith("__")])
def test_public_docstring(name: str) -> None:
    value = getattr(opzoo, name)
    text = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
    assert text and text.strip(), f"opzoo.{name} has no docstring"
    assert len(inspect.cleandoc(text).splitlines()[0]) <= 120


# Files


def _text_files(*suffixes: str) -> Iterator[tuple[Path, str]]:
    for path in TRACKED:
        if not suffixes or path.suffix in suffixes:
            try:
                yield path, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def test_file_length() -> None:
    long = {_name(p): n for p, text in _text_files(".py", *CPP_SUFFIXES) if (n := text.count("\n")) > MAX_LINES}
    assert not long, f"over {MAX_LINES} lines: {long}"


def test_spdx_line() -> None:
    missing = [
        _name(path)
        for path, text in _text_files(*CPP_SUFFIXES)
        if not text.startswith("// SPDX-License-Identifier: Apache-2.0\n")
    ]
    assert not missing, f"first line is not the SPDX line: {missing}"


# An index that torch publishes and users are told to install from may be named; no other.
REGISTRY = re.compile(
    r"\b[\w.-]*(?:py" + r"pi|pythonhosted|ana" + r"conda|npm" + r"js|artifac" + r"tory|nex" + r"us)[\w-]*\.[a-z]{2,}\b"
)
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+)/")


def test_no_machine_in_files() -> None:
    """Paths of one machine and hosts of package registries break on every other machine."""
    found = [
        f"{_name(path)}:{number}: {match[0]}"
        for path, text in _text_files()
        for number, line in enumerate(text.splitlines(), 1)
        for match in [*MACHINE_PATH.finditer(line), *REGISTRY.finditer(line)]
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("see /wo" + "rk/shared/x.md", True),
        ("cd /ro" + "ot/build", True),
        ("https://files.python" + "hosted.org/packages", True),
        ("--index-url https://py" + "pi.org/simple", True),
        ("mirror = https://artifac" + "tory.example.com", True),
        ("pip install --index-url https://download.pytorch.org/whl/cpu torch", False),
        ("on PyPI as opzoo", False),
        ("the network/work/flow", False),
    ],
)
def test_machine_patterns(line: str, bad: bool) -> None:
    assert bool(MACHINE_PATH.search(line) or REGISTRY.search(line)) == bad


def test_changelog_names_the_version() -> None:
    headings = re.findall(r"^##+ .*$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert any(re.search(rf"\b{re.escape(opzoo.__version__)}\b", heading) for heading in headings), headings


def test_citation_version() -> None:
    match = re.search(r"^version:\s*[\"']?([^\"'\s]+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert match is not None and match[1] == opzoo.__version__


def test_build_is_of_this_version() -> None:
    assert opzoo.build_info()["version"] == opzoo.__version__
