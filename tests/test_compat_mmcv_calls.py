"""Unusual calls of ``mmcv._ext``, several things at a time: what the table and one wrong argument do not reach."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("mmcv", reason="needs mmcv-lite")
pytest.importorskip("opzoo.compat.mmcv")

import mmcv.ops as ops
from mmcv_rows import ROWS

ROOT = Path(__file__).parents[1]
ext = importlib.import_module("mmcv._ext")


def call(name: str, **changed):
    arguments = {**ROWS[name].draw(torch.float32), **changed}
    return getattr(ext, name)(**arguments), arguments


# Boxes


@pytest.mark.parametrize("method", [-1, 3, True, 1.0])
def test_soft_nms_of_no_method(method):
    with pytest.raises((ValueError, TypeError), match=r"mmcv\._ext\.softnms: method must be"):
        call("softnms", method=method)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16])
def test_the_last_pixel_of_a_box_fits_in_its_dtype(dtype):
    """255 + 1 and 2048 + 1 do not."""
    far = 251 if dtype == torch.uint8 else 2044
    boxes = torch.tensor([[far, far, far + 4, far + 4], [far, far, far + 4, far + 2]]).to(dtype)
    # 5 by 5 pixels and 5 by 3 of them.
    for threshold, kept in ((0.59, [0]), (0.61, [0, 1])):
        assert ext.nms(boxes, torch.tensor([0.9, 0.8]), threshold, 1).tolist() == kept


def test_a_threshold_between_two_floats_of_single_precision():
    overlap = 1 / 2 + 2.0**-30
    dets = torch.tensor([[0, 0, 1, 1, 0.9], [0, 0, 1, overlap, 0.8]], dtype=torch.float64)
    assert ext.nms_match(dets, overlap) == [[0, 1]] and ext.nms_match(dets, overlap + 2.0**-40) == [[0], [1]]


def test_roi_align_of_no_mode():
    with pytest.raises(ValueError, match="pool_mode must be 0"):
        call("roi_align_forward", pool_mode=2)


@pytest.mark.parametrize("value", [float("nan"), -1.0, 1e30])
def test_places_of_maxima_that_nobody_found(value):
    """Only finite numbers of its own forward make sense; others must not leave the map."""
    wrong = torch.full((3, 3, 2, 3), value)
    grad = torch.zeros(2, 3, 12, 10)
    try:
        call("roi_align_backward", pool_mode=0, argmax_y=wrong, argmax_x=wrong, grad_input=grad)
    except (ValueError, RuntimeError) as error:
        assert "argmax" in str(error) and not grad.any()
    assert grad.isfinite().all()


def test_deform_roi_pool_whose_bins_are_whole_pixels():
    """One sample per started pixel: bins of exactly 3 pixels have 3, wherever an offset takes them."""
    x = torch.randn(1, 2, 40, 40)
    rois = torch.tensor([[0, 4.0, 4, 25, 25]])
    offset = torch.rand(1, 2, 7, 7)
    found = ops.deform_roi_pool(x, rois, offset, (7, 7), 1.0, 0, 0.1)
    torch.testing.assert_close(found, ops.deform_roi_pool(x, rois, offset, (7, 7), 1.0, 3, 0.1), rtol=1e-3, atol=1e-3)


def test_deform_roi_pool_with_offsets_of_another_dtype():
    x = torch.randn(1, 2, 20, 20, dtype=torch.bfloat16, requires_grad=True)
    offset = torch.rand(1, 2, 2, 2, requires_grad=True)
    out = ops.deform_roi_pool(x, torch.tensor([[0, 2.0, 2, 15, 15]], dtype=torch.bfloat16), offset, (2, 2), 1.0, 2, 0.1)
    grads = torch.autograd.grad(out.float().sum(), (x, offset))
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32] and all(g.isfinite().all() for g in grads)


# Layers


def test_gradients_to_larger_maps_reach_strided_memory():
    """The numbers that were read have gradients, the others none, whatever was there and however it lies."""
    torch.manual_seed(0)
    _, plain = call("modulated_deform_conv_backward")
    maps = ("grad_offset", "grad_mask")
    strided = {key: torch.full(plain[key].mT.shape, 77.0).mT for key in maps}
    torch.manual_seed(0)
    call("modulated_deform_conv_backward", **strided)
    for key, buffer in strided.items():
        assert torch.equal(buffer, plain[key]) and not (buffer == 77).any(), key


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kW": 3, "kH": 2}, "kH must be 3"),
        ({"group": 1}, "group must be 2"),
        ({"deformable_group": 1}, "offset must have shape"),
        ({"output": torch.zeros(6, 5, 9)}, "output must have shape"),
        ({"output": torch.zeros(3, 6, 5, 9, dtype=torch.float64)}, "output must be float32, got float64"),
        ({"output": torch.zeros(3, 6, 5, 9, device="meta")}, "output must be on cpu"),
        ({"output": torch.zeros(3, 1, 5, 9).expand(3, 6, 5, 9)}, "output must have memory"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_numbers_that_contradict_the_tensors(changed, message):
    with pytest.raises((RuntimeError, ValueError), match=rf"mmcv\._ext\.deform_conv_forward: {message}"):
        call("deform_conv_forward", **changed)


@pytest.mark.parametrize("name", ["deform_conv_forward", "modulated_deform_conv_forward", "carafe_forward"])
def test_autocast_does_not_round_what_mmcv_kept_in_fp32(name):
    torch.manual_seed(0)
    _, expected = call(name)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        _, found = call(name)
    assert torch.equal(found["output"], expected["output"])


def test_autocast_keeps_the_attention_in_fp32():
    arguments = ROWS["ms_deform_attn_forward"].draw(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = ext.ms_deform_attn_forward(**arguments)
    assert torch.equal(found, ext.ms_deform_attn_forward(**arguments))


def test_windows_beyond_the_image_are_zero():
    im = torch.ones(1, 1, 4, 4)
    y, x = torch.tensor([-5, 0, 3, 9, 1 << 40]), torch.tensor([0, -(1 << 40), 3, 0, 0])
    col = torch.full((4, 5), 77.0)
    ext.masked_im2col_forward(im, y, x, col, kernel_h=2, kernel_w=2, pad_h=0, pad_w=0)
    assert col.sum(0).tolist() == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("index", [-1, 7, 1 << 40])
def test_columns_have_no_place_beyond_the_image(index):
    im = torch.zeros(1, 3, 7, 9)
    with pytest.raises(ValueError, match=r"mask_h_idx must be in \[0, 7\)"):
        call("masked_col2im_forward", mask_h_idx=torch.tensor([0, 3, 5, index]), im=im)
    assert not im.any()


@pytest.mark.parametrize("name", ["masked_im2col_forward", "masked_col2im_forward"])
def test_masked_convolution_is_of_one_image(name):
    with pytest.raises(RuntimeError, match=r"im must have shape \[1, any, any, any\], got \[2, 3, 7, 9\]"):
        call(name, im=torch.zeros(2, 3, 7, 9))


# Losses and norm


@pytest.mark.parametrize("count", [1, 4, 6])
@pytest.mark.parametrize("name", ["sigmoid_focal_loss_forward", "softmax_focal_loss_backward"])
def test_weights_of_other_classes(name, count):
    with pytest.raises(RuntimeError, match=r"weight must have shape \[5\]"):
        call(name, weight=torch.ones(count))


def test_mm_sync_bn_is_batch_norm(tmp_path):
    """mmcv's layer of one process, forward, backward and statistics, beside torch's."""
    code = """
