import torch
from helpers import Case, detector_boxes

import opzoo


def _boxes(device, dtype):
    return detector_boxes(40, 80, 100, torch.Generator().manual_seed(1)).to(device, dtype)


def _scores(device, dtype):
    return torch.linspace(0, 1, 40, device=device, dtype=dtype)


def _soft_nms(method):
    return Case(
        id=f"soft_nms-{method}",
        op="soft_nms",
        tensors=lambda device, dtype: (_boxes(device, dtype), _scores(device, dtype)),
        call=lambda boxes, scores: opzoo.soft_nms(boxes, scores, 0.3, 0.5, 0.01, method),
        raw=lambda boxes, scores: (boxes, scores, 0.3, 0.5, 0.01, ("naive", "linear", "gaussian").index(method)),
        dynamic={0: 0, 1: 0},
    )


CASES = [
    *(_soft_nms(method) for method in ("naive", "linear", "gaussian")),
    Case(
        id="soft_nms-one-left",
        op="soft_nms",
        tensors=lambda device, dtype: (
            torch.tensor([[0, 0, 4, 4]], device=device, dtype=dtype).repeat(9, 1),
            _scores(device, dtype)[:9],
        ),
        call=lambda boxes, scores: opzoo.soft_nms(boxes, scores, 0.3, 0.5, 1e-3, "linear"),
        raw=lambda boxes, scores: (boxes, scores, 0.3, 0.5, 1e-3, 1),
        dynamic={0: 0, 1: 0},
    ),
    Case(
        id="batched_soft_nms",
        op="batched_soft_nms",
        tensors=lambda device, dtype: (
            _boxes(device, dtype),
            _scores(device, dtype),
            torch.arange(40, device=device) % 3,
        ),
        call=lambda boxes, scores, idxs: opzoo.batched_soft_nms(boxes, scores, idxs, 0.3, 0.5, 1e-3, "linear"),
        raw=lambda boxes, scores, idxs: (boxes, scores, idxs, 0.3, 0.5, 1e-3, 1),
        dynamic={0: 0, 1: 0, 2: 0},
    ),
]
