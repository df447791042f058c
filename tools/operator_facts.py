"""Write the table of facts of each operator's page from the cases that the contract suite holds true.

    python tools/operator_facts.py

Rewrites the part of docs/ops/*.md between the facts markers: a row per operator with its dtypes, gradients,
determinism, autocast and vmap. ``tests/cases`` says them, ``tests/test_contract*.py`` tests them on both devices,
and the dtypes are tried here.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers import Case, contract_cases  # noqa: E402

PAGES = ROOT / "docs" / "ops"
BEGIN, END = "<!-- facts:begin -->", "<!-- facts:end -->"
HEADINGS = (
    "operator",
    "dtypes",
    "gradients",
    "beyond the first derivative",
    "the same bits every time",
    "autocast",
    "vmap",
)
LABELS = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
AUTOCAST = {"input": "keeps the dtype", "autocast": "its dtype", "int64": "changes nothing"}


def accepts(case: Case, dtype: torch.dtype) -> bool:
    """Whether the operator takes its floating tensors in this dtype; a ValueError is about a number, not a dtype."""
    tensors = case.tensors(torch.device("cpu"), torch.float32)
    tensors = tuple(t.to(dtype) if t.is_floating_point() else t for t in tensors)
    try:
        with contextlib.suppress(ValueError):
            case.call(*tensors)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


def dtypes(case: Case) -> str:
    names = [label for dtype, label in LABELS.items() if accepts(case, dtype)]
    return ", ".join([*names, *(["integers"] if all(accepts(case, dtype) for dtype in INTEGERS) else [])])


def argument_names(case: Case) -> list[str]:
    """The names of the operator's arguments that come from a tensor with a gradient; of a list, the list's."""
    tensors = case.tensors(torch.device("cpu"), torch.float32)
    leaves = [t.detach().requires_grad_(position in case.differentiable) for position, t in enumerate(tensors)]

    def needs(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(needs, value))
        return isinstance(value, torch.Tensor) and value.requires_grad

    schema = getattr(torch.ops.opzoo, case.op).default._schema
    return [a.name for a, value in zip(schema.arguments, case.raw(*leaves), strict=False) if needs(value)]


def join(values: list[str]) -> str:
    return ", ".join(dict.fromkeys(value for value in values if value))


def gradients(cases: list[Case]) -> str:
    return join([f"`{name}`" for case in cases for name in argument_names(case)])


def further(cases: list[Case]) -> str:
    """Which modes go on where; arguments are named where others have no second derivative."""
    if not gradients(cases):
        return ""
    linear = [case for case in cases if case.double_backward]
    modes = ["reverse mode"] * bool(linear) + ["forward mode"] * any(case.forward_ad for case in cases)
    where = f" in {gradients(linear)}" if linear and gradients(linear) != gradients(cases) else ""
    return (" and ".join(modes) or "raises") + where


def determinism(cases: list[Case]) -> str:
    threads = "" if all(case.same_for_any_threads for case in cases) else "; on the CPU per number of threads"
    if all(case.deterministic_backward for case in cases):
        return "yes" + threads
    return "all but the backward on CUDA, which raises in torch's deterministic mode" + threads


def row(op: str, cases: list[Case]) -> str:
    vmap = "yes" if any(case.vmap_dims for case in cases) else "raises"
    autocast = AUTOCAST[cases[0].autocast_output]
    cells = (
        f"`{op}`",
        dtypes(cases[0]),
        gradients(cases) or "none",
        further(cases),
        determinism(cases),
        autocast,
        vmap,
    )
    return "| " + " | ".join(cells) + " |"


def table(page: Path) -> str:
    """The rows of the operators whose cases lie in the file of the page's name."""
    from importlib import import_module

    rows: dict[str, list[Case]] = {}
    for case in import_module(f"cases.{page.stem}").CASES:
        if not case.op.startswith("_"):
            rows.setdefault(case.op, []).append(case)
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + " --- |" * len(HEADINGS)]
    return "\n".join(lines + [row(op, cases) for op, cases in rows.items()])


def written(page: Path) -> str:
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{BEGIN}\n\n{table(page)}\n\n{END}{rest.split(END)[1]}"


def pages() -> list[Path]:
    return [page for page in sorted(PAGES.glob("*.md")) if page.stem != "index"]


if __name__ == "__main__":
    assert contract_cases()
    for page in pages():
        page.write_text(written(page), encoding="utf-8")
