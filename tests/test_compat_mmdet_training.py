"""MMDetection's own training and test scripts, unmodified, on a small COCO-format set drawn here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mmdet", reason="needs mmdet, mmengine and mmcv-lite")

import cv2
import mmcv
import mmdet
import numpy as np

ROOT = Path(__file__).parents[1]
TOOLS = Path(mmdet.__file__).parent / ".mim" / "tools"

CONFIG = """
_base_ = 'mmdet::dcnv2/mask-rcnn_r50-mdconv-c3-c5_fpn_1x_coco.py'
data_root = '{folder}/'
metainfo = dict(classes=('disc', 'square'))
model = dict(
    backbone=dict(init_cfg=None, frozen_stages=-1, norm_cfg=dict(type='BN', requires_grad=True), norm_eval=False),
    roi_head=dict(bbox_head=dict(num_classes=2), mask_head=dict(num_classes=2)),
    test_cfg=dict(rcnn=dict(score_thr=0.0)))
train_pipeline = [
    dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='Resize', scale=(128, 96), keep_ratio=True), dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs')]
test_pipeline = [
    dict(type='LoadImageFromFile'), dict(type='Resize', scale=(128, 96), keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'))]
common = dict(data_root=data_root, metainfo=metainfo, ann_file='annotations.json', data_prefix=dict(img='images/'))
train_dataloader = dict(batch_size=4, num_workers=1, dataset=dict(pipeline=train_pipeline, **common))
val_dataloader = dict(num_workers=0, persistent_workers=False, dataset=dict(pipeline=test_pipeline, **common))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations.json')
test_evaluator = val_evaluator
train_cfg = dict(max_epochs={epochs}, val_interval={epochs})
param_scheduler = []
optim_wrapper = dict(optimizer=dict(lr=0.005))
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=1))
"""


def draw(folder: Path, images: int = 8) -> None:
    """Discs and squares on noise, with boxes and outlines, as COCO has them."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    content: dict[str, list[dict[str, object]]] = {
        "images": [],
        "annotations": [],
        "categories": [{"id": 1, "name": "disc"}, {"id": 2, "name": "square"}],
    }
    for image in range(images):
        pixels = rng.integers(0, 60, (96, 128, 3), dtype=np.uint8)
        for number in range(2):
            kind, r = int(rng.integers(1, 3)), int(rng.integers(10, 20))
            x, y = 32 + 64 * number + int(rng.integers(-8, 8)), int(rng.integers(24, 72))
            turn = np.linspace(0, 2 * np.pi, 24 if kind == 1 else 4, endpoint=False) + np.pi / 4
            reach = r if kind == 1 else r * 2**0.5
            outline = np.stack([x + reach * np.cos(turn), y + reach * np.sin(turn)], 1)
            cv2.fillPoly(pixels, [outline.round().astype(np.int32)], (200, 80, 80) if kind == 1 else (80, 200, 80))
            content["annotations"].append(
                {
                    "id": len(content["annotations"]) + 1,
                    "image_id": image,
                    "category_id": kind,
                    "bbox": [x - r, y - r, 2 * r, 2 * r],
                    "area": float(3.14 * r * r if kind == 1 else 4 * r * r),
                    "segmentation": [outline.flatten().tolist()],
                    "iscrowd": 0,
                }
            )
        cv2.imwrite(str(folder / "images" / f"{image}.png"), pixels)
        content["images"].append({"id": image, "file_name": f"{image}.png", "height": 96, "width": 128})
    (folder / "annotations.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """mmcv-lite with the file of opzoo-mmcv beside it."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(Path(mmcv.__file__).parent, site / "mmcv", ignore=shutil.ignore_patterns("csrc", "__pycache__"))
    shutil.copy(ROOT / "opzoo-mmcv" / "src" / "mmcv" / "_ext.py", site / "mmcv")
    return site


def script(site: Path, name: str, *arguments: object, cwd: Path) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{site}:{ROOT}",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # checkpoints of mmengine hold more than tensors
        "OMP_NUM_THREADS": "2",
    }
    command = [sys.executable, "-W", "ignore", TOOLS / name, *map(str, arguments)]
    child = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280)
    assert child.returncode == 0, child.stderr[-3000:]
    return child.stdout + child.stderr


def average_precision(log: str, kind: str) -> float:
    return float(re.findall(rf"coco/{kind}_mAP: (-?[\d.]+)", log)[-1])


def test_train_resume_and_test(tmp_path, site):
    draw(tmp_path / "data")
    for epochs in (1, 2):
        (tmp_path / f"{epochs}.py").write_text(CONFIG.format(folder=tmp_path / "data", epochs=epochs))
    work = tmp_path / "work"
    first = script(site, "train.py", tmp_path / "1.py", "--work-dir", work, cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"\bloss: ([\d.]+)", first)]
    assert len(losses) == 2 and all(np.isfinite(losses)) and (work / "epoch_1.pth").exists()
    second = script(site, "train.py", tmp_path / "2.py", "--work-dir", work, "--resume", cwd=tmp_path)
    assert "resumed epoch: 1" in second and (work / "epoch_2.pth").exists()
    tested = script(site, "test.py", tmp_path / "2.py", work / "epoch_2.pth", "--work-dir", work, cwd=tmp_path)
    for kind in ("bbox", "segm"):
        assert average_precision(tested, kind) == average_precision(second, kind) >= 0
