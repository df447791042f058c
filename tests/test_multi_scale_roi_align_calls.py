"""multi_scale_roi_align: the module, detectors, tracing, autocast, errors."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from helpers import error_against
from peers import torchvision
from roi_inputs import close

import opzoo

OPS = torch.ops.opzoo
NAN, INF = float("nan"), float("inf")
SCALES = [0.25, 0.125]
IMAGES = [(64, 64), (60, 48)]


def make_maps(device="cpu", dtype=torch.float32):
    return OrderedDict((str(i), torch.randn(2, 3, 16 >> i, 16 >> i, device=device, dtype=dtype)) for i in range(2))


def make_boxes(device="cpu"):
    boxes = [[[1.0, 2.0, 30.0, 20.0], [0.0, 0.0, 60.0, 64.0]], [[10.0, 5.0, 44.0, 50.0]]]
    return [torch.tensor(rows, device=device) for rows in boxes]


# The module


def test_repr_is_torchvisions():
    args = (["0", "1"], (7, 3), 2)
    assert repr(opzoo.MultiScaleRoIAlign(*args)) == repr(torchvision.ops.MultiScaleRoIAlign(*args))
    full = opzoo.MultiScaleRoIAlign(["0"], 7, 2, canonical_scale=32, spatial_scales=[0.5], aligned=True)
    assert repr(full).endswith("canonical_scale=32, canonical_level=4, spatial_scales=[0.5], aligned=True)")


def test_maps_are_chosen_by_name_in_the_dicts_order(device):
    maps, boxes = make_maps(device), make_boxes(device)
    more = OrderedDict(pool=torch.zeros(2, 3, 1, 1, device=device), **maps)
    module = opzoo.MultiScaleRoIAlign(["1", "0", "absent"], 3, 2, canonical_scale=30)
    peer = torchvision.ops.MultiScaleRoIAlign(["1", "0", "absent"], 3, 2, canonical_scale=30)
    close(module(more, boxes, IMAGES), peer(more, boxes, IMAGES))


# Detectors


def make_detector(kind, device):
    torch.manual_seed(0)
    build = getattr(torchvision.models.detection, f"{kind}_resnet50_fpn")
    model = build(
        weights=None,
        weights_backbone=None,
        num_classes=3,
        min_size=64,
        max_size=96,
        rpn_pre_nms_top_n_train=60,
        rpn_post_nms_top_n_train=30,
        rpn_pre_nms_top_n_test=60,
        rpn_post_nms_top_n_test=30,
        box_batch_size_per_image=16,
        box_detections_per_img=10,
        box_score_thresh=0.0,
    ).to(device)
    # Random weights give boxes of one size: spread them over the levels.
    torch.nn.init.normal_(model.rpn.head.bbox_pred.weight, std=0.05)
    return model


def with_our_poolers(model):
    model = copy.deepcopy(model)
    heads = model.roi_heads
    for name in ("box_roi_pool", "mask_roi_pool"):
        pool = getattr(heads, name)
        if pool is not None:
            ours = opzoo.MultiScaleRoIAlign(
                pool.featmap_names,
                pool.output_size,
                pool.sampling_ratio,
                canonical_scale=pool.canonical_scale,
                canonical_level=pool.canonical_level,
            )
            setattr(heads, name, ours)
    return model


@pytest.fixture
def one_thread():
    """Small convolutions on a busy machine spend their time at barriers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)  # what differs is the poolers' doing
@pytest.mark.parametrize("kind", ["fasterrcnn", "maskrcnn"])
def test_drops_into_torchvisions_detectors(device, kind):
    """Same detections in evaluation, same losses and gradients in training."""
    theirs = make_detector(kind, device)
    ours = with_our_poolers(theirs)
    images = [torch.rand(3, 60, 80, device=device), torch.rand(3, 64, 64, device=device)]
    targets = []
    for _ in images:
        boxes = torch.tensor([[5.0, 6.0, 30.0, 40.0], [20.0, 10.0, 60.0, 50.0]], device=device)
        target = {"boxes": boxes, "labels": torch.tensor([1, 2], device=device)}
        if kind == "maskrcnn":
            target["masks"] = torch.zeros(2, 64, 80, device=device, dtype=torch.uint8)
            target["masks"][:, 10:35, 10:50] = 1
        targets.append(target)
    targets = [
        {k: v[:, : x.shape[1], : x.shape[2]] if k == "masks" else v for k, v in t.items()}
        for t, x in zip(targets, images, strict=True)
    ]

    with torch.no_grad():
        expected, found = theirs.eval()(images), ours.eval()(images)
    assert any(len(e["boxes"]) for e in expected)
    for e, f in zip(expected, found, strict=True):
        for key, value in e.items():
            assert error_against(value.double(), f[key].double()) <= 1e-3 * max(float(value.abs().max()), 1), key

    losses = []
    for model in (theirs.train(), ours.train()):
        torch.manual_seed(1)
        loss = sum(model(images, copy.deepcopy(targets)).values())
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        if a.grad is not None:
            assert error_against(a.grad, b.grad) <= 1e-3 * float(a.grad.abs().max()) + 1e-6, name


