"""The average forward through each of its ways over a map: few RoIs or many, any channels, any layout."""

from __future__ import annotations

import pytest
import torch
from helpers import HALVES, assert_as_good_as, detector_boxes, error_against
from peers import torchvision
from roi_inputs import close, make_map

import opzoo

INF = float("inf")

LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "sliced": lambda x: torch.nn.functional.pad(x, (1, 2, 3, 0, 1, 1))[:, 1:-1, 3:, 1:-2],
    "every other column": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "one image": lambda x: x[:1].expand_as(x),
}


def make_rois(count: int, images: int, height: int, width: int, device: torch.device) -> torch.Tensor:
    """Proposals at stride 4, one of them far larger than the map and one off it."""
    boxes = detector_boxes(count, 4.0 * height, 4.0 * width).to(device)
    boxes[count // 2] = torch.tensor([-2000.0, -600.0, 2200.0, 700.0], device=device)
    boxes[count // 3] = torch.tensor([9e3, 9e3, 9.1e3, 9.1e3], device=device)
    index = torch.arange(count, device=device) % images
    return torch.cat([index[:, None].to(boxes.dtype), boxes], 1)


@pytest.mark.parametrize("count", [10, 100])
@pytest.mark.parametrize("channels", [1, 24, 37])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size,ratio", [((7, 7), 2), ((14, 14), 2), ((7, 7), 0), ((32, 3), 1)], ids=str)
def test_any_map_equals_torchvision(device, size, ratio, layout, channels, count):
    x = LAYOUTS[layout](make_map(2, channels, 37, 71, device=device))
    rois = make_rois(count, 2, 37, 71, device)
    out = opzoo.roi_align(x, rois, size, 0.25, ratio, True)
    peer = torchvision.ops.roi_align(x, rois, size, 0.25, ratio, True)
    exact = torchvision.ops.roi_align(x.double(), rois.double(), size, 0.25, ratio, True)
    close(out, peer, 1e-3)
    assert_as_good_as(out, peer, exact)
    assert torch.equal(out, opzoo.roi_align(x, rois, size, 0.25, ratio, True))


@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("count", [10, 100])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float64], ids=str)
def test_any_dtype_is_torchvision_rounded(device, dtype, count, channels_last):
    x = make_map(2, 72, 37, 71, device=device, channels_last=channels_last).to(dtype)
    rois = make_rois(count, 2, 37, 71, device)
    out = opzoo.roi_align(x, rois, 7, 0.25, 0, True)
    exact_dtype = torch.float64 if dtype == torch.float64 else torch.float32  # of the coordinates
    exact = torchvision.ops.roi_align(x.to(exact_dtype), rois.to(exact_dtype), 7, 0.25, 0, True)
    assert out.dtype == dtype
    assert error_against(exact.double(), out.double()) < (1e-5 if dtype == torch.float64 else 2e-2)


@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [(14, 14), (32, 31)], ids=str)
def test_many_rois_and_large_results(device, size, dtype, channels_last):
    """Results of a block that take more shared memory than it gets without asking."""
    x = make_map(2, 76, 37, 71, device=device, channels_last=channels_last).to(dtype)
    rois = make_rois(300, 2, 37, 71, device)
    out = opzoo.roi_align(x, rois, size, 0.25, 2, True)
    exact_dtype = torch.float64 if dtype == torch.float64 else torch.float32  # of the coordinates
    exact = torchvision.ops.roi_align(x.to(exact_dtype), rois.to(exact_dtype), size, 0.25, 2, True)
    assert error_against(exact.double(), out.double()) < (4e-3 if dtype == torch.float16 else 1e-3)


@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("count", [10, 100])
def test_infinite_pixels_stay_infinite(device, count, channels_last):
    x = make_map(1, 16, 40, 48, device=device, channels_last=channels_last)
    x[:, :, 20, 24] = INF
    rois = torch.tensor([[0.0, 64.0, 48.0, 130.0, 118.0]], device=device).repeat(count, 1)
    out = opzoo.roi_align(x, rois, 5, 0.25, 2, True)
    peer = torchvision.ops.roi_align(x, rois, 5, 0.25, 2, True)
    assert torch.equal(out.isinf(), peer.isinf()) and not out.isnan().any()
