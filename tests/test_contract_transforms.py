"""What every operator promises about derivatives, ``torch.func``, compilation, export; and modules."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract import as_leaves, assert_all_near, forward_backward, grown, loss_of, outputs, raw_op
from helpers import Case, contract_cases, contract_modules
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

import opzoo

CASES = contract_cases()
every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
differentiable = pytest.mark.parametrize("case", [c for c in CASES if c.differentiable], ids=lambda case: case.id)
first_of_each = pytest.mark.parametrize("case", {c.op: c for c in reversed(CASES)}.values(), ids=lambda case: case.id)
raw_or_public = pytest.mark.parametrize("door", ["public", "raw"])
MODULES = {
    name: value for name, value in vars(opzoo).items() if isinstance(value, type) and issubclass(value, nn.Module)
}


def through(case: Case, door: str) -> Callable[..., Any]:
    return case.call if door == "public" else lambda *tensors: raw_op(case)(*case.raw(*tensors))


def bound(case: Case, call: Callable[..., Any], tensors: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    """A function of the differentiable tensors alone, returning the floating outputs, and those tensors."""

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        full = list(tensors)
        for position, value in zip(case.differentiable, values, strict=True):
            full[position] = value
        return tuple(out for out in outputs(call(*full)) if out.is_floating_point())

    return function, [tensors[position].detach().clone() for position in case.differentiable]


def nondeterminism(case: Case, device: torch.device) -> float:
    return 0.0 if case.deterministic_backward or device.type == "cpu" else 1e-9


# Derivatives


@differentiable
def test_gradcheck(case: Case, device: torch.device) -> None:
    function, values = bound(case, case.call, case.tensors(device, torch.float64))
    leaves = [value.requires_grad_() for value in values]
    torch.autograd.gradcheck(
        function, leaves, check_forward_ad=case.forward_ad, nondet_tol=nondeterminism(case, device)
    )


@raw_or_public
@differentiable
def test_each_gradient_alone(case: Case, device: torch.device, door: str) -> None:
    """One tensor wants a gradient and the others do not: the same gradient as among all."""
    tensors = case.tensors(device, torch.float64)
    _, together = forward_backward(case, case.call, tensors)
    for position, expected in zip(case.differentiable, together, strict=True):
        leaves = [t.detach().requires_grad_(i == position) for i, t in enumerate(tensors)]
        result = through(case, door)(*leaves)
        if len(outputs(result)) == len(outputs(case.call(*tensors))):
            (alone,) = torch.autograd.grad(loss_of(result), [leaves[position]])
            assert_all_near([alone], [expected], f"gradient of tensor {position}")


@pytest.mark.parametrize("case", [c for c in CASES if c.double_backward], ids=lambda case: case.id)
def test_second_derivative(case: Case, device: torch.device) -> None:
    function, values = bound(case, case.call, case.tensors(device, torch.float64))
    leaves = [value.requires_grad_() for value in values]
    torch.autograd.gradgradcheck(function, leaves, nondet_tol=nondeterminism(case, device))


SINGLE = [c for c in CASES if c.differentiable and not c.double_backward]


@pytest.mark.parametrize("case", SINGLE, ids=lambda case: case.id)
def test_missing_second_derivative_raises(case: Case, device: torch.device) -> None:
    """An error that names the operator; a zero or a None would be a wrong answer.

    Only a gradient that needs no backward kernel (that of a bias is a sum) may have a derivative, and it
    must then be the right one.
    """
    function, values = bound(case, case.call, case.tensors(device, torch.float64))

    def first_derivatives(*leaves: Tensor) -> list[Tensor]:
        squares = sum((out * out).sum() for out in function(*leaves))
        return list(torch.autograd.grad(squares, leaves, create_graph=True))

    leaves = [value.requires_grad_() for value in values]
    raised = 0
    for position, grad in enumerate(first_derivatives(*leaves)):
        assert grad.requires_grad, f"gradient {position} is cut off from the graph"
        try:
            second = torch.autograd.grad(grad.sum(), leaves, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            assert "opzoo" in str(error)
            raised += 1
            continue
        tangents = [torch.randn_like(leaf) for leaf in leaves]
        expected = _directional(
            lambda *v, position=position: [first_derivatives(*v)[position].sum()], leaves, tangents
        )[0]
        actual = sum((s * t).sum() for s, t in zip(second, tangents, strict=True) if s is not None)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert raised, "the case claims that second derivatives are missing, and none is"


def _directional(function: Callable[..., Any], values: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
    step = 1e-6
    ahead = function(*[v + step * t for v, t in zip(values, tangents, strict=True)])
    behind = function(*[v - step * t for v, t in zip(values, tangents, strict=True)])
    return [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]


def _dual_numbers(function: Callable[..., Any], values: list[Tensor], tangents: list[Tensor]) -> list[Tensor | None]:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(v, t) for v, t in zip(values, tangents, strict=True)]
        return [forward_ad.unpack_dual(out).tangent for out in function(*duals)]


def _functional(function: Callable[..., Any], values: list[Tensor], tangents: list[Tensor]) -> list[Tensor | None]:
    return list(torch.func.jvp(function, tuple(values), tuple(tangents))[1])


@pytest.mark.parametrize("mode", [_dual_numbers, _functional], ids=["dual", "jvp"])
@raw_or_public
@differentiable
def test_forward_mode(case: Case, device: torch.device, door: str, mode: Callable[..., Any]) -> None:
    """Right or refused. A tangent that is silently zero or missing is the failure to find."""
    function, values = bound(case, through(case, door), case.tensors(device, torch.float64))
    for alone in [None, *range(len(values))]:
        tangents = [
            torch.randn_like(v) if alone in (None, position) else torch.zeros_like(v)
            for position, v in enumerate(values)
        ]
        expected = _directional(function, values, tangents)
        try:
            actual = mode(function, values, tangents)
        except (RuntimeError, NotImplementedError) as error:
            assert not (case.forward_ad and door == "public"), f"refused: {error}"
            continue
        for left, right in zip(actual, expected, strict=True):
            assert left is not None, "the tangent is lost"
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


@every
def test_graph_bookkeeping(case: Case, device: torch.device) -> None:
    tensors = case.tensors(device, torch.float32)
    expected = outputs(case.call(*tensors))
    assert not any(out.requires_grad for out in expected)
    for call in (case.call, through(case, "raw")):
        recorded = outputs(call(*as_leaves(case, tensors)))
        for out in recorded:
            if not out.is_floating_point():
                assert out.grad_fn is None and not out.requires_grad
        if case.differentiable:
            assert recorded[0].grad_fn is not None and recorded[0].requires_grad
        with torch.no_grad():
            assert all(out.grad_fn is None for out in outputs(call(*as_leaves(case, tensors))))
        with torch.inference_mode():
            under = outputs(call(*tensors))
            assert all(out.is_inference() and out.grad_fn is None for out in under)
        assert_all_near(under[: len(expected)], expected, "inference mode")


# torch.func


@differentiable
def test_func_grad(case: Case, device: torch.device) -> None:
    tensors = case.tensors(device, torch.float64)
    function, values = bound(case, case.call, tensors)
    _, expected = forward_backward(case, case.call, tensors)
    argnums = tuple(range(len(values)))
    assert_all_near(torch.func.grad(lambda *v: loss_of(function(*v)), argnums)(*values), expected, "torch.func.grad")
    _, pullback = torch.func.vjp(lambda *v: loss_of(function(*v)), *values)
    assert_all_near(pullback(torch.ones((), device=device, dtype=torch.float64)), expected, "torch.func.vjp")


@differentiable
def test_func_grad_of_raw(case: Case, device: torch.device) -> None:
    """``torch.ops`` under ``torch.func``: right, or an error that points at the public function."""
    tensors = case.tensors(device, torch.float64)
    function, values = bound(case, through(case, "raw"), tensors)
    try:
        actual = torch.func.grad(lambda *v: loss_of(function(*v)), tuple(range(len(values))))(*values)
    except RuntimeError as error:
        assert f"opzoo.{case.op}" in str(error), repr(error)
        return
    assert_all_near(actual, forward_backward(case, through(case, "raw"), tensors)[1], "torch.func.grad")


def _batch(case: Case, device: torch.device, dims: tuple[int | None, ...]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Batched tensors, and what a loop over the batch would be given."""
    draws = [case.tensors(device, torch.float64) for _ in range(3)]
    rows = [[draws[0][i] if dim is None else draw[i] for i, dim in enumerate(dims)] for draw in draws]
    batched = [draws[0][i] if dim is None else torch.stack([row[i] for row in rows], dim) for i, dim in enumerate(dims)]
    return batched, rows


