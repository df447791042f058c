"""Functions of ``mmcv._ext`` with an argument wrong: a named error and nothing written, or the right answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mmcv", reason="needs mmcv-lite")
pytest.importorskip("opzoo.compat.mmcv")

from mmcv_rows import ROWS

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def failures() -> dict[str, list[str]]:
    run = subprocess.run(
        [sys.executable, str(TESTS / "mmcv_hostility.py")],
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", sorted(ROWS))
def test_one_argument_wrong(name: str, failures: dict[str, list[str]]) -> None:
    assert not failures[name], "\n".join(failures[name])
