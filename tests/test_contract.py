"""What every operator promises about values, layouts, dtypes, fakes and devices.

Generic over ``tests/cases``: an operator joins by listing its cases there. Derivatives, transforms
and compilation are in ``test_contract_transforms.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import (
    LAYOUTS,
    as_leaves,
    assert_all_near,
    assert_same_form,
    fake_call,
    forward_backward,
    grown,
    in_layout,
    loss_of,
    outputs,
    raw_op,
    record,
    weights_like,
)
from helpers import FLOATS, Case, contract_cases
from torch import Tensor

CASES = contract_cases()
every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
differentiable = pytest.mark.parametrize("case", [c for c in CASES if c.differentiable], ids=lambda case: case.id)
several = pytest.mark.parametrize(
    "case", [c for c in CASES if len(c.tensors(torch.device("cpu"), torch.float32)) > 1], ids=lambda case: case.id
)
layouts = pytest.mark.parametrize("layout", LAYOUTS)
OPERATORS = {case.op: case for case in CASES}


def test_every_operator_is_reached() -> None:
    """An operator that no case reaches, a backward for example, would escape the whole suite."""
    reached = {
        call[0]._schema.name for case in CASES for call in record(case, case.tensors(torch.device("cpu"), torch.double))
    }
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("opzoo::")}
    with_tensors = {name for name in registered if "Tensor" in str(torch._C._get_schema(name, ""))}
    assert with_tensors <= reached, f"no case reaches {sorted(with_tensors - reached)}"


# Registration and fakes


@pytest.mark.parametrize("requires_grad", [False, True], ids=["no-grad", "grad"])
@every
def test_opcheck(case: Case, device: torch.device, requires_grad: bool) -> None:
    tensors = case.tensors(device, torch.float32)
    if requires_grad:
        if not case.differentiable:
            pytest.skip("nothing to differentiate")
        tensors = tuple(as_leaves(case, tensors))
    torch.library.opcheck(raw_op(case), case.raw(*tensors))


@differentiable
def test_opcheck_of_backward(case: Case, device: torch.device) -> None:
    """The operators that the backward calls are public to every user of ``torch.ops`` too."""
    for op, args, _ in record(case, case.tensors(device, torch.float32)):
        torch.library.opcheck(op, args)


@pytest.mark.parametrize("layout", ["contiguous", *LAYOUTS])
@every
def test_fake_equals_real(case: Case, device: torch.device, layout: str) -> None:
    tensors = case.tensors(device, torch.float32)
    variants = [list(tensors)] if layout == "contiguous" else in_layout(LAYOUTS[layout], tensors)
    if not variants:
        pytest.skip("no tensor of this case has such a layout")
    for variant in variants:
        for op, args, result in record(case, variant):
            assert_same_form(op, fake_call(op, args), result)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@every
def test_fake_equals_real_in_dtype(case: Case, device: torch.device, dtype: torch.dtype) -> None:
    for op, args, result in record(case, case.tensors(device, dtype)):
        assert_same_form(op, fake_call(op, args), result)


def _attempt(function: Any, *args: Any) -> tuple[Any, Exception | None]:
    try:
        return function(*args), None
    except Exception as error:
        return None, error


@every
def test_empty_axes(case: Case, device: torch.device) -> None:
    """Each axis of each tensor, and all axes that vary together: a clean answer, the fake's answer."""
    op, tensors = raw_op(case), case.tensors(device, torch.float32)
    variants = [
        [t.narrow(axis, 0, 0) if i == position else t for i, t in enumerate(tensors)]
        for position, changed in enumerate(tensors)
        for axis in range(changed.dim())
    ]
    variants.append([t.narrow(case.dynamic[i], 0, 0) if i in case.dynamic else t for i, t in enumerate(tensors)])
    for variant in variants:
        shapes = [tuple(t.shape) for t in variant]
        arguments, error = _attempt(case.raw, *variant)
        if error is not None:  # not to be said in the operator's arguments
            continue
        real, error = _attempt(op, *arguments)
        fake, fake_error = _attempt(fake_call, op, arguments)
        if error is not None:
            assert isinstance(error, (RuntimeError, ValueError)), f"{shapes}: {error!r}"
            assert "opzoo::" in str(error), f"{shapes}: the message does not name the operator: {error}"
            assert fake_error is not None, f"{shapes}: refused ({error}), but the fake kernel accepts"
            continue
        assert fake_error is None, f"{shapes}: works, but the fake kernel refuses: {fake_error!r}"
        assert_same_form(op, fake, real)
        assert not any(out.is_floating_point() and out.isnan().any() for out in outputs(real)), shapes
        if case.differentiable:
            leaves = as_leaves(case, variant)
            wanted = [leaves[position] for position in case.differentiable]
            for leaf, grad in zip(wanted, torch.autograd.grad(loss_of(case.call(*leaves)), wanted), strict=True):
                assert grad.shape == leaf.shape and not grad.isnan().any(), shapes