import torch, torch.distributed as dist, opzoo.compat.mmcv
from mmcv.ops import SyncBatchNorm
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
for mode in ("default", "N"):
    ours, theirs = SyncBatchNorm(4, stats_mode=mode), torch.nn.BatchNorm2d(4)
    theirs.load_state_dict(ours.state_dict())
    for layout in (torch.contiguous_format, torch.channels_last):
        x = (torch.randn(3, 4, 5, 6) * 3 + 1).to(memory_format=layout).requires_grad_()
        y = x.detach().clone().requires_grad_()
        along = torch.randn(3, 4, 5, 6)
        a, b = ours(x), theirs(y)
        torch.testing.assert_close(a, b)
        a.backward(along), b.backward(along)
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value)
    for left, right in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-4)
print("equal")
"""
    assert child(code, tmp_path) == "equal"


# torch.compile


OFFSET, MASK = torch.rand(1, 18, 14, 14), torch.rand(1, 9, 14, 14)
WEIGHT, ROIS = torch.rand(3, 2, 3, 3), torch.tensor([[0, 1.0, 1, 12, 12]])
TARGET = torch.tensor([0, 1, 2, 5])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ops.roi_align(x, ROIS, 2, 1.0, 0, "avg", True),
        lambda x: ops.deform_conv2d(x, OFFSET, WEIGHT),
        lambda x: ops.modulated_deform_conv2d(x, OFFSET, MASK, WEIGHT, None, 1, 0, 1, 1, 1),
        lambda x: ops.sigmoid_focal_loss(x.flatten()[:20].view(4, 5), TARGET),
    ],
    ids=["roi_align", "deform_conv2d", "modulated_deform_conv2d", "sigmoid_focal_loss"],
)
def test_mmcv_compiles_in_one_graph(function):
    x = torch.randn(1, 2, 16, 16, requires_grad=True)
    expected = function(x)
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(*(torch.autograd.grad(y.sum(), x) for y in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


# Worker processes


def child(code: str, folder: Path) -> str:
    script = folder / "script.py"
    script.write_text(code)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(script)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=250)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.strip()


def test_a_reference_in_a_pickle_brings_the_module_with_it(tmp_path):
    """A process that never heard of opzoo.compat unpickles a function of mmcv._ext and calls it."""
    (tmp_path / "nms.pickle").write_bytes(pickle.dumps([ext.nms, ext.upfirdn2d]))
    code = """
