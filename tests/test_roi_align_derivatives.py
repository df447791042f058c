"""Derivatives of roi_align, in both modes and through torch.func."""

from __future__ import annotations

import pytest
import torch
from roi_inputs import box, close, make_boxes, make_map
from torch.func import grad, hessian, jacrev, jvp, vmap

import opzoo

MODES = ("avg", "max")
OPS = torch.ops.opzoo


GEOMETRIES = [
    pytest.param((2, 2), 1.0, 2, False, id="fixed"),
    pytest.param((1, 3), 0.5, -1, False, id="adaptive"),
    pytest.param((2, 1), 0.3, 0, True, id="adaptive-aligned"),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size,scale,ratio,aligned", GEOMETRIES)
def test_gradcheck(device, size, scale, ratio, aligned, mode):
    x = make_map(2, 1, 3, 4, device=device, dtype=torch.float64).requires_grad_()
    boxes = make_boxes(3, 2, 4 / scale, device).double()

    def call(x):
        return opzoo.roi_align(x, boxes, size, scale, ratio, aligned, mode)

    tolerance = 1e-10 if device.type == "cuda" else 0.0
    assert torch.autograd.gradcheck(call, x, check_forward_ad=True, nondet_tol=tolerance)
    assert torch.autograd.gradgradcheck(call, x, nondet_tol=tolerance)


@pytest.mark.parametrize("mode", MODES)
def test_torch_func(device, mode):
    x = make_map(2, 2, 4, 5, device=device, dtype=torch.float64)
    boxes = make_boxes(3, 2, 5, device)

    def call(x):
        return opzoo.roi_align(x, boxes, 2, 1.0, 2, True, mode)

    def loss(x):
        return call(x).square().sum()

    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    close(grad(loss)(x), expected, 1e-12)
    tangent = torch.randn_like(x)
    jacobian = jacrev(call)(x)
    out, out_tangent = jvp(call, (x,), (tangent,))
    assert torch.equal(out, call(x)) and out_tangent.abs().sum() > 0
    close(out_tangent, torch.tensordot(jacobian, tangent, 4), 1e-12)
    second = hessian(loss)(x)
    close(torch.tensordot(second, x, 4), expected, 1e-10)  # the loss is quadratic


VMAP_DIMS = [(0, None), (3, None), (None, 0), (None, 1), (0, 0), (1, 2)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dims", VMAP_DIMS, ids=str)
def test_vmap(device, dims, mode):
    xs = make_map(3, 2, 2, 5, 6, device=device)
    boxes = torch.stack([make_boxes(4, 2, 6, device) for _ in range(3)])

    def call(x, b):
        return opzoo.roi_align(x, b, 2, 1.0, 2, False, mode)

    def loss(x, b):
        return call(x, b).square().sum()

    def second(x, b):
        return grad(lambda y: grad(loss)(y, b).square().sum())(x)

    args = [t[0] if dim is None else t.movedim(0, dim) for t, dim in zip((xs, boxes), dims, strict=True)]
    for function in (call, grad(loss), second):
        expected = torch.stack(
            [function(*(t[0] if d is None else t[i] for t, d in zip((xs, boxes), dims, strict=True))) for i in range(3)]
        )
        close(vmap(function, dims)(*args), expected, 1e-3 if function is second else 1e-4)


@pytest.mark.parametrize("index_dim", [None, 0])
@pytest.mark.parametrize("boxes_dim", [None, 0])
def test_vmap_over_lists(device, boxes_dim, index_dim):
    x = make_map(3, 2, 2, 5, 6, device=device)
    boxes = torch.stack([make_boxes(4, 2, 6, device) for _ in range(3)])
    coordinates, index = boxes[..., 1:], boxes[..., 0].long()
    coordinates = coordinates if boxes_dim == 0 else coordinates[0]
    index = index if index_dim == 0 else index[0]
    out = vmap(opzoo.ops.roi_align._average, (0, boxes_dim, index_dim, *(None,) * 5))(
        x, coordinates, index, 2, 2, 1.0, 2, False
    )
    for i in range(3):
        c, k = (coordinates[i] if boxes_dim == 0 else coordinates), (index[i] if index_dim == 0 else index)
        close(out[i], OPS.roi_align(x[i], c, k, 2, 2, 1.0, 2, False))


def test_vmap_never_reads_the_next_image():
    x = torch.ones(2, 1, 1, 4, 4)
    boxes = torch.stack([box(0.0, 0.0, 3.0, 3.0, image=1.0), box(0.0, 0.0, 3.0, 3.0)])
    with pytest.raises(ValueError, match="must be an integer in"):
        vmap(lambda x, b: opzoo.roi_align(x, b, 2))(x, boxes)
