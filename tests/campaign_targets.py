"""What the campaign calls: a draw of right arguments and the expected values, for every function and operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from campaign_draw import INTEGERS, Arguments, Draw
from campaign_expected import Expected, Near, adjoint, linear, work
from helpers import FLOATS
from torch import Tensor

import opzoo
from opzoo.reference.nms import _groups

reference = opzoo.reference
ops = torch.ops.opzoo


@dataclass(frozen=True)
class Target:
    """One function: ``call(**draw(...))`` is right, and ``expect(**arguments)`` says what it answers.

    ``expect`` returns None where the reference has no answer (it may raise as well); ``name`` is what
    errors name; ``differentiable`` are the arguments that a gradient may be asked for, each linear but the
    ``coordinates``; ``reference`` is what is differentiated.
    """

    name: str
    call: Callable[..., Any]
    draw: Callable[[Draw], Arguments]
    expect: Callable[..., Expected | None]
    differentiable: tuple[str, ...] = ()
    coordinates: tuple[str, ...] = ()
    reference: Callable[..., Tensor] | None = None


# add and matmul


def draw_add(draw: Draw) -> Arguments:
    shape = [draw.size(4) for _ in range(draw.randint(0, 4))]
    shapes = [[1 if draw.random() < 0.25 else size for size in shape] for _ in range(2)]
    shapes[draw.randrange(2)] = shape[draw.randint(0, len(shape)) if draw.random() < 0.2 else 0 :]
    kinds = (*FLOATS, *INTEGERS, torch.bool) if draw.random() < 0.4 else (draw.dtype(),)
    a, b = (draw.normal(*s).mul(3).to(draw.choice(kinds)) for s in shapes)
    whole = not torch.result_type(a, b).is_floating_point
    return {"a": a, "b": b, "alpha": draw.choice((1, 2, -3)) if whole else draw.choice((1, 2.5, -0.1, 0))}


def draw_add_number(draw: Draw) -> Arguments:
    args = draw_add(draw)
    args[draw.choice("ab")] = draw.choice((0, 3, -7, 2.5, True, 300, 1e10, float("nan"), float("inf")))
    return {**args, "alpha": 1}


def expect_add(a: Any, b: Any, alpha: Any = 1) -> Expected:
    dtype = torch.result_type(a, b)
    if not dtype.is_floating_point:
        if dtype == torch.bool:
            return [(torch.as_tensor(a).long() + int(alpha) * torch.as_tensor(b).long()).bool()]
        return [torch.add(a, b, alpha=int(alpha))]
    acc = torch.promote_types(dtype, torch.float32)

    def operand(value: Any) -> Tensor:
        t = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64)
        return (t if t.dim() == 0 else t.to(dtype)).to(acc)

    a, b = operand(a), operand(b)
    return [Near(reference.add(a, b, alpha=alpha), a.abs() + abs(alpha) * b.abs())]


def draw_matmul(draw: Draw) -> Arguments:
    dtype = draw.dtype()
    M, K, N = draw.size(), draw.size(6, 140), draw.size()
    batch = [draw.size(3, 4) for _ in range(draw.choice((0, 0, 1, 2, 4)))]
    left, right = ([1 if draw.random() < 0.3 else n for n in batch] for _ in range(2))
    a = draw.normal(*([] if draw.random() < 0.1 else [*left, M]), K, dtype=dtype)
    b = draw.normal(*([K] if draw.random() < 0.1 else [*right, K, N]), dtype=dtype)
    return {"a": a, "b": b, "precision": draw.choice((None, None, "ieee"))}


def draw_raw_matmul(draw: Draw) -> Arguments:
    batch = [draw.size(3, 4) for _ in range(draw.choice((0, 0, 1, 2)))]
    M, K, N, dtype = draw.size(), draw.size(6, 140), draw.size(), draw.dtype()
    return {"a": draw.normal(*batch, M, K, dtype=dtype), "b": draw.normal(*batch, K, N, dtype=dtype), "precision": 0}


def expect_matmul(a: Tensor, b: Tensor, precision: Any = None) -> Expected:
    return linear(reference.matmul, {"a": a, "b": b}, ("a", "b"))


# Non-maximum suppression


def draw_nms(draw: Draw) -> Arguments:
    count = draw.size(14, 70)
    boxes = draw.boxes(count, dtype=draw.choice((torch.float32, *FLOATS, *INTEGERS)))
    scores = draw.uniform(count).mul(draw.choice((1, 5, 100)))
    scores = (scores.round() if draw.random() < 0.3 else scores).to(draw.choice((torch.float32, *FLOATS, *INTEGERS)))
    return {"boxes": boxes, "scores": scores, "iou_threshold": draw.choice((0, 0.1, 0.5, 0.5, 0.7, 1, draw.random()))}


def with_limits(draw: Draw, args: Arguments) -> Arguments:
    limits = {"score_threshold": draw.choice((None, None, 0.3, 2.0, -1e30)), "max_output": draw.choice((None, 0, 1, 5))}
    return {**args, **limits}


def with_classes(draw: Draw, args: Arguments) -> Arguments:
    idxs = draw.integers(0, draw.choice((0, 2, 100)), *args["scores"].shape, dtype=draw.choice(INTEGERS))
    return {**args, "idxs": idxs}


def draw_padded(draw: Draw) -> Arguments:
    args, batch = draw_nms(draw), [draw.size(3, 3) for _ in range(draw.randrange(3))]
    for name in ("boxes", "scores"):
        t = args[name]
        order = draw.integers(0, max(len(t) - 1, 0), *batch, len(t)).cpu().to(t.device)
        args[name] = t[order]
    args = with_classes(draw, args) if draw.random() < 0.5 else {**args, "idxs": None}
    return {**args, "max_output": draw.randint(0, 15), "score_threshold": draw.choice((None, 0.3, 2.0))}


def draw_soft_nms(draw: Draw) -> Arguments:
    args = draw_nms(draw)
    sigma, least = draw.choice((0.1, 0.5, 2.0)), draw.choice((0.0, 1e-3, 0.2))
    return {**args, "sigma": sigma, "min_score": least, "method": draw.choice(("naive", "linear", "gaussian"))}


def as_code(args: Arguments) -> Arguments:
    return {**args, "method": ("naive", "linear", "gaussian").index(args["method"])}


def expect_soft_nms(method: Any = "linear", **args: Any) -> Expected:
    method = method if isinstance(method, str) else ("naive", "linear", "gaussian")[method]
    function = reference.batched_soft_nms if "idxs" in args else reference.soft_nms
    scores, indices = function(**args, method=method)
    return [Near(scores, scores.abs()), indices] if scores.is_floating_point() else [scores, indices]


def expect_leaders(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Expected:
    leaders = torch.empty(len(boxes), dtype=torch.int64)
    for group in _groups(boxes, scores, None, iou_threshold, None, None):
        leaders[group] = group[0]
    return [leaders]


# Losses and upsampling


def draw_focal(draw: Draw) -> Arguments:
    shape, dtype = [draw.size() for _ in range(draw.randint(1, 3))], draw.dtype()
    inputs = draw.normal(*shape, dtype=dtype) * draw.choice((1, 10, 100))
    ids = draw.random() < 0.5
    targets = draw.integers(-1, shape[-1], *shape[:-1]) if ids else draw.uniform(*shape, dtype=dtype)
    if not ids and draw.random() < 0.3:
        targets = targets.round()
    return {
        "inputs": inputs,
        "targets": targets,
        "alpha": draw.choice((0.25, 0, 1, -1)),
        "gamma": draw.choice((2, 0, 1.5)),
    }


def expect_focal(inputs: Tensor, targets: Tensor, alpha: float, gamma: float, reduction: str = "none") -> Expected:
    # In float64: the loss is smooth, and its reference loses digits in float32 where the operator does not.
    if targets.dim() == inputs.dim() or targets.is_floating_point():
        targets = targets.to(inputs.dtype)
    dtype, inputs = work(inputs).dtype, inputs.detach().cpu().double()
    targets = targets.detach().cpu()
    targets = targets.double() if targets.is_floating_point() else targets
    loss = reference.sigmoid_focal_loss(inputs, targets, alpha, gamma, reduction)
    if gamma > 1e4 or (targets.is_floating_point() and bool((targets.abs() > 10).any())):
        return [Near(loss.to(dtype), torch.full_like(loss, torch.inf))]  # a power of 1 - eps, no labels
    positive = targets.abs() if targets.is_floating_point() else targets
    scale = reference.sigmoid_focal_loss(inputs, positive, alpha, gamma, reduction).abs() + loss.abs()
    return [Near(loss.to(dtype), scale * (1 + gamma))]


def expect_focal_backward(grad: Tensor, inputs: Tensor, targets: Tensor, alpha: float, gamma: float) -> Expected:
    def loss(inputs: Tensor) -> Tensor:
        t = targets.double() if targets.is_floating_point() else targets
        return reference.sigmoid_focal_loss(inputs, t, alpha, gamma)

    found = adjoint(loss, {"inputs": inputs.double()}, ("inputs",), (), grad.double())[0]
    assert isinstance(found, Near)
    # Where the slope's terms cancel they are at most this large.
    scale = grad.detach().double().abs() * (1 + gamma) * (1 + inputs.detach().double().abs())
    far = targets.abs() > 10 if targets.is_floating_point() else torch.zeros(())  # no labels: terms of any size
    scale = torch.where(found.scale.isfinite() & (far == 0), scale, torch.inf)
    return [replace(found, value=found.value.to(work(inputs).dtype), scale=scale)]


def draw_carafe(draw: Draw) -> Arguments:
    groups, k, s = draw.randint(1, 2), draw.choice((1, 3, 5)), draw.randint(1, 3)
    n, h, w, dtype = draw.size(3, 5), draw.size(5, 20), draw.size(5, 20), draw.dtype()
    features = draw.normal(n, groups * draw.size(3, 20), h, w, dtype=dtype)
    masks = draw.normal(n, groups * k * k, s * h, s * w, dtype=dtype)
    return {"features": features, "masks": masks, "kernel_size": k, "group_size": groups, "scale_factor": s}


def expect_carafe(**args: Any) -> Expected:
    found = linear(reference.carafe, args, ("features", "masks"))[0]
    odd = ~work(args["masks"]).isfinite().all(1, keepdim=True)
    # A number of a mask for a feature outside the map counts for nothing, were it infinite.
    return [replace(found, scale=found.scale.masked_fill(odd, torch.inf))] if isinstance(found, Near) else [found]


def with_grad(draw: Draw, args: Arguments, call: Callable[..., Any]) -> Arguments:
    """``args`` of a backward operator: an incoming gradient of the result's shape and dtype first."""
    out = call(**args)
    out = out[0] if isinstance(out, tuple) else out
    return {"grad": draw.normal(*out.shape, dtype=out.dtype), **args}