import pickle, sys, torch
nms, uncovered = pickle.load(open("nms.pickle", "rb"))
print(nms(torch.tensor([[0., 0, 1, 1]]), torch.ones(1), 0.5, 0).tolist())
try:
    uncovered()
except NotImplementedError as error:
    print(str(error)[:19])
"""
    assert child(code, tmp_path).splitlines() == ["[0]", "mmcv._ext.upfirdn2d"]


def test_spawned_workers_of_a_data_loader(tmp_path):
    code = """
import opzoo.compat.mmcv
import torch
from mmcv.ops import nms
from torch.utils.data import DataLoader

def collate(items):
    boxes = torch.stack(items)
    return nms(boxes, torch.arange(len(items)).float(), 0.5)[1]

boxes = torch.tensor([[0., 0, 10, 10], [0, 0, 10, 9], [20, 20, 30, 30], [0, 0, 9, 9]])
if __name__ == "__main__":
    loader = DataLoader(boxes, 2, collate_fn=collate, num_workers=2, multiprocessing_context="spawn")
    print([kept.tolist() for kept in loader])
"""
    assert child(code, tmp_path) == "[[1], [1, 0]]"


def test_modules_of_the_registry_in_a_spawned_process(tmp_path):
    pytest.importorskip("mmdet", reason="needs mmdet")
    code = """
import multiprocessing, pickle, torch
from opzoo.compat import mmdet as compat

def work(modules, x):
    return [module(x).sum().item() for module in modules]

if __name__ == "__main__":
    options = dict(in_channels=2, out_channels=3, kernel_size=3)
    modules = [compat.DCN(**options), compat.DCNv2(**options)]
    others = [compat.RoIAlign(2), compat.MultiScaleDeformableAttention(16, 2), compat._batched_nms, compat._soft_nms]
    assert [type(o) for o in pickle.loads(pickle.dumps(others))] == [type(o) for o in others]
    x = torch.randn(1, 2, 5, 5)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(work, (modules, x)) == work(modules, x))
"""
    assert child(code, tmp_path) == "True"
