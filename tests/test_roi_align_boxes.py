"""The gradient of roi_align to its boxes: values, kinks, transforms, what it costs, bounded work."""

from __future__ import annotations

import itertools
import time
import weakref

import pytest
import torch
from helpers import assert_as_good_as, error_against
from roi_inputs import box, close, make_boxes, make_map
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vmap

import opzoo
import opzoo.reference

NAN, INF = float("nan"), float("inf")
OPS = torch.ops.opzoo

# output_size, spatial_scale, sampling_ratio, aligned
GEOMETRIES = [
    pytest.param((2, 2), 1.0, 2, False, id="fixed"),
    pytest.param((2, 3), 0.7, 3, True, id="fixed-aligned"),
    pytest.param((1, 3), 0.5, -1, False, id="adaptive"),
    pytest.param((3, 2), 0.3, 0, True, id="adaptive-aligned"),
    pytest.param((2, 2), 1.0, 11, True, id="denser-than-pixels"),
]


def gradients(function, x, boxes, *args, weights=None):
    """Of a weighted sum of the result, to the map and to the boxes."""
    x, boxes = x.detach().requires_grad_(), boxes.detach().requires_grad_()
    out = function(x, boxes, *args)
    if weights is None:
        weights = torch.cos(torch.arange(out.numel(), device=out.device, dtype=torch.float64)).reshape(out.shape)
    return torch.autograd.grad((out * weights.to(out.dtype)).sum(), (x, boxes))


def agrees(x, boxes, *args, tolerance=1e-10):
    ours, exact = (gradients(f, x, boxes, *args) for f in (opzoo.roi_align, opzoo.reference.roi_align))
    close(ours[0], exact[0], tolerance)
    close(ours[1], exact[1], tolerance)
    return ours[1]


# Values


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("geometry", [g.values for g in GEOMETRIES], ids=[g.id for g in GEOMETRIES])
def test_equals_the_derivative_of_the_reference(device, geometry, channels_last):
    _, scale, *_ = geometry
    for channels, (height, width) in itertools.product((1, 4, 16, 35, 132), ((1, 1), (1, 7), (9, 6))):
        x = make_map(2, channels, height, width, device=device, dtype=torch.float64, channels_last=channels_last)
        boxes = make_boxes(5, 2, 9 / scale, device).double()
        agrees(x, boxes, *geometry)


