"""roi_align: threads, the module, tracing, sizes."""

from __future__ import annotations

import pytest
import torch
from peers import torchvision
from roi_inputs import box, close, make_boxes, make_map

import opzoo

MODES = ("avg", "max")
NAN, INF = float("nan"), float("inf")
OPS = torch.ops.opzoo


# Threads, the module, tracing, sizes


def test_module_repr_and_forward(device):
    x, boxes = make_map(1, 2, 5, 5, device=device), box(0.0, 0.0, 3.0, 3.0, device=device)
    ours, peer = opzoo.RoIAlign((2, 3), 0.5, 2, True), torchvision.ops.RoIAlign((2, 3), 0.5, 2, True)
    assert repr(ours) == repr(peer)
    assert repr(opzoo.RoIAlign(7, 0.5, 2, pool_mode="max")).endswith("aligned=False, pool_mode='max')")
    close(ours(x, boxes), peer(x, boxes))
    close(torch.nn.Sequential(ours)[0](x, [boxes[:, 1:]]), peer(x, boxes))


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("op", ["roi_align", "_roi_align_backward", "_max", "_max_backward", "_max_sample"])
def test_opcheck(device, op, channels_last):
    x = make_map(2, 3, 7, 8, device=device, channels_last=channels_last).requires_grad_()
    boxes = make_boxes(4, 2, 8, device)
    grad_out = torch.randn(4, 3, 2, 3, device=device, requires_grad=True)
    argmax = torch.randint(-1, 4, (4, 3, 2, 3), device=device)
    geometry, sizes = (0.7, 2, True), (2, 3, 7, 8)
    name, args = {
        "roi_align": ("roi_align", (x, boxes, None, 2, 3, *geometry)),
        "_roi_align_backward": ("_roi_align_backward", (grad_out, boxes, None, *sizes, *geometry, channels_last)),
        "_max": ("_roi_align_max", (x, boxes, None, 2, 3, *geometry)),
        "_max_backward": ("_roi_align_max_backward", (grad_out, argmax, boxes, None, *sizes, *geometry, channels_last)),
        "_max_sample": ("_roi_align_max_sample", (x, argmax, boxes, None, *geometry)),
    }[op]
    torch.library.opcheck(getattr(OPS, name).default, args)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("mode", MODES)
def test_compile_with_lists_of_any_length(device, mode):
    x = make_map(2, 3, 7, 8, device=device)

    def call(x, first, second):
        return opzoo.roi_align(x, [first, second], 2, 0.5, pool_mode=mode)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (3, 5, 1, 0):
        boxes = make_boxes(count, 2, 8, device)[:, 1:]
        assert torch.equal(compiled(x, boxes, boxes[:1]), call(x, boxes, boxes[:1]))


@pytest.mark.parametrize("bad", ["columns", "size", "scale", "ratio", "index"])
def test_fake_kernels_refuse_the_same(bad):
    x, boxes = torch.empty(1, 3, 4, 4, device="meta"), torch.empty(2, 5, device="meta")
    args = [x, boxes, None, 2, 2, 1.0, 2, False]
    change = {
        "columns": (1, torch.empty(2, 4, device="meta"), RuntimeError),
        "size": (3, 0, ValueError),
        "scale": (5, NAN, ValueError),
        "ratio": (6, 32768, ValueError),
        "index": (2, torch.empty(2, device="meta", dtype=torch.int64), RuntimeError),
    }[bad]
    args[change[0]] = change[1]
    with pytest.raises(change[2], match="opzoo::roi_align: "):
        OPS.roi_align(*args)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements():
    """Offsets (n * C + c) * H * W past 2^31, forward and backward; zeros cost no memory until written."""
    x = torch.zeros(5, 1, 32768, 32768, dtype=torch.bfloat16)
    x[4, 0, :4, :4] = 1
    boxes = box(0.0, 0.0, 3.0, 3.0, image=4.0)
    assert opzoo.roi_align(x, boxes, 1).item() == 1
    assert opzoo.roi_align(x, boxes, 1, pool_mode="max").item() == 1
    del x
    height, width = 32768, 21847  # three such images end just past 2^31
    last = box(width - 9.0, height - 9.0, width - 6.0, height - 6.0, image=2.0)
    sizes = (3, 1, height, width)
    grad_input = OPS._roi_align_backward(torch.ones(1, 1, 1, 1), last, None, *sizes, 1.0, 2, False, False)
    assert grad_input[2, 0, -10:, -10:].sum().item() == pytest.approx(1)
    assert not grad_input[0, 0, :9].any()


def test_offsets_past_2_to_the_31_without_the_memory(device):
    """An expanded map: the offsets are as large, the storage is one image."""
    x = torch.zeros(1, 1, 1, 8, device=device).expand(3, 2, 2**31, 8)
    out = opzoo.roi_align(x, box(0.0, 2.0**30, 3.0, 2.0**30 + 3, image=2.0, device=device), 2)
    assert not out.any()


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("shape", [(9, 256, 1000, 1000), (5, 1, 32768, 32768)], ids=str)
def test_cuda_maps_above_2_to_31_elements(shape, channels_last):
    last = shape[0] - 1
    x = torch.zeros(shape, device="cuda", dtype=torch.float16)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    x[last] = 1
    x.requires_grad_()
    boxes = torch.tensor([[last, 10.0, 10, 90, 90], [0, 10, 10, 90, 90]], device="cuda")
    for ratio in (2, 0):
        out = opzoo.roi_align(x, boxes, 7, 1.0, ratio, True)
        assert (out[0] == 1).all() and (out[1] == 0).all()
        grad = torch.autograd.grad(out, x, torch.ones_like(out))[0]
        for image in (0, last):
            assert grad[image].double().sum().item() == pytest.approx(49 * shape[1], rel=0.02)
        assert not grad[1].any()


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
def test_cuda_result_above_2_to_31_elements(channels_last):
    x = torch.randn(1, 256, 64, 64, device="cuda", dtype=torch.float16)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    boxes = torch.tensor([[0, 0.0, 0, 40, 50]], device="cuda").repeat(172_000, 1)
    boxes[-1] = torch.tensor([0, 5.0, 6, 30, 20])
    out = opzoo.roi_align(x, boxes, 7, 1.0, 2, True)
    assert out.numel() > 2**31
    assert torch.equal(out[-1:], opzoo.roi_align(x, boxes[-1:], 7, 1.0, 2, True))
    assert torch.equal(out[0], out[-2])
