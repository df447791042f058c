"""mmcv-lite on opzoo: every covered function against an independent computation, the module itself, and its overlay."""

from __future__ import annotations

import importlib
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from peers import torchvision

pytest.importorskip("mmcv", reason="needs mmcv-lite")
compat = pytest.importorskip("opzoo.compat.mmcv")

import mmcv  # noqa: E402
import mmcv.ops as ops  # noqa: E402

import opzoo  # noqa: E402

ROOT = Path(__file__).parents[1]
ext = importlib.import_module("mmcv._ext")


def python(code: str, *path: Path, cwd: Path | None = None) -> str:
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={"PYTHONPATH": ":".join(map(str, (*path, ROOT))), "PATH": "/usr/bin:/bin", "HOME": str(cwd or "/tmp")},
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()


# The module


def test_all_names_are_there_and_the_uncovered_raise_on_call():
    covered = set(compat.covered())
    names = covered | compat._mmcv_ext._UNCOVERED
    assert len(names) == 112 and all(callable(getattr(ext, name)) for name in names)
    with pytest.raises(NotImplementedError, match=r"mmcv\._ext\.upfirdn2d is not among .* roi_align_forward"):
        ext.upfirdn2d(1, up=2)
    with pytest.raises(AttributeError):
        _ = ext.no_such_function
    assert not hasattr(ext, "__wrapped__")


def test_functions_survive_pickle():
    for name in (*compat.covered(), "upfirdn2d"):
        assert callable(pickle.loads(pickle.dumps(getattr(ext, name))))


def test_found_by_spec_and_by_pkgutil():
    assert compat.installed() and importlib.util.find_spec("mmcv._ext") is not None
    assert mmcv.utils.ext_loader.check_ops_exist()


def test_a_compiled_module_wins(tmp_path):
    """An extension module beside mmcv comes first, as Python's own finder does."""
    package = tmp_path / "mmcv"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_ext.py").write_text("nms = 'compiled'\n")
    code = "import opzoo.compat.mmcv as c, mmcv._ext as e; print(e.nms, c.installed())"
    assert python(code, tmp_path, cwd=tmp_path) == "compiled False"


def test_without_mmcv(tmp_path):
    (tmp_path / "mmcv.py").write_text("raise ModuleNotFoundError(\"No module named 'mmcv'\")\n")
    code = "import opzoo.compat.mmcv as c; print(c.installed(), len(c.covered()) > 15)"
    assert python(code, tmp_path, cwd=tmp_path) == "False True"


def test_the_overlay_is_one_file_and_enough(tmp_path):
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(tmp_path)]
    source = tmp_path / "source"
    shutil.copytree(ROOT / "opzoo-mmcv", source)
    subprocess.run([*wheel, str(source)], check=True, capture_output=True)
    site = tmp_path / "site"
    shutil.copytree(Path(mmcv.__file__).parent, site / "mmcv", ignore=shutil.ignore_patterns("csrc", "__pycache__"))
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        files = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert files == ["mmcv/_ext.py"]
        archive.extractall(site)
    code = "import mmcv.ops, mmcv._ext as e; print(e.__file__, e.nms.__module__)"
    assert python(code, site, cwd=tmp_path) == f"{site / 'mmcv' / '_ext.py'} opzoo.compat._mmcv_boxes"
    overlay = (ROOT / "opzoo-mmcv" / "src" / "mmcv" / "_ext.py").read_text()
    assert overlay == (ROOT / "opzoo" / "compat" / "_mmcv_overlay.py").read_text()


# The functions


@pytest.mark.parametrize("offset", [0, 1])
def test_nms(offset):
    boxes = torch.rand(200, 4) * 40
    boxes[:, 2:] += boxes[:, :2]
    scores = torch.rand(200)
    dets, keep = ops.nms(boxes, scores, 0.4, offset=offset, score_threshold=0.1, max_num=30)
    moved = boxes + torch.tensor([0, 0, offset, offset])
    kept = torchvision.ops.nms(moved, scores, 0.4)
    expected = kept[scores[kept] > 0.1][:30]
    assert torch.equal(keep, expected)
    assert torch.equal(dets, torch.cat([boxes[expected], scores[expected, None]], 1))


@pytest.mark.parametrize("method", ["naive", "linear", "gaussian"])
def test_soft_nms(method):
    boxes = torch.rand(60, 4) * 20
    boxes[:, 2:] += boxes[:, :2] + 5
    scores = torch.rand(60)
    dets, keep = ops.soft_nms(boxes, scores, 0.3, 0.5, 1e-2, method)
    lowered, expected = opzoo.reference.soft_nms(boxes, scores, 0.3, 0.5, 1e-2, method)
    assert torch.equal(keep, expected)
    torch.testing.assert_close(dets, torch.cat([boxes[expected], lowered[:, None]], 1))