@pytest.mark.parametrize("geometry", [g.values for g in GEOMETRIES], ids=[g.id for g in GEOMETRIES])
def test_gradcheck(device, geometry):
    size, scale, ratio, aligned = geometry
    x = make_map(2, 2, 5, 6, device=device, dtype=torch.float64).requires_grad_()
    boxes = make_boxes(3, 2, 4 / scale, device).double()
    boxes[:, 1:] += torch.tensor([0.113, 0.271, 0.377, 0.191], device=device)
    image, moving = boxes[:, :1], boxes[:, 1:].clone().requires_grad_()

    def call(x, moving):
        return opzoo.roi_align(x, torch.cat([image, moving], 1), size, scale, ratio, aligned)

    assert torch.autograd.gradcheck(call, (x, moving), check_forward_ad=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_single_and_half_sum_in_fp32(device, dtype, channels_last):
    x = make_map(2, 40, 17, 19, device=device, dtype=dtype, channels_last=channels_last)
    boxes = make_boxes(7, 2, 18, device)
    weights = torch.randn(7, 40, 3, 4, device=device).to(dtype)  # exact in every dtype of the comparison
    args = ((3, 4), 0.8, 0, True)
    exact = gradients(opzoo.reference.roi_align, x.double(), boxes.double(), *args, weights=weights)[1]
    # The reference rounds the pooled result to half on its way, not what flows back: an fp32 peer.
    peer = gradients(opzoo.reference.roi_align, x.float(), boxes, *args, weights=weights)[1]
    ours = gradients(opzoo.roi_align, x, boxes, *args, weights=weights)[1]
    assert_as_good_as(ours, peer, exact, 4.0)


def test_layouts_agree_to_the_bit():
    x = torch.randn(2, 37, 9, 11)
    boxes = make_boxes(6, 2, 10, "cpu")
    strided = torch.randn(2, 9, 37, 11).permute(0, 2, 1, 3).copy_(x)
    views = [
        x,
        x.contiguous(memory_format=torch.channels_last),
        strided,
        x.transpose(2, 3).contiguous().transpose(2, 3),
    ]
    results = [gradients(opzoo.roi_align, view, boxes, (3, 2), 0.7, 0, True)[1] for view in views]
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_gradient_has_the_dtype_of_the_boxes(device, dtype):
    x, boxes = make_map(1, 2, 5, 5, device=device), box(0.5, 0.25, 3.5, 4.25, device=device).to(dtype)
    result = gradients(opzoo.roi_align, x, boxes, 2)[1]
    assert result.dtype == dtype
    close(result.float(), gradients(opzoo.roi_align, x, boxes.float(), 2)[1], 0.02)


def test_box_index_gets_zero(device):
    x, boxes = make_map(2, 2, 5, 5, device=device), make_boxes(4, 2, 5, device)
    result = gradients(opzoo.roi_align, x, boxes, 2)[1]
    assert (result[:, 0] == 0).all() and result[:, 1:].any()


def test_lists_of_boxes(device):
    x = make_map(2, 3, 7, 8, device=device, dtype=torch.float64)
    boxes = make_boxes(5, 2, 8, device).double()
    boxes[:, 0] = torch.tensor([0, 0, 1, 1, 1], device=device)
    lists = [boxes[:2, 1:].clone().requires_grad_(), boxes[2:, 1:].clone().requires_grad_()]
    opzoo.roi_align(x, lists, (2, 3), 0.7, 2, True).square().sum().backward()
    leaf = boxes.clone().requires_grad_()
    opzoo.roi_align(x, leaf, (2, 3), 0.7, 2, True).square().sum().backward()
    close(torch.cat([t.grad for t in lists]), leaf.grad[:, 1:], 1e-12)


@pytest.mark.parametrize("shift", [0.0, 1.25])
def test_moving_a_ramp(device, shift):
    """Over a plane of slope (a, b) a bin's value is linear in the box: the gradient is known by hand."""
    a, b, scale = 2.0, -3.0, 0.5
    ramp = a * torch.arange(40.0, device=device)[None, :] + b * torch.arange(30.0, device=device)[:, None]
    x = ramp.double()[None, None]
    boxes = box(8.0 + shift, 6.0, 40.0 + shift, 30.0, device=device).double()
    for ratio in (0, 2):
        result = gradients(opzoo.roi_align, x, boxes, 1, scale, ratio, True)[1]
        half = scale / 2  # the centre moves half as far as one edge
        close(result, torch.tensor([[0, a * half, b * half, a * half, b * half]], device=device).double(), 1e-12)


# Kinks and edges


def test_kinks_take_the_derivative_from_the_right(device):
    x = torch.tensor([0.0, 1.0, 4.0, 9.0], device=device, dtype=torch.float64).reshape(1, 1, 1, 4)
    for position, slope in ((-0.5, 0.0), (0.0, 1.0), (0.5, 1.0), (1.0, 3.0), (2.0, 5.0), (3.0, 0.0), (3.5, 0.0)):
        boxes = box(position - 0.5, -0.5, position + 0.5, 0.5, device=device).double()
        result = agrees(x, boxes, 1, 1.0, 1, False)  # one sample, at position
        assert float(result[0, 1] + result[0, 3]) == slope, position


def test_size_held_at_one_pixel(device):
    x = make_map(1, 2, 6, 6, device=device, dtype=torch.float64)
    thin = box(2.2, 1.1, 2.6, 1.3, device=device).double()
    assert (agrees(x, thin, 2, 1.0, 2, False)[:, 3:] == 0).all()
    assert agrees(x, thin, 2, 1.0, 2, True)[:, 3:].all()
    agrees(x, box(2.0, 1.0, 3.0, 2.0, device=device).double(), 2, 1.0, 2, False)  # exactly one pixel: not held
    inverted = box(4.2, 4.1, 1.6, 2.3, device=device).double()
    assert (agrees(x, inverted, 2, 1.0, 2, False)[:, 3:] == 0).all()
    assert agrees(x, inverted, 2, 1.0, 2, True).any()  # mirrored
    assert not agrees(x, inverted, 2, 1.0, 0, True).any()  # no samples


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("at", range(4))
def test_boxes_without_samples_get_zero(device, at, value):
    x = make_map(1, 2, 4, 4, device=device)
    coordinates = [0.3, 0.4, 2.7, 3.1]
    coordinates[at] = value
    boxes = torch.cat([box(*coordinates, device=device), box(0.3, 0.4, 2.7, 3.1, device=device)])
    for ratio in (0, 2):
        result = gradients(opzoo.roi_align, x, boxes, 2, 1.0, ratio)[1]
        assert (result[0] == 0).all() and result[1, 1:].all() and result.isfinite().all()


def test_infinite_pixels_reach_their_boxes_only(device):
    x = make_map(1, 1, 8, 8, device=device)
    x[..., 1, 1] = INF
    boxes = torch.cat([box(0.3, 0.4, 2.7, 3.1, device=device), box(4.3, 4.4, 6.7, 7.1, device=device)])
    result = gradients(opzoo.roi_align, x, boxes, 2, 1.0, 2)[1]
    assert not result[0, 1:].isfinite().all() and result[1].isfinite().all()


def test_no_boxes_no_channels(device):
    for boxes, channels in (
        (box(0.0, 0.0, 3.0, 3.0, device=device)[:0], 3),
        (box(0.0, 0.0, 3.0, 3.0, device=device), 0),
    ):
        leaf = boxes.clone().requires_grad_()
        opzoo.roi_align(make_map(1, channels, 4, 4, device=device), leaf, 2).sum().backward()
        assert leaf.grad.shape == leaf.shape and not leaf.grad.any()


@pytest.mark.gpu
def test_foreign_image_reads_nothing():
    x = make_map(2, 8, 6, 6, device="cuda")
    boxes = torch.cat([box(0.3, 0.4, 2.7, 3.1, image=i) for i in (5.0, -1.0, 0.5, NAN, 1.0)]).cuda()
    result = gradients(opzoo.roi_align, x, boxes, 2, 1.0, 2)[1]
    assert (result[:4] == 0).all() and result[4, 1:].all()


@pytest.mark.gpu
def test_large_maps_go_without_tables():
    """More entries than shared memory has room for."""
    for shape, size in (((1, 3, 2600, 7), (2, 2)), ((1, 8, 6, 6), (900, 2))):
        for channels_last in (False, True):
            x = make_map(*shape, device="cuda", dtype=torch.float64, channels_last=channels_last)
            boxes = torch.cat([box(0.3, 0.4, shape[3] - 0.6, shape[2] - 1.1), box(1.3, 0.2, 3.1, 2.7)]).cuda().double()
            cpu = gradients(opzoo.roi_align, x.cpu(), boxes.cpu(), size, 1.0, 0, True)[1]
            close(gradients(opzoo.roi_align, x, boxes, size, 1.0, 0, True)[1].cpu(), cpu, 1e-8)


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("rois", [1, 10, 700, 1500])
def test_any_number_of_blocks_per_roi(rois, channels_last):
    """Few RoIs are shared by blocks, whose sums a second kernel adds."""
    x = make_map(2, 72, 40, 50, device="cuda", dtype=torch.float64, channels_last=channels_last)
    boxes = make_boxes(rois, 2, 45, "cuda").double()
    cpu = gradients(opzoo.roi_align, x.cpu(), boxes.cpu(), 7, 1.0, 0, True)[1]
    close(gradients(opzoo.roi_align, x, boxes, 7, 1.0, 0, True)[1].cpu(), cpu, 1e-9)


# Derivatives of derivatives, and the other doors


def test_gradient_of_the_input_gradient(device):
    """grad_input depends on the boxes: a penalty on it reaches them."""
    x = make_map(2, 3, 6, 7, device=device, dtype=torch.float64)
    boxes = make_boxes(4, 2, 7, device).double()

    def penalty(function):
        leaf, moving = x.clone().requires_grad_(), boxes.clone().requires_grad_()
        out = function(leaf, moving, (2, 3), 0.9, 2, True)
        (first,) = torch.autograd.grad((out * out.detach().cos()).sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), moving)[0]

    close(penalty(opzoo.roi_align), penalty(opzoo.reference.roi_align), 1e-10)


