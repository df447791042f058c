"""``opzoo.matmul(precision=...)`` and the products that GPUs do on tensor cores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import opzoo

PRECISIONS = ("ieee", "tf32", "tf32x3")
LAYOUTS = ("nn", "nt", "tn", "tt")
# Tiles cut at every edge, odd leading strides, K that is no multiple of a stage, few tiles and long sums.
SHAPES = [
    (128, 256, 64),
    (130, 264, 72),
    (257, 129, 65),
    (333, 777, 555),
    (16, 900, 300),
    (900, 16, 300),
    (90, 70, 9000),
]


def normal(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.float64).to(dtype)


def pair(
    M: int, N: int, K: int, layout: str, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Operands in row-major order ("n") or as transposed views ("t")."""
    a = normal(M, K, device=device, dtype=dtype)
    b = normal(K, N, device=device, dtype=dtype)
    return (
        a.mT.contiguous().mT if layout[0] == "t" else a,
        b.mT.contiguous().mT if layout[1] == "t" else b,
    )


def error(out: Tensor, truth: Tensor) -> float:
    return float((out.double() - truth).norm() / truth.norm())


def tf32_error(a: Tensor, b: Tensor, truth: Tensor) -> float:
    """Of float64 products of operands rounded to 10 bits of fraction."""

    def rounded(t: Tensor) -> Tensor:
        return ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).double()

    return error(rounded(a) @ rounded(b), truth)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_of_each_precision(shape: tuple[int, int, int], layout: str, device: torch.device) -> None:
    a, b = pair(*shape, layout, device)
    truth = a.double() @ b.double()
    # One unit in the last place is always allowed: a peer that splits a sum may be lucky.
    peer = error(torch.matmul(a, b), truth) + torch.finfo(torch.float32).eps / 2
    bound = {"ieee": 2 * peer, "tf32": max(1.1 * tf32_error(a, b, truth), 2 * peer), "tf32x3": 2 * peer}
    for precision in PRECISIONS:
        assert error(opzoo.matmul(a, b, precision=precision), truth) <= bound[precision], precision


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_halves_in_every_layout(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    a, b = pair(*shape, "nn", device, dtype)
    truth = a.double() @ b.double()
    peer = torch.matmul(a.float(), b.float()).to(dtype)
    out = opzoo.matmul(a, b)
    assert error(out, truth) <= 1.05 * error(peer, truth)
    for left in (a, a.mT.contiguous().mT, torch.nn.functional.pad(a, (1, 0))[:, 1:]):
        for right in (b, b.mT.contiguous().mT, b.repeat_interleave(2, 1)[:, ::2]):
            assert torch.equal(opzoo.matmul(left, right), out), "the bits depend on the strides"


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32), ids=str)
def test_batches(dtype: torch.dtype, device: torch.device) -> None:
    """One, two and three batch axes, shared operands, strides of 0, batch axes in another order."""
    a, b = normal(3, 5, 130, 70, device=device, dtype=dtype), normal(5, 70, 66, device=device, dtype=dtype)
    c = normal(2, 1, 5, 70, 66, device=device, dtype=dtype)
    for x, y in (
        (a, b),
        (a, b[0]),
        (a[0], b),
        (a[0, 0], b),
        (a.transpose(0, 1), b[:, None]),
        (a[:, :1], b),
        (a[None], c),
        (a[0, 0].expand(4, 130, 70), b[0].expand(4, 70, 66)),
        (a[0, 0, :1].expand(130, 70), b[0]),
        (a[0, 0], b[0, :, :1].expand(70, 66)),
    ):
        for precision in PRECISIONS if dtype == torch.float32 else (None,):
            out = opzoo.matmul(x, y, precision=precision)
            limit = 2e-6 if dtype == torch.float32 and precision != "tf32" else 4e-3
            assert error(out, x.double() @ y.double()) <= limit


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=str)
def test_views_that_overlap(dtype: torch.dtype, device: torch.device) -> None:
    """Small memory behind large shapes: sliding windows, and rows and batches that are all the same."""
    memory = normal(40000, device=device, dtype=dtype)
    windows = memory.as_strided((200, 300), (8, 1))
    b = memory[:30000].view(300, 100)
    one = memory[:100].view(1, 100).expand(1 << 15, 100)
    many = memory[:6400].view(64, 1, 1, 100).expand(64, 64, 20, 100)
    for x, y in (
        (windows, b),
        (memory.as_strided((200, 300), (1, 8)), b),
        (windows, memory.as_strided((300, 100), (1, 1))),
        (one, b[:100]),
        (many, memory[:16000].view(1, 8, 100, 20).repeat(1, 8, 1, 1)),
    ):
        for precision in PRECISIONS if dtype == torch.float32 else (None,):
            out = opzoo.matmul(x, y, precision=precision)
            limit = 2e-6 if dtype == torch.float32 and precision != "tf32" else 4e-3
            assert error(out[-100:], x[-100:].double() @ (y if y.dim() == 2 else y[-100:]).double()) <= limit


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nan_and_inf(precision: str, device: torch.device) -> None:
    a, b = pair(256, 384, 512, "nn", device)
    a[3, 7], b[9, 11], b[30, 12] = float("inf"), float("nan"), float("-inf")
    a[5, 30], b[7, 20], a[200] = 0, 0, 0
    truth = a.double() @ b.double()
    out = opzoo.matmul(a, b, precision=precision)
    assert torch.equal(out.isnan(), truth.isnan())
    assert torch.equal(out == float("inf"), truth == float("inf"))
    assert torch.equal(out == float("-inf"), truth == float("-inf"))
    finite = truth.isfinite()
    assert error(out[finite], truth[finite]) <= (1e-3 if precision == "tf32" else 2e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_largest_and_smallest_numbers(precision: str, device: torch.device) -> None:
    eye = torch.eye(256, device=device)
    for value in (torch.finfo(torch.float32).max, -3.4e38, 1.5e-30):
        out = opzoo.matmul(torch.full((128, 256), value, device=device), eye, precision=precision)
        assert out.isfinite().all()
        assert ((out.double() / value - 1).abs() <= (1e-3 if precision == "tf32" else 1e-6)).all()
    for value in (1e30, 1.7e25, 3e38):  # with remainders of either sign
        huge = torch.full((128, 256), value, device=device)
        assert (opzoo.matmul(huge, huge.mT.contiguous(), precision=precision) == float("inf")).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_use_the_same_precision(precision: str, device: torch.device) -> None:
    a, b = (t.requires_grad_() for t in pair(200, 220, 240, "nn", device))
    grad = normal(200, 220, device=device, dtype=torch.float32)
    grad_a, grad_b = torch.autograd.grad(opzoo.matmul(a, b, precision=precision), (a, b), grad)
    with torch.no_grad():
        assert torch.equal(grad_a, opzoo.matmul(grad, b.mT, precision=precision))
        assert torch.equal(grad_b, opzoo.matmul(a.mT, grad, precision=precision))
    code = PRECISIONS.index(precision)
    raw = torch.ops.opzoo.matmul(a, b, code)
    assert torch.equal(torch.autograd.grad(raw, a, grad)[0], grad_a)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_same_bits_every_time(precision: str, device: torch.device) -> None:
    a, b = pair(130, 140, 5000, "nn", device)
    first = opzoo.matmul(a, b, precision=precision)
    for _ in range(3):
        assert torch.equal(opzoo.matmul(a, b, precision=precision), first)


@pytest.mark.gpu
def test_none_follows_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair(300, 310, 320, "nn", torch.device("cuda"))
    for switch, precision in (("tf32", "tf32"), ("ieee", "ieee")):
        monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", switch)
        assert torch.equal(opzoo.matmul(a, b), opzoo.matmul(a, b, precision=precision))
    module = opzoo.MatMul(precision="tf32x3")
    assert torch.equal(module(a, b), opzoo.matmul(a, b, precision="tf32x3"))


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_with_torchs_switch() -> None:
    a, b = pair(300, 310, 320, "nn", torch.device("cuda"))
    compiled = torch.compile(opzoo.matmul, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b), opzoo.matmul(a, b))
    assert torch.equal(compiled(a, b, precision="tf32"), opzoo.matmul(a, b, precision="tf32"))


def test_unknown_precision() -> None:
    a = torch.ones(2, 2)
    for precision in ("fp32", "", 1):
        with pytest.raises(ValueError, match=r"opzoo::matmul: precision must be None or one of \['ieee'"):
            opzoo.matmul(a, a, precision=precision)  # type: ignore[arg-type]
    for code in (-1, 3):
        with pytest.raises((ValueError, RuntimeError), match="opzoo::matmul: precision must be 0"):
            torch.ops.opzoo.matmul(a, a, code)
    assert "tf32x3" in repr(opzoo.MatMul(precision="tf32x3"))
