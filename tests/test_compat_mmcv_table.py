"""Numbers of every covered function of ``mmcv._ext``, in every dtype and layout, by name and by position."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("mmcv", reason="needs mmcv-lite")
compat = pytest.importorskip("opzoo.compat.mmcv")

import mmcv.ops  # noqa: E402
from mmcv_rows import ROWS, Call  # noqa: E402

ext = importlib.import_module("mmcv._ext")
EVERY = [(name, dtype) for name, row in ROWS.items() for dtype in row.dtypes]


def test_every_covered_function_has_a_row():
    assert set(ROWS) == set(compat.covered())


def test_the_signatures_are_those_of_mmcv():
    """Its own list of them comes with mmcv-lite."""
    source = Path(mmcv.__file__).parent / "ops" / "csrc" / "pytorch" / "pybind.cpp"
    binding = re.compile(r'm\.def\(\s*"(\w+)",(.*?)\);', re.DOTALL)
    theirs = {name: re.findall(r'py::arg\("(\w+)"\)', rest) for name, rest in binding.findall(source.read_text())}
    for name, row in ROWS.items():
        assert list(inspect.signature(getattr(ext, name)).parameters) == theirs[name], name
        assert set(row.draw(torch.float32)) == set(theirs[name]), name


def other_strides(t: Any) -> Any:
    """The same values, the last axis not the innermost in memory, and a gap between elements."""
    if not isinstance(t, Tensor) or not t.numel():
        return t
    apart = torch.stack([t, t], -1)[..., 0]
    if t.dim() < 2:
        return apart
    return apart.transpose(-1, -2).clone(memory_format=torch.contiguous_format).transpose(-1, -2)


def in_fp64(t: Any) -> Any:
    return t.double() if isinstance(t, Tensor) and t.is_floating_point() else t


def compare(found: Any, expected: Any, dtype: torch.dtype, what: str, near: float = 0.0) -> None:
    if not isinstance(expected, Tensor) or not expected.is_floating_point():
        assert found.equal(expected) if isinstance(expected, Tensor) else found == expected, what
        return
    assert found.dtype == dtype and found.shape == expected.shape, what
    units = 8 if dtype in (torch.float16, torch.bfloat16) else 200
    near += units * torch.finfo(dtype).eps * float(expected.nan_to_num().abs().max() if expected.numel() else 0)
    torch.testing.assert_close(
        found.double(), expected, rtol=0, atol=near, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def run(name: str, call: Call, dtype: torch.dtype) -> None:
    expected = ROWS[name].expect(**{key: in_fp64(value) for key, value in call.items()})
    result = getattr(ext, name)(**call)
    assert set(expected) == set(ROWS[name].outputs) | ({"return"} if result is not None else set())
    for key, value in expected.items():
        found = result if key == "return" else call[key]
        compare(found, value, dtype if key == "return" else found.dtype, f"{name}, {key}", ROWS[name].near)


@pytest.mark.parametrize(("name", "dtype"), EVERY, ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_numbers(name, dtype, strided):
    call = ROWS[name].draw(dtype)
    if strided:
        call = {key: other_strides(value) for key, value in call.items()}
    run(name, call, dtype)
