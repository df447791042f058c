"""Every CUDA kernel of the extension, launched on shapes as small as its path allows.

    compute-sanitizer --tool racecheck python tests/every_kernel.py
    python tests/every_kernel.py --coverage      # exit status 1 if a kernel of the binary was not launched

The cases of the contract suite run forward and backward in every dtype; the calls below reach what needs a certain
size, layout or number of classes. ``--coverage`` compares the launches that torch's profiler saw with the kernels that
cuobjdump finds in ``opzoo/_C``. ``--device cpu`` runs the same calls without a GPU. ``tools/gpu_check.py`` runs all.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from contract import forward_backward  # noqa: E402
from helpers import contract_cases, detector_boxes  # noqa: E402

import opzoo  # noqa: E402

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
Call = Callable[[], Any]


def backward(result: Tensor, *leaves: Tensor) -> None:
    torch.autograd.grad(result.float().sum(), [t for t in leaves if t.requires_grad])


def leaf(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()


def contract(device: torch.device) -> Iterator[tuple[str, Call]]:
    for case, dtype in itertools.product(contract_cases(), FLOATS):
        yield f"{case.id} {dtype}", lambda c=case, d=dtype: forward_backward(c, c.call, c.tensors(device, d))


def add(device: torch.device) -> Iterator[tuple[str, Call]]:
    for dtype in (*FLOATS, *INTEGERS):
        a = torch.ones(64, 96, device=device, dtype=dtype)
        views = {
            "whole": (a, a),
            "transposed": (a.mT, a.mT.contiguous()),
            "row": (a, a[:1]),
            "sliced": (a[:, 1::2],) * 2,
        }
        for name, (left, right) in views.items():
            yield f"add {dtype} {name}", lambda x=left, y=right: opzoo.add(x, y)
        other = torch.float32 if dtype != torch.float32 else torch.float16
        yield f"add {dtype} mixed", lambda x=a, o=other: opzoo.add(x, x.to(o))


def matmul(device: torch.device) -> Iterator[tuple[str, Call]]:
    """Tiles of both sizes, K split and not, and on Hopper each tensor core kernel in each layout."""
    sizes = ((64, 64, 64), (128, 256, 320), (256, 128, 128), (200, 136, 72), (64, 64, 4096), (1536, 1536, 24))
    for dtype, (m, n, k) in itertools.product(FLOATS, sizes):
        for a_turned, b_turned in itertools.product((False, True), repeat=2):
            a = (
                torch.randn(k, m, device=device, dtype=dtype).mT
                if a_turned
                else torch.randn(m, k, device=device, dtype=dtype)
            )
            b = (
                torch.randn(n, k, device=device, dtype=dtype).mT
                if b_turned
                else torch.randn(k, n, device=device, dtype=dtype)
            )
            for precision in ("ieee", "tf32", "tf32x3") if dtype == torch.float32 else (None,):
                name = f"matmul {dtype} {m}x{n}x{k} {'T' * a_turned}{'t' * b_turned} {precision}"
                yield name, lambda x=a, y=b, p=precision: opzoo.matmul(x, y, precision=p)
    odd = torch.randn(130, 131, device=device)[:, 1:]
    yield "matmul of views no copy engine takes", lambda: opzoo.matmul(odd[::2], odd, precision="tf32x3")
    yield "matmul with infinity", lambda: opzoo.matmul(odd / 0, odd, precision="tf32x3")


def rois(device: torch.device, count: int, height: float, width: float) -> Tensor:
    boxes = detector_boxes(count, height, width).to(device)
    return torch.cat([torch.arange(count, device=device)[:, None] % 2, boxes], 1)


def roi_align(device: torch.device) -> Iterator[tuple[str, Call]]:
    def run(dtype: torch.dtype, count: int, size: int, ratio: int, last: bool, mode: str, moving: bool) -> None:
        x = leaf(device, dtype, 2, 32, 20, 24)
        boxes = rois(device, count, 20, 24).requires_grad_(moving)
        source = x.contiguous(memory_format=torch.channels_last) if last else x
        backward(opzoo.roi_align(source, boxes, size, 1.0, ratio, True, mode), x, boxes)

    for dtype, count, last, ratio in itertools.product(FLOATS, (4, 64), (False, True), (-1, 2)):
        for size, mode, moving in (
            (7, "avg", False),
            (7, "avg", True),
            (7, "max", False),
            (40, "avg", False),
            (40, "avg", True),
        ):
            name = f"roi_align {dtype} {count} RoIs {size} sr{ratio} {'NHWC' if last else 'NCHW'} {mode} {moving}"
            yield name, lambda a=(dtype, count, size, ratio, last, mode, moving): run(*a)
    for dtype, last in itertools.product(FLOATS, (False, True)):
        yield f"multi_scale_roi_align {dtype} {last}", lambda d=dtype, o=last: pyramid(device, d, o)
        yield f"roi_pool {dtype}", lambda d=dtype: pool(device, d)


def pyramid(device: torch.device, dtype: torch.dtype, last: bool) -> None:
    maps = [leaf(device, dtype, 2, 32, size, size) for size in (40, 20)]
    sources = [t.contiguous(memory_format=torch.channels_last) if last else t for t in maps]
    boxes = rois(device, 64, 160, 160).requires_grad_()
    out = opzoo.multi_scale_roi_align(sources, boxes, 7, [0.25, 0.125], 2, True, canonical_scale=40, canonical_level=2)
    backward(out, *maps, boxes)


def pool(device: torch.device, dtype: torch.dtype) -> None:
    x = leaf(device, dtype, 2, 8, 20, 24)
    backward(opzoo.roi_pool(x, rois(device, 8, 20, 24), 7), x)


def nms(device: torch.device) -> Iterator[tuple[str, Call]]:
    """Boxes against all, the cells, scores of 32 and 64 bits, classes, limits, and the teams of soft_nms."""
    for count, dtype in itertools.product((300, 9000), (torch.float32, torch.float64)):
        boxes = detector_boxes(count, 800, 1333).to(device, dtype)
        scores, classes = torch.rand(count, device=device, dtype=dtype), torch.arange(count, device=device) % 5
        for threshold in (0.1, 0.5):
            yield f"nms {count} {dtype} {threshold}", lambda b=boxes, s=scores, t=threshold: opzoo.nms(b, s, t)
            yield (
                f"batched_nms {count} {dtype} {threshold}",
                lambda b=boxes, s=scores, c=classes, t=threshold: opzoo.batched_nms(b, s, c, t, max_output=50),
            )
        yield f"nms of mixed dtypes {count} {dtype}", lambda b=boxes, s=scores: opzoo.nms(b, s.half(), 0.5)
        yield f"nms of integers {count} {dtype}", lambda b=boxes, s=scores: opzoo.nms(b, (s * 99).long(), 0.5)
        yield f"nms_match {count} {dtype}", lambda b=boxes, s=scores: opzoo.nms_match(b, s, 0.5)
        yield (
            f"nms_padded {count} {dtype}",
            lambda b=boxes, s=scores: opzoo.nms_padded(torch.stack([b, b]), torch.stack([s, s]), 0.5, 20),
        )
    for count, dtype, method in itertools.product(
        (300, 6000), (*FLOATS, *INTEGERS[:-1]), ("naive", "linear", "gaussian")
    ):
        boxes = detector_boxes(count, 100, 100).to(device, dtype)
        scores, classes = torch.rand(count, device=device).mul(99).to(dtype), torch.arange(count, device=device) % 3
        yield (
            f"soft_nms {count} {dtype} {method}",
            lambda b=boxes, s=scores, m=method: opzoo.soft_nms(b, s, method=m, min_score=20),
        )
        yield (
            f"batched_soft_nms {count} {dtype} {method}",
            lambda b=boxes, s=scores, c=classes, m=method: opzoo.batched_soft_nms(b, s, c, method=m, min_score=20),
        )


def deform_conv2d(device: torch.device) -> Iterator[tuple[str, Call]]:
    """Each method, layout and tile: many and few outputs, one and two halves, maps small enough to be split."""

    def run(dtype: torch.dtype, channels: int, out: int, side: int, last: bool, method: int, precision: int) -> None:
        x, weight = leaf(device, dtype, 2, channels, side, side), leaf(device, dtype, out, channels, 3, 3)
        source = x.contiguous(memory_format=torch.channels_last) if last else x
        offset, mask = leaf(device, dtype, 2, 18, side, side), leaf(device, dtype, 2, 9, side, side)
        geometry = (1, 1, 1, 1, 1, 1)
        torch.ops.opzoo.deform_conv2d(source, offset, weight, None, mask, *geometry, precision, method)
        if method == 0:
            backward(opzoo.deform_conv2d(source, offset, weight, None, padding=1, mask=mask), x, offset, weight, mask)

    shapes = ((64, 64, 12), (128, 256, 10), (128, 128, 24), (64, 512, 24))
    for dtype, (channels, out, side), last in itertools.product(FLOATS, shapes, (False, True)):
        for method, precision in itertools.product((0, 1, 2), (0, 1) if dtype == torch.float32 else (0,)):
            name = f"deform_conv2d {dtype} {channels}->{out} {side} {'NHWC' if last else 'NCHW'} {method} {precision}"
            yield name, lambda a=(dtype, channels, out, side, last, method, precision): run(*a)


def attention(device: torch.device) -> Iterator[tuple[str, Call]]:
    shapes, starts = torch.tensor([[6, 8], [3, 4]], device=device), torch.tensor([0, 48], device=device)

    def run(dtype: torch.dtype, channels: int, half_locations: bool) -> None:
        value = leaf(device, dtype, 2, 60, 4, channels)
        kept = dtype if half_locations or dtype == torch.float64 else torch.float32
        locations = torch.rand(2, 33, 4, 2, 4, 2, device=device).to(kept).requires_grad_()
        weights = torch.rand(2, 33, 4, 2, 4, device=device).to(kept).requires_grad_()
        backward(opzoo.ms_deform_attn(value, shapes, starts, locations, weights), value, locations, weights)

    for dtype, channels, half in itertools.product(FLOATS, (3, 8, 16, 32, 64, 128), (False, True)):
        yield f"ms_deform_attn {dtype} {channels} {half}", lambda a=(dtype, channels, half): run(*a)


def focal_and_carafe(device: torch.device) -> Iterator[tuple[str, Call]]:
    def focal(dtype: torch.dtype, targets: Tensor, turned: bool) -> None:
        x = leaf(device, dtype, 80, 50) if turned else leaf(device, dtype, 50, 80)
        backward(opzoo.sigmoid_focal_loss(x.mT if turned else x, targets), x)

    def carafe(dtype: torch.dtype, kernel: int, last: bool) -> None:
        x, masks = leaf(device, dtype, 2, 16, 8, 10), leaf(device, dtype, 2, 2 * kernel**2, 16, 20)
        source = x.contiguous(memory_format=torch.channels_last) if last else x
        backward(opzoo.carafe(source, masks, kernel, 2, 2), x, masks)

    for dtype, turned in itertools.product(FLOATS, (False, True)):
        for targets in (torch.rand(50, 80, device=device).round(), torch.arange(50, device=device)):
            yield f"focal {dtype} {targets.dim()} {turned}", lambda d=dtype, t=targets, s=turned: focal(d, t, s)
        for kernel in (1, 3, 5):
            yield f"carafe {dtype} {kernel} {turned}", lambda d=dtype, k=kernel, s=turned: carafe(d, k, s)


GROUPS = (contract, add, matmul, roi_align, nms, deform_conv2d, attention, focal_and_carafe)


def run_all(device: torch.device, chosen: str) -> int:
    count = 0
    for group in GROUPS:
        for name, call in group(device):
            if re.search(chosen, name):
                torch.manual_seed(0)
                try:
                    call()
                    if device.type == "cuda":
                        torch.cuda.synchronize()
                except Exception as error:
                    raise RuntimeError(f"{name}: {error}") from error
                count += 1
    return count


def in_binary() -> set[str]:
    """Names of the kernels of opzoo in the extension, demangled as the profiler does."""
    command = ["cuobjdump", "--dump-elf-symbols", str(find_spec("opzoo._C").origin)]  # type: ignore[union-attr]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = [line.split()[-1] for line in listed.splitlines() if "STO_ENTRY" in line]
    plain = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return {name for name in plain.splitlines() if "opzoo::" in name}


def missed(device: torch.device, chosen: str) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run_all(device, chosen)
    launched = {event.key for event in profile.key_averages()}
    return in_binary() - launched


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--coverage", action="store_true")
    parser.add_argument(
        "-k", default="", metavar="PATTERN", help="only calls whose name matches this regular expression"
    )
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = torch.device(args.device)
    if not args.coverage:
        print(f"{run_all(device, args.k)} calls on {device}")
        return 0
    for tool in ("cuobjdump", "c++filt"):
        if shutil.which(tool) is None:
            parser.error(f"--coverage needs {tool} on PATH")
    left = missed(device, args.k)
    print(*sorted(left), f"{len(left)} of {len(in_binary())} kernels were not launched", sep="\n")
    return bool(left)


if __name__ == "__main__":
    sys.exit(main())
