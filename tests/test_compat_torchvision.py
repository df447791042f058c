"""opzoo under torchvision's models: the same detections, the same gradients, and back."""

from __future__ import annotations

import pytest
import torch
from peers import torchvision

import opzoo
from opzoo.compat import torchvision as compat

detection = torchvision.models.detection
RoIAlign, boxes = torchvision.ops.RoIAlign, torchvision.ops.boxes


@pytest.fixture(autouse=True)
def undo():
    yield
    compat.uninstall()


def calls_of(monkeypatch, name):
    """How often ``opzoo.<name>`` is called."""
    counted = []
    original = getattr(opzoo, name)

    def counting(*args, **kwargs):
        counted.append(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(opzoo, name, counting)
    return counted


def make_model(kind, device):
    torch.manual_seed(3)
    sizes = {"min_size": 96, "max_size": 128, "box_detections_per_img": 20, "rpn_post_nms_top_n_test": 60}
    model = getattr(detection, f"{kind}_resnet50_fpn")(weights=None, weights_backbone=None, num_classes=5, **sizes)
    return model.to(device).double()


@pytest.mark.parametrize("kind", ["fasterrcnn", "maskrcnn"])
def test_detections_are_the_same(device, kind):
    model = make_model(kind, device).eval()
    images = [torch.rand(3, 96, 128, device=device, dtype=torch.float64) for _ in range(2)]
    with torch.no_grad():
        expected = model(images)
        with compat.installed():
            found = model(images)
    assert sum(len(image["scores"]) for image in expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value)


def test_gradients_are_the_same(device):
    model = make_model("fasterrcnn", device).train()
    images = [torch.rand(3, 96, 128, device=device, dtype=torch.float64)]
    target = {"boxes": torch.tensor([[10.0, 10, 60, 70]], device=device), "labels": torch.tensor([2], device=device)}

    def gradients():
        torch.manual_seed(5)  # the samplers of proposals draw
        losses = model(images, [target])
        return torch.autograd.grad(sum(losses.values()), list(model.roi_heads.parameters()))

    expected = gradients()
    with compat.installed():
        found = gradients()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_every_name_is_replaced_and_given_back(monkeypatch):
    names = ("nms", "batched_nms", "roi_align", "deform_conv2d", "sigmoid_focal_loss")
    before = {name: getattr(torchvision.ops, name) for name in names}
    pool = compat._poolers._multiscale_roi_align
    with compat.installed():
        for name in names:
            assert getattr(torchvision.ops, name) is not before[name]
        assert boxes.batched_nms is torchvision.ops.batched_nms
        assert detection.roi_heads.roi_align is torchvision.ops.roi_align
        assert compat._poolers._multiscale_roi_align is not pool
        with compat.installed():
            pass
        assert torchvision.ops.nms is not before["nms"]
    for name in names:
        assert getattr(torchvision.ops, name) is before[name]
    assert boxes.batched_nms is before["batched_nms"]
    assert detection.roi_heads.roi_align is before["roi_align"]
    assert compat._poolers._multiscale_roi_align is pool


def test_modules_of_torchvision_call_opzoo(monkeypatch):
    counted = calls_of(monkeypatch, "roi_align")
    pool = RoIAlign(2, 1.0, 2)
    x, rois = torch.rand(1, 3, 8, 8), torch.tensor([[0.0, 0, 0, 4, 4]])
    expected = pool(x, rois)
    assert not counted
    compat.install()
    torch.testing.assert_close(pool(x, rois), expected)
    assert counted == ["roi_align"]


def test_classes_stay_apart_where_the_offset_merges_them():
    # One class away from the other by the largest coordinate plus one: negative boxes meet again.
    overlapping = torch.tensor([[-30.0, -30, 1, 1], [-32.0, -32, -1, -1]])
    scores, classes = torch.tensor([0.9, 0.8]), torch.tensor([0, 1])
    assert torchvision.ops.batched_nms(overlapping, scores, classes, 0.5).tolist() == [0]
    compat.install()
    assert torchvision.ops.batched_nms(overlapping, scores, classes, 0.5).tolist() == [0, 1]
    assert torchvision.ops.batched_nms(overlapping, scores, classes.double(), 0.5).tolist() == [0, 1]


def test_a_model_is_compiled_with_opzoo_in_its_graph():
    names = []

    def backend(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compat.install()
    pool = RoIAlign(2, 1.0, 2)
    torch.compile(pool, backend=backend, fullgraph=True)(torch.rand(1, 3, 8, 8), torch.tensor([[0.0, 0, 0, 4, 4]]))
    assert any("opzoo" in name for name in names)
