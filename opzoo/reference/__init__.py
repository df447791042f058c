"""Every operator in plain PyTorch: what to read before the kernel, and what the tests compare with."""

from opzoo.reference.add import add
from opzoo.reference.matmul import matmul

__all__ = ["add", "matmul"]
