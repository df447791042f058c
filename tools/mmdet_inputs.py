"""Random data in the form that each family of MMDetection's models takes, for ``mmdet_configs.py``."""

from __future__ import annotations

from typing import Any

import torch
from mmdet.testing import demo_mm_inputs, demo_track_inputs
from mmengine.structures import InstanceData

SIDES = {
    "dino/": 256,
    "ddq/": 256,
    "lad/": 256,
    "ssd/": 300,
    "pisa/ssd": 300,
    "legacy_1.x/ssd": 300,
    "paa/": 256,
}  # where 128 pixels are too few
ONE_CLASS = ("crowddet/", "qdtrack/", "bytetrack/", "ocsort/", "deepsort/", "strongsort/")
VIDEOS = ("mask2former_vis/", "masktrack_rcnn/", "qdtrack/")  # trained on pairs of frames
TRACKERS = ("bytetrack/", "ocsort/", "deepsort/", "strongsort/")  # trained on images, or not at all
WITHOUT_MASKS = ("rtmdet/rtmdet_tiny_8xb32-300e_coco", *ONE_CLASS)


def shape_of(name: str) -> list[int]:
    side = next((size for family, size in SIDES.items() if name.startswith(family)), 128)
    return [3, side, side]


def for_training(name: str) -> dict[str, Any]:
    """Two images, or two frames of one video."""
    shape, classes = shape_of(name), 1 if name.startswith(ONE_CLASS) else 4
    masks = not name.startswith(WITHOUT_MASKS)
    if name.startswith(VIDEOS):
        return dict(
            demo_track_inputs(1, 2, [0], tuple(shape), [3], num_classes=classes, with_mask=not name.startswith("qd"))
        )
    images = dict(demo_mm_inputs(2, [shape, shape], [3, 4], num_classes=4, with_mask=masks, with_semantic=True))
    for sample in images["data_samples"]:
        sample.gt_instances.labels %= classes
    if name.startswith("soft_teacher/"):
        return branches(images, shape)
    return with_proposals(name, images)


def for_prediction(name: str) -> dict[str, Any]:
    """One image, or three frames of one video."""
    shape = shape_of(name)
    if name.startswith(VIDEOS + TRACKERS):
        return dict(demo_track_inputs(1, 3, None, tuple(shape), [3]))
    return with_proposals(name, dict(demo_mm_inputs(1, [shape], [3], num_classes=4)))


def branches(images: dict[str, Any], shape: list[int]) -> dict[str, Any]:
    """One image is labelled; the other is seen by the teacher and by the student."""
    names = {"sup": 0, "unsup_teacher": 1, "unsup_student": 1}
    for sample in images["data_samples"]:
        sample.set_metainfo({"homography_matrix": torch.eye(3).numpy()})
    return {
        key: {name: [images[key][which].clone()] for name, which in names.items()} for key in ("inputs", "data_samples")
    }


def with_proposals(name: str, data: dict[str, Any]) -> dict[str, Any]:
    """Fast R-CNN has no proposals of its own."""
    if name.startswith("fast_rcnn/"):
        for sample in data["data_samples"]:
            boxes = torch.tensor([[4.0, 8.0, 60.0, 90.0], [30.0, 20.0, 100.0, 120.0]])
            sample.proposals = InstanceData(bboxes=boxes, scores=torch.ones(2))
    return data