@pytest.mark.parametrize("where", ["declared", "last"])
@every
def test_vmap(case: Case, device: torch.device, where: str) -> None:
    declared = case.vmap_dims
    if declared is None:
        count = len(case.tensors(device, torch.float64))
        batched, _ = _batch(case, device, (0,) * count)
        with pytest.raises((RuntimeError, NotImplementedError)):
            torch.func.vmap(case.call)(*batched)
        return
    dims = declared if where == "declared" else tuple(None if dim is None else -1 for dim in declared)
    batched, rows = _batch(case, device, dims)
    actual = outputs(torch.func.vmap(case.call, in_dims=dims)(*batched))
    expected = [torch.stack(outs) for outs in zip(*[outputs(case.call(*row)) for row in rows], strict=True)]
    assert_all_near(actual, expected, "vmap")


@pytest.mark.parametrize("case", [c for c in CASES if c.differentiable and c.vmap_dims], ids=lambda case: case.id)
def test_vmap_with_gradients(case: Case, device: torch.device) -> None:
    """Gradients per sample (vmap of grad), and through a batched call (grad of vmap)."""
    assert case.vmap_dims is not None
    dims = case.vmap_dims
    batched, rows = _batch(case, device, dims)
    loop = [forward_backward(case, case.call, row)[1] for row in rows]

    def loss(*tensors: Tensor) -> Tensor:
        return loss_of(case.call(*tensors))

    per_sample = torch.func.vmap(torch.func.grad(loss, case.differentiable), in_dims=dims)(*batched)
    assert_all_near(per_sample, [torch.stack(grads) for grads in zip(*loop, strict=True)], "vmap of grad")

    def total(*tensors: Tensor) -> Tensor:
        return torch.func.vmap(loss, in_dims=dims)(*tensors).sum()

    whole = torch.func.grad(total, case.differentiable)(*batched)
    for position, grad, grads in zip(case.differentiable, whole, zip(*loop, strict=True), strict=True):
        dim = dims[position]
        expected = sum(grads) if dim is None else torch.stack(grads, dim)
        assert_all_near([grad], [expected], f"grad of vmap, tensor {position}")