def test_second_derivative_raises(device):
    x = make_map(1, 2, 5, 5, device=device, dtype=torch.float64).requires_grad_()
    boxes = box(0.3, 0.4, 3.7, 3.1, device=device).double().requires_grad_()
    out = opzoo.roi_align(x, boxes, 2, 1.0, 2).square().sum()
    to_x, to_boxes = torch.autograd.grad(out, (x, boxes), create_graph=True)
    assert torch.autograd.grad(to_x.sum(), x, retain_graph=True)[0].any()  # not on the way
    for leaf in (x, boxes):
        with pytest.raises(NotImplementedError, match="gradient to boxes cannot be differentiated again"):
            torch.autograd.grad(to_boxes.sum(), leaf, retain_graph=True)


def test_torch_func(device):
    x = make_map(2, 2, 5, 6, device=device, dtype=torch.float64)
    boxes = make_boxes(3, 2, 5, device).double()

    def call(x, boxes):
        return opzoo.roi_align(x, boxes, 2, 1.0, 2, True)

    def loss(x, boxes):
        return call(x, boxes).square().sum()

    leaves = x.clone().requires_grad_(), boxes.clone().requires_grad_()
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for actual, true in zip(grad(loss, (0, 1))(x, boxes), expected, strict=True):
        close(actual, true, 1e-12)
    jacobian = jacrev(call, 1)(x, boxes)  # [K, C, 2, 2, K, 5]
    close(torch.tensordot(2 * call(x, boxes), jacobian, 4), expected[1], 1e-12)
    penalty = grad(lambda b: grad(loss)(x, b).square().sum())(boxes)
    moving = boxes.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaves[0], moving), leaves[0], create_graph=True)
    close(penalty, torch.autograd.grad(first.square().sum(), moving)[0], 1e-10)


