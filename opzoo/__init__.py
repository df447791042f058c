"""opzoo: operators for object detection on PyTorch, CPU and CUDA, forward and backward."""

import sys

# `python -m opzoo.info` imports this package before the module it runs, and everything below fails
# loudly where torch or _C is broken: just where the command is needed. So it runs here, first. While
# Python looks for the module, argv[0] is "-m", and the name stands as far from the end of orig_argv
# as argv is long.
if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].endswith("opzoo.info"):
    from opzoo.info import main

    raise SystemExit(main(sys.argv[1:]))

# Likewise `python -m opzoo.new_op`: after the first new operator, until the next build, _C lacks it.
if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].endswith("opzoo.new_op"):
    from opzoo import new_op

    raise SystemExit(new_op.main(sys.argv[1:]))

from opzoo import reference
from opzoo._library import build_info, set_debug
from opzoo._version import __version__
from opzoo.ops.add import Add, add
from opzoo.ops.carafe import carafe
from opzoo.ops.deform_conv2d import DeformConv2d, deform_conv2d
from opzoo.ops.matmul import MatMul, matmul
from opzoo.ops.ms_deform_attn import MultiScaleDeformableAttention, ms_deform_attn
from opzoo.ops.multi_scale_roi_align import MultiScaleRoIAlign, multi_scale_roi_align
from opzoo.ops.nms import batched_nms, nms, nms_match, nms_padded
from opzoo.ops.roi_align import RoIAlign, roi_align
from opzoo.ops.roi_pool import RoIPool, roi_pool
from opzoo.ops.sigmoid_focal_loss import SigmoidFocalLoss, sigmoid_focal_loss
from opzoo.ops.soft_nms import batched_soft_nms, soft_nms

__all__ = [
    "Add",
    "DeformConv2d",
    "MatMul",
    "MultiScaleDeformableAttention",
    "MultiScaleRoIAlign",
    "RoIAlign",
    "RoIPool",
    "SigmoidFocalLoss",
    "__version__",
    "add",
    "batched_nms",
    "batched_soft_nms",
    "build_info",
    "carafe",
    "deform_conv2d",
    "matmul",
    "ms_deform_attn",
    "multi_scale_roi_align",
    "nms",
    "nms_match",
    "nms_padded",
    "reference",
    "roi_align",
    "roi_pool",
    "set_debug",
    "sigmoid_focal_loss",
    "soft_nms",
]