# Tracing and streams


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_of_the_module_with_inferred_scales(device, dynamic):
    module = opzoo.MultiScaleRoIAlign(["0", "1"], 3, 2, canonical_scale=30)

    def call(maps, boxes):
        return module(maps, boxes, IMAGES)

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    maps = OrderedDict((k, v.requires_grad_()) for k, v in make_maps(device).items())
    for count in (2, 1, 0):
        boxes = [t[:count] for t in make_boxes(device)]
        out, expected = compiled(maps, boxes), call(maps, boxes)
        assert torch.equal(out, expected)
        leaves = list(maps.values())
        for a, b in zip(
            torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True
        ):
            assert torch.equal(a, b)


def test_export_of_the_module(device):
    class Pool(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pool = opzoo.MultiScaleRoIAlign(["0", "1"], 3, 2, spatial_scales=SCALES)

        def forward(self, fine, coarse, boxes):
            return self.pool({"0": fine, "1": coarse}, [boxes, boxes])

    fine, coarse = make_maps(device).values()
    boxes = make_boxes(device)[0]
    shapes = (None, None, {0: torch.export.Dim.DYNAMIC})
    program = torch.export.export(Pool(), (fine, coarse, boxes), dynamic_shapes=shapes)
    assert sum("multi_scale_roi_align" in str(node.target) for node in program.graph.nodes) == 1
    for count in (1, 0, 5):
        some = boxes[:1].repeat(count, 1)
        assert torch.equal(program.module()(fine, coarse, some), Pool()(fine, coarse, some))


@pytest.mark.gpu
def test_no_synchronisation_and_graph_capture():
    maps = {name: t.requires_grad_() for name, t in make_maps("cuda").items()}
    boxes, leaves = make_boxes("cuda"), list(maps.values())
    module = opzoo.MultiScaleRoIAlign(["0", "1"], 3, 2)

    def step():
        out = module(maps, boxes, IMAGES)
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t in (*leaves, *boxes):
            t.mul_(0.9)
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


# Autocast


def test_autocast_with_maps_of_two_dtypes(device):
    """Layers under autocast may differ in dtype; the result has the first map's, as in torchvision."""
    fine, coarse = make_maps(device).values()
    half = torch.bfloat16 if device.type == "cpu" else torch.float16
    boxes = make_boxes(device)
    ours, peer = opzoo.MultiScaleRoIAlign(["0", "1"], 3, 2), torchvision.ops.MultiScaleRoIAlign(["0", "1"], 3, 2)
    for dtypes in ((torch.float32, half), (half, torch.float32)):
        maps = OrderedDict([("0", fine.to(dtypes[0])), ("1", coarse.to(dtypes[1]))])
        with torch.autocast(device.type, half):
            out, expected = ours(maps, boxes, IMAGES), peer(maps, boxes, IMAGES)
        assert out.dtype == expected.dtype == dtypes[0]
        assert error_against(expected, out) <= 2e-2
        with pytest.raises(RuntimeError, match=r"inputs\[1\] must have the dtype of inputs\[0\]"):
            ours(maps, boxes, IMAGES)


# Errors


def one(*shape, **options):
    return torch.ones(*shape, **options)


PAIR = [one(1, 3, 8, 8), one(1, 3, 4, 4)]
ERRORS = {
    "inputs-type": ({"inputs": one(1, 3, 8, 8)}, TypeError, "inputs must be a list of tensors, got Tensor"),
    "inputs-member": ({"inputs": [PAIR[0], None]}, TypeError, r"inputs\[1\] must be a tensor, got NoneType"),
    "inputs-none": ({"inputs": [], "spatial_scales": []}, RuntimeError, "inputs must hold 1 to 8 maps, got 0"),
    "inputs-nine": ({"inputs": [PAIR[0]] * 9, "spatial_scales": [0.5] * 9}, RuntimeError, "1 to 8 maps, got 9"),
    "inputs-rank": ({"inputs": [PAIR[0], one(3, 4, 4)]}, RuntimeError, r"inputs\[1\] must have 4 axes, got 3"),
    "inputs-int": ({"inputs": [t.long() for t in PAIR]}, RuntimeError, r"inputs\[0\] must be float64.*got int64"),
    "inputs-dtype": (
        {"inputs": [PAIR[0], PAIR[1].half()]},
        RuntimeError,
        r"dtype of inputs\[0\], float32, got float16",
    ),
    "inputs-batch": (
        {"inputs": [PAIR[0], one(2, 3, 4, 4)]},
        RuntimeError,
        r"inputs\[1\] must have the batch and the channels",
    ),
    "inputs-channels": (
        {"inputs": [PAIR[0], one(1, 4, 4, 4)]},
        RuntimeError,
        r"channels of inputs\[0\], \[1, 3, 8, 8\], got \[1, 4, 4, 4\]",
    ),
    "inputs-pixels": (
        {"inputs": [PAIR[0], one(1, 3, 0, 4)]},
        RuntimeError,
        r"boxes must be empty for a map of shape \[1, 3, 0, 4\]",
    ),
    "scales-count": ({"spatial_scales": [0.5]}, ValueError, "spatial_scales must hold one number per map, 2, got 1"),
    "scales-type": ({"spatial_scales": 0.5}, TypeError, "spatial_scales must be a list of numbers, got float"),
    "scales-member": ({"spatial_scales": [0.5, None]}, TypeError, r"spatial_scales\[1\] must be a number, got None"),
    "scales-zero": (
        {"spatial_scales": [0.5, 0.0]},
        ValueError,
        r"spatial_scales\[1\] must be finite and positive, got 0",
    ),
    "scales-nan": (
        {"spatial_scales": [NAN, 0.5]},
        ValueError,
        r"spatial_scales\[0\] must be finite and positive, got nan",
    ),
    "scales-inf": (
        {"spatial_scales": [0.5, INF]},
        ValueError,
        r"spatial_scales\[1\] must be finite and positive, got inf",
    ),
    "canonical-scale": ({"canonical_scale": 0}, ValueError, "canonical_scale must be finite and positive, got 0"),
    "canonical-level": ({"canonical_level": NAN}, ValueError, "canonical_level must be finite, got nan"),
    "canonical-type": ({"canonical_level": "4"}, TypeError, "canonical_level must be a number, got '4'"),
    "ratio": ({"sampling_ratio": 2**31}, ValueError, "sampling_ratio must be at most 32767"),
    "size": ({"output_size": (0, 2)}, ValueError, r"output_size must be positive, got \(0, 2\)"),
    "boxes-columns": ({"boxes": torch.zeros(2, 4)}, RuntimeError, r"boxes must have shape \[K, 5\]"),
    "boxes-type": (
        {"boxes": 3},
        TypeError,
        "multi_scale_roi_align: boxes must be a tensor or a list of tensors, got int",
    ),
    "list-length": ({"boxes": [torch.zeros(1, 4)] * 2}, ValueError, "one tensor per image of input, 1, got 2"),
}


def to_device(value, device):
    if isinstance(value, list):
        return [to_device(item, device) for item in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("change,error,message", ERRORS.values(), ids=ERRORS)
def test_errors(change, error, message, device):
    args = {"inputs": PAIR, "boxes": torch.zeros(2, 5), "output_size": 2, "spatial_scales": [0.5, 0.25]} | change
    with pytest.raises(error, match="opzoo::multi_scale_roi_align: ") as caught:
        opzoo.multi_scale_roi_align(**{name: to_device(value, device) for name, value in args.items()})
    assert caught.match(message)


MODULE_ERRORS = {
    "dict": (lambda m, x, b: m(list(x.values()), b, IMAGES), TypeError, "x must be a dict of feature maps, got list"),
    "names": (lambda m, x, b: m({"a": x["0"]}, b, IMAGES), ValueError, r"x must hold one of \['0', '1'\], got \['a'\]"),
    "no-images": (lambda m, x, b: m(x, b, []), ValueError, r"image_shapes must hold a \(height, width\) per image"),
    "no-shapes": (lambda m, x, b: m(x, b), ValueError, "image_shapes must hold"),
    "no-height": (lambda m, x, b: m(x, b, [(0, 5), (0, 5)]), ValueError, "no scale to infer from"),
    "no-rows": (lambda m, x, b: m({"0": x["0"][:, :, :0]}, b, IMAGES), ValueError, "no scale to infer from"),
}


@pytest.mark.parametrize("call,error,message", MODULE_ERRORS.values(), ids=MODULE_ERRORS)
def test_module_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(opzoo.MultiScaleRoIAlign(["0", "1"], 3, 2), make_maps(), make_boxes())


@pytest.mark.parametrize("bad", [1.0, -1.0, 0.5, NAN, 1e5])
def test_image_index_is_checked_on_the_cpu(bad):
    boxes = torch.tensor([[0.0, 0, 0, 3, 3], [bad, 0, 0, 3, 3]])
    with pytest.raises(ValueError, match=r"boxes\[1, 0\] .*integer in \[0, 1\), got"):
        opzoo.multi_scale_roi_align(PAIR, boxes, 2, [0.5, 0.25])
    grad = torch.ones(2, 3, 2, 2)
    with pytest.raises(ValueError, match=r"_multi_scale_roi_align_backward: boxes\[1, 0\]"):
        OPS._multi_scale_roi_align_backward(
            grad, boxes, None, 1, 3, [8, 4], [8, 4], [0.5, 0.25], 2, False, 224.0, 4.0, 1, 2, False
        )


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [1.0, -1.0, 0.5, NAN, 1e5])
def test_image_index_is_skipped_on_cuda(bad):
    maps = [t.cuda().requires_grad_() for t in PAIR]
    boxes = torch.tensor([[0.0, 0, 0, 3, 3], [bad, 0, 0, 3, 3]], device="cuda")
    out = opzoo.multi_scale_roi_align(maps, boxes, 2, [0.5, 0.25])
    assert out[0].any() and not out[1].any()
    assert not any(grad.any() for grad in torch.autograd.grad(out[1].sum(), maps))
    opzoo.set_debug(True)
    try:
        with pytest.raises(ValueError, match=r"boxes\[1, 0\] .*integer in \[0, 1\), got"):
            opzoo.multi_scale_roi_align(maps, boxes, 2, [0.5, 0.25])
    finally:
        opzoo.set_debug(False)


RAW_ERRORS = {
    "heights": ({5: [8]}, ValueError, "spatial_scales must hold one number per map, 1, got 2"),
    "widths": ({6: [8]}, ValueError, "widths must hold one number per map, 2, got 1"),
    "negative": ({5: [8, -4]}, ValueError, r"grad_input sizes must not be negative, got \[1, 3, -4, 4\]"),
    "overflow": ({5: [8, 2**40], 6: [8, 2**40]}, ValueError, "grad_input is too large"),
    "empty": ({5: [8, 0]}, RuntimeError, "boxes must be empty for a map of shape"),
    "grad-shape": ({0: torch.ones(2, 3, 2, 2)}, RuntimeError, r"grad must have shape \[1, 3, 2, 2\]"),
}


@pytest.mark.parametrize("change,error,message", RAW_ERRORS.values(), ids=RAW_ERRORS)
def test_raw_backward_errors(change, error, message, device):
    args = [torch.ones(1, 3, 2, 2), torch.zeros(1, 5), None, 1, 3, [8, 4], [8, 4], [0.5, 0.25], 2, False]
    args += [224.0, 4.0, 1, 2, False]
    for position, value in change.items():
        args[position] = value
    with pytest.raises(error, match=message):
        OPS._multi_scale_roi_align_backward(*[to_device(value, device) for value in args])


def test_gradient_of_one_map_alone(device):
    fine, coarse = (t.to(device) for t in PAIR)
    boxes = torch.tensor([[0.0, 0, 0, 3, 3], [0.0, 0, 0, 20, 20]], device=device)
    for position in (0, 1):
        maps = [t.detach().requires_grad_(i == position) for i, t in enumerate((fine, coarse))]
        (grad,) = torch.autograd.grad(
            opzoo.multi_scale_roi_align(maps, boxes, 2, [0.5, 0.25], 2, canonical_scale=4, canonical_level=2).sum(),
            [maps[position]],
        )
        assert grad.any()


def test_names_are_no_str():
    with pytest.raises(TypeError, match="featmap_names must be a list of names, got the str '0'"):
        opzoo.MultiScaleRoIAlign("0", 7, 2)
