"""How an operator meets autograd, autocast and tracing: one derivative formula, four doors.

``differentiable(op, ...)`` returns the callable that the public functions use. It looks at what is
going on and takes the cheapest correct way in:

1. compiling or exporting: the plain operator, so that the graph holds one node;
2. a ``torch.func`` transform or forward-mode AD is active: a ``torch.autograd.Function`` of the
   new style, which knows ``vmap`` and ``jvp``;
3. a gradient is wanted in eager mode: a ``Function`` of the old style, half the cost of the new;
4. otherwise: the kernel itself, below autograd.

A direct caller of ``torch.ops.opzoo.*`` arrives at the same ``Function`` through the dispatcher's
Autograd key. ``torch.library.register_autograd`` would cost 40 us more per call and lose
forward-mode tangents without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from opzoo._library import LIBRARY

Args: TypeAlias = "tuple[Any, ...]"
Op: TypeAlias = "torch._ops.OpOverload[..., Any]"

_autocast_casts: dict[Op, Callable[..., Args]] = {}  # filled by register_autocast
_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_functorch_active = torch._C._are_functorch_transforms_active
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled


def _forward_ad_active() -> bool:
    return forward_ad._current_level >= 0


def _autocast_enabled(device: str) -> bool:
    # torch raises for a device it has no autocast for, meta among them.
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def _name(op: Op) -> str:
    return str(op._schema.name).removeprefix("opzoo::")


def differentiable(
    op: Op,
    *,
    inputs: Sequence[int],
    save: Callable[[Any, Args, Any], None],
    backward: Callable[..., Any],
    jvp: Callable[..., Any] | None = None,
    vmap: Callable[..., Any] | None = None,
    autocast: bool = False,
) -> Callable[..., Any]:
    """Attach a derivative to ``op`` and return its eager entry point.

    Args:
        op: the operator, its arguments all positional.
        inputs: positions of the arguments that can have a gradient.
        save: ``save(ctx, args, output)`` keeps what the derivative needs.
        backward: ``backward(ctx, *grads)`` returns one gradient (or None) per argument. It calls
            public or ``differentiable`` functions only, so that it can be differentiated again.
            For a leading list of tensors it returns a list, and the other hooks take lists for it.
        jvp: ``jvp(ctx, *tangents)`` returns the output's tangent; None makes forward-mode AD raise. It
            computes with ``differentiable`` functions only: torch calls it with forward mode off, so a
            plain torch operator would lose the tangents of an outer level without a word.
        vmap: ``vmap(info, in_dims, *args)`` returns ``(output, out_dims)``; None makes vmap raise.
        autocast: whether the operator has an autocast rule.
    """
    name = _name(op)
    # A Function sees tensors in no list: a leading Tensor[] is spread over its arguments.
    listed = str(op._schema.arguments[0].type) == "List[Tensor]"
    others = len(op._schema.arguments) - 1

    def spread(args: Args) -> Args:
        return (*args[0], *args[1:]) if listed else args

    def gathered(values: Args) -> Args:
        return (list(values[:-others]), *values[-others:]) if listed else values

    def below_autograd(*args: Any) -> Any:
        with _BelowAutograd():
            output = op(*args)
        return tuple(output) if isinstance(output, list) else output

    def refuse_jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(f"opzoo.{name} has no forward-mode derivative (jvp); use reverse mode")

    def refuse_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError(f"opzoo.{name} has no vmap rule; loop over the batch instead")

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *values: Any) -> Any:
            args = gathered(values)
            output = below_autograd(*args)
            ctx.eager = True  # create_graph=True reaches a derivative with gradients enabled; torch.func always does
            save(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return spread(backward(ctx, *grads))

    class Functional(torch.autograd.Function):
        @staticmethod
        def forward(*values: Any) -> Any:
            return below_autograd(*gathered(values))

        @staticmethod
        def setup_context(ctx: Any, inputs: Args, output: Any) -> None:
            save(ctx, gathered(inputs), output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return spread(backward(ctx, *grads))

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            return (jvp or refuse_jvp)(ctx, *gathered(tangents))

        @staticmethod
        def vmap(info: Any, in_dims: Any, *values: Any) -> Any:
            return (vmap or refuse_vmap)(info, gathered(in_dims), *gathered(values))

    Eager.__name__ = Functional.__name__ = Eager.__qualname__ = Functional.__qualname__ = name

    def wants_grad(args: Args) -> bool:
        for position in inputs:
            argument = args[position]
            if isinstance(argument, (list, tuple)):
                if any(t.requires_grad for t in argument):
                    return True
            elif argument is not None and argument.requires_grad:
                return True
        return False

    def autograd_kernel(*args: Any) -> Any:
        if _functorch_active():
            if wants_grad(args) or _forward_ad_active():
                raise RuntimeError(
                    f"torch.ops.opzoo.{name} cannot be differentiated by torch.func; the functions of opzoo can, in "
                    "the arguments and modes they name, but not from inside torch.compile"
                )
        elif _forward_ad_active():
            return Functional.apply(*spread(args))
        elif _is_grad_enabled() and wants_grad(args):
            return Eager.apply(*spread(args))
        with _BelowAutograd():
            return op(*args)

    LIBRARY.impl(name, autograd_kernel, "Autograd")

    def call(*args: Any) -> Any:
        if _is_compiling():
            if forward_ad._current_level >= 0:
                raise RuntimeError(
                    f"opzoo.{name}: forward-mode AD inside torch.compile would lose the tangent; compile less, "
                    "or use reverse mode"
                )
            return op(*args)
        if _functorch_active() or forward_ad._current_level >= 0:
            # A Function runs above the dispatcher's Autocast key: cast here, where it is differentiated.
            if autocast and _autocast_enabled(args[0].device.type):
                args = _autocast_casts[op](torch.get_autocast_dtype(args[0].device.type), *args)
            return Functional.apply(*spread(args))
        if autocast and _autocast_enabled(args[0].device.type):
            return op(*args)
        if _is_grad_enabled() and wants_grad(args):
            return Eager.apply(*spread(args))
        with _BelowAutograd():
            return op(*args)

    return call


def register_fake(op: str, fake: Callable[..., Any]) -> None:
    """``fake`` as the fake kernel of ``op``. The dispatcher lets None pass for a tensor; here it raises.

    One meta tensor brings a call here, whatever the others are: the result would be memory that nobody wrote.
    """
    arguments = torch._C._get_schema(f"opzoo::{op}", "").arguments
    required = [
        (position, argument.name) for position, argument in enumerate(arguments) if str(argument.type) == "Tensor"
    ]

    def require_one_kind(args: Args) -> None:
        first: tuple[str, Tensor] | None = None
        for argument, value in zip(arguments, args, strict=False):
            for t in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(t, Tensor):
                    first = first or (argument.name, t)
                    if t.is_meta != first[1].is_meta:
                        raise RuntimeError(
                            f"opzoo::{op}: {argument.name} must be on the device of {first[0]}, "
                            f"{first[1].device}, got {t.device}"
                        )

    def kernel(*args: Any, **kwargs: Any) -> Any:
        for position, name in required:
            if position < len(args) and args[position] is None:
                raise RuntimeError(f"opzoo::{op}: {name} must be a tensor, got None")
        require_one_kind(args)
        return fake(*args, **kwargs)

    torch.library.register_fake(f"opzoo::{op}", kernel, lib=LIBRARY)


def register_autocast(op: Op, cast: Callable[..., Args]) -> None:
    """Run ``op`` on ``cast(dtype, *args)`` where autocast is on, dtype being autocast's own."""
    name = _name(op)
    _autocast_casts[op] = cast

    def kernel_for(device: str, key: Any) -> Callable[..., Any]:
        keyset = torch._C.DispatchKeySet(key)

        def kernel(*args: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(keyset):
                return op(*cast(torch.get_autocast_dtype(device), *args))

        return kernel

    for device, key in (("cpu", torch._C.DispatchKey.AutocastCPU), ("cuda", torch._C.DispatchKey.AutocastCUDA)):
        LIBRARY.impl(name, kernel_for(device, key), key.name)


def autocast_tensor(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Autocast's own rule: cast floating tensors, but never fp64."""
    if t is None or not t.is_floating_point() or t.dtype == torch.float64:
        return t
    return t.to(dtype)


def require_tensor(op: str, name: str, value: Any) -> None:
    """TypeError unless ``value`` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"opzoo::{op}: {name} must be a tensor, got {type(value).__name__}")


def require_number(op: str, name: str, value: Any, method: str = "__float__") -> None:
    """TypeError unless ``value`` is a number; an integer with ``method="__index__"``. ValueError for a huge int."""
    if not hasattr(value, method):
        kind = "an int" if method == "__index__" else "a number"
        raise TypeError(f"opzoo::{op}: {name} must be {kind}, got {value!r}")
    if isinstance(value, Tensor) and value.numel() != 1:
        raise TypeError(f"opzoo::{op}: {name} must be a number, got a tensor of shape {list(value.shape)}")
    if isinstance(value, int):
        _require_range(op, name, value, 63 if method == "__index__" else 1023)


def _require_range(op: str, name: str, value: int, bits: int) -> None:
    """The dispatcher knows int64 and float64 alone, and raises OverflowError for an int beyond them."""
    if not -(1 << bits) <= value < 1 << bits:
        raise ValueError(f"opzoo::{op}: {name} must fit in {bits + 1} bits, got {value.bit_length()}")


def require_flag(op: str, name: str, value: Any) -> bool:
    """``value`` as a bool; TypeError for a tensor, whose truth may be many or a wait for the device."""
    if isinstance(value, Tensor):
        raise TypeError(f"opzoo::{op}: {name} must be a bool, got a tensor")
    return bool(value)


def pair(op: str, name: str, value: int | Sequence[int]) -> tuple[int, int]:
    """``3`` or ``(3, 5)`` to a pair of ints."""
    both: Any = (value, value) if hasattr(value, "__index__") else value
    if not isinstance(both, (tuple, list)) or not all(hasattr(v, "__index__") for v in both):
        raise TypeError(f"opzoo::{op}: {name} must be an int or a pair of ints, got {value!r}")
    if len(both) != 2:
        raise ValueError(f"opzoo::{op}: {name} must be an int or a pair of ints, got {value!r}")
    for number in both:
        if isinstance(number, int):
            _require_range(op, name, number, 63)
    return both[0], both[1]


def move_batch_first(t: Any, dim: int | None) -> Any:
    """For vmap rules: the batch axis of an argument moved to the front; None when it has none."""
    return t if dim is None or t is None else t.movedim(dim, 0)