# torch.compile


_numbers = itertools.count()


def _compiled(function: Callable[..., Any], backend: Any, **options: Any) -> Callable[..., Any]:
    """With a code object of its own: the limit of recompilations counts per code object, over all tests."""

    def entry(*tensors: Tensor) -> Any:
        return function(*tensors)

    entry.__code__ = entry.__code__.replace(co_name=f"entry_{next(_numbers)}")
    return torch.compile(entry, backend=backend, fullgraph=True, **options)


@pytest.mark.parametrize("case", [c for c in contract_cases() if c.forward_ad], ids=lambda c: c.id)
def test_forward_over_forward(case: Case, device: torch.device) -> None:
    """The second derivative along a line, by two forward passes, against a second difference."""
    function, values = bound(case, case.call, case.tensors(device, torch.float64))
    directions = tuple(torch.randn_like(value) for value in values)

    def along(t: Tensor) -> Tensor:
        outputs = function(*[value + t * d for value, d in zip(values, directions, strict=True)])
        return sum((out * out * out).sum() for out in outputs)

    zero, one, step = (torch.tensor(x, device=device, dtype=torch.float64) for x in (0.0, 1.0, 1e-4))
    second = torch.func.jvp(lambda t: torch.func.jvp(along, (t,), (one,))[1], (zero,), (one,))[1]
    difference = (along(step) - 2 * along(zero) + along(-step)) / step**2
    torch.testing.assert_close(second, difference, rtol=1e-4, atol=1e-3)


@every
def test_compile_two_sizes(case: Case, device: torch.device) -> None:
    """One graph for both sizes, forward and backward equal to eager."""
    counter = CompileCounterWithBackend("aot_eager")
    # Two axes that happen to be equally long stay independent: a count of 4 boxes is not their 4 coordinates.
    independent = torch.fx.experimental._config.patch(use_duck_shape=False)
    with independent, torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = _compiled(case.call, counter, dynamic=True)
        for times in (2, 3):
            tensors = grown(case, device, torch.float32, times)
            expected = forward_backward(case, case.call, tensors)
            actual = forward_backward(case, compiled, tensors)
            assert_all_near(actual[0], expected[0], f"outputs, size {times}")
            assert_all_near(actual[1], expected[1], f"gradients, size {times}")
    assert counter.frame_count == 1, f"compiled {counter.frame_count} times"


