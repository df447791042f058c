"""``python -m pytest test_lltm.py`` after ``python setup.py build_ext --inplace``; on a GPU too, where there is one."""

from __future__ import annotations

import pytest
import torch
from lltm import LLTM, lltm, reference

with_cuda = torch._C._dispatch_has_kernel_for_dispatch_key("lltm::cell", "CUDA")
DEVICES = ["cpu", "cuda"] if with_cuda and torch.cuda.is_available() else ["cpu"]
each_device = pytest.mark.parametrize("device", DEVICES)


def arguments(device: str, dtype: torch.dtype = torch.float64, rows: int = 4, features: int = 3, state: int = 5):
    torch.manual_seed(0)
    shapes = [(rows, features), (3 * state, state + features), (3 * state,), (rows, state), (rows, state)]
    return [torch.randn(shape, dtype=dtype, device=device).requires_grad_() for shape in shapes]


@each_device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_forward(device: str, dtype: torch.dtype, rows: int) -> None:
    args = arguments(device, dtype, rows)
    exact = reference.lltm(*(t.double() for t in args))
    # As good as torch's own operations: they round after each step, the kernel once.
    allowed = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    for got, expected in zip(lltm(*args), exact, strict=True):
        assert got.dtype == dtype and got.shape == expected.shape
        torch.testing.assert_close(got.double(), expected, rtol=allowed, atol=allowed)


@each_device
def test_backward_equals_the_references(device: str) -> None:
    args = arguments(device)
    grads = [torch.randn(4, 5, dtype=torch.float64, device=device) for _ in range(2)]
    got = torch.autograd.grad(lltm(*args), args, grads)
    expected = torch.autograd.grad(reference.lltm(*args), args, grads)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@each_device
@pytest.mark.parametrize("used", [0, 1])
def test_one_result_used(device: str, used: int) -> None:
    """The gradient of a sum has strides of 0, and the other result has none at all."""
    args = arguments(device)
    got = torch.autograd.grad(lltm(*args)[used].sum(), args, allow_unused=True)
    expected = torch.autograd.grad(reference.lltm(*args)[used].sum(), args, allow_unused=True)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other, rtol=1e-12, atol=1e-12)


@each_device
def test_gradcheck(device: str) -> None:
    assert torch.autograd.gradcheck(lltm, arguments(device))


def test_second_derivative_raises() -> None:
    args = arguments("cpu")
    (grad,) = torch.autograd.grad(lltm(*args)[0].sum(), args[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


@each_device
def test_opcheck(device: str) -> None:
    gates = torch.randn(4, 15, device=device, requires_grad=True)
    cell = torch.randn(4, 5, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.lltm.cell.default, (gates, cell))
    torch.library.opcheck(torch.ops.lltm.cell.default, (gates.detach().T.contiguous().T, cell.detach()))
    # Without requires_grad: opcheck would ask for the second derivative.
    grad, gates, cell = torch.randn(4, 5, device=device), gates.detach(), cell.detach()
    torch.library.opcheck(torch.ops.lltm.cell_backward.default, (grad, grad, gates, cell))


@each_device
def test_compile(device: str) -> None:
    module = LLTM(3, 5).to(device)
    state = torch.randn(4, 5, device=device), torch.randn(4, 5, device=device)
    x = torch.randn(4, 3, device=device, requires_grad=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    got, expected = compiled(x, state), module(x, state)
    torch.testing.assert_close(got, expected)
    wanted = (x, *module.parameters())
    grads = [torch.autograd.grad(h.sum() + 2 * cell.sum(), wanted) for h, cell in (got, expected)]
    torch.testing.assert_close(*grads)


def test_wrong_arguments() -> None:
    with pytest.raises(RuntimeError, match=r"gates must have shape \[4, 15\], got \[4, 10\]"):
        torch.ops.lltm.cell(torch.zeros(4, 10), torch.zeros(4, 5))
    with pytest.raises(RuntimeError, match="gates must have the dtype of cell, float32, got float64"):
        torch.ops.lltm.cell(torch.zeros(4, 15, dtype=torch.float64), torch.zeros(4, 5))
