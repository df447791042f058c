"""Machinery of the contract suite: layouts, gradients, and a look at every operator call on the way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from helpers import Case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only


def outputs(result: Any) -> list[Tensor]:
    """The tensors of a result, whatever it is packed in."""
    return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]


def raw_op(case: Case) -> Any:
    return getattr(torch.ops.opzoo, case.op).default


def grown(case: Case, device: torch.device, dtype: torch.dtype, times: int) -> list[Tensor]:
    """The case's tensors with every axis that may vary ``times`` as long."""
    draws = [case.tensors(device, dtype) for _ in range(times)]
    return [
        torch.cat([draw[position] for draw in draws], case.dynamic[position]) if position in case.dynamic else t
        for position, t in enumerate(draws[0])
    ]


def as_leaves(case: Case, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Detached tensors of the same strides; the differentiable ones require gradients."""
    return [t.detach().requires_grad_(position in case.differentiable) for position, t in enumerate(tensors)]


def weights_like(t: Tensor) -> Tensor:
    """Fixed, uneven weights: a plain sum would hide errors that cancel."""
    return torch.cos(torch.arange(t.numel(), device=t.device, dtype=torch.float64)).reshape(t.shape).to(t.dtype)


def loss_of(result: Any) -> Tensor:
    total = [(out * weights_like(out)).sum() for out in outputs(result) if out.is_floating_point()]
    return functools.reduce(torch.add, total)


def forward_backward(case: Case, call: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[list[Tensor], ...]:
    """Outputs and gradients; the gradients are empty for an operator that has none."""
    leaves = as_leaves(case, tensors)
    result = call(*leaves)
    grads = []
    if case.differentiable:
        grads = list(torch.autograd.grad(loss_of(result), [leaves[position] for position in case.differentiable]))
    return [out.detach() for out in outputs(result)], grads


def assert_near(actual: Tensor, expected: Tensor, what: str, ulps: float = 64) -> None:
    """Equal integers; floats within ``ulps`` units of the largest expected value. NaN is never near."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    if not expected.is_floating_point():
        assert torch.equal(actual, expected), f"{what}: {actual} instead of {expected}"
        return
    assert not actual.isnan().any(), f"{what}: NaN in the result"
    if expected.numel():
        unit = torch.finfo(expected.dtype).eps * max(float(expected.abs().max()), 1e-3)
        worst = float((actual.double() - expected.double()).abs().max())
        assert worst <= ulps * unit, f"{what}: off by {worst:.3e}, {worst / unit:.0f} units of the largest value"


def assert_all_near(actual: Sequence[Tensor], expected: Sequence[Tensor], what: str, ulps: float = 64) -> None:
    assert len(actual) == len(expected), what
    for position, (left, right) in enumerate(zip(actual, expected, strict=True)):
        assert_near(left, right, f"{what}, number {position}", ulps)


# Layouts: each returns a tensor of the same values, or None where it has no meaning.


def _transposed(t: Tensor) -> Tensor | None:
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() >= 2 else None


def _reversed_axes(t: Tensor) -> Tensor | None:
    axes = tuple(reversed(range(t.dim())))
    return t.permute(axes).contiguous().permute(axes) if t.dim() >= 3 else None


def _channels_last(t: Tensor) -> Tensor | None:
    if t.dim() != 4 or not t.is_floating_point():
        return None
    return t.contiguous(memory_format=torch.channels_last)


def _gap(t: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory around a view that poisons the result if it is read."""
    return torch.full(tuple(shape), float("nan") if t.is_floating_point() else 77, dtype=t.dtype, device=t.device)


def _sliced(t: Tensor) -> Tensor | None:
    if t.dim() == 0:
        return None
    view = _gap(t, [2 * size + 1 for size in t.shape])[tuple(slice(1, None, 2) for _ in t.shape)]
    return view.copy_(t)


def _offset(t: Tensor) -> Tensor:
    """Contiguous, but starting one element into its storage: no vector load is aligned."""
    return _gap(t, [t.numel() + 1])[1:].view(t.shape).copy_(t)


def _negated(t: Tensor) -> Tensor | None:
    """A view whose memory holds the opposite sign (torch's lazy negation bit)."""
    if t.dtype not in (torch.float32, torch.float64):
        return None
    return torch.complex(torch.zeros_like(t), -t).conj().imag


LAYOUTS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "transposed": _transposed,
    "reversed-axes": _reversed_axes,
    "channels-last": _channels_last,
    "sliced": _sliced,
    "offset": _offset,
    "negated": _negated,
}


def in_layout(layout: Callable[[Tensor], Tensor | None], tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """All tensors in the layout at once, then each alone; empty where no tensor can have it."""
    laid = [layout(t) for t in tensors]
    able = [position for position, t in enumerate(laid) if t is not None]
    if not able:
        return []
    together = [t if other is None else other for t, other in zip(tensors, laid, strict=True)]
    alone = [[laid[i] if i == position else t for i, t in enumerate(tensors)] for position in able]
    return [together, *alone] if len(able) > 1 else [together]  # type: ignore[list-item]


# Fakes


def fake_call(op: Any, args: Any) -> Any:
    """What the fake kernel answers for ``args``."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = tree_map_only(Tensor, lambda t: mode.from_tensor(t.detach(), static_shapes=True), args)
    with mode, torch.no_grad():
        return op(*fakes)


def assert_same_form(op: Any, fake: Any, real: Any) -> None:
    """Equal count, shape, stride, dtype, device. A size that depends on data is free."""
    fakes, reals = outputs(fake), outputs(real)
    assert len(fakes) == len(reals), f"{op}: the fake kernel returns {len(fakes)} tensors, the real one {len(reals)}"
    for left, right in zip(fakes, reals, strict=True):
        assert left.dtype == right.dtype, f"{op}: fake dtype {left.dtype}, real {right.dtype}"
        assert left.device == right.device, f"{op}: fake device {left.device}, real {right.device}"
        assert left.dim() == right.dim(), f"{op}: fake rank {left.dim()}, real {right.dim()}"
        known = [isinstance(size, int) for size in left.shape]
        for axis, size in enumerate(right.shape):
            assert not known[axis] or left.shape[axis] == size, f"{op}: fake shape {left.shape}, real {right.shape}"
        if all(known):
            assert left.stride() == right.stride(), f"{op}: fake strides {left.stride()}, real {right.stride()}"


class Record(TorchDispatchMode):
    """Keeps every call of an opzoo operator below autograd: backward operators are seen as well."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "opzoo":
            self.calls.append((func, tree_map_only(Tensor, Tensor.detach, args), result))
        return result


def record(case: Case, tensors: Sequence[Tensor]) -> list[tuple[Any, tuple[Any, ...], Any]]:
    """Every operator call of the case's forward, backward and, where there is one, second backward."""
    leaves = as_leaves(case, tensors)
    wanted = [leaves[position] for position in case.differentiable]
    with Record() as mode:
        forward_backward(case, case.call, tensors)  # without create_graph: some operators then take another way
        outs = [out for out in outputs(case.call(*leaves)) if out.requires_grad]
        if wanted:
            incoming = [weights_like(out).requires_grad_(case.double_backward) for out in outs]
            grads = torch.autograd.grad(outs, wanted, incoming, create_graph=case.double_backward)
            if case.double_backward:
                torch.autograd.grad(loss_of(grads), [*wanted, *incoming], allow_unused=True)
    return mode.calls
