"""Multi-scale deformable attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import alert_not_deterministic

from opzoo.ops._common import (
    _autocast_enabled,
    autocast_tensor,
    differentiable,
    move_batch_first,
    register_autocast,
    register_fake,
    require_tensor,
)

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float64, torch.float32, *_HALVES)


def ms_deform_attn(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Sum weighted bilinear samples of several maps, for each query and head: deformable attention.

    Args:
        value: ``Tensor[B, S, M, D]``: per item the pixels of all levels one after the other, each level row
            by row, M heads of D channels. float64, float32, float16 or bfloat16.
        spatial_shapes: ``Tensor[L, 2]`` of int64, height and width of each level.
        level_start_index: ``Tensor[L]`` of int64, the number of each level's first pixel among the S.
        sampling_locations: ``Tensor[B, Q, M, L, P, 2]`` of (x, y): 0 is the left or upper edge of the map,
            1 the opposite edge. Any floating dtype.
        attention_weights: ``Tensor[B, Q, M, L, P]``. Any floating dtype.

    Returns:
        ``Tensor[B, Q, M * D]`` of value's dtype, contiguous.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: a level does not lie inside the S pixels (on the CPU; on CUDA it contributes nothing, and
            raises after ``opzoo.set_debug(True)``).
        RuntimeError: a tensor has the wrong rank, shape, dtype or device.

    A sample lies at pixel ``x * width - 0.5, y * height - 0.5``; pixels outside the map are zero. A NaN
    location gives NaN, unless its other coordinate is outside. Locations and weights are used in float32
    (float64 for float64), also beside a half ``value``: float32 ones are better kept so. Under autocast
    ``value`` is cast to its dtype, which the result has; for float32 call it on ``value.float()`` inside
    ``with torch.autocast(device_type, enabled=False)``.
    Differentiable once, in ``value``, ``sampling_locations`` and ``attention_weights``; vmap-able. Forward and
    backward are deterministic on the CPU, and on CUDA but for the gradient to ``value``, which raises
    under ``torch.use_deterministic_algorithms(True)``.

    Source: Zhu et al., "Deformable DETR: Deformable Transformers for End-to-End Object Detection", ICLR
    2021.

    Example:
        >>> value = torch.arange(4.0).reshape(1, 4, 1, 1)  # one level of 2 x 2 pixels
        >>> shapes, starts = torch.tensor([[2, 2]]), torch.tensor([0])
        >>> middle = torch.full((1, 1, 1, 1, 1, 2), 0.5)
        >>> opzoo.ms_deform_attn(value, shapes, starts, middle, torch.ones(1, 1, 1, 1, 1))
        tensor([[[1.5000]]])
    """
    for name, t in (
        ("value", value),
        ("spatial_shapes", spatial_shapes),
        ("level_start_index", level_start_index),
        ("sampling_locations", sampling_locations),
        ("attention_weights", attention_weights),
    ):
        require_tensor("ms_deform_attn", name, t)
    dtype = value.dtype
    if dtype in _HALVES and not sampling_locations.dtype == attention_weights.dtype == dtype:
        dtype = torch.float32
    if sampling_locations.is_floating_point() and attention_weights.is_floating_point():
        sampling_locations, attention_weights = sampling_locations.to(dtype), attention_weights.to(dtype)
    return _forward(value, spatial_shapes, level_start_index, sampling_locations, attention_weights)


