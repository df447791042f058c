"""Arguments for the campaign: right ones of every operator, drawn at random, and every way to spoil them."""

from __future__ import annotations

import random
from typing import Any

import torch
from contract import LAYOUTS
from helpers import FLOATS
from hostility import HOSTILE_FLOATS, HOSTILE_INTS, ODD_DTYPES
from torch import Tensor

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DENORMAL = (1e-40, -1e-40, 5e-324, 6e-8, 0.0, -0.0)
Arguments = dict[str, Any]


class Draw(random.Random):
    """A source of chance that makes tensors too; the same seed draws the same on every device."""

    def __init__(self, seed: int, device: str) -> None:
        super().__init__(seed)
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def size(self, most: int = 6, large: int = 40) -> int:
        """Mostly small, seldom 0, seldom large enough for vector loops and blocks."""
        chance = self.random()
        return 0 if chance < 0.03 else self.randint(1, large) if chance > 0.95 else self.randint(1, most)

    def dtype(self) -> torch.dtype:
        return self.choice((*FLOATS, torch.float32))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)

    def uniform(self, *shape: int, low: float = 0, high: float = 1, dtype: torch.dtype = torch.float32) -> Tensor:
        return (low + (high - low) * torch.rand(shape, generator=self.generator)).to(self.device, dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=self.generator).to(self.device, dtype)

    def boxes(self, *shape: int, side: float = 12, dtype: torch.dtype = torch.float32) -> Tensor:
        """``Tensor[*shape, 4]``: most of them upright, some inverted, many with equal or whole corners."""
        corner = self.uniform(*shape, 2, low=-2, high=side)
        extent = self.uniform(*shape, 2, low=-1 if self.random() < 0.2 else 0, high=side)
        boxes = torch.cat([corner, corner + extent], -1)
        if dtype in INTEGERS or self.random() < 0.5:
            boxes = (boxes * 2).round() / 2 if self.random() < 0.5 else boxes.round()
        return boxes.clamp(min=0).to(dtype) if dtype == torch.uint8 else boxes.to(dtype)

    def pair(self, low: int, high: int) -> int | tuple[int, int]:
        return self.randint(low, high) if self.random() < 0.5 else (self.randint(low, high), self.randint(low, high))


