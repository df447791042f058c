"""``python mmcv_hostility.py``: functions of ``mmcv._ext`` with an argument wrong, in every way; what failed, as JSON.

A process of its own, because oracles differentiate in forks: where a test before has used torch's
autograd threads, a fork of that process may not.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from hostility import hostile_tensors, hostile_values
from isolation import Guarded, in_forks
from mmcv_rows import ROWS, Call
from test_compat_mmcv_table import compare, in_fp64
from torch import Tensor
from torch.utils._pytree import tree_map_only

ext = importlib.import_module("mmcv._ext")


def attempts(name: str) -> Iterator[tuple[str, str, Call]]:
    """(argument, what became of it, call)."""
    call = ROWS[name].draw(torch.float32)
    for argument, value in call.items():
        if argument not in ROWS[name].ignored:
            pool = hostile_tensors(value) if isinstance(value, Tensor) else hostile_values(value, "", "cpu")
            for what, replacement in pool:
                yield argument, what, {**call, argument: replacement}


def judge(name: str, argument: str, what: str, call: Call) -> str:
    """Empty where the attempt ended well."""
    row, guarded = ROWS[name], Guarded()
    before = {key: call[key].clone() for key in row.outputs if isinstance(call[key], Tensor)}
    call = tree_map_only(Tensor, guarded.copy, call)
    try:
        with torch.no_grad():
            result = getattr(ext, name)(**call)
    except Exception as error:
        if "can't allocate memory" in str(error):
            return ""
        named = str(error).startswith((f"mmcv._ext.{name}: ", "opzoo::"))
        if not named or not isinstance(error, (TypeError, ValueError, RuntimeError)):
            return f"{type(error).__name__} that names nothing: {error}"
        for key, value in before.items():
            if value.device.type == "cpu" and value.layout == torch.strided and not same(call[key], value):
                return f"{key} is written before the error: {error}"
        return ""
    if "full of" in what or "ending in" in what or oracle_refuses(name, argument, call[argument]):
        return ""
    try:
        expected = row.expect(**{key: in_fp64(value) for key, value in {**call, **before}.items()})
        for key, value in expected.items():
            found = result if key == "return" else call[key]
            compare(found, value, found.dtype if isinstance(found, Tensor) else torch.float32, key, row.near)
    except Exception as error:
        return f"accepted, and {type(error).__name__}: {str(error)[:200]}"
    return ""


def oracle_refuses(name: str, argument: str, value: Any) -> bool:
    """torchvision has no NMS and no RoIs of integers, and dies of huge numbers."""
    if isinstance(value, Tensor):
        return name.startswith(("nms", "roi")) and not value.is_floating_point() and argument != "argmax"
    return isinstance(value, float) and not abs(value) < 1e300


def same(t: Tensor, other: Tensor) -> bool:
    return bool(((t == other) | ((t != t) & (other != other))).all())


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # no pool of threads for a fork to lose
    failures: dict[str, list[str]] = {}
    for name in sorted(ROWS):
        torch.manual_seed(0)
        tried = list(attempts(name))
        answers = in_forks(range(len(tried)), lambda number: judge(name, *tried[number]))  # noqa: B023
        failures[name] = [f"{a} = {what}: {bad}" for (a, what, _), bad in zip(tried, answers, strict=True) if bad]
    print(json.dumps(failures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
