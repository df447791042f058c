import torch
from helpers import Case, detector_boxes

import opzoo


def _boxes(device, dtype):
    return detector_boxes(40, 80, 100, torch.Generator().manual_seed(1)).to(device, dtype)


def _scores(device, dtype):
    return torch.linspace(0, 1, 40, device=device, dtype=dtype)


CASES = [
    Case(
        id="nms",
        op="nms",
        tensors=lambda device, dtype: (_boxes(device, dtype), _scores(device, dtype)),
        call=lambda boxes, scores: opzoo.nms(boxes, scores, 0.5),
        raw=lambda boxes, scores: (boxes, scores, 0.5),
        dynamic={0: 0, 1: 0},
        autocast_output="int64",
    ),
    Case(
        id="nms-one-kept",
        op="nms",
        tensors=lambda device, dtype: (
            torch.tensor([[0, 0, 4, 4]], device=device, dtype=dtype).repeat(9, 1),
            _scores(device, dtype)[:9],
        ),
        call=lambda boxes, scores: opzoo.nms(boxes, scores, 0.5),
        raw=lambda boxes, scores: (boxes, scores, 0.5),
        dynamic={0: 0, 1: 0},
        autocast_output="int64",
    ),
    Case(
        id="batched_nms",
        op="batched_nms",
        tensors=lambda device, dtype: (
            _boxes(device, dtype),
            _scores(device, dtype),
            torch.arange(40, device=device) % 3,
        ),
        call=lambda boxes, scores, idxs: opzoo.batched_nms(boxes, scores, idxs, 0.5),
        raw=lambda boxes, scores, idxs: (boxes, scores, idxs, 0.5),
        dynamic={0: 0, 1: 0, 2: 0},
        autocast_output="int64",
    ),
    Case(
        id="nms_padded",
        op="nms_padded",
        tensors=lambda device, dtype: (_boxes(device, dtype).reshape(4, 10, 4), _scores(device, dtype).reshape(4, 10)),
        call=lambda boxes, scores: opzoo.nms_padded(boxes, scores, 0.5, 6),
        raw=lambda boxes, scores: (boxes, scores, 0.5, 6),
        dynamic={0: 0, 1: 0},
        autocast_output="int64",
        vmap_dims=(0, 0),
    ),
    Case(
        id="nms_padded-classes",
        op="nms_padded",
        tensors=lambda device, dtype: (
            _boxes(device, dtype).reshape(4, 10, 4),
            _scores(device, dtype).reshape(4, 10),
            torch.arange(40, device=device).reshape(4, 10) % 3,
        ),
        call=lambda boxes, scores, idxs: opzoo.nms_padded(boxes, scores, 0.5, 12, idxs=idxs),
        raw=lambda boxes, scores, idxs: (boxes, scores, 0.5, 12, idxs),
        dynamic={0: 0, 1: 0, 2: 0},
        autocast_output="int64",
        vmap_dims=(0, 0, 0),
    ),
    Case(
        id="nms_leaders",
        op="_nms_leaders",
        tensors=lambda device, dtype: (_boxes(device, dtype), _scores(device, dtype)),
        call=lambda boxes, scores: torch.ops.opzoo._nms_leaders(boxes, scores, 0.5),
        raw=lambda boxes, scores: (boxes, scores, 0.5),
        dynamic={0: 0, 1: 0},
        autocast_output="int64",
    ),
]