def both(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


# Spoiling. Each takes one argument and returns another in its place, and says what it did.


def _sprinkled(draw: Draw, t: Tensor) -> Tensor:
    """Some elements hostile: the shapes pass, the kernel meets the values."""
    if t.dtype.is_floating_point:
        pool = torch.tensor((*HOSTILE_FLOATS, *DENORMAL, 65504.0, 1e5), dtype=torch.float64)
        if draw.random() < 0.5:
            pool = pool[draw.randrange(len(pool))].reshape(1)
    else:
        limits = torch.iinfo(t.dtype)
        pool = torch.tensor(
            [v for v in (*HOSTILE_INTS, 0, 1, 127, limits.min, limits.max) if limits.min <= v <= limits.max]
        )
    picked = pool[draw.integers(0, len(pool) - 1, *t.shape).cpu()].to(t.device, t.dtype)
    return torch.where(draw.uniform(*t.shape) < draw.choice((0.02, 0.2, 1.0)), picked, t)


def _expanded(draw: Draw, t: Tensor) -> Tensor:
    axis = draw.randrange(t.dim())
    return t.narrow(axis, 0, 1).expand_as(t)


def _overlapping(draw: Draw, t: Tensor) -> Tensor:
    """A view whose elements share memory: each row begins one element after the last."""
    strides = [1] * t.dim()
    flat = t.reshape(-1)[: sum(n - 1 for n in t.shape) + 1].clone()
    return flat.as_strided(t.shape, strides)


def view(draw: Draw, t: Tensor) -> tuple[str, Tensor]:
    """The same values, or values of ``t``, in another layout."""
    name = draw.choice((*LAYOUTS, "expanded", "overlapping"))
    if name in ("expanded", "overlapping"):
        if t.dim() == 0 or t.numel() == 0:
            return "plain", t
        return name, _expanded(draw, t) if name == "expanded" else _overlapping(draw, t)
    other = LAYOUTS[name](t)
    return (name, t) if other is None else (name, other)


def spoil_tensor(draw: Draw, t: Tensor) -> tuple[str, Any]:
    kind = draw.choice(("values", "values", "dtype", "rank", "size", "meta", "object", "sparse", "empty"))
    if kind == "values" and t.dtype != torch.bool:
        return "values", _sprinkled(draw, t)
    if kind == "dtype":
        dtype = draw.choice((*FLOATS, *INTEGERS, *ODD_DTYPES))
        return f"in {dtype}", t.to(dtype)
    if kind == "rank":
        rank = draw.randrange(7)
        return f"of rank {rank}", torch.ones((draw.randint(1, 2),) * rank, dtype=t.dtype, device=t.device)
    if kind in ("size", "empty") and t.dim():
        axis = draw.randrange(t.dim())
        size = 0 if kind == "empty" else max(t.shape[axis] + draw.choice((-1, 1)), 0)
        shape = (*t.shape[:axis], size, *t.shape[axis + 1 :])
        return f"with axis {axis} of size {size}", torch.ones(shape, dtype=t.dtype, device=t.device)
    if kind == "meta":
        return "on meta", t.to("meta")
    if kind == "sparse" and t.dim():
        return "sparse", t.to_sparse()
    if kind == "object":
        other = draw.choice((None, 1.5, "text", [], {}))
        return repr(other), other
    return ("on the CPU", t.cpu()) if t.device.type == "cuda" else ("as it is", t)


def spoil_number(draw: Draw, value: Any) -> tuple[str, Any]:
    """A number as no caller should give it. Counts are moderate or absurd: work between is the caller's wish."""
    numbers = (0, -1, -(1 << 63), 1 << 31, (1 << 63) - 1, 10**400, *HOSTILE_FLOATS[:3], 1e308, 0.5, 1e-310)
    other = draw.choice((*numbers, True, None, "text", [], [1], (1, 2, 3), torch.ones(2)))
    if isinstance(value, (list, tuple)) and draw.random() < 0.5:
        other = draw.choice(([], [*value, *value], [draw.choice(numbers)] * len(value), [None] * len(value)))
    if isinstance(value, str):
        other = draw.choice(("", "avg", "max", "mean", "linear", "nearest", 3, None))
    return repr(other), other


def spoil(draw: Draw, args: Arguments) -> list[str]:
    """One to three arguments replaced in ``args``; what was done."""
    done = []
    for name in draw.sample(sorted(args), min(len(args), draw.choice((1, 1, 2, 3)))):
        value = args[name]
        if isinstance(value, Tensor):
            what, args[name] = spoil_tensor(draw, value)
        elif isinstance(value, list) and value and isinstance(value[0], Tensor) and draw.random() < 0.8:
            at = draw.randrange(len(value))
            what, other = spoil_tensor(draw, value[at])
            args[name] = [*value[:at], other, *value[at + 1 :]]
        elif callable(value):
            continue
        else:
            what, args[name] = spoil_number(draw, value)
        done.append(f"{name} {what}")
    return done


def lay_out(draw: Draw, args: Arguments) -> list[str]:
    """Some tensors of ``args`` replaced by views."""
    done = []
    for name, value in args.items():
        if isinstance(value, Tensor) and draw.random() < 0.6:
            what, args[name] = view(draw, value)
            # Of these two the values are others, and may be wrong ones.
            done.append(f"{'!' if what in ('expanded', 'overlapping') else ''}{name} {what}")
        elif isinstance(value, list) and value and isinstance(value[0], Tensor):
            args[name] = [view(draw, t)[1] if draw.random() < 0.6 else t for t in value]
            done.append(f"{name} in layouts")
    return done
