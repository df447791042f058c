"""Every operator in plain PyTorch: what to read before the kernel, and what the tests compare with."""

from opzoo.reference.add import add
from opzoo.reference.carafe import carafe
from opzoo.reference.deform_conv2d import deform_conv2d
from opzoo.reference.matmul import matmul
from opzoo.reference.ms_deform_attn import ms_deform_attn
from opzoo.reference.multi_scale_roi_align import multi_scale_roi_align
from opzoo.reference.nms import batched_nms, nms, nms_match, nms_padded
from opzoo.reference.roi_align import roi_align
from opzoo.reference.roi_pool import roi_pool
from opzoo.reference.sigmoid_focal_loss import sigmoid_focal_loss
from opzoo.reference.soft_nms import batched_soft_nms, soft_nms

__all__ = [
    "add",
    "batched_nms",
    "batched_soft_nms",
    "carafe",
    "deform_conv2d",
    "matmul",
    "ms_deform_attn",
    "multi_scale_roi_align",
    "nms",
    "nms_match",
    "nms_padded",
    "roi_align",
    "roi_pool",
    "sigmoid_focal_loss",
    "soft_nms",
]
