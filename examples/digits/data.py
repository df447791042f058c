"""Scenes of handwritten digits: scikit-learn's 8x8 images, enlarged, coloured, put on clutter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor

from digits.boxes import box_area, box_iou

SIZE = 112  # pixels along each side of a scene
NUM_CLASSES = 10
HELD_OUT = 500  # of the 1797 digit images

Floats = NDArray[np.float32]


class Digits(NamedTuple):
    """Digit images and what they show."""

    ids: NDArray[np.int64]  # [D], row numbers in load_digits
    images: Floats  # [D, 10, 10], ink in 0..1, a blank border around the 8x8
    labels: NDArray[np.int64]  # [D], 0..9


@dataclass(frozen=True)
class Scenes:
    """S scenes, the digits of scene ``i`` in ``boxes[i]`` and ``labels[i]``."""

    images: Tensor  # uint8 [S, 3, SIZE, SIZE]
    boxes: list[Tensor]  # float32 [G, 4] each, G >= 1
    labels: list[Tensor]  # int64 [G] each

    def __len__(self) -> int:
        return len(self.boxes)


def split_digits() -> tuple[Digits, Digits]:
    """The digit images for training and the held-out ones: disjoint, and the same in every run."""
    bunch = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    images = np.pad(bunch.images / 16, ((0, 0), (1, 1), (1, 1))).astype(np.float32)

    def part(ids: NDArray[np.int64]) -> Digits:
        return Digits(ids, images[ids], bunch.target[ids].astype(np.int64))

    return part(order[HELD_OUT:]), part(order[:HELD_OUT])


def make_scenes(digits: Digits, count: int, seed: int) -> Scenes:
    """Draw ``count`` scenes; the same arguments give the same scenes."""
    rng = np.random.default_rng(seed)
    images, boxes, labels = zip(*(_draw_scene(digits, rng) for _ in range(count)), strict=True)
    return Scenes(torch.stack(images), list(boxes), list(labels))


def _draw_scene(digits: Digits, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """One scene: uint8 ``Tensor[3, SIZE, SIZE]``, boxes ``Tensor[G, 4]``, labels ``Tensor[G]``."""
    canvas = _background(rng)
    for _ in range(rng.integers(2, 6)):
        _paint(canvas, _stroke(rng), 0, 0, rng)
    for _ in range(rng.integers(2, 5)):
        _paint(canvas, *_place(_scrap(digits, rng), rng), rng)

    boxes = torch.empty(0, 4)
    labels: list[int] = []
    wanted = rng.integers(3, 8)
    for _ in range(4 * wanted):
        if len(labels) == wanted:
            break
        index = rng.integers(len(digits.labels))
        height = rng.uniform(22, 50)
        ink, x, y = _place(_enlarge(digits.images[index], height, height * rng.uniform(0.8, 1.2)), rng)
        box = _ink_box(ink, x, y)
        if _crowded(box, boxes):
            continue
        _paint(canvas, ink, x, y, rng)
        boxes = torch.cat([boxes, box])
        labels.append(int(digits.labels[index]))

    canvas += 0.03 * rng.standard_normal(canvas.shape, np.float32)
    image = (255 * canvas.clip(0, 1) + 0.5).astype(np.uint8)
    return torch.from_numpy(image), boxes, torch.tensor(labels)


def _resize(image: Floats, height: int, width: int) -> Floats:
    """Bicubic resizing of ``[h, w]``."""
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


def _enlarge(image: Floats, height: float, width: float) -> Floats:
    """Enlarge ``[h, w]`` smoothly and sharpen the strokes; ink stays in 0..1."""
    return ((_resize(image, round(height), round(width)) - 0.35) / 0.4).clip(0, 1)


def _background(rng: np.random.Generator) -> Floats:
    """Coloured cloud texture, two octaves: ``[3, SIZE, SIZE]``."""
    canvas = np.full((3, SIZE, SIZE), rng.uniform(0.3, 0.7), np.float32)
    for cells, strength in ((rng.integers(2, 5), 0.25), (rng.integers(10, 24), 0.1)):
        noise = rng.uniform(-strength, strength, (3, cells, cells)).astype(np.float32)
        canvas += np.stack([_resize(channel, SIZE, SIZE) for channel in noise])
    return canvas.clip(0, 1)


def _stroke(rng: np.random.Generator) -> Floats:
    """Clutter: ink of a straight pen stroke, ``[SIZE, SIZE]``."""
    angle, length, width = rng.uniform(0, 2 * np.pi), rng.uniform(15, 60), rng.uniform(1, 3)
    pixels = np.arange(SIZE, dtype=np.float32)
    x, y = pixels[None, :] - rng.uniform(0, SIZE), pixels[:, None] - rng.uniform(0, SIZE)
    along = (x * np.cos(angle) + y * np.sin(angle)).clip(0, length)
    distance = np.hypot(x - along * np.cos(angle), y - along * np.sin(angle))
    return (width + 0.5 - distance).clip(0, 1)


def _scrap(digits: Digits, rng: np.random.Generator) -> Floats:
    """Clutter: a torn-off 4x4 corner of a digit, enlarged."""
    image = digits.images[rng.integers(len(digits.images))]
    row, column = rng.integers(1, 6, 2)
    side = rng.uniform(8, 20)
    return _enlarge(np.ascontiguousarray(image[row : row + 4, column : column + 4]), side, side)


def _place(ink: Floats, rng: np.random.Generator) -> tuple[Floats, int, int]:
    """The ink with a random top left corner (x, y) that keeps it inside the scene."""
    height, width = ink.shape
    return ink, int(rng.integers(SIZE - width + 1)), int(rng.integers(SIZE - height + 1))


def _ink_box(ink: Floats, x: int, y: int) -> Tensor:
    """The tight box around visible ink: ``Tensor[1, 4]``."""
    rows, columns = np.nonzero(ink.max(1) > 0.3)[0], np.nonzero(ink.max(0) > 0.3)[0]
    edges = [x + columns[0], y + rows[0], x + columns[-1] + 1, y + rows[-1] + 1]
    return torch.tensor([edges], dtype=torch.float32)


def _crowded(box: Tensor, others: Tensor) -> bool:
    """Whether more than a quarter of ``Tensor[1, 4]`` or of one of ``Tensor[G, 4]`` would be covered."""
    iou = box_iou(box, others)[0]
    intersection = iou / (1 + iou) * (box_area(box) + box_area(others))
    return bool((intersection > 0.25 * torch.minimum(box_area(box), box_area(others))).any())


def _paint(canvas: Floats, ink: Floats, x: int, y: int, rng: np.random.Generator) -> None:
    """Blend ``ink`` in a colour that stands out from what lies below it into ``canvas``, in place."""
    height, width = ink.shape
    below = canvas[:, y : y + height, x : x + width]
    brightness = below.mean()
    colour = rng.uniform(0, 1, 3)
    while abs(colour.mean() - brightness) < 0.3:
        colour = rng.uniform(0, 1, 3)
    below += ink * (colour[:, None, None].astype(np.float32) - below)
