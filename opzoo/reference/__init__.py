"""Every operator in plain PyTorch: what to read before the kernel, and what the tests compare with."""

from opzoo.reference.add import add
from opzoo.reference.nms import batched_nms, nms

__all__ = ["add", "batched_nms", "nms"]
