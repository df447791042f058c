"""``roi_align`` in plain PyTorch: one RoI at a time, every sample written out."""

from __future__ import annotations

import torch
from torch import Tensor


def roi_align(
    input: Tensor,
    boxes: Tensor | list[Tensor],
    output_size: int | tuple[int, int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    aligned: bool = False,
    pool_mode: str = "avg",
) -> Tensor:
    """The definition of :func:`opzoo.roi_align`, argument for argument.

    Args:
        input: ``Tensor[N, C, H, W]``.
        boxes: ``Tensor[K, 5]`` of ``(image index, x1, y1, x2, y2)``, or one ``Tensor[L, 4]`` per image.
        output_size: ``(height, width)`` of the result, or one int for both.
        spatial_scale: map pixels per image pixel.
        sampling_ratio: samples per bin and axis; zero or negative for ``ceil(bin)``.
        aligned: shift by half a pixel, and let RoIs be smaller than one pixel.
        pool_mode: ``"avg"`` or ``"max"``.

    Autograd differentiates it in ``boxes`` as well, the number of samples held constant. At a kink that is
    the derivative from the right: ``torch.clamp`` would leave it to the version of torch.
    """
    pooled_height, pooled_width = (output_size, output_size) if isinstance(output_size, int) else output_size
    if isinstance(boxes, Tensor):
        images, boxes = boxes[:, 0].long().tolist(), boxes[:, 1:]
    else:
        images = [i for i, t in enumerate(boxes) for _ in range(t.shape[0])]
        boxes = torch.cat(boxes)
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    features = input.to(dtype)
    outputs = []
    for image, (x1, y1, x2, y2) in zip(images, boxes.to(dtype), strict=True):
        ys = _sample_positions(y1, y2, pooled_height, spatial_scale, sampling_ratio, aligned)  # [PH, grid_h]
        xs = _sample_positions(x1, x2, pooled_width, spatial_scale, sampling_ratio, aligned)  # [PW, grid_w]
        samples = _bilinear(features[image], ys.flatten(), xs.flatten())
        samples = samples.reshape(input.shape[1], *ys.shape, *xs.shape).permute(0, 1, 3, 2, 4).flatten(3)
        if samples.shape[-1] == 0:
            outputs.append(samples.sum(-1))
        elif pool_mode == "avg":
            outputs.append(samples.sum(-1) / samples.shape[-1])
        else:
            outputs.append(samples.max(-1).values)
    if not outputs:
        return features.new_zeros((0, input.shape[1], pooled_height, pooled_width)).to(input.dtype)
    return torch.stack(outputs).to(input.dtype)


def _sample_positions(
    low: Tensor, high: Tensor, bins: int, spatial_scale: float, sampling_ratio: int, aligned: bool
) -> Tensor:
    """Coordinates of the samples along one axis of a RoI, ``Tensor[bins, grid]``."""
    offset = 0.5 if aligned else 0.0
    start = low * spatial_scale - offset
    size = high * spatial_scale - offset - start
    if not size.isfinite():
        return low.new_zeros((bins, 0))
    if not aligned:
        size = torch.where(size < 1, 1, size)
    bin = size / bins
    grid = sampling_ratio if sampling_ratio > 0 else max(int(bin.ceil()), 0)
    p = torch.arange(bins, dtype=low.dtype, device=low.device)[:, None]
    i = torch.arange(grid, dtype=low.dtype, device=low.device)
    return start + p * bin + (i + 0.5) * bin / grid


def _bilinear(image: Tensor, ys: Tensor, xs: Tensor) -> Tensor:
    """``Tensor[C, H, W]`` sampled at every (y, x): ``Tensor[C, len(ys), len(xs)]``.

    A sample outside [-1, H] x [-1, W] is 0. Inside, it is clamped to the centres of the edge pixels.
    """

    def taps(position: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inside = (position >= -1) & (position <= size)
        clamped = torch.where(inside & (position >= 0), position, 0)
        clamped = torch.where(clamped > size - 1, size - 1, clamped)
        low = clamped.floor()
        return low.long(), (low.long() + 1).clamp(max=size - 1), clamped - low, inside

    y_low, y_high, y_weight, y_inside = taps(ys, image.shape[1])
    x_low, x_high, x_weight, x_inside = taps(xs, image.shape[2])
    y_weight = y_weight[:, None]
    value = (
        (1 - y_weight) * (1 - x_weight) * image[:, y_low][:, :, x_low]
        + (1 - y_weight) * x_weight * image[:, y_low][:, :, x_high]
        + y_weight * (1 - x_weight) * image[:, y_high][:, :, x_low]
        + y_weight * x_weight * image[:, y_high][:, :, x_high]
    )
    return torch.where(y_inside[:, None] & x_inside, value, 0)
