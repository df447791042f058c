"""Whole steps of whole models, on opzoo and on the peer: the same weights, and other operators."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from opzoo.bench import gate
from opzoo.bench.case import LABELS

Context = Callable[[], AbstractContextManager[object]]
Tensors = dict[str, Tensor]

# Of one step against the peer's in float64, where a deep network cannot make much of a rounding.
STEP_TOLERANCE = 1e-6
# Of the loss in the dtype that is timed. Random weights make chaos of the roundings in between; the layers
# themselves are compared on equal inputs.
LOSS_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Model:
    """A model with its data.

    Attributes:
        module: what has the parameters.
        loss: ``loss(dtype)`` is one forward pass for training: in float64 with the module's parameters so, under
            autocast in a half type.
        passes: what is timed, by name: ``train`` is a training step, ``detect`` a detection.
        ours: the context in which the module runs on opzoo.
        theirs: the context in which it runs on the peer.
        layers: parts of the module, of one input and one output, in which the two differ.
    """

    module: nn.Module
    loss: Callable[[torch.dtype], Tensor]
    passes: dict[str, Callable[[], object]]
    ours: Context
    theirs: Context
    layers: dict[str, nn.Module] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelCase:
    """A model of one size; the counterpart of :class:`opzoo.bench.case.Case`.

    Attributes:
        id: stable name, unique among models.
        dtype: that of autocast, or float32 for none.
        build: ``build(device)`` makes the model, the same weights and data on every call.
    """

    id: str
    dtype: torch.dtype
    build: Callable[[torch.device], Model]
    op: str = "models"
    peer_name: str = "torchvision"


def model_id(name: str, dtype: torch.dtype, images: int, side: int) -> str:
    return f"{name} {LABELS[dtype]} N{images} {side}x{side}"


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Autocast to a half type; off for others."""
    half = dtype in (torch.float16, torch.bfloat16)
    return torch.autocast(device.type, dtype if half else torch.bfloat16, enabled=half)


def step(model: Model, context: Context, dtype: torch.dtype) -> Tensors:
    """The loss and all gradients of one training step, with the same random numbers on every call."""
    torch.manual_seed(0)
    with context():
        loss = model.loss(dtype)
        loss.backward()
    found = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
    model.module.zero_grad()
    return {"loss": loss.detach(), **found}


def errors(found: Tensors, expected: Tensors) -> dict[str, float]:
    """Per tensor, the length of the difference over the length of what is expected; infinite where one is missing.

    What is rounding alone, as the gradient of a bias before a batch norm, is measured by the longest gradient.
    """
    if found.keys() != expected.keys():
        return {", ".join(sorted(found.keys() ^ expected.keys())): float("inf")}
    lengths = {name: float(t.double().norm()) for name, t in expected.items()}
    least = 1e-5 * max(length for name, length in lengths.items() if name != "loss" or len(lengths) == 1)
    result = {}
    for name, t in expected.items():
        error = float((found[name].double() - t.double()).norm()) / (max(lengths[name], least) or 1.0)
        result[name] = error if error == error else float("inf")
    return result


def _require(found: dict[str, float], allowed: dict[str, float]) -> None:
    where = max(found, key=lambda name: found[name] / allowed[name] if name in allowed else float("inf"))
    if not found[where] <= allowed.get(where, 0.0):
        limit = allowed.get(where, 0.0)
        raise gate.GateError(f"{where}: error {found[where]:.2e}, allowed {limit:.1e}", found[where])


def _inputs_of_layers(model: Model, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """What reaches each layer in a step on the peer: its input, and the gradient of its output."""
    inputs: Tensors = {}
    grads: Tensors = {}
    handles = []
    for name, layer in model.layers.items():

        def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor, name: str = name) -> None:
            inputs[name] = args[0].detach()
            output.register_hook(lambda grad: grads.__setitem__(name, grad.detach()))

        handles.append(layer.register_forward_hook(keep))
    step(model, model.theirs, dtype)
    for handle in handles:
        handle.remove()
    return {name: (inputs[name], grads[name]) for name in model.layers}


def _layer(layer: nn.Module, context: Context, dtype: torch.dtype, x: Tensor, grad: Tensor) -> Tensors:
    """Its output and gradients."""
    x = x.detach().requires_grad_()
    with context(), autocast(x.device, dtype):
        output = layer(x)
    parameters = dict(layer.named_parameters())
    grads = torch.autograd.grad(output, [x, *parameters.values()], grad.to(output.dtype))
    return {"output": output.detach(), **dict(zip(["input", *parameters], grads, strict=True))}


def _check_layers(model: Model, dtype: torch.dtype) -> None:
    """Each layer in the dtype that is timed: at most twice as far from float64 as the peer."""
    for name, (x, grad) in _inputs_of_layers(model, dtype).items():
        layer = model.layers[name]
        exact = _layer(copy.deepcopy(layer).double(), model.theirs, torch.float64, x.double(), grad)
        ours, theirs = (errors(_layer(layer, c, dtype, x, grad), exact) for c in (model.ours, model.theirs))
        found = {f"{name}.{key}": error for key, error in ours.items()}
        _require(found, {f"{name}.{key}": 2 * error + gate.TOLERANCE[dtype] for key, error in theirs.items()})


def check(case: ModelCase, model: Model) -> float:
    """Compare a training step with the peer's.

    In float64 the loss and every gradient; in the dtype that is timed the loss, and the layers one by one.

    Returns:
        The largest error of the step in float64.

    Raises:
        GateError: an error is too large.
    """
    model.module.double()
    found, expected = (step(model, context, torch.float64) for context in (model.ours, model.theirs))
    model.module.float()
    in_double = errors(found, expected)
    _require(in_double, dict.fromkeys(expected, STEP_TOLERANCE))
    ours, theirs = ({"loss": step(model, context, case.dtype)["loss"]} for context in (model.ours, model.theirs))
    _require(errors(ours, theirs), {"loss": LOSS_TOLERANCE})
    _check_layers(model, case.dtype)
    return max(in_double.values())


def find_models(which: str, device_type: str) -> Sequence[ModelCase]:
    """The models of one set of cases; none of ``tiny``, and none without torchvision, which they are made of."""
    if which == "tiny" or importlib.util.find_spec("torchvision") is None:
        return []
    found: list[ModelCase] = []
    for name in ("deform_resnet", "detectors"):
        module = importlib.import_module(f"opzoo.bench.{name}")
        found += module.cases(device_type) if which == "full" else module.quick()
    return found