class MultiScaleDeformableAttention(nn.Module):
    """The attention layer of Deformable DETR, with mmcv's parameters, initial values and call.

    Args:
        embed_dims: channels of the queries, a multiple of ``num_heads``.
        num_heads: heads M.
        num_levels: maps L.
        num_points: samples P per map.
        dropout: probability of a zero in the projected result.
        batch_first: queries and values are ``[B, Q, C]``; else ``[Q, B, C]``.
        value_proj_ratio: channels of the values over ``embed_dims``.
    """

    def __init__(
        self,
        embed_dims: int = 256,
        num_heads: int = 8,
        num_levels: int = 4,
        num_points: int = 4,
        dropout: float = 0.1,
        batch_first: bool = False,
        value_proj_ratio: float = 1.0,
    ) -> None:
        super().__init__()
        if embed_dims % num_heads:
            raise ValueError(
                "opzoo.MultiScaleDeformableAttention: embed_dims must be a multiple of num_heads, "
                f"got {embed_dims} and {num_heads}"
            )
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.num_levels = num_levels
        self.num_points = num_points
        self.batch_first = batch_first
        samples = num_heads * num_levels * num_points
        value_dims = int(embed_dims * value_proj_ratio)
        self.dropout = nn.Dropout(dropout)
        self.sampling_offsets = nn.Linear(embed_dims, 2 * samples)
        self.attention_weights = nn.Linear(embed_dims, samples)
        self.value_proj = nn.Linear(embed_dims, value_dims)
        self.output_proj = nn.Linear(value_dims, embed_dims)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each head looks its own way, one pixel further per point; all points weigh the same."""
        angles = torch.arange(self.num_heads, dtype=torch.float32) * (2 * math.pi / self.num_heads)
        way = torch.stack([angles.cos(), angles.sin()], -1)
        way = way / way.abs().max(-1, keepdim=True)[0]
        steps = torch.arange(1, self.num_points + 1, dtype=torch.float32)
        offsets = way[:, None, None] * steps[:, None]
        with torch.no_grad():
            self.sampling_offsets.bias.copy_(offsets.expand(-1, self.num_levels, -1, -1).reshape(-1))
        for zero in (self.sampling_offsets.weight, self.attention_weights.weight, self.attention_weights.bias):
            nn.init.zeros_(zero)
        for projection in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        identity: Tensor | None = None,
        query_pos: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        *,
        reference_points: Tensor,
        spatial_shapes: Tensor,
        level_start_index: Tensor,
    ) -> Tensor:
        """The queries plus what they gathered.

        Args:
            query: ``Tensor[Q, B, C]``, or ``[B, Q, C]`` with ``batch_first``.
            key: not used; there for the call of other attentions.
            value: ``Tensor[S, B, C]``; the queries if left out.
            identity: what the result is added to; the queries if left out.
            query_pos: added to the queries before offsets and weights are read from them.
            key_padding_mask: ``Tensor[B, S]``, true where a value counts as zero.
            reference_points: ``Tensor[B, Q, L, 2]`` of (x, y) in 0 to 1, or ``[B, Q, L, 4]`` with (w, h) of a box
                that the offsets are measured in.
            spatial_shapes: ``Tensor[L, 2]`` of int64, see :func:`ms_deform_attn`.
            level_start_index: ``Tensor[L]`` of int64.

        Returns:
            A tensor of the shape of ``query``.
        """
        value = query if value is None else value
        if problem := _find_problem(self, query, value, reference_points, spatial_shapes, level_start_index):
            raise RuntimeError(f"opzoo::ms_deform_attn: {problem}")
        if reference_points.shape[-1] not in (2, 4):
            raise ValueError(
                "opzoo::ms_deform_attn: reference_points must have 2 or 4 numbers a point, "
                f"got {reference_points.shape[-1]}"
            )
        identity = query if identity is None else identity
        query = query if query_pos is None else query + query_pos
        if not self.batch_first:
            query, value = query.transpose(0, 1), value.transpose(0, 1)
        batch, queries, _ = query.shape
        value = self.value_proj(value)
        if key_padding_mask is not None:
            value = value.masked_fill(key_padding_mask[..., None], 0.0)
        value = value.unflatten(-1, (self.num_heads, -1))
        shape = (batch, queries, self.num_heads, self.num_levels, self.num_points)
        offsets = self.sampling_offsets(query).view(*shape, 2)
        weights = self.attention_weights(query).view(*shape[:3], shape[3] * shape[4]).softmax(-1).view(shape)
        points = reference_points[:, :, None, :, None]
        if points.shape[-1] == 2:
            locations = points + offsets / spatial_shapes.flip(-1)[None, None, None, :, None]
        else:
            locations = points[..., :2] + offsets / self.num_points * points[..., 2:] * 0.5
        output = self.output_proj(ms_deform_attn(value, spatial_shapes, level_start_index, locations, weights))
        if not self.batch_first:
            output = output.transpose(0, 1)
        return self.dropout(output) + identity

    def extra_repr(self) -> str:
        return (
            f"embed_dims={self.embed_dims}, num_heads={self.num_heads}, num_levels={self.num_levels}, "
            f"num_points={self.num_points}, batch_first={self.batch_first}"
        )


def _find_problem(
    layer: Any, query: Tensor, value: Tensor, points: Tensor, shapes: Tensor, starts: Tensor
) -> str | None:
    """What the layers would refuse in words of their own."""
    weight, batch = layer.value_proj.weight, 0 if layer.batch_first else 1
    names = ("query", "value", "reference_points", "spatial_shapes", "level_start_index")
    for name, t in zip(names, (query, value, points, shapes, starts), strict=True):
        require_tensor("ms_deform_attn", name, t)
        if t.device != weight.device or t.layout != torch.strided:
            return f"{name} must be dense and on the device of the parameters, {weight.device}, got {t.device}"
    for name, t in (("query", query), ("value", value)):
        if t.dim() != 3 or t.shape[2] != layer.embed_dims or t.shape[batch] != query.shape[batch]:
            return f"{name} must have 3 axes, {layer.embed_dims} channels, the batch of query, got {list(t.shape)}"
        if t.dtype != weight.dtype and not (t.is_floating_point() and _autocast_enabled(t.device.type)):
            return f"{name} must have the dtype of the parameters, {weight.dtype}, got {t.dtype}"
    expected = (query.shape[batch], query.shape[1 - batch], layer.num_levels)
    if points.dim() != 4 or any(n not in (1, full) for n, full in zip(points.shape, expected, strict=False)):
        return f"reference_points must have shape {[*expected, 2]} or {[*expected, 4]}, got {list(points.shape)}"
    if points.dtype not in _FLOATS:
        return f"reference_points must be float64, float32, float16 or bfloat16, got {points.dtype}"
    if tuple(shapes.shape) != (layer.num_levels, 2) or shapes.dtype != torch.int64:
        levels = [layer.num_levels, 2]
        return f"spatial_shapes must be int64 of shape {levels}, got {shapes.dtype}, {list(shapes.shape)}"
    return None


def _check(
    op: str, value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor
) -> tuple[Any, ...]:
    torch._check(value.dim() == 4, lambda: f"opzoo::{op}: value must have 4 axes, got {value.dim()}")
    torch._check(
        locations.dim() == 6, lambda: f"opzoo::{op}: sampling_locations must have 6 axes, got {locations.dim()}"
    )
    half = value.dtype in _HALVES
    torch._check(
        half or value.dtype in (torch.float32, torch.float64),
        lambda: f"opzoo::{op}: value must be float64, float32, float16 or bfloat16, got {value.dtype}",
    )
    for name, t in (("spatial_shapes", shapes), ("level_start_index", starts)):
        torch._check(t.dtype == torch.int64, lambda: f"opzoo::{op}: {name} must be int64, got {t.dtype}")  # noqa: B023
    torch._check(
        locations.dtype == value.dtype or (half and locations.dtype == torch.float32),
        lambda: f"opzoo::{op}: sampling_locations must have the dtype of value, {value.dtype}, got {locations.dtype}",
    )
    torch._check(
        weights.dtype == locations.dtype,
        lambda: f"opzoo::{op}: attention_weights must have the dtype of sampling_locations, got {weights.dtype}",
    )
    B, S, M, D = value.shape
    _, Q, _, L, P, _ = locations.shape
    torch._check(S > 0 or L == 0, lambda: f"opzoo::{op}: value must have the pixels of {L} levels, got none")
    for name, t, expected in (
        ("spatial_shapes", shapes, (L, 2)),
        ("level_start_index", starts, (L,)),
        ("sampling_locations", locations, (B, Q, M, L, P, 2)),
        ("attention_weights", weights, (B, Q, M, L, P)),
    ):
        torch._check(
            t.shape == torch.Size(expected),
            lambda: f"opzoo::{op}: {name} must have shape {list(expected)}, got {list(t.shape)}",  # noqa: B023
        )
    return B, Q, M * D


def _fake(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    return value.new_empty(_check("ms_deform_attn", value, shapes, starts, locations, weights))


def _fake_backward(
    grad: Tensor, value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, need_value: bool
) -> tuple[Tensor, Tensor, Tensor]:
    op = "_ms_deform_attn_backward"
    expected = _check(op, value, shapes, starts, locations, weights)
    torch._check(
        grad.shape == torch.Size(expected),
        lambda: f"opzoo::{op}: grad must have shape {list(expected)}, got {list(grad.shape)}",
    )
    return (
        value.new_empty(value.shape if need_value else 0),
        locations.new_empty(locations.shape),
        weights.new_empty(weights.shape),
    )


def _save(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*args)


def _derive(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    need_value, _, _, need_locations, need_weights = ctx.needs_input_grad
    if need_value and grad.is_cuda:
        alert_not_deterministic("opzoo.ms_deform_attn backward to value on CUDA")
    to_value, to_locations, to_weights = _backward(grad, *ctx.saved_tensors, need_value)
    return (
        to_value if need_value else None,
        None,
        None,
        to_locations if need_locations else None,
        to_weights if need_weights else None,
    )


def _refuse_double_backward(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("opzoo.ms_deform_attn has no second derivative; opzoo.reference.ms_deform_attn has")


def _folded(info: Any, in_dims: Any, args: tuple[Any, ...], positions: tuple[int, ...]) -> list[Any] | None:
    """The mapped axis merged into B; None where the levels differ along it."""
    folded: list[Any] = []
    for position, (t, dim) in enumerate(zip(args, in_dims, strict=True)):
        if position in positions:
            t = t.expand(info.batch_size, *t.shape) if dim is None else move_batch_first(t, dim)
            t = t.flatten(0, 1)
        elif dim is not None:
            return None
        folded.append(t)
    return folded


_LEVELS = "opzoo.ms_deform_attn: vmap over spatial_shapes or level_start_index is not possible; loop instead"


def _vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    folded = _folded(info, in_dims, args, (0, 3, 4))
    if folded is None:
        raise NotImplementedError(_LEVELS)
    return _forward(*folded).unflatten(0, (info.batch_size, -1)), 0


def _vmap_backward(info: Any, in_dims: Any, *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    folded = _folded(info, in_dims, args, (0, 1, 4, 5))
    if folded is None:
        raise NotImplementedError(_LEVELS)
    grads = _backward(*folded)
    return tuple(
        g.unflatten(0, (info.batch_size, -1)) if g.dim() > 1 else g.expand(info.batch_size, *g.shape) for g in grads
    ), (0, 0, 0)


register_fake("ms_deform_attn", _fake)
register_fake("_ms_deform_attn_backward", _fake_backward)
register_autocast(
    torch.ops.opzoo.ms_deform_attn.default,
    lambda dtype, value, shapes, starts, locations, weights: (
        autocast_tensor(value, dtype),
        shapes,
        starts,
        # Both in fp32, whatever they come in: the operator wants one dtype of them.
        autocast_tensor(locations, torch.float32),
        autocast_tensor(weights, torch.float32),
    ),
)
register_autocast(torch.ops.opzoo._ms_deform_attn_backward.default, lambda dtype, *args: args)
_backward = differentiable(
    torch.ops.opzoo._ms_deform_attn_backward.default,
    inputs=(0, 1, 4, 5),
    save=lambda ctx, args, output: None,
    backward=_refuse_double_backward,
    vmap=_vmap_backward,
    autocast=True,
)
_forward = differentiable(
    torch.ops.opzoo.ms_deform_attn.default,
    inputs=(0, 3, 4),
    save=_save,
    backward=_derive,
    vmap=_vmap,
    autocast=True,
)
