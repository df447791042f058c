"""ms_deform_attn at the sizes of Deformable DETR: the encoder, whose queries are the pixels, and the decoder."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opzoo.bench.case import LABELS, Case, Tensors, Work, nbytes
from opzoo.bench.data import normal, seeded

_ENCODER = ((100, 152), (50, 76), (25, 38), (13, 19))
_SMALL = ((25, 38), (13, 19), (7, 10), (4, 5))


def _points(levels: tuple[tuple[int, int], ...], queries: int | None, generator: torch.Generator) -> Tensor:
    """Where the queries stand, 0 to 1: the centre of every pixel, or anywhere."""
    if queries is not None:
        return torch.rand(queries, 2, generator=generator, device=generator.device)
    centres = []
    for height, width in levels:
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centres.append(torch.stack([(x.flatten() + 0.5) / width, (y.flatten() + 0.5) / height], 1))
    return torch.cat(centres).to(generator.device)


def _between_pixels(pixels: Tensor) -> Tensor:
    """The places at least a tenth of a pixel from a pixel's centre, where the gradient jumps and no check is fair."""
    corner = (pixels - 0.5).floor()
    return corner + 0.6 + 0.8 * (pixels - 0.5 - corner)


def _case(name: str, dtype: torch.dtype, levels: tuple[tuple[int, int], ...], queries: int | None, batch: int) -> Case:
    def tensors(device: torch.device) -> Tensors:
        generator = seeded(device)
        shapes = torch.tensor(levels, device=device)
        sizes = shapes.prod(1)
        value = normal((batch, int(sizes.sum()), 8, 32), dtype, generator)
        points = _points(levels, queries, generator)
        offsets = 2 * torch.randn(batch, len(points), 8, 4, 4, 2, generator=generator, device=device)
        sizes_xy = shapes.flip(1)[None, None, None, :, None]
        locations = _between_pixels(points[None, :, None, None, None] * sizes_xy + offsets) / sizes_xy
        weights = torch.randn(batch, len(points), 8, 16, generator=generator, device=device).softmax(-1)
        return value, shapes, sizes.cumsum(0) - sizes, locations, weights.unflatten(-1, (4, 4))

    def call(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return function(*tensors)

    return Case(
        op="ms_deform_attn",
        id=f"{LABELS[dtype]} {name}",
        dtype=dtype,
        tensors=tensors,
        call=call,
        work=lambda tensors, output: {
            "fwd": Work(nbytes(*tensors, output)),
            "bwd": Work(2 * nbytes(*tensors) + nbytes(output)),
        },
        peer="opzoo.reference",
        sample=lambda rows, value, shapes, starts, locations, weights: (
            value[rows],
            shapes,
            starts,
            locations[rows],
            weights[rows],
        ),
        differentiable=(0, 3, 4),
    )


def cases(device_type: str) -> list[Case]:
    on_gpu = device_type == "cuda"
    dtypes = (torch.float32, torch.float16, torch.bfloat16) if on_gpu else (torch.float32,)
    levels, batch = (_ENCODER, 2) if on_gpu else (_SMALL, 1)
    places: tuple[tuple[str, int | None], ...] = (("encoder", None), ("decoder Q900", 900))
    return [_case(name, dtype, levels, queries, batch) for dtype in dtypes for name, queries in places]


def quick() -> list[Case]:
    return [_case("Q50", torch.float32, _SMALL, 50, 1)]


def tiny() -> list[Case]:
    return [_case("Q1", torch.float32, ((2, 2), (1, 1), (1, 1), (1, 1)), 1, 1)]