# Values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@layouts
@every
def test_layout_does_not_change_values(case: Case, device: torch.device, layout: str, dtype: torch.dtype) -> None:
    tensors = case.tensors(device, dtype)
    variants = in_layout(LAYOUTS[layout], tensors)
    if not variants:
        pytest.skip("no tensor of this case has such a layout")
    expected = forward_backward(case, case.call, [t.contiguous() for t in tensors])
    for variant in variants:
        strides = [t.stride() for t in variant]
        values, grads = forward_backward(case, case.call, variant)
        assert_all_near(values, expected[0], f"outputs for strides {strides}")
        assert_all_near(grads, expected[1], f"gradients for strides {strides}")


@every
def test_expanded_inputs(case: Case, device: torch.device) -> None:
    """Stride 0, as ``expand`` makes it, against the same values written out."""
    tensors, tried = case.tensors(device, torch.float32), 0
    for position, t in enumerate(tensors):
        for axis in range(t.dim()):
            stretched = t.narrow(axis, 0, 1).expand_as(t)
            views = [stretched if i == position else other for i, other in enumerate(tensors)]
            expected, error = _attempt(forward_backward, case, case.call, [v.contiguous() for v in views])
            if error is not None:  # the values themselves are refused, an image index say
                continue
            tried += 1
            actual = forward_backward(case, case.call, views)
            assert_all_near(actual[0], expected[0], f"outputs, tensor {position} expanded along {axis}")
            assert_all_near(actual[1], expected[1], f"gradients, tensor {position} expanded along {axis}")
    assert tried


@layouts
@differentiable
def test_layout_of_incoming_gradient(case: Case, device: torch.device, layout: str) -> None:
    leaves = as_leaves(case, case.tensors(device, torch.float32))
    wanted = [leaves[position] for position in case.differentiable]
    outs = [out for out in outputs(case.call(*leaves)) if out.is_floating_point()]
    incoming = [weights_like(out) for out in outs]
    variants = in_layout(LAYOUTS[layout], incoming)
    if not variants:
        pytest.skip("no output of this case has such a layout")
    expected = torch.autograd.grad(outs, wanted, incoming, retain_graph=True)
    for variant in variants:
        actual = torch.autograd.grad(outs, wanted, variant, retain_graph=True)
        assert_all_near(actual, expected, f"gradients for incoming strides {[g.stride() for g in variant]}")


@differentiable
def test_expanded_incoming_gradient(case: Case, device: torch.device) -> None:
    """``out.sum().backward()``: the incoming gradient is one number with stride 0 everywhere."""
    leaves = as_leaves(case, case.tensors(device, torch.float32))
    wanted = [leaves[position] for position in case.differentiable]
    outs = [out for out in outputs(case.call(*leaves)) if out.is_floating_point()]
    stretched = [torch.ones((), device=device).expand_as(out) for out in outs]
    expected = torch.autograd.grad(outs, wanted, [g.contiguous() for g in stretched], retain_graph=True)
    assert_all_near(torch.autograd.grad(outs, wanted, stretched), expected, "gradients")


@every
def test_inputs_are_left_alone(case: Case, device: torch.device) -> None:
    tensors = case.tensors(device, torch.float32)
    before = [t.clone() for t in tensors]
    forward_backward(case, case.call, tensors)
    for position, (t, copy) in enumerate(zip(tensors, before, strict=True)):
        assert torch.equal(t, copy), f"tensor {position} was written to"


