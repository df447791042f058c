"""What several test files need: cases of the contract suite, inputs, comparisons."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)
ODD_SIZES = (1, 2, 31, 33, 63, 127, 129)


@dataclass(frozen=True)
class Case:
    """One way to call an operator, for the contract suite.

    ``tensors(device, dtype)`` makes the tensor arguments; ``call(*tensors)`` is the public function
    with everything else bound; ``raw(*tensors)`` the positional arguments of ``torch.ops.opzoo.<op>``.
    """

    id: str
    op: str
    tensors: Callable[[torch.device, torch.dtype], tuple[Tensor, ...]]
    call: Callable[..., Any]
    raw: Callable[..., tuple[Any, ...]]
    differentiable: tuple[int, ...] = ()  # positions in tensors that get gradients
    forward_ad: bool = False
    double_backward: bool = False
    deterministic_backward: bool = True
    same_for_any_threads: bool = True  # on the CPU; False: products are torch's, which splits sums by threads
    dynamic: dict[int, int] = field(default_factory=dict)  # tensor position -> axis that may vary
    autocast_output: str = "input"  # "input": the first tensor's dtype; "autocast": autocast's; "int64"
    vmap_dims: tuple[int | None, ...] | None = None  # in_dims for vmap over `call`; None: vmap must raise


def contract_cases() -> list[Case]:
    """All cases of ``tests/cases/*.py``, one module per operator."""
    import cases

    found: list[Case] = []
    for module in pkgutil.iter_modules(cases.__path__):
        found += importlib.import_module(f"cases.{module.name}").CASES
    return found


def contract_modules() -> list[Callable[[], nn.Module]]:
    """Makers of module instances: the optional ``MODULES`` of each file of ``tests/cases``."""
    import cases

    found: list[Callable[[], nn.Module]] = []
    for module in pkgutil.iter_modules(cases.__path__):
        found += getattr(importlib.import_module(f"cases.{module.name}"), "MODULES", [])
    return found


def error_against(reference: Tensor, result: Tensor) -> float:
    """Largest absolute difference, taken in float64. NaN or inf in only one of the two gives inf."""
    reference, result = reference.detach().double().cpu(), result.detach().double().cpu()
    assert reference.shape == result.shape, (reference.shape, result.shape)
    if reference.numel() == 0:
        return 0.0
    same = (reference == result) | (reference.isnan() & result.isnan())
    difference = torch.where(same, 0.0, (reference - result).abs())
    return float(torch.nan_to_num(difference, nan=float("inf")).max())


def assert_as_good_as(result: Tensor, peer: Tensor, exact: Tensor, factor: float = 2.0) -> None:
    """``result`` is at most ``factor`` times as far from the float64 truth as ``peer`` is.

    One unit in the last place of the result's dtype is always allowed: a peer may be exact by luck.
    """
    unit = torch.finfo(result.dtype).eps * float(exact.abs().max()) if exact.numel() else 0.0
    ours, theirs = error_against(exact, result), error_against(exact, peer)
    assert ours <= factor * theirs + unit, f"error {ours:.3e}, peer's {theirs:.3e}, one unit {unit:.3e}"


def detector_boxes(count: int, height: float, width: float, generator: torch.Generator | None = None) -> Tensor:
    """``Tensor[count, 4]`` of boxes clustered like a detector's proposals, inside the image."""
    centres = max(1, count // 20)
    cx = torch.rand(centres, generator=generator) * width
    cy = torch.rand(centres, generator=generator) * height
    size = torch.exp(torch.rand(centres, generator=generator) * 3.0) * min(height, width) / 30
    pick = torch.randint(centres, (count,), generator=generator)
    jitter = 1 + 0.3 * torch.randn(count, 4, generator=generator)
    x, y = cx[pick] + size[pick] * 0.2 * jitter[:, 0], cy[pick] + size[pick] * 0.2 * jitter[:, 1]
    w, h = size[pick] * jitter[:, 2].abs(), size[pick] * jitter[:, 3].abs()
    boxes = torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], 1)
    boxes[:, 0::2].clamp_(0, width)
    boxes[:, 1::2].clamp_(0, height)
    return boxes
