"""add against torch.add: promotion, broadcasting, strides, numbers, gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import FLOATS, HALVES, assert_as_good_as
from hypothesis import given
from hypothesis import strategies as st

import opzoo

DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

SHAPES = {
    "same": ((3, 5), (3, 5)),
    "row": ((4, 5), (5,)),
    "column": ((4, 5), (4, 1)),
    "outer": ((7, 1), (1, 9)),
    "extra axes": ((2, 1, 3, 1), (4, 1, 6)),
    "0-d": ((), (3, 2)),
    "both 0-d": ((), ()),
    "empty": ((0, 3), (3,)),
    "empty by broadcast": ((1, 4), (0, 1)),
    "one element": ((1, 1), (1,)),
    "odd": ((33, 127), (33, 127)),
}


def make(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, device=device).to(dtype)
    if dtype == torch.bool:
        return torch.rand(shape, device=device) > 0.5
    return torch.randint(0 if dtype == torch.uint8 else -100, 100, shape, device=device).to(dtype)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_torch(shapes, dtype, device):
    a, b = (make(shape, dtype, device) for shape in shapes)
    expected = torch.add(a, b)
    result = opzoo.add(a, b)
    assert result.dtype == expected.dtype and result.device == expected.device
    assert torch.equal(result, expected)
    assert torch.equal(opzoo.reference.add(a, b), expected)


@pytest.mark.parametrize(
    "dtypes", list(itertools.product(DTYPES, DTYPES)), ids=lambda d: f"{d[0]}-{d[1]}".replace("torch.", "")
)
def test_promotion(dtypes, device):
    for shape_a, shape_b in (((2,), (2,)), ((), (2,)), ((2,), ()), ((), ())):
        a, b = make(shape_a, dtypes[0], device), make(shape_b, dtypes[1], device)
        expected = torch.add(a, b)
        result = opzoo.add(a, b)
        assert result.dtype == expected.dtype, (shape_a, shape_b)
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", [2, -3, 2.5, True, float("inf")], ids=str)
@pytest.mark.parametrize("shape", [(), (3,)], ids=["0-d", "1-d"])
def test_numbers(dtype, number, shape, device):
    a = make(shape, dtype, device)
    expected = torch.add(a, number)
    for result in (opzoo.add(a, number), opzoo.add(number, a)):
        assert result.dtype == expected.dtype and result.device == a.device
        torch.testing.assert_close(result, expected)


def test_number_keeps_its_precision():
    a = torch.full((1,), 1000.0, dtype=torch.float16)
    # 0.26 rounds to 0.2600098 in half: the sum is taken with 0.26 and rounded once.
    assert opzoo.add(a, 0.26).item() == torch.tensor(1000.26).half().item()


@pytest.mark.parametrize("alpha", [1, 0, -2, 2.5], ids=str)
def test_alpha(alpha, device):
    a, b = torch.randn(5, 7, device=device), torch.randn(7, device=device)
    torch.testing.assert_close(opzoo.add(a, b, alpha=alpha), torch.add(a, b, alpha=alpha))
    assert repr(opzoo.Add(alpha)) == f"Add(alpha={alpha})"
    torch.testing.assert_close(opzoo.Add(alpha)(a, b), torch.add(a, b, alpha=alpha))


def test_integers_wrap(device):
    a = torch.tensor([127, -128], dtype=torch.int8, device=device)
    assert opzoo.add(a, a).tolist() == torch.add(a, a).tolist()
    big = torch.tensor([2**63 - 1], device=device)
    assert opzoo.add(big, 1).item() == -(2**63)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_accuracy(dtype, device):
    a, b = (torch.randn(1000, device=device).to(dtype) for _ in range(2))
    exact = a.double() + 3 * b.double()
    assert_as_good_as(opzoo.add(a, b, alpha=3), torch.add(a.float(), b.float(), alpha=3).to(dtype), exact)


VIEWS = {
    "transposed": lambda t: t.mT,
    "sliced": lambda t: t[..., ::2],
    "offset": lambda t: t[1:],
    "flipped axes": lambda t: t.permute(2, 0, 1),
    "expanded": lambda t: t[:1].expand_as(t),
    "unfolded (overlapping)": lambda t: t.unfold(1, 2, 1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_strides(view, device):
    a = view(torch.randn(4, 6, 8, device=device))
    b = torch.randn(a.shape, device=device)
    for left, right in ((a, b), (b, a), (a, a)):
        assert torch.equal(opzoo.add(left, right), torch.add(left, right))


def test_dense_layouts_are_kept(device):
    nhwc = torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
    bias = torch.randn(1, 3, 1, 1, device=device)
    assert opzoo.add(nhwc, bias).is_contiguous(memory_format=torch.channels_last)
    assert opzoo.add(bias, nhwc).is_contiguous(memory_format=torch.channels_last)
    assert opzoo.add(nhwc.contiguous(), nhwc).is_contiguous()


@given(
    shape=st.lists(st.integers(0, 4), max_size=5),
    drop=st.integers(0, 5),
    ones=st.sets(st.integers(0, 4)),
    permutation=st.randoms(use_true_random=False),
)
def test_any_broadcast_of_any_layout(shape, drop, ones, permutation):
    order = list(range(len(shape)))
    permutation.shuffle(order)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    a = torch.randn([shape[axis] for axis in order]).permute(inverse) if shape else torch.randn(())
    assert list(a.shape) == shape
    b = torch.randn([1 if axis in ones else size for axis, size in enumerate(shape)][drop:])
    assert torch.equal(opzoo.add(a, b), torch.add(a, b))
    assert torch.equal(opzoo.add(b, a), torch.add(b, a))


def test_many_axes(device):
    a = torch.randn([2] * 16, device=device).permute(*range(15, -1, -2), *range(0, 16, 2))
    b = torch.randn([1, 2] * 8, device=device)
    assert torch.equal(opzoo.add(a, b), torch.add(a, b))


@pytest.mark.parametrize("alpha", [1, -0.5], ids=str)
@pytest.mark.parametrize("shapes", [s for k, s in SHAPES.items() if k != "odd"], ids=[k for k in SHAPES if k != "odd"])
def test_gradients(shapes, alpha, device):
    a, b = (torch.randn(shape, device=device, dtype=torch.float64, requires_grad=True) for shape in shapes)

    def call(a, b):
        return opzoo.add(a, b, alpha=alpha)

    assert torch.autograd.gradcheck(call, (a, b), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, (a, b))


def test_gradient_dtypes(device):
    a = torch.randn(3, device=device, dtype=torch.float16, requires_grad=True)
    b = torch.randn(2, 3, device=device, requires_grad=True)
    opzoo.add(a, b).sum().backward()
    assert a.grad.dtype == torch.float16 and b.grad.dtype == torch.float32
    assert a.grad.tolist() == [2.0, 2.0, 2.0]


def test_transforms():
    a, b = torch.randn(3, 4), torch.randn(4)
    ones = torch.ones_like(a)
    assert torch.equal(torch.func.jvp(lambda t: opzoo.add(t, b, alpha=3), (a,), (ones,))[1], ones)
    tangent = torch.func.jvp(lambda t: opzoo.add(a, t, alpha=3), (b,), (torch.ones_like(b),))[1]
    assert torch.equal(tangent, 3 * ones)
    assert torch.equal(torch.func.grad(lambda t: opzoo.add(a, t, alpha=2).sum())(b), torch.full((4,), 6.0))
    assert torch.equal(torch.vmap(opzoo.add, in_dims=(1, None))(a, torch.ones(2, 1)), (a.T[:, None] + torch.ones(2, 1)))
    hessian = torch.func.hessian(lambda t: (opzoo.add(t, b) ** 2).sum())(a[0])
    torch.testing.assert_close(hessian, 2 * torch.eye(4))


@pytest.mark.gpu
def test_cpu_number_joins_cuda():
    a = torch.randn(3, device="cuda", requires_grad=True)
    b = torch.tensor(2.0, requires_grad=True)
    result = opzoo.add(a, b)
    assert result.device == a.device
    result.sum().backward()
    assert b.grad.device.type == "cpu" and b.grad.item() == 3.0
    with pytest.raises(RuntimeError, match=r"opzoo::add: b must be on the device of a, cuda:0, got cpu"):
        opzoo.add(a, torch.ones(3))


ERRORS = {
    "shapes": (
        lambda: opzoo.add(torch.ones(2), torch.ones(3)),
        RuntimeError,
        r"opzoo::add: a and b must broadcast, got shapes \[2\] and \[3\]",
    ),
    "complex": (
        lambda: opzoo.add(torch.ones(2, dtype=torch.cfloat), torch.ones(2)),
        RuntimeError,
        "opzoo::add: a must have a floating, int8 to int64, uint8 or bool dtype, got complex64",
    ),
    "fractional alpha": (
        lambda: opzoo.add(torch.ones(2, dtype=torch.int32), 1, alpha=0.5),
        ValueError,
        "opzoo::add: alpha must be an integer for a result of dtype int32, got 0.5",
    ),
    "nan alpha": (
        lambda: opzoo.add(torch.ones(2, dtype=torch.int32), 1, alpha=float("nan")),
        ValueError,
        "opzoo::add: alpha must be an integer for a result of dtype int32, got nan",
    ),
    "huge alpha": (
        lambda: opzoo.add(torch.ones(2, dtype=torch.int64), 1, alpha=2**60 + 1),
        ValueError,
        "opzoo::add: alpha must be exact in float64",
    ),
    "no tensor": (lambda: opzoo.add(1, 2), TypeError, "opzoo::add: a or b must be a tensor"),
    "a string": (
        lambda: opzoo.add(torch.ones(2), "x"),
        TypeError,
        "opzoo::add: expected a tensor or a number, got str",
    ),
}


@pytest.mark.parametrize("call, error, message", ERRORS.values(), ids=ERRORS.keys())
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.slow
def test_more_than_2_31_elements(device):
    size = 2**31 + 7
    a = torch.zeros(size, dtype=torch.int8, device=device)
    a[-1] = 5
    result = opzoo.add(a, a)
    assert result[-1].item() == 10 and result[:8].sum().item() == 0


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("number", [2.5, 3, True], ids=str)
def test_numbers_compile(number):
    a = torch.randn(3)
    compiled = torch.compile(lambda t: opzoo.add(number, opzoo.add(t, number)), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a), number + (a + number))


def test_integer_numbers_wrap(device):
    for dtype, number in ((torch.uint8, 300), (torch.int16, 2**40 + 1)):
        for shape in ((), (2,)):
            a = torch.ones(shape, dtype=dtype, device=device)
            assert torch.equal(opzoo.add(a, number), torch.add(a, number))


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.int64, torch.int8)], ids=str)
def test_vmap_promotes_as_the_loop(dtypes):
    a, b = torch.ones(4, dtype=dtypes[0]), torch.ones(4, 3, dtype=dtypes[1])
    result = torch.vmap(opzoo.add)(a, b)
    assert result.dtype == opzoo.add(a[0], b[0]).dtype == dtypes[1] and (result == 2).all()
    wide = torch.tensor(1, dtype=dtypes[0])
    assert torch.vmap(opzoo.add, in_dims=(0, None))(torch.ones(4, dtype=dtypes[1]), wide).dtype == dtypes[0]


def test_meta_tensors():
    a = torch.empty(3, 4, device="meta")
    assert opzoo.add(a, a).device.type == "meta" and opzoo.matmul(a, a.mT).shape == (3, 3)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_numbers_under_vmap_keep_their_precision(dtype):
    a = torch.randn(4, 3).to(dtype)
    for call in (lambda t: opzoo.add(t, 0.26), lambda t: opzoo.add(1e-3, t, alpha=3), lambda t: opzoo.add(t.sum(), 2)):
        assert torch.equal(torch.func.vmap(call)(a), torch.stack([call(t) for t in a]))


def test_fake_kernel_refuses_the_same():
    meta = torch.empty(2, 3, device="meta")
    with pytest.raises(RuntimeError, match=r"opzoo::add: a and b must broadcast, got shapes \[2, 3\] and \[2\]"):
        opzoo.add(meta, meta[:, 0])
    with pytest.raises(RuntimeError, match="opzoo::add: b must have a floating, int8 to int64, uint8 or bool dtype"):
        opzoo.add(meta, meta.to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="opzoo::add: alpha must be an integer for a result of dtype"):
        opzoo.add(meta.long(), meta.long(), alpha=0.5)
