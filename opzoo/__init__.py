"""opzoo: operators for object detection on PyTorch, CPU and CUDA, forward and backward."""

from opzoo import reference
from opzoo._library import build_info, set_debug
from opzoo._version import __version__
from opzoo.ops.add import Add, add
from opzoo.ops.roi_align import RoIAlign, roi_align

__all__ = [
    "Add",
    "RoIAlign",
    "__version__",
    "add",
    "build_info",
    "reference",
    "roi_align",
    "set_debug",
]
