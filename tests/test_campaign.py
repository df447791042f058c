"""The campaign in short, that it sees what is wrong, and the same promises under threads and in repetition."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import campaign
import determinism
import pytest
import torch
from campaign_draw import Draw
from campaign_expected import Near, difference
from campaign_targets import Target
from contract import forward_backward, grown
from helpers import Case, contract_cases
from isolation import Guarded, in_forks
from torch import Tensor

import opzoo

TESTS = Path(__file__).parent
CPU = torch.device("cpu")
REGISTERED = sorted(
    name
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("opzoo::") and "Tensor" in str(torch._C._get_schema(name, ""))
)


def test_campaign(device: torch.device) -> None:
    run = subprocess.run(
        [sys.executable, str(TESTS / "campaign.py"), "--device", device.type, "--cases", "8000"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_SHOW_CPP_STACKTRACES": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


def test_every_operator_is_a_target() -> None:
    called = {getattr(target.call, "_qualified_op_name", "") for target in campaign.TARGETS}
    assert set(REGISTERED) <= called, sorted(set(REGISTERED) - called)
    public = {name for name in opzoo.__all__ if callable(getattr(opzoo, name)) and name[0].islower()}
    functions = {target.call.__name__ for target in campaign.TARGETS if hasattr(target.call, "__name__")}
    assert public - {"build_info", "set_debug"} <= functions


def _answer(call: Any, expect: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    target = Target("add", call, lambda draw: {"a": draw.normal(3)}, expect)
    monkeypatch.setattr(
        campaign, "arguments", lambda seed, number, device: (target, target.draw(Draw(0, "cpu")), [], "")
    )
    return campaign.run_case(0, 0, "cpu")


def _raise(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda a: a + 1, "values 3"),
        (lambda a: a + 1.001, "FAULT result 0"),
        (lambda a: torch.full_like(a, float("nan")), "FAULT result 0"),
        (lambda a: (a + 1)[:2], "FAULT result 0"),
        (lambda a: (a + 1, a), "FAULT result: 2 results"),
        (lambda a: _raise(KeyError("a")), "FAULT undocumented KeyError"),
        (lambda a: _raise(RuntimeError("opzoo::matmul: no")), "FAULT does not name the operator"),
        (lambda a: _raise(RuntimeError("opzoo::add: view size is not compatible")), "FAULT RuntimeError"),
        (lambda a: _raise(RuntimeError("opzoo::add: a must be right")), "FAULT right arguments are refused"),
        (lambda a: _raise(MemoryError("opzoo::add")), "error: out of memory"),
    ],
)
def test_campaign_sees_faults(call: Any, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _answer(call, lambda a: [Near(a + 1, (a + 1).abs())], monkeypatch).startswith(answer)


def test_a_crash_is_seen_and_the_rest_goes_on() -> None:
    def work(number: int) -> str:
        if number == 2:
            ctypes.string_at(0)
        if number == 4:
            raise ValueError("of the work itself")
        return f"line {number}\nof two"

    answers = in_forks(range(6), work)
    assert answers[0] == "line 0 of two" and answers[5] == "line 5 of two" and len(answers) == 6
    assert answers[2] == f"died: {signal.SIGSEGV.name}" and answers[4] == "died: exit status 70"


def test_reads_beyond_a_guarded_tensor_crash() -> None:
    t = torch.arange(6.0).reshape(2, 3).mT
    memory = Guarded()
    copy = memory.copy(t)
    assert torch.equal(copy, t) and copy.stride() == t.stride()
    end = copy.data_ptr() + 6 * 4
    inside, outside = in_forks((-4, 0), lambda offset: str(len(ctypes.string_at(end + offset, 4))))
    assert inside == "4" and outside == "died: SIGSEGV"
    memory.free()


@pytest.mark.parametrize(
    ("result", "good"),
    [
        ([1.0, float("inf"), float("nan")], True),
        ([1.0 + 1e-6, float("inf"), float("nan")], True),
        ([1.001, float("inf"), float("nan")], False),
        ([1.0, float("-inf"), float("nan")], False),
        ([1.0, float("inf"), 0.0], False),
        ([float("nan"), float("inf"), float("nan")], False),
    ],
)
def test_difference(result: list[float], good: bool) -> None:
    expected = Near(torch.tensor([1.0, float("inf"), float("nan")]), torch.ones(3))
    assert (difference(torch.tensor(result), expected) == "") == good


# Kinds of faults that the campaign found


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize("name", REGISTERED)
def test_none_for_a_tensor_is_named(name: str, place: str) -> None:
    """The dispatcher hands None to the kernel as a tensor without anything."""
    op = getattr(torch.ops.opzoo, name.removeprefix("opzoo::"))
    target = next(target for target in campaign.TARGETS if target.call is op)
    args = target.draw(Draw(5, "cpu"))
    names = [argument.name for argument in op.default._schema.arguments if str(argument.type) == "Tensor"]
    given = {n: v.to(place) if isinstance(v, Tensor) else v for n, v in args.items()}
    for missing in names:
        if len(names) == 1:
            continue  # nothing is left to choose the kernel
        with torch.inference_mode(), pytest.raises(RuntimeError, match=f"{name}: {missing}"):
            op(**{**given, missing: None})


HUGE = {
    "add": lambda: opzoo.add(torch.ones(2), torch.ones(2), alpha=10**400),
    "add a number": lambda: opzoo.add(torch.ones(2), 10**400),
    "nms": lambda: opzoo.nms(torch.ones(2, 4), torch.ones(2), 10**400),
    "nms max_output": lambda: opzoo.nms(torch.ones(2, 4), torch.ones(2), 0.5, max_output=10**400),
    "sigmoid_focal_loss": lambda: opzoo.sigmoid_focal_loss(torch.ones(2), torch.ones(2), gamma=10**400),
    "roi_align": lambda: opzoo.roi_align(torch.ones(1, 1, 2, 2), torch.ones(0, 5), 10**400),
    "carafe": lambda: opzoo.carafe(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), 10**400),
}


@pytest.mark.parametrize("call", HUGE.values(), ids=HUGE.keys())
def test_huge_numbers_are_value_errors(call: Any) -> None:
    with pytest.raises(ValueError, match=r"opzoo::\w+: .* must fit in \d+ bits"):
        call()


# Threads and repetition


def without_case() -> list[Case]:
    """The public functions that are no operator of their own."""
    (nms,) = (case for case in contract_cases() if case.id == "nms")
    match = replace(nms, id="nms_match", call=lambda boxes, scores: opzoo.nms_match(boxes, scores, 0.5))
    offset = Case(
        id="make_offset",
        op="make_offset",
        tensors=lambda device, dtype: tuple(torch.rand(2, 2, 9, 5, 5, device=device, dtype=dtype)),
        call=opzoo.make_offset,
        raw=lambda dy, dx: (dy, dx),
        differentiable=(0, 1),
    )
    return [match, offset]


def test_python_threads_at_once() -> None:
    """Eight Python threads call every function at once; each gets what one thread alone gets."""
    inputs = [(case, grown(case, CPU, torch.float32, 4)) for case in [*contract_cases(), *without_case()]]

    def results(item: tuple[Case, list[Tensor]]) -> list[Tensor]:
        case, tensors = item
        return [t for part in forward_backward(case, case.call, tensors) for t in part]

    alone = [results(item) for item in inputs]

    def all_in_turn(start: int) -> list[list[Tensor]]:
        found = {at % len(inputs): results(inputs[at % len(inputs)]) for at in range(start, start + len(inputs))}
        return [found[at] for at in range(len(inputs))]

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(all_in_turn, range(8)):
            for (case, _), got, wanted in zip(inputs, found, alone, strict=True):
                for a, b in zip(got, wanted, strict=True):
                    if case.same_for_any_threads:
                        assert torch.equal(a, b), case.id
                    else:
                        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("case", contract_cases(), ids=lambda case: case.id)
def test_same_bits_for_any_threads(case: Case) -> None:
    """Threads 1, 2, 3, 8 and again: the short form of ``determinism.py``."""
    assert not determinism.differing(case, torch.float32, CPU, runs=8)


def test_determinism_sees_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    case = contract_cases()[0]
    monkeypatch.setattr(determinism, "forward_backward", lambda *args: ([torch.rand(3)], []))
    assert determinism.differing(case, torch.float32, CPU, runs=4)


def test_foreign_arguments_of_matmul_are_named() -> None:
    a = torch.ones(1, 2, 2)
    with pytest.raises(RuntimeError, match="opzoo::matmul: b must be dense"):
        opzoo.matmul(a.expand(3, 2, 2), a.to_sparse())
    with pytest.raises(ValueError, match="opzoo::matmul: precision must be None or one of"):
        opzoo.matmul(a, a, precision=[])  # type: ignore[arg-type]
