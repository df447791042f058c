"""vmap of operators that pool boxes from images: the new axis folded into one that is there already.

Where only features are batched, the new axis joins the channels. Where boxes are, it joins the RoIs,
and the images as well unless all share one map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Batched: TypeAlias = "tuple[Any, int | None]"  # a tensor and its vmapped axis


class Folded:
    """Arguments with the vmapped axis folded away; ``unfold`` brings it back in a result.

    ``per_roi``: the axis joins the RoIs whatever is batched, because the result has no channels. ``op``: the
    operator that errors name.
    """

    def __init__(
        self,
        size: int,
        images: Any,
        boxes: Batched,
        batch_index: Batched,
        pooled: Sequence[Batched],
        map: Batched,
        per_roi: bool = False,
        op: str = "roi_align",
    ) -> None:
        self.size = size
        self.axis = 0 if per_roi or boxes[1] is not None or batch_index[1] is not None else 1
        self.boxes, self.batch_index = boxes[0], batch_index[0]
        self.map, shared_map = map[0], map[0] is not None and map[1] is None
        if self.axis == 0:
            leading = boxes[0] if boxes[1] is None else boxes[0].movedim(boxes[1], 0)
            index = _image_indices(op, leading, batch_index, images)
            coordinates = self._leading(boxes)[..., -4:]
            index = index.expand(coordinates.shape[:-1])
            if not shared_map:
                first = torch.arange(size, device=index.device).unsqueeze(1) * images
                index = torch.where(index >= 0, index + first, index)
            self.boxes, self.batch_index = coordinates.flatten(0, 1), index.flatten()
        if self.map is not None and not (self.axis == 0 and shared_map):
            self.map = self._fold(map)
        self.pooled = [self._fold(t) for t in pooled]

    def _leading(self, t: Batched, axis: int = 0) -> Tensor:
        tensor, dim = t
        if dim is not None:
            return tensor.movedim(dim, axis)
        tensor = tensor.unsqueeze(axis)
        return tensor.expand(*tensor.shape[:axis], self.size, *tensor.shape[axis + 1 :])

    def _fold(self, t: Batched) -> Tensor:
        return self._leading(t, self.axis).flatten(self.axis, self.axis + 1)

    def unfold(self, result: Tensor) -> Tensor:
        return result.unflatten(self.axis, (self.size, result.shape[self.axis] // self.size))


def _image_indices(op: str, boxes: Tensor, batch_index: Batched, images: Any) -> Tensor:
    """int64 image indices ``[K]`` or ``[B, K]``, -1 for one that is none of the batch."""
    index, dim = batch_index
    if index is None:
        largest = largest_exact_index(boxes.dtype, torch.float64)
        torch._check(
            images - 1 <= largest,
            lambda: f"opzoo::{op}: boxes of dtype {boxes.dtype} hold image indices exactly up to {largest}",
        )
        index = boxes[..., 0]
    elif dim is not None:
        index = index.movedim(dim, 0)
    valid = (index >= 0) & (index < images) & (index == index.floor())
    _refuse_image_indices(op, index, valid, images, "boxes" if batch_index[0] is None else "batch_index")
    return torch.where(valid, index, -1).long()


def _refuse_image_indices(op: str, index: Tensor, valid: Tensor, images: Any, name: str) -> None:
    """On the CPU, what its kernel would say of a bad index; it would be told -1, of an argument of its own.

    Not where no value can be read: in a nested vmap, or while tracing. There the kernel's words must do.
    """
    if type(valid) is not Tensor or valid.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(valid) or bool(valid.all()):
        return
    at = tuple(int(i) for i in (~valid).nonzero()[0])
    row = f"{name}[{at[-1]}, 0] (the image index)" if name == "boxes" else f"{name}[{at[-1]}]"
    where = f", in element {at[0]} of the vmapped axis" if len(at) > 1 else ""
    raise ValueError(f"opzoo::{op}: {row} must be an integer in [0, {images}), got {float(index[at]):g}{where}")


def axis_after(t: Tensor, dim: int | None, axis: int) -> Any:
    """Size of an axis, the vmapped one not counted."""
    return t.shape[axis if dim is None or axis < dim else axis + 1]


def largest_exact_index(boxes: torch.dtype, features: torch.dtype) -> int:
    """The largest n for which boxes of this dtype hold all image indices 0, 1, ..., n."""
    if boxes in (torch.float16, torch.bfloat16):
        return 2**11 if boxes == torch.float16 else 2**8
    return 2**53 if boxes == features == torch.float64 else 2**24
