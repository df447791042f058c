"""opzoo's modules in mmengine's registry, and under mmcv's names: parameters, results, replaced functions."""

from __future__ import annotations

import sys

import pytest
import torch
from peers import torchvision

pytest.importorskip("mmdet", reason="needs mmdet, mmengine and mmcv-lite")

from opzoo.compat import mmdet as compat

# isort: split
import mmcv.ops
from mmdet.registry import MODELS
from mmdet.utils import register_all_modules
from mmengine.registry import MODELS as ROOT_MODELS
from mmengine.runner import load_state_dict

import opzoo

nms_module = sys.modules["mmcv.ops.nms"]


@pytest.fixture(scope="module", autouse=True)
def registered():
    register_all_modules(init_default_scope=True)
    originals = {name: ROOT_MODELS.get(name) for name in ("DCN", "DCNv2", "MultiScaleDeformableAttention")}
    compat.register()
    yield originals
    for name, module in originals.items():
        ROOT_MODELS.register_module(name=name, module=module, force=True)


@pytest.fixture
def overridden(registered):
    compat.register(override=True)
    yield
    for name, module in registered.items():
        ROOT_MODELS.register_module(name=name, module=module, force=True)
    back = {ours: theirs for theirs, ours in compat._FUNCTIONS.items()}
    back[compat.RoIAlign] = compat._mmcv_roi_align
    back[compat.MultiScaleDeformableAttention] = compat._mmcv_attention
    compat.rebind(compat._PACKAGES, back)


def build_pair(name, **options):
    torch.manual_seed(1)
    theirs = MODELS.build({"type": name, **options})
    torch.manual_seed(1)
    ours = MODELS.build({"type": f"opzoo.{name}", **options})
    assert type(ours).__module__ == "opzoo.compat.mmdet" and isinstance(ours, type(theirs))
    assert type(theirs).__module__.startswith("mmcv.")
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key
    return ours, theirs


@pytest.mark.parametrize("name", ["DCN", "DCNv2"])
@pytest.mark.parametrize("deform_groups", [1, 2])
def test_deformable_convolutions(name, deform_groups):
    options = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "padding": 1, "deform_groups": deform_groups}
    ours, theirs = build_pair(name, **options)
    for module in (ours, theirs):
        torch.manual_seed(2)
        torch.nn.init.normal_(module.conv_offset.weight, std=0.3)
    x = torch.randn(5, 4, 9, 8, requires_grad=True)
    torch.testing.assert_close(ours(x), theirs(x))
    along = torch.randn_like(theirs(x))
    for left, right in zip(
        torch.autograd.grad(ours(x), [x, *ours.parameters()], along),
        torch.autograd.grad(theirs(x), [x, *theirs.parameters()], along),
        strict=True,
    ):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["DCN", "DCNv2"])
def test_names_of_old_checkpoints_are_upgraded(name):
    """Before version 2 the offset branch of conv2.weight was conv2_offset.weight. The hook is mmcv's own."""
    for module in build_pair(name, in_channels=4, out_channels=4, kernel_size=3):
        state = {f"conv2.{key}": torch.full_like(value, 0.5) for key, value in module.state_dict().items()}
        for end in ("weight", "bias"):
            state[f"conv2_offset.{end}"] = state.pop(f"conv2.conv_offset.{end}")
        missing = []
        for prefix, child in (("conv2.", module), ("conv2.conv_offset.", module.conv_offset)):
            child._load_from_state_dict(state, prefix, {}, True, missing, [], [])
        assert not missing
        assert all(bool((value == 0.5).all()) for value in module.state_dict().values())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("name", "bias"),
    [("DeformConv2dPack", False), ("ModulatedDeformConv2dPack", True), ("ModulatedDeformConv2dPack", False)],
)
def test_files_of_mmcv_fit_the_layers_of_opzoo(tmp_path, name, groups, bias):
    """Same keys both ways, and of them the function that mmcv documents, by torchvision's convolution."""
    modulated = name.startswith("Modulated")
    numbers = {"in_channels": 4, "out_channels": 6, "kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 2)}
    numbers |= {"dilation": (1, 2), "groups": groups, "bias": bias}
    theirs = getattr(mmcv.ops, name)(**numbers, deform_groups=2)
    torch.nn.init.normal_(theirs.conv_offset.weight, std=0.3)
    torch.nn.init.normal_(theirs.conv_offset.bias)
    torch.save(theirs.state_dict(), tmp_path / "mmcv.pth")
    ours = getattr(opzoo, name)(**numbers, offset_groups=2)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [t.shape for t in ours.state_dict().values()] == [t.shape for t in theirs.state_dict().values()]
    ours.load_state_dict(torch.load(tmp_path / "mmcv.pth", weights_only=True))
    x = torch.randn(2, 4, 9, 8)
    maps = torch.nn.functional.conv2d(x, theirs.conv_offset.weight, theirs.conv_offset.bias, (2, 1), (1, 2), (1, 2))
    mask = None
    if modulated:
        first, second, mask = maps.chunk(3, 1)
        maps, mask = torch.cat([first, second], 1), mask.sigmoid()
    expected = torchvision.ops.deform_conv2d(
        x, maps, theirs.weight, theirs.bias if bias else None, (2, 1), (1, 2), (1, 2), mask
    )
    for module in (ours, theirs):
        torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-4)
    again = getattr(mmcv.ops, name)(**numbers, deform_groups=2)
    again.load_state_dict(ours.state_dict())
    assert all(torch.equal(again.state_dict()[key], value) for key, value in theirs.state_dict().items())


