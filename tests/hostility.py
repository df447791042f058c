"""``python hostility.py <op> <device>``: calls an operator and its backward with one argument wrong, in every way.

Every attempt must return or raise. On the CPU they run in forks, on tensors that end at an unmapped
page, so that one element read past the end is a crash; an attempt that takes too long kills its fork
too. On CUDA, where a fork cannot go, the process itself is the detector. Random calls with several
arguments wrong at once, and a look at what they answer, are ``campaign.py``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

sys.path.insert(0, str(Path(__file__).parent))
from contract import record
from helpers import contract_cases
from isolation import Guarded, in_forks, limit_memory

HOSTILE_FLOATS = (float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 1e9)
HOSTILE_INTS = (-1, 1 << 31, (1 << 63) - 1, -(1 << 63))
ODD_DTYPES = (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.bfloat16)


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


def call(op: Any, args: list[Any], guard: bool) -> None:
    guarded = Guarded()
    try:
        with torch.no_grad():
            result = op(*tree_map_only(Tensor, guarded.copy, args) if guard else args)
        if not guard:
            torch.cuda.synchronize()
        del result
    except Exception as error:
        if "illegal memory access" in str(error) or "device-side assert" in str(error):
            raise SystemExit(str(error)) from error


def in_children(tried: list[tuple[str, bool, Any, list[Any]]]) -> list[str]:
    """What failed, of all attempts."""

    def work(number: int) -> str:
        call(*tried[number][2:], guard=True)
        return ""

    failures = []
    for (what, hostile_data, *_), answer in zip(tried, in_forks(range(len(tried)), work), strict=True):
        # Work without end because of a number is the caller's own wish; because of data it is a defect.
        if answer and (hostile_data or "SIGALRM" not in answer):
            failures.append(f"{what}: {answer}")
    return failures


def main(name: str, device: str) -> int:
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
    tried: list[tuple[str, bool, Any, list[Any]]] = []
    for op, args in calls:
        tried.append((f"{op} with its own arguments", True, op, list(args)))
        tried += [(what, hostile_data, op, changed) for what, hostile_data, changed in attempts(op, args, device)]
    failures = []
    if device == "cpu":
        limit_memory()
        failures = in_children(tried)
    else:
        for what, _, op, changed in tried:
            print(what, flush=True)  # the last line names the attempt that killed the process
            call(op, changed, guard=False)
    print("\n".join(failures))
    print(f"{len(tried)} attempts on {sorted(map(str, seen))}, {len(failures)} failed")
    return 1 if failures or not tried else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