VMAP_DIMS = [(0, None), (3, None), (None, 0), (None, 1), (0, 0), (1, 2)]


@pytest.mark.parametrize("dims", VMAP_DIMS, ids=str)
def test_vmap(device, dims):
    xs = make_map(3, 2, 2, 5, 6, device=device, dtype=torch.float64)
    boxes = torch.stack([make_boxes(4, 2, 6, device) for _ in range(3)]).double()

    def of_boxes(x, b):
        return grad(lambda b: opzoo.roi_align(x, b, 2, 1.0, 2).square().sum())(b)

    args = [t[0] if dim is None else t.movedim(0, dim) for t, dim in zip((xs, boxes), dims, strict=True)]
    expected = [
        of_boxes(*(t[0] if d is None else t[i] for t, d in zip((xs, boxes), dims, strict=True))) for i in range(3)
    ]
    close(vmap(of_boxes, dims)(*args), torch.stack(expected), 1e-12)


def test_vmap_over_lists(device):
    xs = make_map(3, 2, 2, 5, 6, device=device, dtype=torch.float64)
    boxes = [torch.rand(3, 2, 4, device=device, dtype=torch.float64) * 5 for _ in range(2)]

    def of_boxes(x, *b):
        return grad(lambda b: opzoo.roi_align(x, list(b), 2, 1.0, 2, True).square().sum())(b)

    expected = [of_boxes(xs[i], boxes[0][i], boxes[1][i]) for i in range(3)]
    for position, result in enumerate(vmap(of_boxes)(xs, *boxes)):
        close(result, torch.stack([e[position] for e in expected]), 1e-12)


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("through", ["jvp", "dual"])
def test_forward_mode_is_refused(device, through, mode):
    x, boxes = make_map(1, 1, 4, 4, device=device), box(0.0, 0.0, 3.0, 3.0, device=device)
    with pytest.raises(NotImplementedError, match=r"opzoo\.roi_align has no forward-mode derivative in boxes"):
        if through == "jvp":
            jvp(lambda b: opzoo.roi_align(x, b, 2, pool_mode=mode), (boxes,), (boxes,))
        else:
            with forward_ad.dual_level():
                opzoo.roi_align(x, forward_ad.make_dual(boxes, boxes), 2, pool_mode=mode)


