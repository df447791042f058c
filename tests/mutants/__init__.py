"""Deliberately wrong operators in plain PyTorch, one believable mistake each.

``tests/test_mutants.py`` holds the comparison of the suite to them: it must reject every mutant and
accept the true operator on the very same inputs.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Mutant:
    """``wrong`` takes the arguments of ``opzoo.reference.<op>``; ``inputs`` makes arguments that expose it."""

    id: str
    op: str
    wrong: Callable[..., Any]
    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    dtype: torch.dtype = torch.float64  # of the comparison; below float64 it is "as good as"
    constant: tuple[int, ...] = ()  # positions of floating arguments that get no gradient


def all_mutants() -> list[Mutant]:
    found: list[Mutant] = []
    for module in pkgutil.iter_modules(__path__):
        found += importlib.import_module(f"{__name__}.{module.name}").MUTANTS
    return found