def test_old_names_inside_a_model_are_treated_as_by_mmcv():
    """torch and mmengine show a layer only the keys that begin with its name; the hook of both finds no more."""
    options = {"in_channels": 4, "out_channels": 4, "kernel_size": 3}
    found = []
    for kind in ("DCNv2", "opzoo.DCNv2"):
        model = torch.nn.ModuleDict({"conv2": MODELS.build({"type": kind, **options})})
        state = {key.replace("conv2.conv_offset", "conv2_offset"): t for key, t in model.state_dict().items()}
        found.append(model.load_state_dict(state, strict=False))
        state = model.state_dict()
        state["conv2.weight"] = torch.full_like(state["conv2.weight"], 0.25)
        load_state_dict(model, state, strict=True)
        assert bool((model["conv2"].weight == 0.25).all())
    assert found[0] == found[1] and found[0].missing_keys == ["conv2.conv_offset.weight", "conv2.conv_offset.bias"]


def test_attention():
    ours, theirs = build_pair("MultiScaleDeformableAttention", embed_dims=16, num_heads=2, num_levels=2, dropout=0.0)
    shapes, starts = torch.tensor([[3, 4], [2, 2]]), torch.tensor([0, 12])
    query, value, position = torch.randn(10, 2, 16), torch.randn(16, 2, 16), torch.randn(10, 2, 16)
    for numbers in (2, 4):
        options = {
            "value": value,
            "query_pos": position,
            "reference_points": torch.rand(2, 10, 2, numbers),
            "spatial_shapes": shapes,
            "level_start_index": starts,
        }
        torch.testing.assert_close(ours(query, **options), theirs(query, **options))


def test_roi_extractor():
    from mmdet.models.roi_heads import SingleRoIExtractor

    maps = [torch.randn(2, 8, 16, 16), torch.randn(2, 8, 8, 8)]
    rois = torch.tensor([[0, 1.0, 2, 30, 40], [1, 0, 0, 120, 100]])
    layer = {"output_size": 7, "sampling_ratio": 0}
    found = SingleRoIExtractor({"type": "opzoo.RoIAlign", **layer}, 8, [4, 8])
    assert type(found.roi_layers[0]) is compat.RoIAlign
    expected = SingleRoIExtractor({"type": "RoIAlign", **layer}, 8, [4, 8])
    torch.testing.assert_close(found(maps, rois), expected(maps, rois))


def make_boxes(count=300, classes=4):
    boxes = torch.rand(count, 4) * 60
    boxes[:, 2:] += boxes[:, :2]
    return boxes, torch.rand(count), torch.randint(0, classes, (count,))


@pytest.mark.parametrize(
    "config",
    [
        {"type": "nms", "iou_threshold": 0.5},
        {"type": "nms", "iou_thr": 0.4, "max_num": 20, "score_threshold": 0.2},
        {"iou_threshold": 0.5, "class_agnostic": True, "split_thr": 100_000},
        None,
    ],
    ids=str,
)
def test_batched_nms(config):
    inputs = make_boxes()
    for ours, theirs in zip(
        compat._batched_nms(*inputs, config), compat._mmcv_batched_nms(*inputs, config), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "idxs",
    [lambda c: c.int(), lambda c: c.double(), lambda c: c.float() / 8, lambda c: c.half() - 2, lambda c: c.bool()],
    ids=["int32", "float64", "fractions", "negative", "bool"],
)
def test_class_ids_of_any_dtype(idxs):
    """Two boxes are of one class where their ids are equal: fractions are not cut off."""
    boxes, scores, classes = make_boxes()
    given = idxs(classes)
    _, keep = compat._batched_nms(boxes, scores, given, {"iou_threshold": 0.3})
    expected = [int(i) for value in given.unique() for i in (given == value).nonzero().flatten()[
        torchvision.ops.nms(boxes[given == value], scores[given == value], 0.3)]]  # fmt: skip
    assert sorted(keep.tolist()) == sorted(expected) and bool((scores[keep].diff() <= 0).all())


