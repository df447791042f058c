"""opzoo: operators for object detection on PyTorch, CPU and CUDA, forward and backward."""

from opzoo import reference
from opzoo._library import build_info, set_debug
from opzoo._version import __version__
from opzoo.ops.add import Add, add
from opzoo.ops.nms import batched_nms, nms

__all__ = [
    "Add",
    "__version__",
    "add",
    "batched_nms",
    "build_info",
    "nms",
    "reference",
    "set_debug",
]
