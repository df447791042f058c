"""Unmodified configs of MMDetection on opzoo: build, loss, backward, predict on random data; a table of what came out.

    pip install mmdet==3.3.0 mmengine==0.10.7 mmcv-lite==2.1.0
    python tools/mmdet_configs.py                  # all of CONFIGS; writes docs/howto/mmdet_configs.md
    python tools/mmdet_configs.py CONFIG           # one, here, with its traceback

Weights are random (nothing is downloaded), images are 128 pixels wide or a little more.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "howto" / "mmdet_configs.md"
SECONDS = 600  # for one config
SIDES = {
    "dino/": 256,
    "ddq/": 256,
    "ssd/": 300,
    "pisa/ssd": 300,
    "paa/": 256,
}  # where 128 pixels are too few

CONFIGS = [
    "atss/atss_r50_fpn_1x_coco",
    "autoassign/autoassign_r50-caffe_fpn_1x_coco",
    "boxinst/boxinst_r50_fpn_ms-90k_coco",
    "carafe/faster-rcnn_r50_fpn-carafe_1x_coco",
    "carafe/mask-rcnn_r50_fpn-carafe_1x_coco",
    "cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco",
    "cascade_rpn/cascade-rpn_faster-rcnn_r50-caffe_fpn_1x_coco",
    "centernet/centernet-update_r50-caffe_fpn_ms-1x_coco",
    "centernet/centernet_r18-dcnv2_8xb16-crop512-140e_coco",
    "centripetalnet/centripetalnet_hourglass104_16xb6-crop511-210e-mstest_coco",
    "condinst/condinst_r50_fpn_ms-poly-90k_coco_instance",
    "conditional_detr/conditional-detr_r50_8xb2-50e_coco",
    "cornernet/cornernet_hourglass104_8xb6-210e-mstest_coco",
    "dab_detr/dab-detr_r50_8xb2-50e_coco",
    "dcn/cascade-mask-rcnn_r50-dconv-c3-c5_fpn_1x_coco",
    "dcn/faster-rcnn_r50_fpn_dpool_1x_coco",
    "dcn/mask-rcnn_r50-dconv-c3-c5_fpn_1x_coco",
    "dcnv2/faster-rcnn_r50-mdconv-c3-c5_fpn_1x_coco",
    "dcnv2/faster-rcnn_r50-mdconv-group4-c3-c5_fpn_1x_coco",
    "dcnv2/faster-rcnn_r50_fpn_mdpool_1x_coco",
    "dcnv2/mask-rcnn_r50-mdconv-c3-c5_fpn_1x_coco",
    "ddod/ddod_r50_fpn_1x_coco",
    "ddq/ddq-detr-4scale_r50_8xb2-12e_coco",
    "deformable_detr/deformable-detr-refine-twostage_r50_16xb2-50e_coco",
    "deformable_detr/deformable-detr_r50_16xb2-50e_coco",
    "detectors/cascade-rcnn_r50-sac_1x_coco",
    "detr/detr_r50_8xb2-150e_coco",
    "dino/dino-4scale_r50_8xb2-12e_coco",
    "double_heads/dh-faster-rcnn_r50_fpn_1x_coco",
    "dyhead/atss_r50_fpn_dyhead_1x_coco",
    "dynamic_rcnn/dynamic-rcnn_r50_fpn_1x_coco",
    "empirical_attention/faster-rcnn_r50-attn0010-dcn_fpn_1x_coco",
    "fast_rcnn/fast-rcnn_r50_fpn_1x_coco",
    "faster_rcnn/faster-rcnn_r50_fpn_1x_coco",
    "faster_rcnn/faster-rcnn_r50_fpn_soft-nms_1x_coco",
    "fcos/fcos_r50-dcn-caffe_fpn_gn-head-center-normbbox-centeronreg-giou_1x_coco",
    "foveabox/fovea_r50_fpn_gn-head-align_4xb4-2x_coco",
    "free_anchor/freeanchor_r50_fpn_1x_coco",
    "fsaf/fsaf_r50_fpn_1x_coco",
    "gfl/gfl_r50_fpn_1x_coco",
    "ghm/retinanet_r50_fpn_ghm-1x_coco",
    "grid_rcnn/grid-rcnn_r50_fpn_gn-head_1x_coco",
    "groie/faste-rcnn_r50_fpn_groie_1x_coco",
    "guided_anchoring/ga-faster-rcnn_r50-caffe_fpn_1x_coco",
    "guided_anchoring/ga-retinanet_r50-caffe_fpn_1x_coco",
    "htc/htc-without-semantic_r50_fpn_1x_coco",
    "htc/htc_r50_fpn_1x_coco",
    "ld/ld_r18-gflv1-r101_fpn_1x_coco",
    "libra_rcnn/libra-faster-rcnn_r50_fpn_1x_coco",
    "mask2former/mask2former_r50_8xb2-lsj-50e_coco",
    "mask_rcnn/mask-rcnn_r50_fpn_1x_coco",
    "maskformer/maskformer_r50_ms-16xb1-75e_coco",
    "ms_rcnn/ms-rcnn_r50-caffe_fpn_1x_coco",
    "nas_fpn/retinanet_r50_nasfpn_crop640-50e_coco",
    "paa/paa_r50_fpn_1x_coco",
    "pafpn/faster-rcnn_r50_pafpn_1x_coco",
    "panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco",
    "pisa/faster-rcnn_r50_fpn_pisa_1x_coco",
    "pisa/ssd300_pisa_coco",
    "point_rend/point-rend_r50-caffe_fpn_ms-1x_coco",
    "queryinst/queryinst_r50_fpn_1x_coco",
    "reppoints/reppoints-moment_r50_fpn_1x_coco",
    "retinanet/retinanet_r50_fpn_1x_coco",
    "rpn/rpn_r50_fpn_1x_coco",
    "rtmdet/rtmdet-ins_tiny_8xb32-300e_coco",
    "rtmdet/rtmdet_tiny_8xb32-300e_coco",
    "sabl/sabl-retinanet_r50_fpn_1x_coco",
    "scnet/scnet_r50_fpn_1x_coco",
    "solo/solo_r50_fpn_1x_coco",
    "solov2/solov2-light_r50-dcn_fpn_ms-3x_coco",
    "sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco",
    "ssd/ssd300_coco",
    "tood/tood_r50_fpn_1x_coco",
    "tridentnet/tridentnet_r50-caffe_1x_coco",
    "vfnet/vfnet_r50-mdconv-c3-c5_fpn_ms-2x_coco",
    "yolact/yolact_r50_1xb8-55e_coco",
    "yolo/yolov3_d53_8xb8-320-273e_coco",
    "yolof/yolof_r50-c5_8xb8-1x_coco",
    "yolox/yolox_s_8xb8-300e_coco",
]


def count_calls() -> Counter[str]:
    """Calls of ``mmcv._ext`` by name, from now on; before anything of mmcv.ops is imported."""

    import opzoo.compat.mmcv as compat

    ext = importlib.import_module("mmcv._ext")  # now that it is found

    calls: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return counted

    for name in compat.covered():
        setattr(ext, name, counting(name, getattr(ext, name)))
    return calls


def without_downloads(node: Any) -> None:
    """Random weights where the config names a file."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("init_cfg", "pretrained", "teacher_ckpt") and value is not None:
                node[key] = None
            else:
                without_downloads(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            without_downloads(value)


def run(name: str) -> dict[str, Any]:
    """Build, loss, backward, predict; what was called and how long it took."""
    warnings.filterwarnings("ignore")
    import torch

    calls = count_calls()
    import mmdet
    from mmdet.registry import MODELS
    from mmdet.testing import demo_mm_inputs
    from mmdet.utils import register_all_modules
    from mmengine.config import Config
    from mmengine.logging import MessageHub

    start = time.monotonic()
    register_all_modules(init_default_scope=True)
    config = Config.fromfile(Path(mmdet.__file__).parent / ".mim" / "configs" / f"{name}.py")
    without_downloads(config.model)
    torch.manual_seed(0)
    os.chdir(Path(mmdet.__file__).parent / ".mim")  # a config may name its teacher's, from here
    model = MODELS.build(config.model)
    model.train()  # that of a distilling detector returns None
    for counter in ("epoch", "iter"):
        MessageHub.get_current_instance().update_info(counter, 0)  # as the runner does
    for module in model.modules():
        if hasattr(module, "weight_gamma"):  # of standardised weights: a checkpoint brings their scale
            module.weight_gamma.fill_(module.weight[0].numel() ** -0.5)
    side = next((size for family, size in SIDES.items() if name.startswith(family)), 128)
    shape = [3, side, side]
    data = demo_mm_inputs(
        2,
        [shape, shape],
        [3, 4],
        num_classes=4,
        with_mask=name != "rtmdet/rtmdet_tiny_8xb32-300e_coco",
        with_semantic=True,
    )
    proposals_of(name, data)
    losses = model.forward(**model.data_preprocessor(data, True), mode="loss")
    loss, _ = model.parse_losses(losses)
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    model.eval()
    data = demo_mm_inputs(1, [shape], [3], num_classes=4)
    proposals_of(name, data)
    with torch.no_grad():
        found = model.forward(**model.data_preprocessor(data, False), mode="predict")
    finite = bool(torch.isfinite(loss)) and all(bool(torch.isfinite(g).all()) for g in grads) and bool(grads)
    finite = finite and all(bool(torch.isfinite(i.pred_instances.scores).all()) for i in found if "pred_instances" in i)
    outcome = "ok" if finite else "values are not finite"
    return {"outcome": outcome, "loss": float(loss), "calls": dict(calls), "seconds": time.monotonic() - start}


def proposals_of(name: str, data: dict[str, Any]) -> None:
    """Fast R-CNN has no proposals of its own."""
    if not name.startswith("fast_rcnn/"):
        return
    import torch
    from mmengine.structures import InstanceData

    for sample in data["data_samples"]:
        boxes = torch.tensor([[4.0, 8.0, 60.0, 90.0], [30.0, 20.0, 100.0, 120.0]])
        sample.proposals = InstanceData(bboxes=boxes, scores=torch.ones(2))


def in_a_process(name: str) -> dict[str, Any]:
    try:
        child = subprocess.run(
            [sys.executable, __file__, "--json", name], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"outcome": f"more than {SECONDS} s", "calls": {}}
    for line in reversed(child.stdout.splitlines()):
        if line.startswith('{"outcome"'):
            return dict(json.loads(line))
    last = (child.stderr.strip().splitlines() or ["no output"])[-1]
    folder = Path(importlib.util.find_spec("mmdet").origin).parent  # type: ignore[union-attr, arg-type]
    return {"outcome": f"failed: {last.replace(str(folder), 'mmdet')}"[:200], "calls": {}}


def page(results: dict[str, dict[str, Any]]) -> str:
    import importlib.metadata

    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("mmdet", "mmengine", "mmcv-lite", "torch"))
    good = sum(r["outcome"] == "ok" for r in results.values())
    lines = [
        "# MMDetection configs that run",
        "",
        f"{good} of {len(results)} unmodified configs build, give finite loss and finite gradients and predict on the",
        f"CPU ({versions}). Written by `tools/mmdet_configs.py` on {datetime.date.today()}.",
        "",
        "| config | outcome | functions of `mmcv._ext`, calls |",
        "| --- | --- | --- |",
    ]
    for name, result in results.items():
        calls = ", ".join(f"{op} {n}" for op, n in sorted(result["calls"].items())) or "none"
        outcome = result["outcome"].replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| `{name}` | {outcome} | {calls} |")
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", help="one config, below mmdet's configs, without .py")
    parser.add_argument("--json", action="store_true", help="print the result of one config as JSON")
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    if arguments.config:
        result = run(arguments.config)
        print(json.dumps(result) if arguments.json else result)
        return 0
    results = {}
    for name in CONFIGS:
        results[name] = in_a_process(name)
        print(name, results[name]["outcome"], flush=True)
    arguments.page.write_text(page(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
