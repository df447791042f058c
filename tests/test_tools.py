"""The scripts of ``tools/``: that they pass on what is good, and above all fail on what is not."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import opzoo

TOOLS = Path(__file__).parents[1] / "tools"


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


GOOD = """\
0000000000001000 T PyInit__C
0000000000002000 W _ZNKSt19bad_optional_access4whatEv
                 U PyModuleDef_Init
                 U _Unwind_Resume@GCC_3.0
                 U _ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv
                 U memcpy@GLIBC_2.14
                 U aoti_torch_empty_strided
                 U torch_parallel_for
                 w aoti_torch_get_current_cuda_stream
                 w torch_c10_cuda_check_msg
                 w __gmon_start__
"""
NEEDED = ["libtorch.so", "libtorch_cpu.so", "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6"]


def test_symbols_accept_a_good_listing() -> None:
    report = _tool("check_symbols").check(GOOD, NEEDED)
    assert report.problems == []
    assert (report.shims, report.weak_shims, report.glibc) == (4, 2, (2, 14))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("                 U _ZN2at6detail14empty_cpuEv", "C++ symbol of torch"),
        ("                 U _ZNK3c1010TensorImpl5sizesEv", "C++ symbol of torch"),
        ("                 U _ZN5torch7LibraryC1EPKc", "C++ symbol of torch"),
        ("                 U _ZTIN3c105ErrorE", "C++ symbol of torch"),
        ("                 U _ZNSt6vectorIN2at6TensorESaIS1_EE9push_backERKS1_", "C++ symbol of torch"),
        ("                 U PyLong_FromLong", "Python symbol"),
        ("                 U _Py_Dealloc", "Python symbol"),
        ("                 U cudaLaunchKernel@libcudart.so.13", "CUDA runtime symbol"),
        ("                 U aoti_torch_get_current_cuda_stream", "must be weak"),
        ("                 U torch_c10_cuda_check_msg", "must be weak"),
        ("                 U gemm_from_elsewhere", "unknown undefined symbol"),
        ("0000000000003000 T _ZN5opzoo8plan_addEv", "exported"),
        ("0000000000003000 T cudaMalloc", "exported"),
        ("0000000000003000 W _ZN5torch6stable6TensorD1Ev", "exported"),
    ],
)
def test_symbols_reject(line: str, reason: str) -> None:
    (problem,) = _tool("check_symbols").check(f"{GOOD}{line}\n", NEEDED).problems
    assert problem.startswith(reason) and line.split()[-1].partition("@")[0] in problem


@pytest.mark.parametrize("library", ["libcudart.so.13", "libtorch_cuda.so", "libc10_cuda.so", "libtorch_python.so"])
def test_symbols_reject_library(library: str) -> None:
    assert _tool("check_symbols").check(GOOD, [*NEEDED, library]).problems == [f"NEEDED must not hold {library}"]


def test_symbols_reject_missing_parts() -> None:
    check = _tool("check_symbols").check
    assert check(GOOD, NEEDED[1:]).problems == ["NEEDED lacks libtorch.so"]
    assert "PyInit__C is not exported" in check(GOOD.partition("\n")[2], NEEDED).problems[0]


@pytest.mark.skipif(not (shutil.which("nm") and shutil.which("readelf")), reason="needs nm and readelf")
def test_symbols_of_the_build(capsys: pytest.CaptureFixture[str]) -> None:
    binary = next(Path(opzoo.__file__).parent.glob("_C.*so"))
    assert _tool("check_symbols").main([str(binary)]) == 0, capsys.readouterr().out


def test_symbols_script_fails_without_a_build(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, TOOLS / "check_symbols.py", tmp_path / "_C.so"], capture_output=True)
    assert run.returncode == 1 and b"build first" in run.stdout


def test_smoke_rejects_wrong_values(monkeypatch: pytest.MonkeyPatch) -> None:
    smoke = _tool("smoke")
    monkeypatch.setattr(opzoo, "add", lambda a, b, alpha: a + b)
    with pytest.raises(AssertionError, match="add, output"):
        smoke.check("add", "cpu", smoke.DTYPES[0])


def test_smoke_passes() -> None:
    run = subprocess.run([sys.executable, TOOLS / "smoke.py"], capture_output=True, text=True, cwd=TOOLS.parent)
    assert run.returncode == 0 and run.stdout.rstrip().endswith(" passed"), run.stdout + run.stderr


def test_smoke_covers_every_operator() -> None:
    smoke = _tool("smoke")
    assert smoke.public_operators() == set(smoke.CHECKS)


def test_matrix_rows() -> None:
    matrix = _tool("matrix")
    row = matrix.parse("/opt/python/bin/python3/torch==2.13.0")
    assert (row.python, row.torch) == ("/opt/python/bin/python3", "torch==2.13.0")
    for spec in ("3.11", "3.11/", "3.11/numpy==2"):
        with pytest.raises(Exception, match="expected PYTHON/TORCH"):
            matrix.parse(spec)
    good, bad = (
        matrix.Row("3.11", "torch==2.14.1", "numpy>=2", "smoke: 30 passed", True),
        matrix.Row("3.1", "torch==2.11.0"),
    )
    assert matrix.table([good, bad]).count("FAIL") == 1


def test_matrix_fails_without_an_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / "opzoo-0-cp310-abi3-any.whl"
    wheel.touch()
    assert _tool("matrix").main(["--wheel", str(wheel), "2.6/torch==2.14.1"]) == 1
    assert "no python 2.6 here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "report"),
    [
        ("==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x602000000018", True),
        ("nms_cpu.cpp:3:5: runtime error: inf is outside the range of representable values of type 'int'", True),
        ("==7==WARNING: AddressSanitizer failed to allocate 0x15000000000 bytes", False),
    ],
)
def test_sanitizer_reports(text: str, report: bool) -> None:
    assert _tool("sanitize").is_report(text) == report


FAULTS = {
    "heap read past the end": "int *volatile p = new int[4]; return p[argc + 3];",
    "inf to an integer": "volatile float x = 3e38f; x = x * 10; return (int)x;",
    "signed overflow": "volatile int x = 2147483647; return x + argc;",
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("body", [*FAULTS.values(), "return argc - 1;"], ids=[*FAULTS, "no fault"])
def test_sanitizer_flags_find_faults(body: str, tmp_path: Path) -> None:
    """The flags of ``setup.py`` under the environment of ``tools/sanitize.py`` report each kind and end non-zero."""
    flags = re.search(r"^SANITIZERS = (\[.*\])$", (TOOLS.parent / "setup.py").read_text(), re.MULTILINE)
    assert flags is not None
    program, reports = tmp_path / "program", tmp_path / "reports"
    reports.mkdir()
    compiler = ["g++", "-O1", *ast.literal_eval(flags[1]), "-x", "c++", "-", "-o", str(program)]
    subprocess.run(compiler, input=f"int main(int argc, char**) {{ {body} }}", text=True, check=True)
    tool = _tool("sanitize")
    run = subprocess.run([program], env={**tool.environment(reports), "LD_PRELOAD": ""}, capture_output=True, text=True)
    texts = [run.stderr, *(path.read_text() for path in reports.iterdir())]
    assert any(map(tool.is_report, texts)) == (run.returncode != 0) == ("return argc - 1" not in body)


def test_sanitizer_runs_every_operator() -> None:
    tool = _tool("sanitize")
    suite, *hostility, campaign = tool.commands(tool.operators(), 10, 0)
    assert [command[2] for command in hostility] == tool.operators()
    assert campaign[1].endswith("campaign.py")
    assert all(any(f"test_{op}.py" in word for word in suite) for op in tool.operators())


def test_reliability_page_is_that_of_the_script() -> None:
    page = TOOLS.parent / "docs" / "reliability.md"
    assert page.read_text(encoding="utf-8") == _tool("reliability").page(), "run python tools/reliability.py"


def test_the_tests_that_the_reliability_page_names_exist() -> None:
    tool = _tool("reliability")
    for test in [*(row["test"] for row in tool.rows("faults")), *(test for _, test in tool.HELD)]:
        path, name = test.split("::")
        assert f"def {name}(" in (TOOLS.parent / path).read_text(), test


def test_benchmark_tables_name_their_origin_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows merged from another commit say so, and memory stands where it is known."""
    tables = _tool("benchmark_tables")
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    lines = ["op,impl,pass,case,metric,unit,p50,ratio,floor_share,peak_bytes,device,torch,commit"]
    for op, commit, ours, theirs in (("add", "1", "", ""), ("models", "2", 3 << 20, 9 << 20), ("models", "1", "", "")):
        for impl, peak in (("opzoo", ours), ("torchvision", theirs)):
            lines.append(f"{op},{impl},fwd,case {commit},time,us,200,2,,{peak},GPU,2.11,{commit}")
    (tmp_path / "gpu.csv").write_text("\n".join(lines) + "\n")
    add, models = tables.all_rows().split("### models, gpu")
    assert "## GPU, torch 2.11, opzoo 1\n" in add and "Measured on" not in add and "memory |" not in add
    assert "Measured on GPU, torch 2.11, opzoo 2 and GPU, torch 2.11, opzoo 1.\n" in models
    assert "| floor | memory |" in models and "| 3.0, 9.0 |" in models


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_other_switches_build_anew(tmp_path: Path) -> None:
    """``make build`` does nothing when all is built, but for switches that the last build did not have."""

    def make(*switches: str) -> str:
        clean = {k: v for k, v in os.environ.items() if k not in ("OPZOO_CUDA", "OPZOO_RELEASE", "CUDA_HOME")}
        clean = {k: v for k, v in clean.items() if not k.startswith(("MAKE", "TORCH_CUDA_ARCH"))}
        command = ["make", "-n", "build", f"VENV={tmp_path}", *switches]
        return subprocess.run(command, cwd=TOOLS.parent, env=clean, capture_output=True, text=True, check=True).stdout

    for name, text in (("installed", ""), ("switches", "OPZOO_CUDA=0 TORCH_CUDA_ARCH_LIST=8.6;9.0a\n"), ("built", "")):
        (tmp_path / name).write_text(text)
    assert "pip" not in make()
    assert "pip" not in make("OPZOO_CUDA=0", "TORCH_CUDA_ARCH_LIST=8.6;9.0a")
    assert "pip install" in make("OPZOO_CUDA=1", "TORCH_CUDA_ARCH_LIST=8.6;9.0a")
    assert "pip install" in make("OPZOO_RELEASE=1")


def test_the_table_of_configs_is_whole() -> None:
    """A row per config, a failure with words of its own, and rows that a rerun of others carries over unchanged."""
    tool = _tool("mmdet_configs")
    rows = tool.rows(tool.PAGE.read_text(encoding="utf-8"))
    assert list(rows) == tool.CONFIGS, "run python tools/mmdet_configs.py"
    good = [name for name, row in rows.items() if row["outcome"] == "ok"]
    assert f"{len(good)} of {len(rows)} unmodified configs" in tool.PAGE.read_text(encoding="utf-8") and len(good) >= 60
    assert all(len(row["outcome"]) > 20 for row in rows.values() if row["outcome"] != "ok")
    text = "\n".join(f"| `{name}` | a \\| b &lt; c | nms 3, roi_align_forward 12 |" for name in ("x/y", "z"))
    expected = {"outcome": "a | b < c", "calls": {"nms": "3", "roi_align_forward": "12"}}
    assert tool.rows(text) == {"x/y": expected, "z": expected}
