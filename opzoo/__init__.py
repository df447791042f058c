"""opzoo: operators for object detection on PyTorch, CPU and CUDA, forward and backward."""

from opzoo import reference
from opzoo._library import build_info, set_debug
from opzoo._version import __version__
from opzoo.ops.add import Add, add
from opzoo.ops.deform_conv2d import DeformConv2d, deform_conv2d

__all__ = [
    "Add",
    "DeformConv2d",
    "__version__",
    "add",
    "build_info",
    "deform_conv2d",
    "reference",
    "set_debug",
]
