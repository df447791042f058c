"""What the campaign expects of a call: values of :mod:`opzoo.reference`, and how far from them rounding may lead.

Of an operator that is linear in some arguments the reference of their absolute values is the size of
its sums, element by element: rounding errs by a few units of that, whatever cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from campaign_draw import Arguments
from contract import outputs
from torch import Tensor
from torch.utils._pytree import tree_map_only


@dataclass
class Near:
    """A floating result: ``value`` within some units of ``scale``, the size of what was summed.

    The dtype of ``value`` is that of the arithmetic. Where ``scale`` is infinite the order of a sum decides,
    and nothing is compared. With ``loose`` NaN may stand for infinity and the other way round.
    """

    value: Tensor
    scale: Tensor
    loose: bool = False
    odd: bool = False  # NaN and infinity may stand for a number too
    rounded: float = 0  # epsilon of a dtype that sums were rounded to on the way, some times


Expected = list["Near | Tensor | None"]  # one per output: near a value, equal to a tensor, or not looked at
UNITS = 256  # of the arithmetic's epsilon, per unit of scale


def work(value: Any) -> Any:
    """The tensors in ``value`` as the arithmetic has them: half types in float32, plain memory, no gradient."""

    def one(t: Tensor) -> Tensor:
        t = t.detach().cpu()
        t = t.float() if t.dtype in (torch.float16, torch.bfloat16) else t
        return t.clone(memory_format=torch.contiguous_format)

    return tree_map_only(Tensor, one, value)


def absolute(args: Arguments, names: Sequence[str]) -> Arguments:
    """``args`` with the size of what is finite in ``names``."""

    def size(t: Tensor) -> Tensor:
        return torch.where(t.isfinite(), t.abs(), 0) if t.is_floating_point() else t.abs()

    return {name: tree_map_only(Tensor, size, v) if name in names else v for name, v in args.items()}


def linear(reference: Callable[..., Any], args: Arguments, names: Sequence[str], loose: bool = False) -> Expected:
    """Of an operator that is linear in each of the arguments ``names``."""
    args = work(args)
    return [Near(reference(**args), reference(**absolute(args, names)), loose)]


def _flat(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def gradients(reference: Callable[..., Tensor], args: Arguments, wanted: Sequence[str], grad: Tensor) -> list[Tensor]:
    """Of ``<reference(args), grad>`` to each of the arguments ``wanted``; lists of tensors are spread."""
    leaves = {name: tree_map_only(Tensor, lambda t: t.clone().requires_grad_(), args[name]) for name in wanted}
    out = reference(**{**args, **leaves})
    flat = [t for name in wanted for t in _flat(leaves[name])]
    if not out.requires_grad:
        return [torch.zeros_like(t) for t in flat]
    found = torch.autograd.grad(out, flat, grad.to(out.dtype), allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(flat, found, strict=True)]


def adjoint(
    reference: Callable[..., Tensor],
    args: Arguments,
    wanted: Sequence[str],
    names: Sequence[str],
    grad: Tensor,
    coordinates: Sequence[str] = (),
) -> Expected:
    """Of a backward: the gradients of ``reference``, which is linear in each of ``names``.

    A gradient to ``coordinates`` is a difference of pixels: its scale is all that may enter it. Of infinity
    and NaN the order of products decides: where they reach a gradient nothing is compared.
    """
    rounded = torch.finfo(grad.dtype).eps
    args, grad = work(args), work(grad)
    values = gradients(reference, args, wanted, grad)
    size = absolute({"grad": grad}, ("grad",))["grad"]
    scales = gradients(reference, absolute(args, names), wanted, size)
    whole = 4 * size.double().sum()
    for name in names:
        for t in _flat(absolute(args, names).get(name)):
            whole = whole * t.abs().max().double() if t is not None and t.numel() else whole
    spread = [name for name in wanted for _ in _flat(args[name])]
    floating = [t.dtype for name in names for t in _flat(args[name]) if t is not None and t.is_floating_point()]
    arithmetic = floating[0] if floating else values[0].dtype
    odd = not all(bool(t.isfinite().all()) for t in outputs([args, grad]))
    expected: Expected = []
    for name, value, scale in zip(spread, values, scales, strict=True):
        size = (whole if name in coordinates else scale.double().abs()).expand(value.shape)
        if coordinates:  # whose errors reach every gradient, where samples have small weights above all
            size = size + 0.01 * whole
        size = torch.where(value.isfinite(), size, torch.inf)
        expected.append(Near(value.to(arithmetic), size, odd=odd, rounded=rounded))
    return expected


def is_finite(value: Any) -> bool:
    """Whether every number of every tensor is one, and moderate: sums of them do not overflow."""
    leaves: list[bool] = []

    def look(t: Tensor) -> Tensor:
        if t.is_floating_point() and t.numel():
            leaves.append(bool((t.detach().double().abs() < 1e9).all()))
        return t

    tree_map_only(Tensor, look, value)
    return all(leaves)


def difference(result: Tensor, expected: Near | Tensor) -> str:
    """What is wrong with ``result``; an empty string if nothing."""
    result = result.detach().cpu()
    value = expected.value if isinstance(expected, Near) else expected
    if result.shape != value.shape:
        return f"shape {list(result.shape)}, expected {list(value.shape)}"
    if not isinstance(expected, Near):
        if result.dtype != value.dtype:
            return f"dtype {result.dtype}, expected {value.dtype}"
        return "" if torch.equal(result, value) else f"{_first(result, value, result != value)}"
    got, want, scale = result.double(), value.double(), expected.scale.double().expand(value.shape)
    acc = torch.finfo(torch.promote_types(value.dtype, torch.float32))
    out = torch.finfo(result.dtype)
    units = acc.eps if result.dtype in (torch.float16, torch.bfloat16) else max(acc.eps, out.eps)
    steps = 4 * max(expected.rounded, out.eps) * scale if expected.rounded else out.eps * want.abs()
    allowed = UNITS * units * scale + steps + 4 * max(out.tiny, acc.tiny)
    good = (got == want) | (got.isnan() & want.isnan())
    good |= got.isfinite() & want.isfinite() & ((got - want).abs() <= allowed)
    # Where a sum may overflow, in the arithmetic or in the result, its order decides between a number,
    # infinity and NaN.
    largest = min(out.max, acc.max) / 256
    good |= ~(scale <= largest)
    good |= ((expected.loose & ~want.isfinite()) | expected.odd) & ~got.isfinite()
    good |= (want.abs() > largest) & want.isfinite() & ~got.isnan()
    return "" if bool(good.all()) else _first(result, value, ~good, scale)


def _first(result: Tensor, value: Tensor, bad: Tensor, scale: Tensor | None = None) -> str:
    at = tuple(int(i) for i in bad.nonzero()[0])
    size = "" if scale is None else f" (size of the sum {float(scale[at]):.4g})"
    return f"{int(bad.sum())} of {bad.numel()} differ, {float(result[at]):.9g} for {float(value[at]):.9g}{size} at {at}"