@pytest.mark.parametrize("kind", ["nms", "soft_nms"])
@pytest.mark.parametrize("limit", [0, -1, 7])
def test_limits_of_batched_nms(kind, limit):
    """Only a positive max_num limits, in mmcv as well."""
    boxes, scores, classes = make_boxes()
    config = {"type": kind, "iou_threshold": 0.3, "max_num": limit}
    dets, keep = compat._batched_nms(boxes, scores, classes, config)
    full = compat._batched_nms(boxes, scores, classes, {"type": kind, "iou_threshold": 0.3})
    count = len(full[1]) if limit <= 0 else limit
    assert torch.equal(keep, full[1][:count]) and torch.equal(dets, full[0][:count])
    empty = compat._batched_nms(boxes[:0], scores[:0], classes[:0], config)
    assert empty[0].shape == (0, 5) and empty[1].shape == (0,)


def test_dtypes_of_results():
    """A score keeps its digits beside boxes of integers or of half precision."""
    boxes, scores = torch.tensor([[0, 0, 10, 10], [20, 20, 30, 30]]), torch.tensor([0.75, 0.123456])
    for function in (
        lambda b: compat._batched_nms(b, scores, torch.tensor([0, 0]), {"iou_threshold": 0.5})[0],
        lambda b: compat._soft_nms(b, scores)[0],
    ):
        for given in (boxes, boxes.half()):
            assert function(given)[:, 4].tolist() == scores.tolist()


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"iou_threshold": 0.5, "iou_thr": 0.4}, AssertionError),
        ({"type": "soft_nms", "score_threshold": 0.5}, TypeError),
        ({"iou_threshold": 0.5, "no_such_option": 1}, TypeError),
        ({}, TypeError),
        ({"iou_threshold": 0.5, "offset": 2}, (ValueError, AssertionError)),
    ],
    ids=str,
)
def test_configs_that_mmcv_refuses(config, error):
    for function in (compat._batched_nms, compat._mmcv_batched_nms):
        with pytest.raises(error):
            function(*make_boxes(), config)


def test_soft_nms_takes_what_mmcv_takes():
    boxes, scores, _ = make_boxes(20)
    expected = compat._mmcv_soft_nms(boxes, scores, 0.4)
    with pytest.warns(DeprecationWarning, match="iou_thr"):
        found = compat._soft_nms(boxes, scores, iou_thr=0.4)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    mixed = compat._soft_nms(boxes, scores.numpy(), 0.4)  # a tensor and an array
    torch.testing.assert_close(torch.as_tensor(mixed[0]), expected[0])


def test_batched_soft_nms():
    boxes, scores, classes = make_boxes()
    config = {"type": "soft_nms", "iou_threshold": 0.3, "min_score": 0.05}
    dets, keep = compat._batched_nms(boxes, scores, classes, config)
    expected, kept = compat._mmcv_batched_nms(boxes, scores, classes, config)
    assert torch.equal(keep, kept)
    torch.testing.assert_close(dets, expected, rtol=1e-3, atol=1e-4)  # mmcv shifts the boxes of each class


def test_classes_above_the_threshold_of_mmcv():
    """mmcv loops over classes from split_thr boxes on, even if told that classes do not matter."""
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9]])
    config = {"iou_threshold": 0.5, "class_agnostic": True, "split_thr": 1}
    inputs = boxes, torch.tensor([0.9, 0.8]), torch.tensor([0, 1])
    assert compat._mmcv_batched_nms(*inputs, config)[1].tolist() == [0, 1]
    assert compat._batched_nms(*inputs, config)[1].tolist() == [0]


def test_override(overridden):
    from mmdet.models.dense_heads import base_dense_head
    from mmdet.models.layers.transformer import deformable_detr_layers

    for name, options in (
        ("DCNv2", {"in_channels": 4, "out_channels": 4, "kernel_size": 3}),
        ("MultiScaleDeformableAttention", {"embed_dims": 16, "num_heads": 2}),
    ):
        assert type(MODELS.build({"type": name, **options})) is getattr(compat, name)
    assert mmcv.ops.RoIAlign is compat.RoIAlign
    assert base_dense_head.batched_nms is compat._batched_nms and nms_module.soft_nms is compat._soft_nms
    assert deformable_detr_layers.MultiScaleDeformableAttention is compat.MultiScaleDeformableAttention


def test_without_override_mmcv_stays():
    from mmdet.models.dense_heads import base_dense_head

    assert mmcv.ops.RoIAlign is compat._mmcv_roi_align
    assert base_dense_head.batched_nms is compat._mmcv_batched_nms
