"""``opzoo.matmul`` against ``torch.matmul``, the reference and the truth in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import FLOATS, HALVES, ODD_SIZES, assert_as_good_as
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import opzoo

SHAPES = [
    ((5,), (5,)),
    ((5,), (5, 3)),
    ((4, 5), (5,)),
    ((2, 3, 5), (5,)),
    ((5,), (2, 5, 3)),
    ((4, 5), (5, 3)),
    ((1, 1), (1, 1)),
    ((2, 4, 5), (5, 3)),
    ((4, 5), (2, 5, 3)),
    ((2, 4, 5), (2, 5, 3)),
    ((2, 1, 4, 5), (3, 5, 2)),
    ((3, 5, 2), (2, 1, 2, 4)),
    ((1, 4, 5), (6, 5, 3)),
    ((2, 3, 1, 5), (5, 3)),
    ((2, 1, 3, 1, 4, 2), (5, 1, 4, 2, 3)),
    ((200, 300), (300, 270)),
    ((2, 7, 513), (2, 513, 17)),
]
EMPTY_SHAPES = [
    ((0,), (0,)),
    ((0, 5), (5, 3)),
    ((4, 0), (0, 3)),
    ((4, 5), (5, 0)),
    ((4, 0), (0,)),
    ((0, 4, 5), (5, 3)),
    ((0, 4, 5), (1, 5, 3)),
    ((3, 0, 4, 5), (5, 3)),
    ((3, 4, 0), (3, 0, 5)),
    ((0, 0), (0, 0)),
]


def shape_id(shapes: object) -> str:
    return str(shapes).replace(" ", "")


def normal(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.float64).to(dtype)


def in_float32(a: Tensor, b: Tensor) -> Tensor:
    """torch's product with float32 (or wider) arithmetic, rounded to the operands' dtype."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return torch.matmul(a.to(wide), b.to(wide)).to(a.dtype)


def check(a: Tensor, b: Tensor) -> None:
    out = opzoo.matmul(a, b)
    peer = in_float32(a, b)
    assert (out.shape, out.dtype, out.device) == (peer.shape, a.dtype, a.device)
    assert out.is_contiguous()
    if a.dtype == torch.float64:  # nothing wider to measure against
        bound = torch.matmul(a.abs(), b.abs()) * torch.finfo(a.dtype).eps * 8
        assert ((out - peer).abs() <= bound).all()
    else:
        assert_as_good_as(out, peer, torch.matmul(a.double(), b.double()))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=shape_id)
