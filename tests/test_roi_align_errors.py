"""What roi_align refuses, and that a refused or untrusted value never reaches memory."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from roi_inputs import box
from torch.func import grad, vmap

import opzoo

MODES = ("avg", "max")
NAN, INF = float("nan"), float("inf")
OPS = torch.ops.opzoo


BAD_INDICES = [1.0, -1.0, 0.5, NAN, INF, 1e5, -1e5, 3e38]


def backward_args(boxes, index=None, grad=None):
    grad = torch.ones(1, 4, 2, 2) if grad is None else grad
    return grad.to(boxes.device), boxes, index, 1, 4, 8, 8, 1.0, 2, False, False


@pytest.mark.parametrize("bad", BAD_INDICES)
def test_image_index_is_checked_on_the_cpu(bad):
    x = torch.full((3, 64, 8, 8), 777.0)[1:2]  # a view: its neighbours are valid memory
    boxes = torch.cat([box(0.0, 0.0, 3.0, 3.0), box(0.0, 0.0, 3.0, 3.0, image=bad)])
    with pytest.raises(ValueError, match=r"roi_align: boxes\[1, 0\] .*integer in \[0, 1\), got"):
        opzoo.roi_align(x, boxes, 1)
    with pytest.raises(ValueError, match=r"boxes\[1, 0\] .*integer in \[0, 1\), got"):
        opzoo.roi_align(x, boxes, 1, pool_mode="max")
    grad = torch.ones(2, 4, 2, 2)
    with pytest.raises(ValueError, match=r"_roi_align_backward: boxes\[1, 0\]"):
        OPS._roi_align_backward(*backward_args(boxes, grad=grad))
    argmax = torch.zeros(2, 4, 2, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"_roi_align_max_backward: boxes\[1, 0\]"):
        OPS._roi_align_max_backward(grad, argmax, *backward_args(boxes)[1:])
    with pytest.raises(ValueError, match=r"_roi_align_max_sample: boxes\[1, 0\]"):
        OPS._roi_align_max_sample(x[:, :4], argmax, boxes, None, 1.0, 2, False)


@pytest.mark.parametrize("bad", [1, -1, 2**62, -(2**63)])
def test_int64_image_index_is_checked_on_the_cpu(bad):
    boxes, index = box(0.0, 0.0, 3.0, 3.0)[:, 1:], torch.tensor([bad])
    with pytest.raises(ValueError, match=rf"batch_index\[0\] must be an integer in \[0, 1\), got {bad}"):
        OPS.roi_align(torch.ones(1, 4, 8, 8), boxes, index, 2, 2, 1.0, 2, False)
    with pytest.raises(ValueError, match=r"batch_index\[0\]"):
        OPS._roi_align_backward(*backward_args(boxes, index))


@pytest.mark.parametrize("bad", [7.0, 0.5, NAN])
def test_image_index_is_named_under_vmap(bad):
    x = torch.ones(3, 1, 2, 8, 8)
    boxes = torch.stack([box(0.0, 0.0, 3.0, 3.0), box(0.0, 0.0, 3.0, 3.0, image=bad), box(0.0, 0.0, 3.0, 3.0)])
    message = rf"roi_align: boxes\[0, 0\] .*integer in \[0, 1\), got {bad:g}, in element 1 of the vmapped axis"
    for per_map in (lambda x, b: opzoo.roi_align(x, b, 2), grad(lambda x, b: opzoo.roi_align(x, b, 2).sum())):
        with pytest.raises(ValueError, match=message):
            vmap(per_map)(x, boxes)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", BAD_INDICES)
def test_image_index_is_skipped_on_cuda(bad, mode):
    x = torch.ones(1, 4, 8, 8, device="cuda", requires_grad=True)
    boxes = torch.cat([box(0.0, 0.0, 3.0, 3.0), box(0.0, 0.0, 3.0, 3.0, image=bad)]).cuda()
    out = opzoo.roi_align(x, boxes, 2, pool_mode=mode)
    assert (out[0] == 1).all() and not out[1].any()
    out[1].sum().backward()
    assert not x.grad.any()
    opzoo.set_debug(True)
    try:
        with pytest.raises(ValueError, match=r"boxes\[1, 0\] .*integer in \[0, 1\), got"):
            opzoo.roi_align(x, boxes, 2, pool_mode=mode)
        opzoo.roi_align(x, boxes[:1], 2, pool_mode=mode)
    finally:
        opzoo.set_debug(False)


@pytest.mark.parametrize("bad", [-2, 4, 5, 2**31, 2**62, 2**63 - 1, -(2**63)])
def test_argmax_is_not_trusted(device, bad):
    x = torch.ones(1, 3, 8, 8, device=device)
    boxes = box(0.0, 0.0, 6.0, 6.0, device=device)
    argmax = torch.full((1, 3, 2, 2), bad, device=device)
    assert not OPS._roi_align_max_sample(x, argmax, boxes, None, 1.0, 2, False).any()
    grad = torch.ones(1, 3, 2, 2, device=device)
    assert not OPS._roi_align_max_backward(grad, argmax, boxes, None, 1, 3, 8, 8, 1.0, 2, False, False).any()


ERRORS = {
    "input-rank": ({"input": torch.ones(3, 4, 4)}, RuntimeError, "input must have 4 axes, got 3"),
    "input-dtype": ({"input": torch.ones(1, 3, 4, 4).long()}, RuntimeError, "input must be float64.*got int64"),
    "boxes-rank": ({"boxes": torch.zeros(5)}, RuntimeError, "boxes must have 2 axes, got 1"),
    "boxes-columns": ({"boxes": torch.zeros(2, 4)}, RuntimeError, r"boxes must have shape \[K, 5\].*got \[2, 4\]"),
    "boxes-bool": ({"boxes": torch.zeros(2, 5).bool()}, RuntimeError, "boxes must have a floating or integer dtype"),
    "boxes-complex": ({"boxes": torch.zeros(2, 5).cfloat()}, RuntimeError, "floating or integer dtype"),
    "boxes-type": ({"boxes": 3}, TypeError, "boxes must be a tensor or a list of tensors, got int"),
    "list-item": ({"boxes": [None]}, TypeError, r"boxes\[0\] must be a tensor, got NoneType"),
    "list-shape": ({"boxes": [torch.zeros(2, 5)]}, RuntimeError, r"boxes\[0\] must have shape \[L, 4\], got \[2, 5\]"),
    "list-length": ({"boxes": [torch.zeros(1, 4)] * 2}, ValueError, "one tensor per image of input, 1, got 2"),
    "list-empty": ({"boxes": []}, ValueError, "one tensor per image of input, 1, got 0"),
    "size-zero": ({"output_size": (0, 2)}, ValueError, r"output_size must be positive, got \(0, 2\)"),
    "size-negative": ({"output_size": -1}, ValueError, "output_size must be positive"),
    "size-triple": ({"output_size": (1, 2, 3)}, ValueError, "output_size must be an int or a pair"),
    "size-overflow": ({"output_size": 2**31}, ValueError, r"output is too large: output_size \(2147483648, "),
    "size-memory": (
        {"output_size": 2**20},
        RuntimeError,
        r"roi_align: output_size \(1048576, 1048576\) makes an output",
    ),
    "scale-zero": ({"spatial_scale": 0.0}, ValueError, "spatial_scale must be finite and positive, got 0"),
    "scale-negative": ({"spatial_scale": -1.0}, ValueError, "spatial_scale must be finite and positive, got -1"),
    "scale-nan": ({"spatial_scale": NAN}, ValueError, "spatial_scale must be finite and positive, got nan"),
    "scale-inf": ({"spatial_scale": INF}, ValueError, "spatial_scale must be finite and positive, got inf"),
    "ratio": ({"sampling_ratio": 2**31}, ValueError, "sampling_ratio must be at most 32767, got 2147483648"),
    "mode": ({"pool_mode": "sum"}, ValueError, "pool_mode must be 'avg' or 'max', got 'sum'"),
    "no-images": ({"input": torch.ones(0, 3, 4, 4)}, RuntimeError, r"boxes must be empty for a map.*got 2 boxes"),
    "no-rows": ({"input": torch.ones(1, 3, 0, 4)}, RuntimeError, r"boxes must be empty for a map.*\[1, 3, 0, 4\]"),
    "no-columns": ({"input": torch.ones(1, 3, 4, 0)}, RuntimeError, r"boxes must be empty for a map"),
}


def to_device(value, device):
    if isinstance(value, list):
        return [to_device(item, device) for item in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("change,error,message", ERRORS.values(), ids=ERRORS)
def test_errors(change, error, message, device):
    args = {"input": torch.ones(1, 3, 4, 4), "boxes": torch.zeros(2, 5), "output_size": 2} | change
    with pytest.raises(error, match=message):
        opzoo.roi_align(**{name: to_device(value, device) for name, value in args.items()})


RAW_ERRORS = {
    "index-dtype": ({"index": torch.zeros(1)}, "batch_index must have dtype int64, got float32"),
    "index-shape": ({"index": torch.zeros(2).long()}, r"batch_index must have shape \[1\], got \[2\]"),
    "index-columns": ({"boxes": torch.zeros(1, 5), "index": torch.zeros(1).long()}, r"boxes must have shape \[K, 4\]"),
    "grad-rank": ({"grad": torch.ones(4, 2, 2)}, "grad must have 4 axes"),
    "grad-dtype": ({"grad": torch.ones(1, 4, 2, 2).long()}, "grad must be float64"),
    "grad-shape": ({"grad": torch.ones(1, 3, 2, 2)}, r"grad must have shape \[1, 4, 2, 2\], got \[1, 3, 2, 2\]"),
    "grad-count": ({"grad": torch.ones(2, 4, 2, 2)}, r"grad must have shape \[1, 4, 2, 2\]"),
    "grad-empty-bins": ({"grad": torch.ones(1, 4, 0, 2)}, "output_size must be positive"),
    "argmax-dtype": ({"argmax": torch.zeros(1, 4, 2, 2)}, "argmax must have dtype int64"),
    "argmax-shape": ({"argmax": torch.zeros(1, 4, 2, 3).long()}, r"argmax must have shape \[1, 4, 2, 2\]"),
    "sizes-negative": ({"sizes": (1, 4, -8, 8)}, "grad_input sizes must not be negative"),
    "sizes-overflow": ({"sizes": (2**20, 4, 2**31, 2**31)}, "grad_input is too large"),
    "sizes-empty": ({"sizes": (1, 4, 0, 8)}, "boxes must be empty for a map"),
}


@pytest.mark.parametrize("change,message", RAW_ERRORS.values(), ids=RAW_ERRORS)
def test_raw_backward_errors(change, message, device):
    argmax = torch.zeros(1, 4, 2, 2, dtype=torch.int64)
    args = {
        "grad": torch.ones(1, 4, 2, 2),
        "argmax": argmax,
        "boxes": torch.zeros(1, 5),
        "index": None,
        "sizes": (1, 4, 8, 8),
    }
    args |= change
    if "index" in change and "boxes" not in change:
        args["boxes"] = torch.zeros(1, 4)
    args = {name: to_device(value, device) for name, value in args.items()}
    rest = (args["boxes"], args["index"], *args["sizes"], 1.0, 2, False, False)
    with pytest.raises((RuntimeError, ValueError), match=message):
        OPS._roi_align_max_backward(args["grad"], args["argmax"], *rest)
    if "argmax" not in change:
        with pytest.raises((RuntimeError, ValueError), match=message):
            OPS._roi_align_backward(args["grad"], *rest)


@pytest.mark.gpu
def test_devices_must_agree():
    x = torch.ones(1, 3, 4, 4, device="cuda")
    with pytest.raises(RuntimeError, match="boxes must be on the device of input, cuda:0, got cpu"):
        opzoo.roi_align(x, torch.zeros(1, 5), 2)
    with pytest.raises(RuntimeError, match="batch_index must be on the device of input"):
        OPS.roi_align(x, torch.zeros(1, 4, device="cuda"), torch.zeros(1).long(), 2, 2, 1.0, 2, False)


CRASHERS = """
import torch, opzoo
T = torch.tensor
nan, inf = float("nan"), float("inf")
ops = torch.ops.opzoo
for sr in (-1, 1):
    for b in ([0, nan, nan, nan, nan], [0, 0, 0, inf, inf], [0, -inf, 0, inf, 3.0]):
        for aligned in (False, True):
            opzoo.roi_align(torch.zeros(1, 1, 4, 4), T([b]), 1, 1.0, sr, aligned)
