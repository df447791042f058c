"""Does an installed opzoo work here? Needs torch and nothing else.

Every public operator, forward and backward, in four dtypes, on the CPU and on CUDA where there is
one, against values that can be checked by hand; each once through torch.compile.
"""

from __future__ import annotations

import inspect
import platform
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import opzoo

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Calls:
    """One operator's tiny call: arguments, the positions that get gradients, what must come out.

    ``gradients`` are those of the sum of the output.
    """

    def __init__(
        self,
        call: Callable[..., Tensor],
        inputs: Any,
        wanted: Any,
        output: Any,
        gradients: Any,
        compiles: bool = True,
    ) -> None:
        self.call, self.inputs, self.wanted, self.output, self.gradients = call, inputs, wanted, output, gradients
        self.compiles = compiles


def _ramp(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


_INF = float("inf")

CHECKS: dict[str, Calls] = {
    # 1 + 2 * 3
    "add": Calls(
        lambda a, b: opzoo.add(a, b, alpha=2),
        (torch.ones(2, 3), torch.full((3,), 3.0)),
        (0, 1),
        torch.full((2, 3), 7.0),
        (torch.ones(2, 3), torch.full((3,), 4.0)),
    ),
    "matmul": Calls(
        lambda a, b: opzoo.matmul(a, b),
        (torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([[5.0, 6], [7, 8]])),
        (0, 1),
        torch.tensor([[19.0, 22], [43, 50]]),
        (torch.tensor([[11.0, 15], [11, 15]]), torch.tensor([[4.0, 4], [6, 6]])),
    ),
    # One bin of one sample at (1.5, 1.5): the mean of the four middle pixels of 0..15.
    "roi_align": Calls(
        lambda x, boxes: opzoo.roi_align(x, boxes, (1, 1), 1.0, 1, True),
        (_ramp(1, 1, 4, 4), torch.tensor([[0.0, 1, 1, 3, 3]])),
        (0,),
        torch.full((1, 1, 1, 1), 7.5),
        (torch.nn.functional.pad(torch.full((1, 1, 2, 2), 0.25), (1, 1, 1, 1)),),
    ),
    # The same from the first map of two: a box of side 2 belongs to the map of scale 1.
    "multi_scale_roi_align": Calls(
        lambda fine, coarse, boxes: opzoo.multi_scale_roi_align(
            [fine, coarse], boxes, 1, [1.0, 0.5], 1, True, canonical_scale=2, canonical_level=0
        ),
        (_ramp(1, 1, 4, 4), torch.ones(1, 1, 2, 2), torch.tensor([[0.0, 1, 1, 3, 3]])),
        (0, 1),
        torch.full((1, 1, 1, 1), 7.5),
        (torch.nn.functional.pad(torch.full((1, 1, 2, 2), 0.25), (1, 1, 1, 1)), torch.zeros(1, 1, 2, 2)),
    ),
    # IoU of the first two is 0.5, which does not exceed the threshold; the third repeats the first.
    "nms": Calls(
        lambda boxes, scores: opzoo.nms(boxes, scores, 0.5),
        (torch.tensor([[0.0, 0, 2, 1], [0, 0, 1, 1], [0, 0, 2, 1]]), torch.tensor([0.5, 0.75, 0.25])),
        (),
        torch.tensor([1, 0]),
        (),
    ),
    "nms_padded": Calls(
        lambda boxes, scores: opzoo.nms_padded(boxes, scores, 0.5, 3)[0],
        (torch.tensor([[0.0, 0, 2, 1], [0, 0, 1, 1], [0, 0, 2, 1]]), torch.tensor([0.5, 0.75, 0.25])),
        (),
        torch.tensor([1, 0, -1]),
        (),
    ),
    "nms_match": Calls(
        lambda boxes, scores: torch.cat(opzoo.nms_match(boxes, scores, 0.5)),
        (torch.tensor([[0.0, 0, 2, 1], [0, 0, 1, 1], [0, 0, 2, 1]]), torch.tensor([0.5, 0.75, 0.25])),
        (),
        torch.tensor([1, 0, 2]),
        (),
        compiles=False,  # the number of groups is data
    ),
    # "naive" lowers to 0 what nms drops.
    "soft_nms": Calls(
        lambda boxes, scores: opzoo.soft_nms(boxes, scores, 0.75, method="naive")[0],
        (torch.tensor([[0.0, 0, 2, 1], [0, 0, 1, 1], [0, 0, 2, 1]]), torch.tensor([0.5, 0.75, 0.25])),
        (),
        torch.tensor([0.75, 0.5]),
        (),
    ),
    "batched_soft_nms": Calls(
        lambda boxes, scores: opzoo.batched_soft_nms(
            boxes, scores, torch.tensor([0, 1, 0]).to(boxes.device), 0.5, method="naive"
        )[0],
        (torch.tensor([[-3.0, -3, -1, -1]]).repeat(3, 1), torch.tensor([0.5, 0.75, 0.25])),
        (),
        torch.tensor([0.75, 0.5]),
        (),
    ),
    "batched_nms": Calls(
        lambda boxes, scores: opzoo.batched_nms(boxes, scores, torch.tensor([0, 1, 0]).to(boxes.device), 0.5),
        (torch.tensor([[-3.0, -3, -1, -1]]).repeat(3, 1), torch.tensor([0.5, 0.75, 0.25])),
        (),
        torch.tensor([1, 0]),
        (),
    ),
    # A 1x1 kernel of weight 2 that looks one pixel to the right, mask 0.5: the right neighbour, 0 past the edge.
    "deform_conv2d": Calls(
        lambda x, offset, weight, mask: opzoo.deform_conv2d(x, offset, weight, mask=mask),
        (
            _ramp(1, 1, 2, 3),
            torch.tensor([0.0, 1]).view(1, 2, 1, 1).repeat(1, 1, 2, 3),
            torch.full((1, 1, 1, 1), 2.0),
            torch.full((1, 1, 2, 3), 0.5),
        ),
        (0, 2, 3),
        torch.tensor([[1.0, 2, 0], [4, 5, 0]]).view(1, 1, 2, 3),
        (
            torch.tensor([[0.0, 1, 1], [0, 1, 1]]).view(1, 1, 2, 3),
            torch.full((1, 1, 1, 1), 6.0),
            torch.tensor([[2.0, 4, 0], [8, 10, 0]]).view(1, 1, 2, 3),
        ),
    ),
    # Infinite logits, right and wrong: the limits.
    "sigmoid_focal_loss": Calls(
        lambda x, t: opzoo.sigmoid_focal_loss(x, t, -1),
        (torch.tensor([_INF, -_INF, _INF, -_INF]), torch.tensor([1.0, 0, 0, 1])),
        (0,),
        torch.tensor([0.0, 0, _INF, _INF]),
        (torch.tensor([0.0, 0, 1, -1]),),
    ),
    # The middle of four pixels, twice: their mean times two, and its slopes times the two pixels of the map.
    "ms_deform_attn": Calls(
        lambda value, place, weight: opzoo.ms_deform_attn(
            value, torch.tensor([[2, 2]]).to(value.device), torch.tensor([0]).to(value.device), place, weight
        ),
        (_ramp(1, 4, 1, 1), torch.full((1, 1, 1, 1, 1, 2), 0.5), torch.full((1, 1, 1, 1, 1), 2.0)),
        (0, 1, 2),
        torch.full((1, 1, 1), 3.0),
        (
            torch.full((1, 4, 1, 1), 0.5),
            torch.tensor([4.0, 8]).view(1, 1, 1, 1, 1, 2),
            torch.full((1, 1, 1, 1, 1), 1.5),
        ),
    ),
    # Kernels of one number, 0.5: every pixel four times, halved.
    "carafe": Calls(
        lambda x, masks: opzoo.carafe(x, masks, 1, 1, 2),
        (_ramp(1, 1, 1, 2), torch.full((1, 1, 2, 4), 0.5)),
        (0, 1),
        torch.tensor([[0.0, 0, 0.5, 0.5]]).repeat(2, 1).view(1, 1, 2, 4),
        (torch.full((1, 1, 1, 2), 2.0), torch.tensor([[0.0, 0, 1, 1]]).repeat(2, 1).view(1, 1, 2, 4)),
    ),
    # The last pixel of each of four bins.
    "roi_pool": Calls(
        lambda x, boxes: opzoo.roi_pool(x, boxes, 2),
        (_ramp(1, 1, 4, 4), torch.tensor([[0.0, 0, 0, 3, 3]])),
        (0,),
        torch.tensor([[5.0, 7], [13, 15]]).view(1, 1, 2, 2),
        (torch.tensor([[0.0, 0, 0, 0], [0, 1, 0, 1]]).repeat(2, 1).view(1, 1, 4, 4),),
    ),
}


def public_operators() -> set[str]:
    """Functions of ``opzoo`` that lead to an operator, from the package itself."""
    functions = {name: getattr(opzoo, name) for name in opzoo.__all__}
    return {
        name
        for name, value in functions.items()
        if inspect.isfunction(value) and value.__module__.startswith("opzoo.ops.") and hasattr(opzoo.reference, name)
    }


def _equal(actual: Tensor, expected: Tensor, what: str) -> None:
    """Exactly: every number above is a small multiple of a power of two in all four dtypes."""
    actual = actual.detach().cpu()
    expected = expected.to(actual.dtype) if actual.is_floating_point() else expected
    if actual.dtype != expected.dtype or not torch.equal(actual, expected):
        raise AssertionError(f"{what}: got {actual.tolist()} ({actual.dtype}), expected {expected.tolist()}")


def check(name: str, device: str, dtype: torch.dtype, wrap: Callable[..., Any] = lambda call: call) -> None:
    case = CHECKS[name]
    tensors = [t.detach().to(device, dtype, copy=True) for t in case.inputs]
    for position in case.wanted:
        tensors[position].requires_grad_()
    output = wrap(case.call)(*tensors)
    _equal(output, case.output, f"{name}, output")
    if case.wanted:
        output.sum().backward()
        for position, expected in zip(case.wanted, case.gradients, strict=True):
            gradient = tensors[position].grad
            assert gradient is not None and gradient.dtype == dtype
            _equal(gradient, expected, f"{name}, gradient of argument {position}")


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(lambda *args: call(*args), backend="aot_eager", fullgraph=True)


def main() -> int:
    warnings.simplefilter("ignore")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    print(f"python {platform.python_version()}, torch {torch.__version__}, GPU {gpu}")
    print(f"opzoo {opzoo.__version__} from {opzoo.__path__[0]}: {opzoo.build_info()}")
    devices = ["cpu"] + ["cuda"] * (torch.cuda.is_available() and opzoo.build_info()["cuda"])
    torch._dynamo.config.capture_dynamic_output_shape_ops = True

    passed, failures = 0, []
    for name in sorted(CHECKS.keys() ^ public_operators()):
        failures.append(f"{name}: {'no such operator' if name in CHECKS else 'no smoke check'}")
    for name in sorted(CHECKS.keys() & public_operators()):
        for device in devices:
            runs: list[tuple[str, Callable[[], None]]] = [
                (str(dtype).removeprefix("torch."), lambda n=name, d=device, t=dtype: check(n, d, t))
                for dtype in DTYPES
            ]
            if CHECKS[name].compiles:
                runs.append(("compiled", lambda n=name, d=device: check(n, d, torch.float32, compiled)))
            for label, run in runs:
                try:
                    run()
                    passed += 1
                except Exception as error:
                    reason = str(error).strip().partition("\n")[0]
                    failures.append(f"{name} {device} {label}: {type(error).__name__}: {reason}")
    for failure in failures:
        print(f"  {failure}")
    print(f"smoke: {passed} passed" + (f", {len(failures)} failed" if failures else ""))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