def test_maximum_raises_when_asked(device):
    x = make_map(1, 2, 6, 6, device=device).requires_grad_()
    boxes = box(0.3, 0.4, 3.7, 3.1, device=device).requires_grad_()
    out = opzoo.roi_align(x, boxes, 2, pool_mode="max").sum()
    with pytest.raises(NotImplementedError, match="pool_mode='max' is not differentiable in boxes; detach them"):
        out.backward()
    opzoo.roi_align(x, boxes.detach(), 2, pool_mode="max").sum().backward()
    with pytest.raises(NotImplementedError, match="pool_mode='max' is not differentiable in boxes"):
        grad(lambda b: opzoo.roi_align(x.detach(), b, 2, pool_mode="max").sum())(boxes.detach())


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile(device):
    x, boxes = make_map(2, 3, 7, 8, device=device), make_boxes(5, 2, 8, device)

    def loss(x, boxes):
        return opzoo.roi_align(x, boxes, 2, 0.5, 2, True).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (5, 3, 1):
        leaves = [(x.clone().requires_grad_(), boxes[:count].clone().requires_grad_()) for _ in range(2)]
        expected = torch.autograd.grad(loss(*leaves[0]), leaves[0])
        for actual, true in zip(torch.autograd.grad(compiled(*leaves[1]), leaves[1]), expected, strict=True):
            assert torch.equal(actual, true)


def test_opcheck(device):
    x = make_map(2, 3, 7, 8, device=device).requires_grad_()
    boxes = make_boxes(4, 2, 8, device).requires_grad_()
    torch.library.opcheck(OPS.roi_align.default, (x, boxes, None, 2, 3, 0.7, 2, True))
    grad_out = torch.randn(4, 3, 2, 3, device=device)
    op = OPS._roi_align_boxes_backward.default
    torch.library.opcheck(op, (grad_out, x.detach(), boxes.detach(), None, 0.7, 2, True))
    index = torch.zeros(4, dtype=torch.int64, device=device)
    torch.library.opcheck(op, (grad_out, x.detach(), boxes.detach()[:, 1:], index, 0.7, 0, False))


def test_errors(device):
    x, boxes = make_map(2, 3, 7, 8, device=device), make_boxes(4, 2, 8, device)
    op, grad_out = OPS._roi_align_boxes_backward, torch.randn(4, 3, 2, 3, device=device)
    for wrong, message in (
        ((grad_out[:3], x), r"grad must have shape \[4, 3, 2, 3\], got \[3, 3, 2, 3\]"),
        ((grad_out[:, :2], x), r"grad must have shape \[4, 3, 2, 3\], got \[4, 2, 2, 3\]"),
        ((grad_out[0], x), "grad must have 4 axes, got 3"),
        ((grad_out.double(), x), "grad must have the dtype of input, float32, got float64"),
        ((grad_out, x[0]), "input must have 4 axes, got 3"),
    ):
        with pytest.raises(RuntimeError, match=f"_roi_align_boxes_backward: {message}"):
            op(*wrong, boxes, None, 1.0, 2, True)
    with pytest.raises(ValueError, match="sampling_ratio must be at most 32767"):
        op(grad_out, x, boxes, None, 1.0, 2**31 - 1, True)


