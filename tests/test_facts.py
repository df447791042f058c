"""The table of facts on each operator's page is what the contract cases say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("operator_facts", ROOT / "tools" / "operator_facts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


facts = _load()


@pytest.mark.parametrize("page", facts.pages(), ids=lambda page: page.stem)
def test_page_has_the_facts(page: Path) -> None:
    assert facts.written(page) == page.read_text(encoding="utf-8"), "run python tools/operator_facts.py"


def test_another_case_gives_another_row() -> None:
    """Each column follows the case: none is a constant."""
    from dataclasses import replace

    case = next(case for case in facts.contract_cases() if case.id == "matmul-2d")
    base = facts.row("matmul", [case]).split("|")
    changes = [
        {"differentiable": (0,)},
        {"double_backward": False},
        {"deterministic_backward": False},
        {"same_for_any_threads": False},
        {"autocast_output": "input"},
        {"vmap_dims": None},
    ]
    rows = [facts.row("matmul", [replace(case, **change)]).split("|") for change in changes]
    changed = [[i for i, (a, b) in enumerate(zip(base, row, strict=True)) if a != b] for row in rows]
    assert changed == [[3], [4], [5], [5], [6], [7]]
    integers = next(case for case in facts.contract_cases() if case.op == "nms")
    assert facts.dtypes(case) == "fp64, fp32, fp16, bf16" and facts.dtypes(integers).endswith("integers")