def expect_carafe_backward(grad: Tensor, **args: Any) -> Expected:
    names = ("features", "masks")
    return adjoint(reference.carafe, args, names, names, grad)


def expect_offset(dy: Tensor, dx: Tensor) -> Expected:
    value = torch.stack([work(dy), work(dx)], 2).flatten(1, 2)
    return [Near(value, torch.zeros_like(value))]


def simple_targets() -> list[Target]:
    """All but RoIs and deformable sampling."""

    def padded(**args: Any) -> Expected:
        return list(reference.nms_padded(**args))

    def one(function: Callable[..., Tensor]) -> Callable[..., Expected]:
        return lambda **args: [function(**args)]

    def only(draw: Draw) -> Arguments:
        args = draw_focal(draw)
        ids = args["targets"].shape != args["inputs"].shape or args["targets"].is_floating_point()
        return args if ids else {**args, "targets": args["targets"].to(args["inputs"].dtype)}

    pair = ("a", "b")
    masks = ("features", "masks")
    return [
        Target("add", opzoo.add, draw_add, expect_add, pair, (), lambda a, b, alpha: reference.add(a, b, alpha=alpha)),
        Target("add", opzoo.add, draw_add_number, expect_add),
        Target("add", lambda a, b, alpha: opzoo.Add(alpha)(a, b), draw_add, expect_add),
        Target("add", ops.add, draw_add, expect_add),
        Target("matmul", opzoo.matmul, draw_matmul, expect_matmul, pair, (), reference.matmul),
        Target("matmul", lambda a, b, precision: opzoo.MatMul(precision=precision)(a, b), draw_matmul, expect_matmul),
        Target("matmul", ops.matmul, draw_raw_matmul, expect_matmul),
        Target("nms", opzoo.nms, lambda d: with_limits(d, draw_nms(d)), one(reference.nms)),
        Target("nms", ops.nms, lambda d: with_limits(d, draw_nms(d)), one(reference.nms)),
        Target(
            "batched_nms",
            opzoo.batched_nms,
            lambda d: with_limits(d, with_classes(d, draw_nms(d))),
            one(reference.batched_nms),
        ),
        Target(
            "batched_nms",
            ops.batched_nms,
            lambda d: with_limits(d, with_classes(d, draw_nms(d))),
            one(reference.batched_nms),
        ),
        Target("nms_padded", opzoo.nms_padded, draw_padded, padded),
        Target("nms_padded", ops.nms_padded, draw_padded, padded),
        Target("nms_match", opzoo.nms_match, draw_nms, lambda **args: list(reference.nms_match(**args))),
        Target("_nms_leaders", ops._nms_leaders, draw_nms, expect_leaders),
        Target("soft_nms", opzoo.soft_nms, draw_soft_nms, expect_soft_nms),
        Target("soft_nms", ops.soft_nms, lambda d: as_code(draw_soft_nms(d)), expect_soft_nms),
        Target(
            "batched_soft_nms",
            opzoo.batched_soft_nms,
            lambda d: with_classes(d, draw_soft_nms(d)),
            expect_soft_nms,
        ),
        Target(
            "batched_soft_nms",
            ops.batched_soft_nms,
            lambda d: as_code(with_classes(d, draw_soft_nms(d))),
            expect_soft_nms,
        ),
        Target(
            "sigmoid_focal_loss",
            opzoo.sigmoid_focal_loss,
            lambda d: {**draw_focal(d), "reduction": d.choice(("none", "none", "sum", "mean"))},
            expect_focal,
        ),
        Target(
            "sigmoid_focal_loss",
            lambda inputs, targets, **numbers: opzoo.SigmoidFocalLoss(**numbers)(inputs, targets),
            lambda d: {**draw_focal(d), "reduction": d.choice(("none", "sum", "mean"))},
            expect_focal,
        ),
        Target("sigmoid_focal_loss", ops.sigmoid_focal_loss, only, expect_focal),
        Target(
            "_sigmoid_focal_loss_backward",
            ops._sigmoid_focal_loss_backward,
            lambda d: with_grad(d, only(d), ops.sigmoid_focal_loss),
            expect_focal_backward,
        ),
        Target("carafe", opzoo.carafe, draw_carafe, expect_carafe, masks, (), reference.carafe),
        Target("carafe", ops.carafe, draw_carafe, expect_carafe),
        Target(
            "_carafe_backward",
            ops._carafe_backward,
            lambda d: with_grad(d, draw_carafe(d), ops.carafe),
            expect_carafe_backward,
        ),
        Target(
            "make_offset",
            opzoo.make_offset,
            lambda d: dict(zip(("dy", "dx"), d.normal(2, *(d.size() for _ in range(4))), strict=True)),
            expect_offset,
        ),
    ]