def test_nms_match():
    dets = torch.tensor([[0.0, 0, 10, 10, 0.8], [0, 0, 10, 5, 0.9], [20, 20, 30, 30, 0.7], [1, 0, 11, 10, 0.6]])
    # An IoU of exactly the threshold counts: box 1 covers half of box 0.
    assert [group.tolist() for group in ops.nms_match(dets, 0.5)] == [[1, 0], [2], [3]]


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("transposed", [False, True])
def test_roi_align(aligned, transposed):
    x = torch.randn(2, 3, 12, 14, dtype=torch.float64)
    x = x.transpose(2, 3).contiguous().transpose(2, 3) if transposed else x  # mmcv reads this one wrong
    x.requires_grad_()
    rois = torch.tensor([[0, 1.0, 2, 20, 17], [1, 4, 0, 9, 22]], dtype=torch.float64)
    out = ops.roi_align(x, rois, (3, 4), 0.5, 2, "avg", aligned)
    expected = torchvision.ops.roi_align(x, rois, (3, 4), 0.5, 2, aligned)
    torch.testing.assert_close(out, expected)
    along = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, x, along)[0], torch.autograd.grad(expected, x, along)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_roi_align_maximum(dtype):
    x = torch.randn(2, 3, 12, 14).to(dtype).requires_grad_()
    rois = torch.tensor([[0, 1.0, 2, 20, 17], [1, 4, 0, 9, 22], [0, 30, 30, 31, 31]]).to(dtype)
    out = ops.roi_align(x, rois, 3, 0.5, 0, "max", True)
    expected = opzoo.roi_align(x, rois, 3, 0.5, 0, True, "max")
    assert torch.equal(out, expected)
    along = torch.randn_like(out)
    assert torch.equal(torch.autograd.grad(out, x, along)[0], torch.autograd.grad(expected, x, along)[0])


@pytest.mark.parametrize("groups,deform_groups", [(1, 1), (2, 2)])
def test_deform_conv(groups, deform_groups):
    x = torch.randn(3, 4, 9, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4 // groups, 3, 2, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(3, 12 * deform_groups, 5, 9, dtype=torch.float64, requires_grad=True)
    out = ops.deform_conv2d(x, offset, weight, (2, 1), (1, 2), (1, 3), groups, deform_groups, False, 2 + 1)
    expected = torchvision.ops.deform_conv2d(x, offset, weight, None, (2, 1), (1, 2), (1, 3))
    torch.testing.assert_close(out, expected)
    along = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, (x, offset, weight), along),
        torch.autograd.grad(expected, (x, offset, weight), along),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("larger", [False, True])
def test_modulated_deform_conv(larger, bias):
    """With offset maps larger than the result, as DyHead has them: the first numbers of each item count."""
    size = (9, 9) if larger else (5, 5)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(2, 18, *size, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 9, *size, dtype=torch.float64, requires_grad=True)
    shift = torch.randn(6, dtype=torch.float64, requires_grad=True) if bias else None
    out = ops.modulated_deform_conv2d(x, offset, mask, weight, shift, 2, 1, 1, 1, 1)
    read = [t.flatten(1)[:, : c * 25].reshape(2, c, 5, 5) for t, c in ((offset, 18), (mask, 9))]
    expected = torchvision.ops.deform_conv2d(x, read[0], weight, shift, 2, 1, 1, read[1])
    torch.testing.assert_close(out, expected)
    leaves = [t for t in (x, offset, mask, weight, shift) if t is not None]
    along = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, leaves, along), torch.autograd.grad(expected, leaves, along), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_focal_losses(weighted, reduction):
    x = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(5, dtype=torch.float64) if weighted else None
    rows = torch.arange(11)
    target = torch.randint(0, 5, (11,))
    factor = weight[target] if weighted else torch.ones(11, dtype=torch.float64)
    reduce = {"none": lambda t: t, "mean": lambda t: t.sum() / 11, "sum": torch.Tensor.sum}[reduction]

    labels = torch.nn.functional.one_hot(target, 5).double()
    loss = torchvision.ops.sigmoid_focal_loss(x, labels, 0.3, 1.5) * factor[:, None]
    torch.testing.assert_close(ops.sigmoid_focal_loss(x, target, 1.5, 0.3, weight, reduction), reduce(loss))
    p = x.softmax(1)[rows, target]
    loss = -0.3 * (1 - p) ** 1.5 * p.log() * factor
    torch.testing.assert_close(ops.softmax_focal_loss(x, target, 1.5, 0.3, weight, reduction), reduce(loss))
    if reduction != "none":
        for function in (ops.sigmoid_focal_loss, ops.softmax_focal_loss):
            assert torch.autograd.gradcheck(lambda x, f=function: f(x, target, 1.5, 0.3, weight, reduction), x)


