"""The suite's comparison against operators that are wrong on purpose: it must tell them from the true one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import mutants
import pytest
import torch
from contract import assert_all_near, loss_of, outputs
from helpers import assert_as_good_as
from mutants import Mutant, all_mutants
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

import opzoo
import opzoo.reference

MUTANTS = all_mutants()
CORRECT = [
    correct
    for module in pkgutil.iter_modules(mutants.__path__)
    for correct in getattr(importlib.import_module(f"mutants.{module.name}"), "CORRECT", [])
]


def cast(arguments: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in ``dtype``, by way of the comparison's own precision, so that all see the same numbers."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, arguments)


def run(function: Callable[..., Any], arguments: Any, constant: tuple[int, ...] | None) -> list[Tensor]:
    """Outputs and, unless ``constant`` is None, the gradients of all other floating tensors."""
    fresh = tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), arguments)
    for position in constant or ():
        fresh[0][position].requires_grad_(False)
    result = outputs(function(*fresh[0], **fresh[1]))
    if constant is None or not any(out.requires_grad for out in result):
        return [out.detach() for out in result]
    leaves = [t for t in tree_flatten(fresh)[0] if isinstance(t, Tensor) and t.requires_grad]
    grads = torch.autograd.grad(loss_of(result), leaves, allow_unused=True)
    kept = [torch.zeros_like(t) if grad is None else grad for t, grad in zip(leaves, grads, strict=True)]
    return [out.detach() for out in result] + kept


def compare(candidate: Callable[..., Any], mutant: Mutant, arguments: Any) -> None:
    """float64: outputs and gradients within rounding. Below: as good as the reference in that dtype."""
    truth, dtype = getattr(opzoo.reference, mutant.op), mutant.dtype
    arguments = cast(arguments, dtype)
    if dtype == torch.float64:
        actual, expected = (run(function, arguments, mutant.constant) for function in (candidate, truth))
        assert_all_near(actual, expected, "outputs and gradients", 1024)
        return
    exact = run(truth, cast(arguments, torch.float64), None)
    peer = run(truth, arguments, None)
    for result, other, true in zip(run(candidate, arguments, None), peer, exact, strict=True):
        assert result.dtype == dtype
        assert_as_good_as(result, other, true)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_mutant_is_rejected(mutant: Mutant) -> None:
    arguments = mutant.inputs()
    compare(getattr(opzoo.reference, mutant.op), mutant, arguments)
    compare(getattr(opzoo, mutant.op), mutant, arguments)
    with pytest.raises(AssertionError):
        compare(mutant.wrong, mutant, arguments)


@pytest.mark.parametrize("correct", CORRECT, ids=lambda correct: correct.id)
def test_frame_of_the_mutants_is_right(correct: Mutant) -> None:
    """Without its mistake a mutant passes: it is rejected for the mistake and for nothing else."""
    compare(correct.wrong, correct, correct.inputs())