@every
def test_raw_equals_public(case: Case, device: torch.device) -> None:
    tensors = case.tensors(device, torch.float32)
    raw = forward_backward(case, lambda *t: raw_op(case)(*case.raw(*t)), tensors)
    public = forward_backward(case, case.call, tensors)
    assert len(raw[0]) >= len(public[0])  # an operator may return what only its backward needs
    assert_all_near(raw[0][: len(public[0])], public[0], "outputs")
    if len(raw[0]) == len(public[0]):
        assert_all_near(raw[1], public[1], "gradients")


# Dtypes


@several
def test_mixed_dtypes(case: Case, device: torch.device) -> None:
    """Another float dtype in one tensor: promotion as the fake says, or an error that names the operator."""
    op, tensors = raw_op(case), case.tensors(device, torch.float32)
    exact = outputs(case.call(*tensors))
    for position, t in enumerate(tensors):
        for dtype in set(FLOATS) - {torch.float32} if t.is_floating_point() else ():
            mixed = [other.to(dtype) if i == position else other for i, other in enumerate(tensors)]
            result, error = _attempt(op, *case.raw(*mixed))
            fake, fake_error = _attempt(fake_call, op, case.raw(*mixed))
            what = f"tensor {position} in {dtype}"
            if error is not None:
                assert isinstance(error, RuntimeError) and f"opzoo::{case.op}" in str(error), f"{what}: {error!r}"
                assert fake_error is not None, f"{what}: refused, but the fake kernel accepts"
                continue
            assert fake_error is None, f"{what}: works, but the fake kernel refuses: {fake_error!r}"
            assert_same_form(op, fake, result)
            public = outputs(case.call(*mixed))
            if all(out.is_floating_point() for out in exact):
                assert_all_near([out.double() for out in public], [e.double() for e in exact], what, 2.0**52 / 20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every
def test_autocast(case: Case, device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "cpu" and dtype == torch.float16:
        pytest.skip("autocast on the CPU is bfloat16")
    tensors = case.tensors(device, torch.float32)
    leaves = as_leaves(case, tensors)
    with torch.autocast(device.type, dtype):
        result = case.call(*leaves)
        raw = outputs(raw_op(case)(*case.raw(*leaves)))
    outs = outputs(result)
    expected = {"input": torch.float32, "autocast": dtype, "int64": torch.int64}[case.autocast_output]
    assert outs[0].dtype == raw[0].dtype == expected
    if not case.differentiable:
        return
    wanted = [leaves[position] for position in case.differentiable]
    _, exact = forward_backward(case, case.call, tensors)
    for leaf, grad, true in zip(wanted, torch.autograd.grad(loss_of(result), wanted), exact, strict=True):
        assert grad.dtype == leaf.dtype == torch.float32
        assert float((grad - true).abs().max()) <= 0.1 * float(true.abs().max()) + 1e-3


@every
def test_autocast_spares_float64(case: Case, device: torch.device) -> None:
    tensors = case.tensors(device, torch.float64)
    dtype = torch.bfloat16 if device.type == "cpu" else torch.float16
    with torch.autocast(device.type, dtype):
        under = outputs(case.call(*tensors))
    assert_all_near(under, outputs(case.call(*tensors)), "outputs")


# Determinism


def _three_runs(case: Case, tensors: list[Tensor]) -> list[list[Tensor]]:
    runs = [forward_backward(case, case.call, tensors) for _ in range(3)]
    return [[*values, *grads] for values, grads in runs]


def _assert_bit_equal(left: list[Tensor], right: list[Tensor], what: str) -> None:
    for position, (a, b) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(a, b), f"{what}: tensor {position} differs by {float((a - b).abs().max()):.3e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every
def test_runs_are_bit_equal(case: Case, device: torch.device, dtype: torch.dtype) -> None:
    tensors = grown(case, device, dtype, 8)
    if device.type == "cuda" and not case.deterministic_backward:
        runs = [outputs(case.call(*tensors)) for _ in range(3)]
    else:
        runs = _three_runs(case, tensors)
    _assert_bit_equal(runs[0], runs[1], "second run")
    _assert_bit_equal(runs[0], runs[2], "third run")


@every
def test_threads_do_not_change_bits(case: Case) -> None:
    if not case.same_for_any_threads:
        pytest.skip("multiplies with torch, which splits sums by threads")
    tensors = grown(case, torch.device("cpu"), torch.float32, 16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = _three_runs(case, tensors)[0]
        torch.set_num_threads(2)
        two = _three_runs(case, tensors)[0]
    finally:
        torch.set_num_threads(before)
    _assert_bit_equal(one, two, "two threads")


@every
def test_deterministic_mode(case: Case, device: torch.device) -> None:
    """Under ``use_deterministic_algorithms`` a run repeats itself to the bit, or says that it cannot."""
    tensors = grown(case, device, torch.float32, 8)
    torch.use_deterministic_algorithms(True)
    try:
        runs, error = _attempt(_three_runs, case, tensors)
    finally:
        torch.use_deterministic_algorithms(False)
    if error is not None:
        assert not case.deterministic_backward and "deterministic" in str(error), repr(error)
        return
    _assert_bit_equal(runs[0], runs[1], "second run")
    _assert_bit_equal(runs[0], runs[2], "third run")


# Devices


@pytest.mark.gpu
@every
def test_side_stream(case: Case) -> None:
    """Inputs arrive late on a side stream; work launched on any other stream would read the old memory."""
    device = torch.device("cuda")
    tensors = grown(case, device, torch.float32, 2)
    expected = forward_backward(case, case.call, tensors)
    late = [torch.zeros_like(t) for t in tensors]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for target, source in zip(late, tensors, strict=True):
            target.copy_(source)
        actual = forward_backward(case, case.call, late)
    stream.synchronize()
    assert_all_near(actual[0], expected[0], "outputs")
    assert_all_near(actual[1], expected[1], "gradients")


@every
def test_one_meta_tensor_raises(case: Case) -> None:
    """It reaches the fake kernel, whose results are memory that nobody wrote."""
    for op, args, _ in record(case, case.tensors(torch.device("cpu"), torch.float32)):
        tensors = [i for i, value in enumerate(args) if isinstance(value, Tensor)]
        for place in tensors if len(tensors) > 1 else []:
            changed = [value.to("meta") if i == place else value for i, value in enumerate(args)]
            with torch.no_grad(), pytest.raises(RuntimeError, match="opzoo::"):
                op(*changed)


@pytest.mark.gpu
@several
def test_mixed_devices_raise(case: Case) -> None:
    op, tensors = raw_op(case), case.tensors(torch.device("cuda"), torch.float32)
    names = [argument.name for argument in op._schema.arguments if "Tensor" in str(argument.type)]
    for position, t in enumerate(tensors):
        if t.dim() == 0:
            continue
        mixed = [other.cpu() if i == position else other for i, other in enumerate(tensors)]
        try:
            raw = case.raw(*mixed)
        except RuntimeError:  # a case that concatenates its tensors cannot mix them
            continue
        for call in (lambda: case.call(*mixed), lambda: op(*raw)):  # noqa: B023
            with pytest.raises(RuntimeError, match="device") as caught:
                call()
            message = str(caught.value)
            assert f"opzoo::{case.op}" in message and any(name in message for name in names), message


@pytest.mark.gpu
@every
def test_devices_agree(case: Case) -> None:
    """One formula on both devices: fp64 leaves only the order of sums."""
    tensors = grown(case, torch.device("cpu"), torch.float64, 2)
    cpu = forward_backward(case, case.call, tensors)
    cuda = forward_backward(case, case.call, [t.cuda() for t in tensors])
    assert_all_near([t.cpu() for t in cuda[0]], cpu[0], "outputs", 1024)
    assert_all_near([t.cpu() for t in cuda[1]], cpu[1], "gradients", 1024)


# Whole processes


@pytest.mark.skipif(os.environ.get("OPZOO_POISON") == "1", reason="this is the poisoned run")
def test_poisoned_allocations() -> None:
    """With every allocation full of NaN, an element that no kernel wrote shows up as NaN."""
    chosen = "layout or expanded or empty or left_alone or raw_equals or bit_equal"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", chosen],
        env={**os.environ, "OPZOO_POISON": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


@pytest.mark.parametrize("op", OPERATORS)
def test_hostile_arguments(op: str, device: torch.device) -> None:
    """Whatever the arguments, a call returns or raises. In a process of its own, which may die."""
    run = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "hostility.py"), op, device.type],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_SHOW_CPP_STACKTRACES": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
