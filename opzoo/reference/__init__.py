"""Every operator in plain PyTorch: what to read before the kernel, and what the tests compare with."""

from opzoo.reference.add import add
from opzoo.reference.deform_conv2d import deform_conv2d

__all__ = ["add", "deform_conv2d"]
