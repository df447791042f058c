"""The focal loss of independent sigmoids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opzoo.ops._common import differentiable, move_batch_first, register_fake, require_number, require_tensor
from opzoo.reference.sigmoid_focal_loss import sigmoid_focal_loss as _reference

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def sigmoid_focal_loss(
    inputs: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2.0, reduction: str = "none"
) -> Tensor:
    """Binary cross-entropy that fades out what is already right: the focal loss of RetinaNet.

    With ``p = sigmoid(inputs)``, and ``p_t`` the probability given to the label,
    ``alpha_t * (1 - p_t) ** gamma * cross_entropy(p, label)``.

    Args:
        inputs: logits, ``Tensor[*]`` of a floating dtype; ``Tensor[*, C]`` for class ids.
        targets: ``Tensor[*]`` of the shape of ``inputs``, labels from 0 to 1 of any dtype; or class ids, an
            integer ``Tensor[*]`` of the shape of ``inputs`` without C. An id outside [0, C) is background:
            all its labels are 0.
        alpha: weight of label 1, in [0, 1], against ``1 - alpha`` of label 0; -1 for no weights.
        gamma: exponent, finite and not negative. 0 is the weighted cross-entropy.
        reduction: ``"none"``, ``"mean"`` over all elements, or ``"sum"``.

    Returns:
        ``Tensor[*]`` of the shape and dtype of ``inputs``, contiguous; 0-d for ``"mean"`` and ``"sum"``.

    Raises:
        TypeError: an argument is no tensor or no number.
        RuntimeError: ``targets`` is on another device or fits in shape neither as labels nor as class
            ids, or ``inputs`` is not float64, float32, float16 or bfloat16.
        ValueError: ``alpha``, ``gamma`` or ``reduction`` is outside its range.

    Computed in float32 (float64 for float64) from ``exp(-|inputs|)``, so that nothing overflows or cancels;
    the loss of an infinite logit is the limit: 0 where its label is right. Under autocast the dtype of
    ``inputs`` is kept. Differentiable any number of times in ``inputs``, in reverse mode (forward mode
    raises); labels that require a gradient go through :mod:`opzoo.reference`. vmap-able. Deterministic.

    Source: Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017; arguments as in torchvision.

    Example:
        >>> opzoo.sigmoid_focal_loss(torch.tensor([[2.0, -1.0]]), torch.tensor([0]))
        tensor([[0.0005, 0.0170]])
    """
    require_tensor("sigmoid_focal_loss", "inputs", inputs)
    require_tensor("sigmoid_focal_loss", "targets", targets)
    require_number("sigmoid_focal_loss", "alpha", alpha)
    require_number("sigmoid_focal_loss", "gamma", gamma)
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"opzoo::sigmoid_focal_loss: reduction must be 'none', 'mean' or 'sum', got {reduction!r}")
    if targets.requires_grad:
        return _reference(inputs, targets, alpha, gamma, reduction)
    if targets.dtype in _INTEGERS and targets.shape != inputs.shape:
        targets = targets.to(torch.int64)  # class ids
    elif targets.dtype in _INTEGERS or targets.is_floating_point():
        targets = targets.to(inputs.dtype)
    loss = _forward(inputs, targets, float(alpha), float(gamma))
    return loss.sum() if reduction == "sum" else loss.mean() if reduction == "mean" else loss


class SigmoidFocalLoss(nn.Module):
    """:func:`sigmoid_focal_loss` as a module.

    Args:
        alpha: weight of label 1; -1 for no weights.
        gamma: exponent of the fading factor.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
    """

    def __init__(self, alpha: float = 0.25, gamma: float = 2.0, reduction: str = "none") -> None:
        super().__init__()
        self.alpha = alpha
        self.gamma = gamma
        self.reduction = reduction

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of ``inputs`` against ``targets``; see :func:`sigmoid_focal_loss`."""
        return sigmoid_focal_loss(inputs, targets, self.alpha, self.gamma, self.reduction)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, gamma={self.gamma}, reduction={self.reduction!r}"