def test_shapes(shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
    a, b = (normal(*shape, device=device, dtype=dtype) for shape in shapes)
    check(a, b)


@pytest.mark.parametrize("M", ODD_SIZES)
def test_odd_sizes(M: int, device: torch.device) -> None:
    # A batch of products: one small product can come out exact in one library by luck.
    for N in ODD_SIZES:
        for K in ODD_SIZES:
            check(normal(8, M, K, device=device), normal(8, K, N, device=device))


@pytest.mark.parametrize("shapes", EMPTY_SHAPES, ids=shape_id)
def test_empty(shapes: tuple[tuple[int, ...], tuple[int, ...]], device: torch.device) -> None:
    a, b = (torch.ones(shape, device=device, requires_grad=True) for shape in shapes)
    out = opzoo.matmul(a, b)
    expected = torch.matmul(a, b)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert a.grad is not None and torch.equal(a.grad, torch.autograd.grad(expected.sum(), a)[0])


@pytest.mark.parametrize("shapes", SHAPES[:15], ids=shape_id)
def test_reference(shapes: tuple[tuple[int, ...], tuple[int, ...]], device: torch.device) -> None:
    a, b = (normal(*shape, device=device, dtype=torch.float64) for shape in shapes)
    torch.testing.assert_close(opzoo.reference.matmul(a, b), torch.matmul(a, b))
    torch.testing.assert_close(opzoo.matmul(a, b), opzoo.reference.matmul(a, b))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT,
    "every-second-column": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "every-third-row": lambda t: t.repeat_interleave(3, -2)[..., ::3, :],
    "offset": lambda t: torch.nn.functional.pad(t, (1, 2, 3, 1))[..., 3:-1, 1:-2],
    "both-strided": lambda t: torch.nn.functional.pad(t.mT, (1, 0)).repeat_interleave(2, -2)[..., ::2, 1:].mT,
    "batch-last": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("view_b", VIEWS)
@pytest.mark.parametrize("view_a", VIEWS)
def test_views(view_a: str, view_b: str, dtype: torch.dtype, device: torch.device) -> None:
    a, b = normal(3, 37, 70, device=device, dtype=dtype), normal(3, 70, 41, device=device, dtype=dtype)
    plain = opzoo.matmul(a, b)
    assert torch.equal(opzoo.matmul(VIEWS[view_a](a), VIEWS[view_b](b)), plain)
    check(a, b)


def test_expanded_operands(device: torch.device) -> None:
    row, column = normal(1, 20, device=device), normal(20, 1, device=device)
    check(row.expand(30, 20), column.expand(20, 40))
    check(torch.ones(1, 1, device=device).expand(9, 8), torch.ones((), device=device).expand(8, 7))
    a, b = normal(30, 20, device=device), normal(20, 40, device=device)
    check(a.expand(5, 6, 30, 20), b.expand(5, 6, 20, 40))
    check(a.expand(5, 30, 20), normal(5, 20, 40, device=device))


def test_batch_of_rows_is_one_product(device: torch.device) -> None:
    """The layouts in which a shared b lets batch items be taken as further rows, and their neighbours."""
    b = normal(33, 17, device=device)
    for a in (
        normal(6, 5, 33, device=device),
        normal(6, 5, 33, device=device)[:, :4],
        normal(6, 5, 33, device=device)[::2],
        normal(6, 1, 33, device=device),
        normal(6, 1, 66, device=device)[..., ::2],
        normal(2, 6, 5, 33, device=device),
        normal(2, 6, 5, 33, device=device).transpose(0, 1),
        normal(5, 6, 33, device=device).transpose(0, 1),
        normal(1, 5, 33, device=device).expand(6, 5, 33),
    ):
        check(a, b)


def test_many_batch_items(device: torch.device) -> None:
    check(normal(70000, 2, 3, device=device), normal(70000, 3, 2, device=device))


def test_sixteen_batch_axes_work_and_more_are_refused(device: torch.device) -> None:
    def rank(axes: int) -> tuple[Tensor, Tensor]:
        alternating = [2 if axis % 2 else 1 for axis in range(axes)]
        opposite = [1 if axis % 2 else 2 for axis in range(axes)]
        return normal(*alternating, 1, 2, device=device), normal(*opposite, 2, 1, device=device)

    check(*rank(16))
    with pytest.raises(RuntimeError, match="at most 16 batch axes that do not merge"):
        opzoo.matmul(*rank(17))
    check(normal(*[1] * 30, 3, 4, device=device), normal(4, 5, device=device))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_and_inf_propagate(dtype: torch.dtype, device: torch.device) -> None:
    a = torch.zeros(70, 300, device=device, dtype=dtype)
    b = torch.ones(300, 40, device=device, dtype=dtype)
    a[1, 299] = float("inf")
    b[2, 3] = float("nan")
    b[5, 7] = float("inf")  # 0 * inf
    out = opzoo.matmul(a, b)
    assert torch.equal(out.isnan(), torch.matmul(a.double(), b.double()).isnan())
    assert out[:, 3].isnan().all() and out[:, 7].isnan().all()
    assert (out[1, 10:] == float("inf")).all() and (out[2:, 10:] == 0).all()


def test_half_overflow_and_sums_in_float32(device: torch.device) -> None:
    ones = torch.ones(1, 4096, device=device, dtype=torch.float16)
    assert opzoo.matmul(ones, ones.T).item() == 4096
    assert opzoo.matmul(ones * 16, ones.T * 16).item() == float("inf")
    big = torch.tensor([[60000.0, 60000.0, -60000.0]], device=device, dtype=torch.float16)
    assert opzoo.matmul(big, torch.ones_like(big).T).item() == big[0, 0].item()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_long_sum(dtype: torch.dtype, device: torch.device) -> None:
    check(normal(3, 20000, device=device, dtype=dtype), normal(20000, 5, device=device, dtype=dtype))


def test_result_is_fresh(device: torch.device) -> None:
    a, b = normal(3, 3, device=device), torch.eye(3, device=device)
    kept = a.clone()
    opzoo.matmul(a, b).zero_()
    assert torch.equal(a, kept)


def test_same_bits_for_any_thread_count() -> None:
    a, b = torch.randn(2, 401, 700), torch.randn(700, 530)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(opzoo.matmul(a, b))
        whole = opzoo.matmul(a[1], b)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert torch.equal(results[0][1], whole), "a row's bits depend on its neighbours"


@given(data=st.data())
def test_any_strides(data: st.DataObject) -> None:
    sizes = st.integers(0, 9)
    M, K, N = data.draw(st.tuples(sizes, sizes, sizes))
    batch = data.draw(st.lists(st.integers(0, 3), max_size=3))

    def operand(rows: int, cols: int) -> Tensor:
        shape = [*batch, rows, cols]
        expanded = data.draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
        steps = data.draw(st.lists(st.integers(1, 3), min_size=len(shape), max_size=len(shape)))
        order = data.draw(st.permutations(range(len(shape))))
        stored = [1 if stretch else size * step for size, step, stretch in zip(shape, steps, expanded, strict=True)]
        memory = torch.randn([stored[axis] for axis in order], dtype=torch.float64)
        t = memory.permute([order.index(axis) for axis in range(len(shape))])
        t = t[
            tuple(
                slice(None, None, step) if not stretch else slice(None)
                for step, stretch in zip(steps, expanded, strict=True)
            )
        ]
        return t.expand(shape)

    a, b = operand(M, K), operand(K, N)
    torch.testing.assert_close(torch.ops.opzoo.matmul(a, b), torch.matmul(a, b), rtol=1e-12, atol=1e-12)


@given(data=st.data())
def test_any_broadcast(data: st.DataObject) -> None:
    batch = data.draw(st.lists(st.integers(1, 3), max_size=4))

    def shape(*matrix: int) -> list[int]:
        own = [data.draw(st.sampled_from((1, size))) for size in batch]
        return [*own[data.draw(st.integers(0, len(own))) :], *matrix]

    a, b = torch.randn(shape(3, 4), dtype=torch.float64), torch.randn(shape(4, 2), dtype=torch.float64)
    torch.testing.assert_close(opzoo.matmul(a, b), torch.matmul(a, b), rtol=1e-12, atol=1e-12)


# Derivatives.

GRAD_SHAPES = [
    ((4, 3), (3, 2)),
    ((3,), (3,)),
    ((3,), (3, 2)),
    ((2, 1, 4, 3), (2, 3, 2)),
    ((2, 4, 3), (3,)),
    ((1, 3, 1), (2, 1, 2)),
]


@pytest.mark.parametrize("shapes", GRAD_SHAPES, ids=shape_id)
def test_gradcheck(shapes: tuple[tuple[int, ...], tuple[int, ...]], device: torch.device) -> None:
    a, b = (normal(*shape, device=device, dtype=torch.float64).requires_grad_() for shape in shapes)
    assert gradcheck(opzoo.matmul, (a, b), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(opzoo.matmul, (a, b), check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.parametrize("needs", ("a", "b"))
def test_one_gradient(needs: str, device: torch.device) -> None:
    a, b = normal(4, 3, device=device, dtype=torch.float64), normal(3, 2, device=device, dtype=torch.float64)
    t = (a if needs == "a" else b).requires_grad_()
    assert gradcheck(opzoo.matmul, (a, b), check_forward_ad=True)
    assert gradgradcheck(opzoo.matmul, (a, b))
    out = opzoo.matmul(a, b)
    (grad,) = torch.autograd.grad(out.sum(), t)
    torch.testing.assert_close(grad, torch.autograd.grad(torch.matmul(a, b).sum(), t)[0])


def test_raw_op_is_differentiable(device: torch.device) -> None:
    a, b = (normal(3, 3, device=device, dtype=torch.float64).requires_grad_() for _ in range(2))
    assert gradcheck(torch.ops.opzoo.matmul, (a, b), check_forward_ad=True)
    assert gradgradcheck(torch.ops.opzoo.matmul, (a, b))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_gradients(dtype: torch.dtype, device: torch.device) -> None:
    a, b, grad = (normal(*s, device=device, dtype=dtype) for s in ((40, 50), (50, 60), (40, 60)))
    a.requires_grad_(), b.requires_grad_()
    grad_a, grad_b = torch.autograd.grad(opzoo.matmul(a, b), (a, b), grad)
    a, b = a.detach(), b.detach()
    assert_as_good_as(grad_a, in_float32(grad, b.mT), grad.double() @ b.double().mT)
    assert_as_good_as(grad_b, in_float32(a.mT, grad), a.double().mT @ grad.double())


def test_forward_mode(device: torch.device) -> None:
    a, b, ta, tb = (normal(3, 3, device=device, dtype=torch.float64) for _ in range(4))
    with forward_ad.dual_level():
        out = opzoo.matmul(forward_ad.make_dual(a, ta), forward_ad.make_dual(b, tb))
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, ta @ b + a @ tb)
        one = forward_ad.unpack_dual(opzoo.matmul(a, forward_ad.make_dual(b, tb))).tangent
        torch.testing.assert_close(one, a @ tb)


FUNCTIONALS: dict[str, Callable[..., object]] = {
    "grad": lambda f, a, b: torch.func.grad(lambda a, b: f(a, b).sin().sum(), argnums=(0, 1))(a, b),
    "jvp": lambda f, a, b: torch.func.jvp(f, (a, b), (b, a)),
    "jacrev": lambda f, a, b: torch.func.jacrev(f)(a, b),
    "jacfwd": lambda f, a, b: torch.func.jacfwd(f, argnums=1)(a, b),
    "hessian": lambda f, a, b: torch.func.hessian(lambda a, b: f(a, b).sin().sum(), argnums=(0, 1))(a, b),
    "vmap-both": lambda f, a, b: torch.func.vmap(f)(a, b),
    "vmap-a": lambda f, a, b: torch.func.vmap(f, in_dims=(1, None), out_dims=1)(a, b),
    "vmap-b": lambda f, a, b: torch.func.vmap(f, in_dims=(None, 1))(a, b),
    "vmap-vmap": lambda f, a, b: torch.func.vmap(torch.func.vmap(f, (None, 0)), (0, None))(a, b),
    "vmap-grad": lambda f, a, b: torch.func.vmap(torch.func.grad(lambda a, b: f(a, b).sin().sum()), (0, None))(a, b),
}


@pytest.mark.parametrize("name", FUNCTIONALS)
def test_functional_transforms(name: str, device: torch.device) -> None:
    a, b = normal(3, 3, device=device, dtype=torch.float64), normal(3, 3, device=device, dtype=torch.float64)
    ours, theirs = FUNCTIONALS[name](opzoo.matmul, a, b), FUNCTIONALS[name](torch.matmul, a, b)
    torch.testing.assert_close(ours, theirs)


# Autocast.


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast(dtype: torch.dtype, device: torch.device) -> None:
    a = normal(2, 20, 30, device=device).requires_grad_()
    b = normal(30, 40, device=device).requires_grad_()
    with torch.autocast(device.type, dtype):
        out = opzoo.matmul(a, b)
        mixed = opzoo.matmul(a, b.to(dtype))
        wide = opzoo.matmul(a.double(), b.double())
    assert (out.dtype, mixed.dtype, wide.dtype) == (dtype, dtype, torch.float64)
    assert torch.equal(out, opzoo.matmul(a.to(dtype), b.to(dtype))) and torch.equal(out, mixed)
    grad_a, grad_b = torch.autograd.grad(out.sum(), (a, b))
    assert (grad_a.dtype, grad_b.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(grad_a, b.sum(1).expand_as(a), rtol=2e-2, atol=0.3)


def test_autocast_inside_transforms(device: torch.device) -> None:
    a, b = normal(4, 3, device=device), normal(3, 2, device=device)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            out = opzoo.matmul(a, b)
        assert out.dtype == torch.bfloat16
        return out.float().sum()

    grad_a, grad_b = torch.func.grad(loss, argnums=(0, 1))(a, b)
    assert (grad_a.dtype, grad_b.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(grad_b, a.sum(0)[:, None].expand_as(b), rtol=2e-2, atol=0.1)
    out, tangent = torch.func.jvp(loss, (a, b), (a, b))
    torch.testing.assert_close(tangent, 2 * out, rtol=2e-2, atol=0.1)
    assert torch.func.vmap(loss, (0, None))(a[:, None], b).shape == (4,)


# Compiled graphs.


@pytest.mark.parametrize("shapes", [((6, 5), (5, 4)), ((5,), (5, 4)), ((3, 1, 6, 5), (2, 5, 4))], ids=shape_id)
def test_compile(shapes: tuple[tuple[int, ...], tuple[int, ...]], device: torch.device) -> None:
    compiled = torch.compile(opzoo.matmul, fullgraph=True, dynamic=True, backend="aot_eager")
    for extra in (0, 3):
        a, b = (normal(*s[:-1], s[-1], device=device) for s in shapes)
        b = torch.cat([b] + [b[..., :1]] * extra, -1).requires_grad_()
        out = compiled(a, b)
        torch.testing.assert_close(out, torch.matmul(a, b))
        (grad,) = torch.autograd.grad(out.sum(), b)
        torch.testing.assert_close(grad, torch.autograd.grad(torch.matmul(a, b).sum(), b)[0])


def test_export(device: torch.device) -> None:
    a, b = normal(3, 4, 5, device=device), normal(5, 6, device=device)
    rows = torch.export.Dim("rows", min=1, max=100)
    program = torch.export.export(opzoo.MatMul(), (a, b), dynamic_shapes={"a": {1: rows}, "b": None})
    assert any(node.target is torch.ops.opzoo.matmul.default for node in program.graph.nodes)
    longer = normal(3, 9, 5, device=device)
    torch.testing.assert_close(program.module()(longer, b), torch.matmul(longer, b))


def test_fake_equals_real(device: torch.device) -> None:
    a, b = normal(3, 5, 4, device=device).mT, normal(3, 5, 6, device=device)
    real = torch.ops.opzoo.matmul(a, b)
    fake = torch.ops.opzoo.matmul(a.to("meta"), b.to("meta"))
    assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


def test_opcheck(device: torch.device) -> None:
    a, b = normal(3, 4, 5, device=device).requires_grad_(), normal(5, 6, device=device).expand(3, 5, 6)
    torch.library.opcheck(torch.ops.opzoo.matmul.default, (a, b))


def test_module(device: torch.device) -> None:
    module = opzoo.MatMul()
    a, b = normal(3, 4, device=device), normal(4, 5, device=device)
    assert torch.equal(module(a, b), opzoo.matmul(a, b))
    assert not module.state_dict()


# Errors.


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


BAD_SUGAR: dict[str, tuple[Tensor, Tensor, str]] = {
    "0-d-a": (ones(), ones(3), "a must have at least 1 axis"),
    "0-d-b": (ones(3), ones(), "b must have at least 1 axis"),
    "batch": (ones(2, 3, 4), ones(3, 4, 5), r"batch axes of b must broadcast with those of a, \[2\], got \[3\]"),
}
BAD_RAW: dict[str, tuple[Tensor, Tensor, str]] = {
    "inner": (ones(2, 3), ones(4, 5), r"b must have shape \[3, 5\] to follow a of shape \[2, 3\], got \[4, 5\]"),
    "inner-batched": (ones(2, 3, 4), ones(2, 3, 5), r"b must have shape \[2, 4, 5\] .* got \[2, 3, 5\]"),
    "vector": (ones(1, 3), ones(4, 1), r"b must have shape \[3, 1\]"),
    "mixed": (ones(2, 3), ones(3, 2, dtype=torch.float64), "b must have the dtype of a, float32, got float64"),
    "mixed-half": (
        ones(2, 3, dtype=torch.float16),
        ones(3, 2, dtype=torch.bfloat16),
        "b must have the dtype of a, float16, got bfloat16",
    ),
    "int": (ones(2, 3, dtype=torch.int64), ones(3, 2, dtype=torch.int64), "a must be float64, .* got int64"),
    "bool": (ones(2, 3, dtype=torch.bool), ones(3, 2, dtype=torch.bool), "a must be float64, .* got bool"),
    "complex": (ones(2, 3, dtype=torch.complex64), ones(3, 2, dtype=torch.complex64), "a must be float64"),
}
RAW_ONLY: dict[str, tuple[Tensor, Tensor, str]] = {
    "rank-1": (ones(3), ones(3), r"a must have shape \[\*, M, K\] with at least 2 axes, got \[3\]"),
    "rank-0": (ones(), ones(), r"a must have shape \[\*, M, K\] with at least 2 axes, got \[\]"),
    "ranks": (ones(2, 3, 4), ones(4, 5), "b must have as many axes as a, 3, got 2"),
    "batch": (ones(1, 3, 4), ones(2, 4, 5), r"b must have shape \[1, 4, 5\]"),
}


@pytest.mark.parametrize("name", [*BAD_SUGAR, *BAD_RAW])
def test_bad_input(name: str, device: torch.device) -> None:
    a, b, message = (BAD_SUGAR | BAD_RAW)[name]
    with pytest.raises(RuntimeError, match=f"opzoo::matmul: .*{message}"):
        opzoo.matmul(a.to(device), b.to(device))


@pytest.mark.parametrize("name", BAD_RAW | RAW_ONLY)
def test_bad_input_of_the_raw_op(name: str, device: torch.device) -> None:
    a, b, message = (BAD_RAW | RAW_ONLY)[name]
    with pytest.raises(RuntimeError, match=f"opzoo::matmul: .*{message}"):
        torch.ops.opzoo.matmul(a.to(device), b.to(device))
    with pytest.raises(RuntimeError, match="opzoo::matmul: "):
        torch.ops.opzoo.matmul(a.to("meta"), b.to("meta"))


def test_not_a_tensor() -> None:
    with pytest.raises(TypeError, match="a and b must be tensors, got Tensor and float"):
        opzoo.matmul(ones(2, 2), 2.0)  # type: ignore[arg-type]


def test_result_too_large_to_count() -> None:
    a, b = ones(1, 1).expand(2**40, 1), ones(1, 1).expand(1, 2**40)
    with pytest.raises(RuntimeError, match="too large"):
        torch.ops.opzoo.matmul(a, b)
    assert torch.ops.opzoo.matmul(a[:, :0], b[:0, :0]).shape == (2**40, 0)


@pytest.mark.gpu
def test_mixed_devices() -> None:
    with pytest.raises(RuntimeError, match="b must be on the device of a, cpu, got cuda:"):
        opzoo.matmul(ones(2, 2), ones(2, 2).cuda())


@pytest.mark.slow
def test_more_than_2_31_elements(device: torch.device) -> None:
    """Offsets beyond 32 bits in an operand, in the batch and in the result."""
    a = torch.zeros(2**16 + 1, 2**15 + 1, dtype=torch.bfloat16, device=device)
    a[-1] = 1
    b = torch.ones(2**15 + 1, 2, dtype=torch.bfloat16, device=device)
    assert opzoo.matmul(a, b)[-1].tolist() == [32768.0, 32768.0]
    row = torch.ones(2**16 + 1, 1, dtype=torch.bfloat16, device=device)
    out = opzoo.matmul(row, torch.ones(1, 2**15 + 1, dtype=torch.bfloat16, device=device))
    assert out[-1].eq(1).all() and out[0].eq(1).all()