for call in (
    lambda: opzoo.roi_align(torch.ones(1, 64, 32, 32), T([[1e5, 0, 0, 3, 3]]), 1, 1.0, 2),
    lambda: opzoo.roi_align(torch.ones(1, 64, 32, 32), T([[-1e5, 0, 0, 3, 3]]), 1, 1.0, 2),
    lambda: opzoo.roi_align(torch.zeros(1, 1, 4, 4), T([[0, 0, 0, 3.0, 3]]), 1, nan),
    lambda: opzoo.roi_align(torch.ones(1, 3, 0, 4), T([[0, 0, 0, 3.0, 3]]), 1),
    lambda: opzoo.roi_align(torch.ones(0, 3, 4, 4), T([[0, 0, 0, 3.0, 3]]), 1),
    lambda: ops._roi_align_backward(
        torch.ones(1, 4, 2, 2), T([[1, 0, 0, 7.0, 7]]), None, 1, 4, 8, 8, 1.0, 2, False, False
    ),
):
    for _ in range(20):
        try:
            call()
        except (ValueError, RuntimeError):
            continue
        raise SystemExit("accepted")
print("survived")
"""


def test_inputs_that_crashed_other_libraries():
    """In a process of its own, so that a fault is this test's failure and not the run's end."""
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(CRASHERS)], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "survived", (run.returncode, run.stdout, run.stderr[-2000:])


def test_foreign_arguments_are_named():
    image, boxes = torch.ones(1, 1, 4, 4), torch.zeros(1, 4)
    with pytest.raises(TypeError, match="opzoo::roi_align: aligned must be a bool, got a tensor"):
        opzoo.roi_align(image, [boxes], 2, aligned=torch.ones(2))
    for odd in (boxes.to_sparse(), boxes.to(torch.float8_e4m3fn)):
        with pytest.raises(RuntimeError, match=r"opzoo::roi_align: boxes\[0\] must be dense, of a floating or integer"):
            opzoo.roi_align(image, [odd], 2)