# Without the request


def test_nothing_is_kept_for_boxes_at_rest(device):
    x = make_map(1, 2, 6, 6, device=device)
    boxes = box(0.3, 0.4, 3.7, 3.1, device=device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        out = opzoo.roi_align(x.requires_grad_(), boxes, 2)
    assert kept == [boxes.shape]
    alive = weakref.ref(x)
    del x
    assert out.grad_fn is not None and alive() is not None  # the leaf lives on in its AccumulateGrad
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        opzoo.roi_align(make_map(1, 2, 6, 6, device=device), boxes.requires_grad_(), 2)
    assert sorted(len(shape) for shape in kept) == [2, 4]


def test_only_what_is_wanted_is_computed(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    x, boxes = make_map(1, 2, 6, 6, device=device), box(0.3, 0.4, 3.7, 3.1, device=device)
    backward, to_boxes = "opzoo::_roi_align_backward", "opzoo::_roi_align_boxes_backward"
    for of_x, of_boxes in ((True, False), (False, True), (True, True)):
        called: list[str] = []
        out = opzoo.roi_align(x.detach().requires_grad_(of_x), boxes.detach().requires_grad_(of_boxes), 2).sum()
        with Record():
            out.backward()
        assert (backward in called, to_boxes in called) == (of_x, of_boxes)


# Bounded work: seconds here, hours where samples are visited one by one

HUGE = [
    pytest.param((-1e6, -1e6, 1e6, 1e6), 0, id="million-adaptive"),
    pytest.param((-1e9, -1e9, 1e9, 1e9), 0, id="billion-adaptive"),
    pytest.param((2.0, 3.0, 1e9, 1e9), 0, id="corner-billion"),
    pytest.param((-1e6, -1e6, 1e6, 1e6), 32767, id="million-dense"),
    pytest.param((1.2, 1.3, 50.2, 40.9), 32767, id="map-dense"),
]


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("aligned", [False, True], ids=["legacy", "aligned"])
@pytest.mark.parametrize("coordinates,ratio", HUGE)
def test_bounded_work(device, coordinates, ratio, aligned, channels_last):
    x = make_map(1, 8, 48, 56, device=device, channels_last=channels_last).requires_grad_()
    boxes = box(*coordinates, device=device).requires_grad_()
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    out = opzoo.roi_align(x, boxes, 7, 1.0, ratio, aligned)
    to_x, to_boxes = torch.autograd.grad(out.square().sum(), (x, boxes))
    assert out.isfinite().all() and to_x.isfinite().all() and to_boxes.isfinite().all()
    assert time.perf_counter() - start < 30
    if device.type == "cuda":
        assert torch.cuda.max_memory_allocated() - before < 16 * x.numel() * x.element_size()


@pytest.mark.parametrize("ratio", [10**6, 2**31 - 1, 2**62])
def test_absurd_sampling_ratio_is_refused(device, ratio):
    x, boxes = make_map(1, 2, 6, 6, device=device), box(0.0, 0.0, 3.0, 3.0, device=device)
    with pytest.raises(ValueError, match=f"sampling_ratio must be at most 32767, got {ratio}"):
        opzoo.roi_align(x, boxes, 2, 1.0, ratio)


def test_dense_samples_approach_the_integral(device):
    """Many samples change the answer little: what the bisected ranges leave out has no weight."""
    x = make_map(1, 3, 12, 13, device=device, dtype=torch.float64)
    boxes = box(-3.3, 1.2, 9.7, 14.9, device=device).double()
    few, many = (gradients(opzoo.roi_align, x, boxes, 3, 1.0, ratio, True)[1] for ratio in (500, 5000))
    assert error_against(few, many) < 1e-2 * float(few.abs().max())
