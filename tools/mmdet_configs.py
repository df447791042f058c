"""Unmodified configs of MMDetection on opzoo: build, loss, backward, predict on random data; a table of what came out.

    pip install mmdet==3.3.0 mmengine==0.10.7 mmcv-lite==2.1.0 lap motmetrics
    python tools/mmdet_configs.py                  # all of CONFIGS; writes docs/howto/mmdet_configs.md
    python tools/mmdet_configs.py CONFIG           # one, here, with its traceback
    python tools/mmdet_configs.py --again ld/ ssd  # those whose names begin so; the other rows of the page stay

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
import re
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
HEAD = "| config | outcome | functions of `mmcv._ext`, calls |"
CONFIGS = [
    "atss/atss_r50_fpn_1x_coco",
    "autoassign/autoassign_r50-caffe_fpn_1x_coco",
    "boxinst/boxinst_r50_fpn_ms-90k_coco",
    "bytetrack/bytetrack_yolox_x_8xb4-80e_crowdhuman-mot17halftrain_test-mot17halfval",
    "carafe/faster-rcnn_r50_fpn-carafe_1x_coco",
    "carafe/mask-rcnn_r50_fpn-carafe_1x_coco",
    "cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco",
    "cascade_rpn/cascade-rpn_faster-rcnn_r50-caffe_fpn_1x_coco",
    "centernet/centernet-update_r50-caffe_fpn_ms-1x_coco",
    "centernet/centernet_r18-dcnv2_8xb16-crop512-140e_coco",
    "centripetalnet/centripetalnet_hourglass104_16xb6-crop511-210e-mstest_coco",
    "condinst/condinst_r50_fpn_ms-poly-90k_coco_instance",
    "conditional_detr/conditional-detr_r50_8xb2-50e_coco",
    "convnext/mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco",
    "cornernet/cornernet_hourglass104_8xb6-210e-mstest_coco",
    "crowddet/crowddet-rcnn_r50_fpn_8xb2-30e_crowdhuman",
    "crowddet/crowddet-rcnn_refine_r50_fpn_8xb2-30e_crowdhuman",
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
    "efficientnet/retinanet_effb3_fpn_8xb4-crop896-1x_coco",
    "empirical_attention/faster-rcnn_r50-attn0010-dcn_fpn_1x_coco",
    "fast_rcnn/fast-rcnn_r50_fpn_1x_coco",
    "faster_rcnn/faster-rcnn_r50_fpn_1x_coco",
    "faster_rcnn/faster-rcnn_r50_fpn_soft-nms_1x_coco",
    "fcos/fcos_r50-dcn-caffe_fpn_gn-head-center-normbbox-centeronreg-giou_1x_coco",
    "foveabox/fovea_r50_fpn_gn-head-align_4xb4-2x_coco",
    "fpg/faster-rcnn_r50_fpg-chn128_crop640-50e_coco",
    "fpg/mask-rcnn_r50_fpg-chn128_crop640-50e_coco",
    "free_anchor/freeanchor_r50_fpn_1x_coco",
    "fsaf/fsaf_r50_fpn_1x_coco",
    "gcnet/mask-rcnn_r50-gcb-r16-c3-c5_fpn_1x_coco",
    "gcnet/mask-rcnn_r50-syncbn-gcb-r4-c3-c5_fpn_1x_coco",
    "gfl/gfl_r50_fpn_1x_coco",
    "ghm/retinanet_r50_fpn_ghm-1x_coco",
    "glip/glip_atss_swin-t_a_fpn_dyhead_16xb2_ms-2x_funtune_coco",
    "gn+ws/faster-rcnn_r50_fpn_gn-ws-all_1x_coco",
    "grid_rcnn/grid-rcnn_r50_fpn_gn-head_1x_coco",
    "groie/faste-rcnn_r50_fpn_groie_1x_coco",
    "grounding_dino/grounding_dino_swin-t_finetune_16xb2_1x_coco",
    "guided_anchoring/ga-faster-rcnn_r50-caffe_fpn_1x_coco",
    "guided_anchoring/ga-retinanet_r50-caffe_fpn_1x_coco",
    "hrnet/cascade-rcnn_hrnetv2p-w18-20e_coco",
    "htc/htc-without-semantic_r50_fpn_1x_coco",
    "htc/htc_r50_fpn_1x_coco",
    "lad/lad_r50-paa-r101_fpn_2xb8_coco_1x",
    "ld/ld_r18-gflv1-r101_fpn_1x_coco",
    "legacy_1.x/cascade-mask-rcnn_r50_fpn_1x_coco_v1",
    "legacy_1.x/faster-rcnn_r50_fpn_1x_coco_v1",
    "legacy_1.x/mask-rcnn_r50_fpn_1x_coco_v1",
    "legacy_1.x/retinanet_r50_fpn_1x_coco_v1",
    "legacy_1.x/ssd300_coco_v1",
    "libra_rcnn/libra-faster-rcnn_r50_fpn_1x_coco",
    "mask2former/mask2former_r50_8xb2-lsj-50e_coco",
    "mask2former_vis/mask2former_r50_8xb2-8e_youtubevis2019",
    "mask_rcnn/mask-rcnn_r50_fpn_1x_coco",
    "maskformer/maskformer_r50_ms-16xb1-75e_coco",
    "masktrack_rcnn/masktrack-rcnn_mask-rcnn_r50_fpn_8xb1-12e_youtubevis2019",
    "mm_grounding_dino/grounding_dino_swin-t_pretrain_obj365",
    "ms_rcnn/ms-rcnn_r50-caffe_fpn_1x_coco",
    "nas_fcos/nas-fcos_r50-caffe_fpn_fcoshead-gn-head_4xb4-1x_coco",
    "nas_fcos/nas-fcos_r50-caffe_fpn_nashead-gn-head_4xb4-1x_coco",
    "nas_fpn/retinanet_r50_nasfpn_crop640-50e_coco",
    "ocsort/ocsort_yolox_x_8xb4-amp-80e_crowdhuman-mot17halftrain_test-mot17halfval",
    "paa/paa_r50_fpn_1x_coco",
    "pafpn/faster-rcnn_r50_pafpn_1x_coco",
    "panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco",
    "pisa/faster-rcnn_r50_fpn_pisa_1x_coco",
    "pisa/ssd300_pisa_coco",
    "point_rend/point-rend_r50-caffe_fpn_ms-1x_coco",
    "pvt/retinanet_pvt-t_fpn_1x_coco",
    "qdtrack/qdtrack_faster-rcnn_r50_fpn_8xb2-4e_mot17halftrain_test-mot17halfval",
    "queryinst/queryinst_r50_fpn_1x_coco",
    "regnet/mask-rcnn_regnetx-3.2GF_fpn_1x_coco",
    "reppoints/reppoints-moment_r50_fpn_1x_coco",
    "res2net/faster-rcnn_res2net-101_fpn_2x_coco",
    "resnest/faster-rcnn_s50_fpn_syncbn-backbone+head_ms-range-1x_coco",
    "retinanet/retinanet_r50_fpn_1x_coco",
    "rpn/rpn_r50_fpn_1x_coco",
    "rtmdet/rtmdet-ins_tiny_8xb32-300e_coco",
    "rtmdet/rtmdet_tiny_8xb32-300e_coco",
    "sabl/sabl-retinanet_r50_fpn_1x_coco",
    "scnet/scnet_r50_fpn_1x_coco",
    "seesaw_loss/mask-rcnn_r50_fpn_seesaw-loss_random-ms-2x_lvis-v1",
    "soft_teacher/soft-teacher_faster-rcnn_r50-caffe_fpn_180k_semi-0.1-coco",
    "solo/solo_r50_fpn_1x_coco",
    "solov2/solov2-light_r50-dcn_fpn_ms-3x_coco",
    "sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco",
    "ssd/ssd300_coco",
    "strong_baselines/mask-rcnn_r50_fpn_rpn-2conv_4conv1fc_syncbn-all_lsj-100e_coco",
    "swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco",
    "tood/tood_r50_fpn_1x_coco",
    "tridentnet/tridentnet_r50-caffe_1x_coco",
    "vfnet/vfnet_r50-mdconv-c3-c5_fpn_ms-2x_coco",
    "yolact/yolact_r50_1xb8-55e_coco",
    "yolo/yolov3_d53_8xb8-320-273e_coco",
    "yolof/yolof_r50-c5_8xb8-1x_coco",
    "yolox/yolox_s_8xb8-300e_coco",
]

NEEDS = {  # not run
    "glip/": "transformers and the weights of BERT, which are downloaded",
    "grounding_dino/": "transformers, fairscale and the weights of BERT, which are downloaded",
    "mm_grounding_dino/": "transformers, fairscale and the weights of BERT, which are downloaded",
}
SSD = "after loss and backward; a fault of mmdet 3.3 with any mmcv: open-mmlab/mmdetection#11063"
CAUSES = {  # found by hand, added to what a failure says
    "convnext/": "the config imports that package",
    "legacy_1.x/ssd300": SSD,
    "pisa/ssd300": SSD,
    "queryinst/": "a box of random weights lies beside the image, inside out: mmdet cannot paste its mask",
    "ssd/": SSD,
}


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
    start = time.monotonic()
    model = build(name)
    from mmdet_inputs import for_prediction, for_training

    data = model.data_preprocessor(for_training(name), True)
    losses = model.forward(**data, mode="loss")
    loss, _ = model.parse_losses(losses)
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    model.eval()
    data = model.data_preprocessor(for_prediction(name), False)
    with torch.no_grad():
        found = model.forward(**data, mode="predict")
    finite = bool(torch.isfinite(loss)) and all(bool(torch.isfinite(g).all()) for g in grads) and bool(grads)
    finite = finite and all(bool(torch.isfinite(i.pred_instances.scores).all()) for i in found if "pred_instances" in i)
    outcome = "ok" if finite else "values are not finite"
    return {"outcome": outcome, "loss": float(loss), "calls": dict(calls), "seconds": time.monotonic() - start}


def build(name: str) -> Any:
    """The model of a config, of random weights, as the runner has it at the first step."""
    import mmdet
    import torch
    from mmdet.registry import MODELS
    from mmdet.utils import register_all_modules
    from mmengine.config import Config
    from mmengine.logging import MessageHub

    register_all_modules(init_default_scope=True)
    config = Config.fromfile(Path(mmdet.__file__).parent / ".mim" / "configs" / f"{name}.py")
    without_downloads(config.model)
    group = "MMSyncBN" in config.pretty_text  # asks how many processes there are
    if group:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    os.chdir(Path(mmdet.__file__).parent / ".mim")  # a config may name its teacher's, from here
    model = MODELS.build(config.model)
    if group:  # or torch's own SyncBatchNorm refuses the CPU
        torch.distributed.destroy_process_group()
    model.train()  # that of a distilling detector returns None
    for counter in ("epoch", "iter"):
        MessageHub.get_current_instance().update_info(counter, 0)  # as the runner does
    for module in model.modules():
        if hasattr(module, "weight_gamma"):  # of standardised weights: a checkpoint brings their scale
            module.weight_gamma.fill_(module.weight[0].numel() ** -0.5)
    return model


def run_or_reason(name: str) -> dict[str, Any]:
    """The first of the errors that followed from one another is the reason."""
    try:
        return run(name)
    except Exception as error:
        first: BaseException = error
        while first.__cause__ or first.__context__:
            first = first.__cause__ or first.__context__ or first
        text = " ".join(str(first).split())
        folder = str(Path(importlib.util.find_spec("mmdet").origin).parent)  # type: ignore[union-attr, arg-type]
        return {"outcome": f"failed: {type(first).__name__}: {text.replace(folder, 'mmdet')}"[:200], "calls": {}}


def in_a_process(name: str) -> dict[str, Any]:
    for family, missing in NEEDS.items():
        if name.startswith(family):
            return {"outcome": f"not run: needs {missing}", "calls": {}}
    try:
        child = subprocess.run(
            [sys.executable, __file__, "--json", name], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"outcome": f"more than {SECONDS} s", "calls": {}}
    for line in reversed(child.stdout.splitlines()):
        if line.startswith('{"outcome"'):
            result = dict(json.loads(line))
            for family, cause in CAUSES.items():
                if name.startswith(family) and result["outcome"].startswith("failed"):
                    result["outcome"] += f" ({cause})"
            return result
    last = (child.stderr.strip().splitlines() or ["no output"])[-1]
    return {"outcome": f"failed: {last}"[:200], "calls": {}}


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
        HEAD,
        "| --- | --- | --- |",
    ]
    for name, result in results.items():
        calls = ", ".join(f"{op} {n}" for op, n in sorted(result["calls"].items())) or "none"
        outcome = result["outcome"].replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| `{name}` | {outcome} | {calls} |")
    return "\n".join([*lines, ""])


def rows(text: str) -> dict[str, dict[str, Any]]:
    """The results that a page shows."""
    found = {}
    for name, outcome, calls in re.findall(r"^\| `(.+?)` \| (.+?) \| ([^|]+) \|$", text, re.MULTILINE):
        counts = {} if calls == "none" else dict(call.rsplit(" ", 1) for call in calls.split(", "))
        found[name] = {"outcome": outcome.replace("\\|", "|").replace("&lt;", "<"), "calls": counts}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", help="one config, below mmdet's configs, without .py")
    parser.add_argument("--json", action="store_true", help="print the result of one config as JSON")
    parser.add_argument("--again", nargs="+", metavar="BEGINNING", help="only configs whose names begin so")
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    if arguments.config:
        if arguments.json:
            print(json.dumps(run_or_reason(arguments.config)))
        else:
            print(run(arguments.config))
        return 0
    results = rows(arguments.page.read_text(encoding="utf-8")) if arguments.again else {}
    for name in CONFIGS:
        if not arguments.again or name.startswith(tuple(arguments.again)):
            results[name] = in_a_process(name)
            print(name, results[name]["outcome"], flush=True)
    ordered = {name: results[name] for name in CONFIGS if name in results}
    arguments.page.write_text(page(ordered), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