def _check(op: str, inputs: Tensor, targets: Tensor, alpha: float, gamma: float) -> None:
    shape = inputs.shape
    torch._check(
        inputs.dtype in _FLOATS,
        lambda: f"opzoo::{op}: inputs must be float64, float32, float16 or bfloat16, got {inputs.dtype}",
    )
    if targets.dtype == torch.int64:
        torch._check(
            inputs.dim() > 0, lambda: f"opzoo::{op}: inputs must have an axis of classes for class ids, got none"
        )
        shape = inputs.shape[:-1]
    else:
        torch._check(
            targets.dtype == inputs.dtype,
            lambda: f"opzoo::{op}: targets must have the dtype of inputs, {inputs.dtype}, got {targets.dtype}",
        )
    torch._check(
        targets.shape == shape,
        lambda: f"opzoo::{op}: targets must have shape {list(shape)}, got {list(targets.shape)}",
    )
    torch._check_value(
        alpha == -1 or 0 <= alpha <= 1, lambda: f"opzoo::{op}: alpha must be in [0, 1] or -1, got {alpha}"
    )
    torch._check_value(
        0 <= gamma < float("inf"), lambda: f"opzoo::{op}: gamma must be finite and not negative, got {gamma}"
    )


def _fake(inputs: Tensor, targets: Tensor, alpha: float, gamma: float) -> Tensor:
    _check("sigmoid_focal_loss", inputs, targets, alpha, gamma)
    return torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)


def _fake_backward(grad: Tensor, inputs: Tensor, targets: Tensor, alpha: float, gamma: float) -> Tensor:
    op = "_sigmoid_focal_loss_backward"
    _check(op, inputs, targets, alpha, gamma)
    torch._check(
        grad.shape == inputs.shape,
        lambda: f"opzoo::{op}: grad must have shape {list(inputs.shape)}, got {list(grad.shape)}",
    )
    return torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)


def _slope(x: Tensor, targets: Tensor, alpha: float, gamma: float) -> Tensor:
    """The derivative of the loss, element by element, in operators that can be differentiated again."""
    if targets.dtype == torch.int64:
        targets = targets.unsqueeze(-1) == torch.arange(x.shape[-1], device=x.device)
    t = targets.to(x.dtype)
    p, not_p = torch.sigmoid(x), torch.sigmoid(-x)
    q = p * (1 - t) + not_p * t
    cross_entropy = -nn.functional.logsigmoid(x) * t - nn.functional.logsigmoid(-x) * (1 - t)
    scale = alpha * t + (1 - alpha) * (1 - t) if alpha >= 0 else 1
    inner = gamma * q ** (gamma - 1) * (1 - 2 * t) * p * not_p * cross_entropy if gamma else 0
    return scale * (inner + q**gamma * (p * (1 - t) - not_p * t))


def _save(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
    inputs, targets, ctx.alpha, ctx.gamma = args
    ctx.save_for_backward(inputs, targets)


def _derive(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    inputs, targets = ctx.saved_tensors
    if torch.is_grad_enabled():  # the derivative is to be differentiated again
        return grad * _slope(inputs, targets, ctx.alpha, ctx.gamma), None, None, None
    return _backward(grad, inputs, targets, ctx.alpha, ctx.gamma), None, None, None


def _vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    return _forward(*_leading(info, in_dims, args)), 0


def _leading(info: Any, in_dims: Any, args: tuple[Any, ...]) -> list[Any]:
    """Every tensor with the mapped axis in front: one more row, for labels and class ids alike."""
    return [
        t
        if not isinstance(t, Tensor)
        else t.expand(info.batch_size, *t.shape)
        if dim is None
        else move_batch_first(t, dim)
        for t, dim in zip(args, in_dims, strict=True)
    ]


def _save_backward(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
    _, inputs, targets, ctx.alpha, ctx.gamma = args
    ctx.save_for_backward(inputs, targets)


def _derive_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    # Linear in grad: the derivative there is the operator itself. To the one in inputs `_derive` is the way.
    if ctx.needs_input_grad[1]:
        raise NotImplementedError(
            "opzoo._sigmoid_focal_loss_backward has no derivative in inputs; "
            "opzoo.reference.sigmoid_focal_loss has every derivative"
        )
    inputs, targets = ctx.saved_tensors
    return _backward(grad, inputs, targets, ctx.alpha, ctx.gamma), None, None, None, None


def _vmap_backward(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    return _backward(*_leading(info, in_dims, args)), 0


register_fake("sigmoid_focal_loss", _fake)
register_fake("_sigmoid_focal_loss_backward", _fake_backward)
_forward = differentiable(
    torch.ops.opzoo.sigmoid_focal_loss.default, inputs=(0,), save=_save, backward=_derive, vmap=_vmap
)
_backward = differentiable(
    torch.ops.opzoo._sigmoid_focal_loss_backward.default,
    inputs=(0, 1),
    save=_save_backward,
    backward=_derive_backward,
    vmap=_vmap_backward,
)
