"""tools/gpu_check.py and tests/every_kernel.py as far as a machine without a GPU can tell."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import gpu_check  # noqa: E402


def test_every_kernel_calls_are_right() -> None:
    """Each call of the list is one that the operators take: on the CPU the same calls run without a kernel of CUDA."""
    command = [sys.executable, str(ROOT / "tests" / "every_kernel.py"), "--device", "cpu"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[0]) > 800


def test_a_step_that_fails_or_lasts_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def step(code: str, limit: int = 20) -> gpu_check.Step:
        return gpu_check.Step([sys.executable, "-c", code], limit)

    assert gpu_check.run("good", step("print('fine')"), tmp_path)
    assert not gpu_check.run("bad", step("raise SystemExit(3)"), tmp_path)
    assert not gpu_check.run("slow", step("import time; time.sleep(60)", limit=1), tmp_path)
    assert "ended after its limit of 1 s" in (tmp_path / "slow.txt").read_text()
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["ok", "FAILED", "FAILED"]


def test_reports_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "device_and_commit", lambda: ("a GPU", "abc"))
    table = tmp_path / "compute_sanitizer.csv"
    gpu_check.write_row(table, "memcheck", "856 calls on cuda\n========= ERROR SUMMARY: 2 errors\n")
    gpu_check.write_row(table, "racecheck", "9 calls on cuda\n=== RACECHECK SUMMARY: 3 hazards displayed (1 errors)\n")
    gpu_check.write_row(table, "initcheck", "no end\n")
    with table.open(newline="") as file:
        rows = [(row["tool"], row["calls"], row["reports"]) for row in csv.DictReader(file)]
    assert rows == [("memcheck", "856", "2"), ("racecheck", "9", "3")]


def test_every_step_names_what_exists(tmp_path: Path) -> None:
    found = gpu_check.steps(tmp_path, 1, 0.5)
    assert set(gpu_check.SANITIZERS) < set(found)
    for step in found.values():
        for word in step.command:
            assert not word.startswith("tests/") or (ROOT / word).exists(), word
    assert "25000" in found["campaign"].command
    with pytest.raises(SystemExit):
        gpu_check.main(["no_such_step", "--out", str(tmp_path)])