@first_of_each
def test_compile_inductor(case: Case, device: torch.device) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        tensors = case.tensors(device, torch.float32)
        expected = forward_backward(case, case.call, tensors)
        actual = forward_backward(case, _compiled(case.call, "inductor"), tensors)
    assert_all_near(actual[0], expected[0], "outputs")
    assert_all_near(actual[1], expected[1], "gradients")


@every
def test_compile_channels_last(case: Case, device: torch.device) -> None:
    tensors = case.tensors(device, torch.float32)
    if not any(t.dim() == 4 for t in tensors):
        pytest.skip("no image among the tensors")
    laid = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]
    expected = forward_backward(case, case.call, laid)
    actual = forward_backward(case, _compiled(case.call, "aot_eager"), laid)
    assert [out.stride() for out in actual[0]] == [out.stride() for out in expected[0]]
    assert_all_near(actual[0], expected[0], "outputs")
    assert_all_near(actual[1], expected[1], "gradients")


@every
def test_compile_under_autocast(case: Case, device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cpu" else torch.float16

    def under(*tensors: Tensor) -> Any:
        with torch.autocast(device.type, dtype):
            return case.call(*tensors)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        tensors = case.tensors(device, torch.float32)
        expected = forward_backward(case, under, tensors)
        actual = forward_backward(case, _compiled(under, "aot_eager"), tensors)
    assert_all_near(actual[0], expected[0], "outputs")
    assert_all_near(actual[1], expected[1], "gradients", 2.0**16)  # a cast may be fused away


class _Calling(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def forward(self, *tensors: Tensor) -> Any:
        return self.case.call(*tensors)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@every
def test_export(case: Case, device: torch.device, strict: bool) -> None:
    example = grown(case, device, torch.float32, 2)
    dynamic = [{case.dynamic[i]: torch.export.Dim.DYNAMIC} if i in case.dynamic else None for i in range(len(example))]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        program = torch.export.export(
            _Calling(case), tuple(example), dynamic_shapes={"tensors": tuple(dynamic)}, strict=strict
        )
    assert any(str(node.target).startswith("opzoo.") for node in program.graph.nodes), program.graph
    for times in (2, 3, 5):
        tensors = grown(case, device, torch.float32, times)
        assert_all_near(outputs(program.module()(*tensors)), outputs(case.call(*tensors)), f"size {times}")


# Modules


def _instances(name: str) -> list[nn.Module]:
    """From MODULES of the case files, else the class without arguments."""
    made = [module for module in (factory() for factory in contract_modules()) if type(module) is MODULES[name]]
    if made:
        return made
    try:
        return [MODULES[name]()]
    except TypeError as error:
        raise AssertionError(f"{error}: list a maker of {name} in MODULES of its file in tests/cases") from None


def _plain(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if not key.startswith("_")}


def _assert_same_module(left: nn.Module, right: nn.Module) -> None:
    assert type(left) is type(right) and left is not right
    assert repr(left) == repr(right)
    assert _plain(left) == _plain(right)
    assert left.state_dict().keys() == right.state_dict().keys()
    for key, value in left.state_dict().items():
        other = right.state_dict()[key]
        assert torch.equal(value, other), key
        assert value.numel() == 0 or value.data_ptr() != other.data_ptr(), f"{key} is shared"


def _saved(value: Any, weights_only: bool) -> Any:
    """Through a file of ``torch.save``."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@pytest.mark.parametrize("name", MODULES)
def test_module_copies(name: str) -> None:
    for module in _instances(name):
        _assert_same_module(module, pickle.loads(pickle.dumps(module)))
        _assert_same_module(module, copy.deepcopy(module))
        _assert_same_module(module, _saved(module, weights_only=False))


@pytest.mark.parametrize("name", MODULES)
def test_module_state_dict(name: str) -> None:
    for module, other in zip(_instances(name), _instances(name), strict=True):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1)
        missing = other.load_state_dict(_saved(module.state_dict(), weights_only=True), strict=True)
        assert not missing.missing_keys and not missing.unexpected_keys
        _assert_same_module(module, other)


@pytest.mark.parametrize("name", MODULES)
def test_module_repr(name: str) -> None:
    """The hyper-parameters a reader needs: every plain attribute of the constructor that is kept."""
    for module in _instances(name):
        text = repr(module)
        assert text.startswith(f"{name}("), text
        assert "\n" not in text or list(module.children()), text
        kept = {key for key in _plain(module) if key != "training"}
        assert not kept or text != f"{name}()", text
