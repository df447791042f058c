"""A data set whose items are made by operators: what the workers of a ``DataLoader`` import."""

from __future__ import annotations

import torch
from helpers import detector_boxes
from torch import Tensor
from torch.utils.data import Dataset

import opzoo


class Pooled(Dataset[Tensor]):
    """Item ``i``: boxes of a random image through nms, and what roi_align pools from the ones kept."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        boxes = detector_boxes(2000, 256, 256, generator)
        keep = opzoo.nms(boxes, torch.rand(2000, generator=generator), 0.5)[:50]
        features = torch.randn(1, 32, 64, 64, generator=generator)
        return opzoo.roi_align(features, [boxes[keep]], 7, 0.25, 2, True)