def test_focal_loss_of_the_background():
    x = torch.randn(3, 4)
    background = torch.tensor([4, 4, 4])
    expected = torchvision.ops.sigmoid_focal_loss(x, torch.zeros(3, 4))
    torch.testing.assert_close(ops.sigmoid_focal_loss(x, background, 2.0, 0.25, torch.rand(4), "none"), expected)


def test_ms_deform_attn():
    attention = sys.modules["mmcv.ops.multi_scale_deform_attn"]
    shapes = torch.tensor([[4, 5], [2, 3]])
    value = torch.randn(2, 26, 2, 8, requires_grad=True)
    locations = torch.rand(2, 3, 2, 2, 4, 2, requires_grad=True)
    weights = torch.rand(2, 3, 2, 2, 4, requires_grad=True)
    starts = torch.tensor([0, 20])
    out = attention.MultiScaleDeformableAttnFunction.apply(value, shapes, starts, locations, weights, 64)
    expected = attention.multi_scale_deformable_attn_pytorch(value, shapes, locations, weights)
    torch.testing.assert_close(out, expected)
    leaves, along = (value, locations, weights), torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, leaves, along), torch.autograd.grad(expected, leaves, along), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_masked_conv():
    conv = ops.MaskedConv2d(3, 5, (3, 1), padding=(1, 0))
    x, mask = torch.randn(1, 3, 8, 9), (torch.rand(1, 8, 9) > 0.5).float()
    with torch.no_grad():
        torch.testing.assert_close(conv(x, mask), conv(x) * mask)


@pytest.mark.parametrize("naive", [False, True])
def test_carafe(naive):
    features = torch.randn(2, 4, 3, 5, dtype=torch.float64, requires_grad=True)
    masks = torch.rand(2, 18, 6, 10, dtype=torch.float64, requires_grad=True)
    function = ops.carafe_naive if naive else ops.carafe
    out = function(features, masks, 3, 2, 2)
    expected = opzoo.reference.carafe(features, masks, 3, 2, 2)
    torch.testing.assert_close(out, expected)
    if naive:  # its backward asserts a CUDA tensor
        return
    along = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, (features, masks), along),
        torch.autograd.grad(expected, (features, masks), along),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_roi_pool():
    """By hand: bins of 1.5 pixels from pixel 1 on, edges rounded outwards."""
    x = torch.arange(64.0).reshape(1, 1, 8, 8).requires_grad_()
    out = ops.roi_pool(x, torch.tensor([[0, 1.0, 2.0, 3.0, 4.0]]), (2, 2), 1.0)
    # x: [1, 4) in bins [1, 2.5) and [2.5, 4); y: [2, 5) in bins [2, 3.5) and [3.5, 5).
    assert out.flatten().tolist() == [3 * 8 + 2, 3 * 8 + 3, 4 * 8 + 2, 4 * 8 + 3]
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.sum() == 4 and grad[0, 0, 3:5, 2:4].tolist() == [[1, 1], [1, 1]]


def test_deform_roi_pool():
    """Without offsets RoIAlign; with the same offset for all bins RoIAlign of the moved box."""
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64, requires_grad=True)
    rois = torch.tensor([[0, 4.0, 6, 40, 33], [1, 10, 2, 50, 61]], dtype=torch.float64)
    pool = lambda x, offset: ops.deform_roi_pool(x, rois, offset, (2, 3), 0.25, 2, 0.1)  # noqa: E731
    torch.testing.assert_close(pool(x, None), torchvision.ops.roi_align(x, rois, (2, 3), 0.25, 2, True))
    offset = torch.tensor([0.7, -0.4], dtype=torch.float64)[:, None, None].expand(2, 2, 2, 3)
    moved = rois.clone()
    for k in range(2):
        for axis in range(2):
            moved[k, 1 + axis :: 2] += 0.1 * (rois[k, 3 + axis] - rois[k, 1 + axis]) * offset[k, axis, 0, 0]
    torch.testing.assert_close(pool(x, offset), torchvision.ops.roi_align(x, moved, (2, 3), 0.25, 2, True))
    free = torch.randn(2, 2, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(pool, (x, free))
