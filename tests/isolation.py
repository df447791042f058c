"""Calls that may kill their process: guarded memory, and forks that report how each call went."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

SECONDS = 10  # a call that takes longer loses its fork
PAGE = 4096

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Guarded:
    """Copies whose last byte is the last of a page, between two pages that cannot be read."""

    def __init__(self) -> None:
        self._maps: list[tuple[int, int]] = []

    def copy(self, t: Tensor) -> Tensor:
        """``t`` with its values and strides in guarded memory; where that is impossible, ``t`` itself."""
        if t.device.type != "cpu" or t.layout != torch.strided or t.numel() == 0 or t.is_conj() or t.is_neg():
            return t
        size = (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size()
        pages = -(-size // PAGE)
        base = _libc.mmap(None, (pages + 2) * PAGE, 3, 0x22, -1, 0)  # read and write; private, anonymous
        assert base not in (None, ctypes.c_void_p(-1).value), "mmap failed"
        self._maps.append((base, (pages + 2) * PAGE))
        for guard in (base, base + (pages + 1) * PAGE):
            assert _libc.mprotect(guard, PAGE, 0) == 0
        memory = (ctypes.c_char * size).from_address(base + PAGE + pages * PAGE - size)
        flat = torch.frombuffer(memory, dtype=t.dtype)
        flat.copy_(t.detach().as_strided((flat.numel(),), (1,)))
        return flat.as_strided(t.shape, t.stride()).requires_grad_(t.requires_grad)

    def free(self) -> None:
        """Give the pages back; no copy may be used any more."""
        for base, size in self._maps:
            _libc.munmap(base, size)
        self._maps.clear()


def limit_memory(extra: int = 2 << 30) -> None:
    """A huge result is refused, not filled; a death leaves no core file."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    resource.setrlimit(resource.RLIMIT_AS, (used + extra,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def in_forks(calls: Sequence[int], work: Callable[[int], str]) -> list[str]:
    """``work(call)`` of every call, each after the last in one fork; its answer is one line of text.

    After a death the next fork goes on behind it, and the answer is ``died: `` and the signal.
    """
    answers: list[str] = []
    while len(answers) < len(calls):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            if "libasan" not in os.environ.get("LD_PRELOAD", ""):  # a sanitizer's report belongs on the screen
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                faulthandler.disable()
            try:
                for call in calls[len(answers) :]:
                    signal.alarm(SECONDS)
                    answer = work(call).replace("\n", " ")
                    os.write(writing, answer[:4000].encode() + b"\n")
                os._exit(0)
            finally:
                os._exit(70)  # an exception of `work` itself
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            answers += pipe.read().decode(errors="replace").splitlines()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != 0:
            answers.append(f"died: {signal.Signals(-status).name if status < 0 else f'exit status {status}'}")
    return answers
