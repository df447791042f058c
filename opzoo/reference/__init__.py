"""Every operator in plain PyTorch: what to read before the kernel, and what the tests compare with."""

from opzoo.reference.add import add
from opzoo.reference.roi_align import roi_align

__all__ = ["add", "roi_align"]
