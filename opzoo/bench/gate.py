"""The correctness gate: a case is timed only after its result and gradients were found right.

The operator runs on the whole case. A sample of the output's rows is then compared with the
reference, computed in float64 from the same (rounded) inputs; the gradients are those of a random
``grad_output`` that is zero outside the sampled rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opzoo.bench.case import Case, Tensors
from opzoo.bench.data import seeded

# Largest difference over the reference's largest magnitude. For half types four times the rounding
# of the result, 2^-11 and 2^-8. For float32 several times what float32 coordinates near 150 cost
# roi_align (1e-5), and a fifth of what TF32 costs a product.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class GateError(Exception):
    """The operator is wrong on this case."""

    def __init__(self, message: str, error: float) -> None:
        super().__init__(message)
        self.error = error


def relative_error(result: Tensor, reference: Tensor) -> float:
    """Largest difference over the reference's largest magnitude; NaN, inf or a wrong shape give inf."""
    if result.shape != reference.shape:
        return float("inf")
    if reference.numel() == 0:
        return 0.0
    difference = float((result.double() - reference).abs().max())
    scale = float(reference.abs().max()) or 1.0
    return difference / scale if difference < float("inf") else float("inf")


def sampled_rows(count: int, wanted: int, device: torch.device) -> Tensor:
    """Sorted row numbers without repeats, the first and the last among them."""
    ends = torch.tensor([0, count - 1], device=device)
    inner = torch.randint(count, (max(0, wanted - 2),), generator=seeded(device, 1), device=device)
    return torch.cat([ends, inner]).unique()


def _double(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


def _with_gradients(tensors: Tensors, positions: tuple[int, ...]) -> Tensors:
    return tuple(t.detach().requires_grad_(i in positions) for i, t in enumerate(tensors))


def errors(case: Case, tensors: Tensors) -> dict[str, float]:
    """The relative error of the output and of each gradient."""
    assert case.sample is not None
    leaves = _with_gradients(tensors, case.differentiable)
    exact = _with_gradients(tuple(_double(t) for t in tensors), case.differentiable)
    output = case.ours(*leaves)
    rows = sampled_rows(output.shape[0], case.gate_rows, output.device)
    expected = case.reference(*case.sample(rows, *exact))
    found = {"output": relative_error(output.detach()[rows], expected.detach())}
    if output.dtype != case.dtype:
        found["dtype"] = float("inf")
    if case.differentiable:
        part = torch.randn(expected.shape, generator=seeded(output.device, 2), device=output.device)
        grad = torch.zeros_like(output)
        grad[rows] = part.to(output.dtype)
        wanted = [leaves[i] for i in case.differentiable]
        grads = torch.autograd.grad(output, wanted, grad)
        exact_grads = torch.autograd.grad(expected, [exact[i] for i in case.differentiable], grad[rows].double())
        for i, result, reference in zip(case.differentiable, grads, exact_grads, strict=True):
            found[f"gradient of argument {i}"] = relative_error(result, reference)
    return found


def check(case: Case, tensors: Tensors) -> float:
    """Run the gate.

    Returns:
        The largest error.

    Raises:
        GateError: an error is above the dtype's tolerance.
    """
    if case.gate is not None:
        error = case.gate(case, tensors)
        if error != 0:
            raise GateError(f"{error:g} boxes differ from the definition", error)
        return error
    found = errors(case, tensors)
    where, error = max(found.items(), key=lambda item: item[1])
    tolerance = TOLERANCE[case.dtype]
    if not error <= tolerance:
        raise GateError(f"{where}: error {error:.2e}, allowed {tolerance:.1e}", error)
    return error
