"""RoIAlign: a window of a feature map, pooled to a fixed size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from opzoo.ops._common import pair, require_flag, require_number, require_tensor
from opzoo.ops._roi_align_derivatives import _average, _maximum
from opzoo.ops._roi_checks import BOX_DTYPES


def roi_align(
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | Sequence[int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    aligned: bool = False,
    pool_mode: str = "avg",
) -> Tensor:
    """Pool the window of each box to ``output_size`` by bilinear sampling.

    A box is scaled to the feature map, cut into ``output_size`` bins, and each bin is the average (or
    the maximum) of a regular grid of bilinear samples. Nothing is rounded to whole pixels.

    Args:
        input: feature map, ``Tensor[N, C, H, W]``, floating.
        boxes: ``Tensor[K, 5]`` of ``(image index, x1, y1, x2, y2)``, or one ``Tensor[L, 4]`` of
            ``(x1, y1, x2, y2)`` per image, in image pixels. Any floating or integer dtype.
        output_size: ``(height, width)`` of the result, or one int for both. Positive.
        spatial_scale: map pixels per image pixel, 0.25 for a map of stride 4. Finite and positive.
        sampling_ratio: samples per bin and axis, at most 32767. Zero or negative: as many as the bin
            has map pixels, rounded up.
        aligned: shift the map by half a pixel, so that pixel (0, 0) has its centre there and not its
            corner. Without it a RoI is at least one pixel wide and high.
        pool_mode: ``"avg"`` or ``"max"``, over the samples of a bin.

    Returns:
        ``Tensor[K, C, height, width]`` of ``input``'s dtype, channels_last if ``input`` is. A list of
        boxes is pooled in its order, image by image.

    Raises:
        TypeError: an argument is no tensor, no number, or no pair of ints.
        ValueError: an image index is no integer in ``[0, N)`` (on the CPU; on CUDA such a RoI gives
            zeros, and raises after ``opzoo.set_debug(True)``), ``boxes`` is a list of another length
            than N, or a number is out of its range.
        RuntimeError: a tensor has the wrong rank, shape, dtype or device, there are boxes but the map
            has no pixels, or the dtype of ``Tensor[K, 5]`` cannot hold the image indices.

    A sample further than one pixel outside the map has the value 0. A box with a NaN or infinite
    coordinate gives zeros. An inverted box (x2 < x1) with ``aligned=True`` gives zeros on an adaptive
    grid and the mirrored window on a fixed one.

    fp64, fp32, fp16 and bf16; coordinates, weights and sums are fp32 (fp64 for fp64), whatever the
    dtype of ``boxes``. Under autocast the result keeps ``input``'s dtype: pass ``input.float()`` for float32.
    Differentiable any number of times in ``input``, in both modes. With ``pool_mode="avg"`` once in
    ``boxes`` too, in reverse mode, the number of samples held constant; with ``"max"`` the backward of
    boxes that require a gradient raises NotImplementedError. vmap-able.
    Deterministic, forward and backward, on every device.

    Source: He et al., "Mask R-CNN", 2017; ``aligned=True`` as in Detectron2.

    Example:
        >>> image = torch.arange(16.0).reshape(1, 1, 4, 4)
        >>> opzoo.roi_align(image, [torch.tensor([[0.0, 0.0, 4.0, 4.0]])], 2, aligned=True)
        tensor([[[[ 2.5000,  4.5000],
                  [10.5000, 12.5000]]]])
    """
    require_tensor("roi_align", "input", input)
    height, width = pair("roi_align", "output_size", output_size)
    require_number("roi_align", "spatial_scale", spatial_scale)
    require_number("roi_align", "sampling_ratio", sampling_ratio, "__index__")
    aligned = require_flag("roi_align", "aligned", aligned)
    batch_index = None
    if not isinstance(boxes, Tensor):
        boxes, batch_index = _concatenate("roi_align", input, boxes)
    if pool_mode == "avg":
        return _average(input, boxes, batch_index, height, width, spatial_scale, sampling_ratio, aligned)
    if pool_mode == "max":
        return _maximum(input, boxes, batch_index, height, width, spatial_scale, sampling_ratio, aligned)[0]
    raise ValueError(f"opzoo::roi_align: pool_mode must be 'avg' or 'max', got {pool_mode!r}")


class RoIAlign(nn.Module):
    """:func:`roi_align` as a module.

    Args:
        output_size: ``(height, width)`` of the result, or one int for both.
        spatial_scale: map pixels per image pixel.
        sampling_ratio: samples per bin and axis; zero or negative for an adaptive number.
        aligned: shift the map by half a pixel.
        pool_mode: ``"avg"`` or ``"max"``.
    """

    def __init__(
        self,
        output_size: int | Sequence[int],
        spatial_scale: float,
        sampling_ratio: int,
        aligned: bool = False,
        pool_mode: str = "avg",
    ) -> None:
        super().__init__()
        self.output_size = output_size
        self.spatial_scale = spatial_scale
        self.sampling_ratio = sampling_ratio
        self.aligned = aligned
        self.pool_mode = pool_mode

    def forward(self, input: Tensor, boxes: Tensor | Sequence[Tensor]) -> Tensor:
        """``Tensor[K, C, height, width]``; see :func:`roi_align`."""
        return roi_align(
            input, boxes, self.output_size, self.spatial_scale, self.sampling_ratio, self.aligned, self.pool_mode
        )

    def extra_repr(self) -> str:
        text = (
            f"output_size={self.output_size}, spatial_scale={self.spatial_scale}, "
            f"sampling_ratio={self.sampling_ratio}, aligned={self.aligned}"
        )
        return text if self.pool_mode == "avg" else f"{text}, pool_mode={self.pool_mode!r}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


def _concatenate(op: str, input: Tensor, boxes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One ``Tensor[L, 4]`` per image to ``Tensor[K, 4]`` and an int64 image index ``Tensor[K]``."""
    if not isinstance(boxes, (list, tuple)):
        raise TypeError(f"opzoo::{op}: boxes must be a tensor or a list of tensors, got {type(boxes).__name__}")
    for i, t in enumerate(boxes):
        if not isinstance(t, Tensor):
            raise TypeError(f"opzoo::{op}: boxes[{i}] must be a tensor, got {type(t).__name__}")
        if t.dim() != 2 or t.shape[1] != 4:
            raise RuntimeError(f"opzoo::{op}: boxes[{i}] must have shape [L, 4], got {list(t.shape)}")
        if t.layout != torch.strided or t.dtype not in BOX_DTYPES:
            raise RuntimeError(
                f"opzoo::{op}: boxes[{i}] must be dense, of a floating or integer dtype, got {t.dtype}, {t.layout}"
            )
        if t.device != input.device:
            raise RuntimeError(
                f"opzoo::{op}: boxes[{i}] must be on the device of input, {input.device}, got {t.device}"
            )
    if input.dim() == 4 and len(boxes) != input.shape[0]:
        raise ValueError(
            f"opzoo::{op}: boxes must hold one tensor per image of input, {input.shape[0]}, got {len(boxes)}"
        )
    if not boxes:
        return input.new_zeros((0, 4)), input.new_zeros((0,), dtype=torch.int64)
    if len(boxes) == 1:
        return boxes[0], boxes[0].new_zeros((boxes[0].shape[0],), dtype=torch.int64)
    index = [t.new_full((t.shape[0],), i, dtype=torch.int64) for i, t in enumerate(boxes)]
    return torch.cat(list(boxes)), torch.cat(index)
