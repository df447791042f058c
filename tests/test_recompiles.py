"""torch.compile in every mode: once for one count of boxes, once for all counts, and never again.

Sizes 0 and 1 are left out: torch compiles anew for them, whatever the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract import outputs
from helpers import detector_boxes
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import opzoo


def features(device: torch.device, size: int = 32) -> Tensor:
    return torch.linspace(-1, 1, 2 * 8 * size * size, device=device).sin().reshape(2, 8, size, size)


def rois(boxes: Tensor) -> Tensor:
    index = torch.arange(boxes.shape[0], device=boxes.device) % 2
    return torch.cat([index.unsqueeze(1).to(boxes.dtype), boxes], 1)


def roi_align(boxes: Tensor, scores: Tensor, classes: Tensor) -> Any:
    return opzoo.roi_align(features(boxes.device), rois(boxes), 3, 0.25, 2, True)


def roi_align_of_list(boxes: Tensor, scores: Tensor, classes: Tensor) -> Any:
    return opzoo.roi_align(features(boxes.device), [boxes, boxes[:2]], 3, 0.25, -1)


def multi_scale_roi_align(boxes: Tensor, scores: Tensor, classes: Tensor) -> Any:
    maps = [features(boxes.device), features(boxes.device, 16)]
    return opzoo.multi_scale_roi_align(maps, rois(boxes), 3, [0.25, 0.125], 2, canonical_scale=64, canonical_level=3)


def roi_pool(boxes: Tensor, scores: Tensor, classes: Tensor) -> Any:
    return opzoo.roi_pool(features(boxes.device), rois(boxes), 3, 0.25)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "roi_align": roi_align,
    "roi_align-list": roi_align_of_list,
    "multi_scale_roi_align": multi_scale_roi_align,
    "roi_pool": roi_pool,
    "nms": lambda boxes, scores, classes: opzoo.nms(boxes, scores, 0.5),
    "batched_nms": lambda boxes, scores, classes: opzoo.batched_nms(boxes, scores, classes, 0.5),
    "nms_padded": lambda boxes, scores, classes: opzoo.nms_padded(boxes, scores, 0.5, 10),
    "soft_nms": lambda boxes, scores, classes: opzoo.soft_nms(boxes, scores, 0.5),
    "batched_soft_nms": lambda boxes, scores, classes: opzoo.batched_soft_nms(boxes, scores, classes, 0.5),
}


def all_of_them(boxes: Tensor, scores: Tensor, classes: Tensor) -> Any:
    return [function(boxes, scores, classes) for function in FUNCTIONS.values()]


def arguments(count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    boxes = detector_boxes(count, 128, 128, torch.Generator().manual_seed(count)).to(device)
    return boxes, torch.linspace(0, 1, count, device=device), torch.arange(count, device=device) % 3


def check(function: Callable[..., Any], compiled: Callable[..., Any], counts: tuple[int, ...], where: Any) -> None:
    for count in counts:
        given = arguments(count, where)
        for got, wanted in zip(outputs(compiled(*given)), outputs(function(*given)), strict=True):
            torch.testing.assert_close(got, wanted, msg=lambda text, count=count: f"{count} boxes: {text}")


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_recompile_per_count(name: str, device: torch.device) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(FUNCTIONS[name], backend=counter, fullgraph=True)
        check(FUNCTIONS[name], compiled, (7, 40), device)
        with torch._dynamo.config.patch(error_on_recompile=True):
            check(FUNCTIONS[name], compiled, (2, 3, 5, 41, 300), device)
    assert counter.frame_count == 2  # for 7 boxes, then for any number


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_compilation_where_the_count_is_marked(name: str, device: torch.device) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(FUNCTIONS[name], backend=counter, fullgraph=True)
        given = arguments(7, device)
        for t in given:
            torch._dynamo.mark_dynamic(t, 0)
        compiled(*given)
        with torch._dynamo.config.patch(error_on_recompile=True):
            check(FUNCTIONS[name], compiled, (2, 4, 5, 300), device)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_every_mode(mode: str, device: torch.device) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(all_of_them, mode=mode, fullgraph=True, dynamic=True)
        check(all_of_them, compiled, (7,), device)
        with torch._dynamo.config.patch(error_on_recompile=True):
            check(all_of_them, compiled, (2, 3, 40), device)
