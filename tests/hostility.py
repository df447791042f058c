"""``python hostility.py <op> <device> [cases] [seed]``: calls an operator and its backward with everything wrong.

First one argument at a time, in every way there is; then, on the CPU, ``cases`` random calls with several
arguments wrong at once (default 200, a few seconds; a million runs for hours).

Every attempt must return or raise. On the CPU they run in forks, on tensors that end at an unmapped
page, so that one element read past the end is a crash; an attempt that takes longer than
``SECONDS`` kills its fork too. On CUDA, where a fork cannot go, the process itself is the detector.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import resource
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

sys.path.insert(0, str(Path(__file__).parent))
from contract import LAYOUTS, record
from helpers import contract_cases

SECONDS = 10
BATCH = 1000  # random calls per fork: guarded() never gives its pages back
PAGE = 4096
HOSTILE_FLOATS = (float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 1e9)
HOSTILE_INTS = (-1, 1 << 31, (1 << 63) - 1, -(1 << 63))
ODD_DTYPES = (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.bfloat16)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(t: Tensor) -> Tensor:
    """A contiguous copy whose last byte is the last of a page, between two pages that cannot be read."""
    size = t.numel() * t.element_size()
    if t.device.type != "cpu" or t.layout != torch.strided or size == 0:
        return t.clone()
    pages = -(-size // PAGE)
    base = _libc.mmap(None, (pages + 2) * PAGE, 3, 0x22, -1, 0)  # read and write; private, anonymous
    assert base not in (None, ctypes.c_void_p(-1).value), "mmap failed"
    for guard in (base, base + (pages + 1) * PAGE):
        assert _libc.mprotect(guard, PAGE, 0) == 0
    start = base + PAGE + pages * PAGE - size
    memory = (ctypes.c_char * size).from_address(start)
    return torch.frombuffer(memory, dtype=t.dtype).view(t.shape).copy_(t)


def hostile_tensors(t: Tensor) -> Iterator[tuple[str, Any]]:
    for rank in range(7):
        yield f"ones of rank {rank}", torch.ones((2,) * rank, dtype=t.dtype, device=t.device)
    for dtype in ODD_DTYPES:
        yield str(dtype), torch.ones(t.shape, device=t.device).to(dtype)
    for axis, size in enumerate(t.shape):
        for other in (size + 1, max(size - 1, 0), 0):
            shape = (*t.shape[:axis], other, *t.shape[axis + 1 :])
            yield f"axis {axis} of size {other}", torch.ones(shape, dtype=t.dtype, device=t.device)
    for value in HOSTILE_FLOATS if t.is_floating_point() else HOSTILE_INTS:
        if t.is_floating_point() or torch.iinfo(t.dtype).min <= value <= torch.iinfo(t.dtype).max:
            yield f"full of {value}", torch.full_like(t, value)
            if t.numel():
                one = t.clone(memory_format=torch.contiguous_format)
                one.view(-1)[-1] = value
                yield f"ending in {value}", one
    yield "meta", t.to("meta")
    yield "requires_grad", t.clone().requires_grad_() if t.is_floating_point() else t
    if t.dim() == 2:
        yield "sparse CSR", t.to_sparse_csr()
    if t.dim() > 0:
        yield "sparse", t.to_sparse()
        yield "stride 0", t.narrow(0, 0, min(1, t.shape[0])).expand_as(t)
    if t.device.type == "cuda":
        yield "on the CPU", t.cpu()
    yield "None", None
    yield "a number", 1.5


def hostile_values(value: Any, kind: str, device: str) -> Iterator[tuple[str, Any]]:
    """Numbers, lists of them and absent optionals. A huge count is refused, not tried, on CUDA."""
    huge = device == "cpu"
    if isinstance(value, bool):
        yield str(not value), not value
    elif isinstance(value, (int, float)):
        numbers = [0, -1, -(1 << 63), *HOSTILE_FLOATS[:3], *((1 << 31, (1 << 63) - 1, 1e308) if huge else ())]
        yield from ((str(number), number) for number in numbers)
    elif isinstance(value, (list, tuple)):
        yield from (("empty list", []), ("longer list", [*value, *value]))
        yield from ((f"list of {n}", [n] * len(value)) for n in (0, -1, -(1 << 63), *HOSTILE_INTS[1:3] * huge))
    elif value is None and "Tensor" in kind:
        for rank in range(5):
            yield f"ones of rank {rank}", torch.ones((2,) * rank, device=device)


def attempts(op: Any, args: tuple[Any, ...], device: str) -> Iterator[tuple[str, bool, list[Any]]]:
    """(what, whether data alone is hostile, arguments)."""
    for position, (argument, value) in enumerate(zip(op._schema.arguments, args, strict=False)):
        is_tensor = isinstance(value, Tensor)
        pool = hostile_tensors(value) if is_tensor else hostile_values(value, str(argument.type), device)
        for what, replacement in pool:
            changed = [replacement if i == position else other for i, other in enumerate(args)]
            yield f"{op} with {argument.name} = {what}", is_tensor, changed
        if str(argument.type) == "List[Tensor]":
            for number, member in enumerate(value):
                for what, replacement in hostile_tensors(member):
                    members = [replacement if i == number else other for i, other in enumerate(value)]
                    changed = [members if i == position else other for i, other in enumerate(args)]
                    yield f"{op} with {argument.name}[{number}] = {what}", True, changed


def sprinkled(t: Tensor, draw: random.Random) -> Tensor:
    """A float tensor with a random share of its elements hostile: the shapes pass, the kernel meets the values."""
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    values = torch.tensor(HOSTILE_FLOATS, dtype=torch.float64).to(t.device, t.dtype)
    picked = values[torch.randint(len(values), t.shape, generator=generator).to(t.device)]
    return torch.where(torch.rand(t.shape, generator=generator).to(t.device) < draw.random(), picked, t)


def random_calls(
    calls: list[tuple[Any, tuple[Any, ...]]], device: str, cases: int, seed: int
) -> Iterator[tuple[str, bool, Any, list[Any]]]:
    """``cases`` calls, drawn in the same order for the same seed: in every second one all float tensors keep
    their shape and are sprinkled with hostile values; in the others one to four arguments are replaced."""
    draw = random.Random(seed)
    pools = []
    for op, args in calls:
        by_argument: dict[str, list[tuple[str, int, Any]]] = {}
        for what, _, changed in attempts(op, args, device):
            for position, (new, old) in enumerate(zip(changed, args, strict=True)):
                if new is not old:
                    by_argument.setdefault(what.split(" = ")[0], []).append((what, position, new))
        for position, value in enumerate(args):
            if isinstance(value, Tensor):
                views = [(name, view) for name, layout in LAYOUTS.items() if (view := layout(value)) is not None]
                pool = by_argument[f"{op} with {op._schema.arguments[position].name}"]
                pool += [(f"{op} with a {name} argument {position}", position, view) for name, view in views]
        pools.append((op, args, list(by_argument.values())))
    for number in range(cases):
        op, args, arguments = draw.choice(pools)
        if number % 2:
            floats = lambda t: sprinkled(t, draw) if t.is_floating_point() else t  # noqa: E731
            yield f"seed {seed}, call {number}: {op} sprinkled", True, op, list(tree_map_only(Tensor, floats, args))
            continue
        changed = list(args)
        chosen = [draw.choice(pool) for pool in draw.sample(arguments, min(draw.randint(1, 4), len(arguments)))]
        for _, position, value in chosen:
            changed[position] = value
        # A number may ask for endless work, whatever the tensors are.
        hostile_data = all("Tensor" in str(op._schema.arguments[position].type) for _, position, _ in chosen)
        yield f"seed {seed}, call {number}: {'; '.join(what for what, *_ in chosen)}", hostile_data, op, changed


def call(op: Any, args: list[Any], guard: bool) -> None:
    def protected(t: Tensor) -> Tensor:
        return guarded(t) if guard and t.device.type == "cpu" else t

    try:
        with torch.no_grad():
            result = op(*tree_map_only(Tensor, protected, args))
        if not guard:
            torch.cuda.synchronize()
        del result
    except Exception as error:
        if "illegal memory access" in str(error) or "device-side assert" in str(error):
            raise SystemExit(str(error)) from error


def in_children(tried: list[tuple[str, bool, Any, list[Any]]]) -> list[str]:
    """Every attempt, each after the last in one fork; after a death the next fork goes on behind it."""
    failures, start = [], 0
    while start < len(tried):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            if "libasan" not in os.environ.get("LD_PRELOAD", ""):  # a sanitizer's report belongs on the screen
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            for number in range(start, len(tried)):
                os.write(writing, number.to_bytes(4, "little"))
                signal.alarm(SECONDS)
                call(*tried[number][2:], guard=True)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            progress = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            break
        start = int.from_bytes(progress[-4:], "little") + 1
        what, hostile_data, *_ = tried[start - 1]
        # Work without end because of a number is the caller's own wish; because of data it is a defect.
        if hostile_data or status != -signal.SIGALRM:
            failures.append(f"{what}: {signal.Signals(-status).name if status < 0 else f'exit status {status}'}")
    return failures


def main(name: str, device: str, cases: int = 200, seed: int = 0) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # no pool of threads for a fork to lose
    seen: dict[Any, int] = {}
    calls = []
    for case in contract_cases():
        if case.op == name:
            for op, args, _ in record(case, case.tensors(torch.device(device), torch.float32)):
                seen[op] = seen.get(op, 0) + 1
                if seen[op] <= 3:
                    calls.append((op, args))
    if device == "cpu":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
        resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30),) * 2)  # a huge result is refused, not filled
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tried: list[tuple[str, bool, Any, list[Any]]] = []
    for op, args in calls:
        tried.append((f"{op} with its own arguments", True, op, list(args)))
        tried += [(what, hostile_data, op, changed) for what, hostile_data, changed in attempts(op, args, device)]
    if device == "cuda":
        for what, _, op, changed in tried:
            print(what, flush=True)  # the last line names the attempt that killed the process
            call(op, changed, guard=False)
    failures, drawn = [], 0
    if device == "cpu":
        failures = in_children(tried)
        stream = random_calls(calls, device, cases, seed)
        while batch := list(itertools.islice(stream, BATCH)):
            failures += in_children(batch)
            drawn += len(batch)
    print("\n".join(failures))
    print(f"{len(tried)} attempts and {drawn} random calls on {sorted(map(str, seen))}, {len(failures)} failed")
    return 1 if failures or not tried else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3], *map(int, sys.argv[3:])))
