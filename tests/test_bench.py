"""The benchmark: numbers appear for right operators only, and its arithmetic holds."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import opzoo
from opzoo.bench import report
from opzoo.bench.__main__ import main
from opzoo.bench.case import Case, Work, find_cases
from opzoo.bench.cases import add as add_cases
from opzoo.bench.cases import nms as nms_cases
from opzoo.bench.cases import roi_align as roi_align_cases
from opzoo.bench.data import detector_boxes, seeded
from opzoo.bench.gate import GateError, check, relative_error, sampled_rows
from opzoo.bench.machine import Machine, floor_seconds, is_arithmetic_bound, machine_for
from opzoo.bench.runner import Options, Result, Timing, run_case, run_isolated
from opzoo.bench.timer import MAX_REPEATS, MIN_REPEATS, WARM_UP, Quantiles, interleaved, quantile, quantiles

CPU = torch.device("cpu")
MACHINE = Machine("toy", bandwidth=1e9, rates={torch.float32: 1e12}, source="made up")
QUICK = ["add", "--quick", "--device", "cpu", "--in-process"]


@pytest.fixture(autouse=True)
def _known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opzoo.bench.runner.machine_for", lambda device: MACHINE)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_quick_run_prints_a_table_and_writes_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "numbers.csv"
    assert main([*QUICK, "--csv", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "fp32 2^16 transposed + row" in printed and "vs torch" in printed
    assert "extra MiB" not in printed  # unknown on the CPU
    rows = read_csv(path)
    assert tuple(rows[0]) == report.COLUMNS
    assert {(row["impl"], row["pass"], row["metric"], row["unit"]) for row in rows} == {
        (impl, what, metric, unit)
        for impl in ("opzoo", "torch")
        for what in ("fwd", "bwd")
        for metric, unit in (("time", "us"), ("throughput", "GB/s"))
    }
    for row in rows:
        assert 0 < float(row["p20"]) <= float(row["p50"]) <= float(row["p80"])
        assert bool(row["ratio"]) == (row["impl"] == "opzoo")
        assert float(row["gate_error"]) <= 5e-5 and row["peak_bytes"] == ""
        assert row["torch"] == torch.__version__ and row["commit"].startswith(opzoo.__version__)


def test_merging_keeps_other_cases(tmp_path: Path) -> None:
    path = tmp_path / "numbers.csv"
    assert main([*QUICK, "--csv", str(path), "--merge"]) == 0  # nothing there yet
    first = read_csv(path)
    other = {**first[0], "case": "of another day"}
    file = report.CsvFile(path)
    file.write([other, *first])
    file.close()
    assert main([*QUICK, "--csv", str(path), "--merge"]) == 0
    merged = read_csv(path)
    assert merged[0] == other and [row["case"] for row in merged[1:]] == [row["case"] for row in first]
    assert main([*QUICK, "--csv", str(path)]) == 0
    assert len(read_csv(path)) == len(first)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda a, b: a + b + 1e-3, id="value"),
        pytest.param(lambda a, b: a + b.detach(), id="no-gradient"),
        pytest.param(lambda a, b: a + 2 * b - b.detach(), id="gradient"),
        pytest.param(lambda a, b: (a + b).double(), id="dtype"),
        pytest.param(lambda a, b: (a + b) * torch.nan, id="nan"),
        pytest.param(lambda a, b: (a + b)[:, :-1], id="shape"),
    ],
)
def test_a_wrong_operator_gets_no_number(
    wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(opzoo, "add", wrong)
    path = tmp_path / "numbers.csv"
    assert main([*QUICK, "--csv", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed or "ERROR" in printed
    assert "vs torch" not in printed and "1 of 1 cases" in printed
    (row,) = read_csv(path)
    assert row["pass"] == "gate" and row["p50"] == row["p20"] == row["ratio"] == ""


def test_failed_states_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opzoo, "add", lambda a, b: a + b + 1)
    result = run_case(add_cases.quick()[0], Options("cpu", "quick"))
    assert result.status == "FAILED" and not result.timings
    assert result.gate_error is not None and result.gate_error > 0.1
    assert result.message.startswith("output: error ")


def test_an_exception_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cases = add_cases.tiny() + add_cases.quick()
    monkeypatch.setattr("opzoo.bench.__main__.find_all", lambda which, device: cases)

    def broken(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dim() == 1:
            raise RuntimeError("out of paper\nsecond line")
        return a + b

    monkeypatch.setattr(opzoo, "add", broken)
    assert main(QUICK) == 1
    printed = capsys.readouterr().out
    assert "ERROR" in printed and "RuntimeError: out of paper (broken, line" in printed
    assert "second line" not in printed and "vs torch" in printed


def test_a_dead_worker_costs_its_own_case_only() -> None:
    (case,) = add_cases.quick()
    absent = dataclasses.replace(case, id="absent")  # the worker looks it up, and dies of it
    _, *results = run_isolated([absent, case], Options("cpu", "quick", peers=()))
    assert all(isinstance(result, Result) for result in results)
    assert [(result.case, result.status) for result in results] == [("absent", "ERROR"), (case.id, "ok")]
    assert "the process died" in results[0].message


def test_overhead_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["add", "--overhead", "--device", "cpu", "--in-process"]) == 0
    printed = capsys.readouterr().out
    assert all(what in printed for what in ("no grad", "grad fwd", "fwd+bwd"))
    assert "GB/s" not in printed


def test_list_names_every_case_once(capsys: pytest.CaptureFixture[str]) -> None:
    for device in ("cpu", "cuda"):
        cases = find_cases("full", device)
        names = [(case.op, case.id) for case in cases]
        assert len(set(names)) == len(names)
        assert {case.op for case in cases} == {case.op for case in find_cases("quick", device)}
        assert {case.op for case in cases} == {case.op for case in find_cases("tiny", device)}
    assert main(["--list", "--device", "cpu"]) == 0
    assert "roi_align: fp32 NCHW 7x7 sr2 R256\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["subtract"], "no operator 'subtract'; there are add, "),
        (["--compare", "numpy"], "no peer 'numpy'; there are torch, torchvision and none"),
        (["--device", "tpu"], "expected cuda, cuda:N or cpu, got 'tpu'"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_no_peer_when_asked_for_none() -> None:
    result = run_case(add_cases.quick()[0], Options("cpu", "quick", peers=()))
    assert {timing.impl for timing in result.timings} == {"opzoo"}
    assert all(timing.ratio is None for timing in result.timings)


def test_a_peer_in_another_dtype_is_labelled() -> None:
    (case,) = add_cases.quick()
    case = dataclasses.replace(case, peer_tensors=lambda *tensors: tuple(t.half() for t in tensors))
    result = run_case(case, Options("cpu", "quick"))
    assert {timing.impl for timing in result.timings} == {"opzoo", "torch fp16"}


def test_a_peer_that_raises_leaves_our_number() -> None:
    (case,) = add_cases.quick()
    case = dataclasses.replace(case, peer_tensors=lambda a, b: (a, b[:, :3]))
    result = run_case(case, Options("cpu", "quick"))
    assert result.status == "ok" and {timing.impl for timing in result.timings} == {"opzoo"}
    assert result.message.startswith("torch does not run this case: ")


@pytest.mark.parametrize(
    ("work", "seconds", "arithmetic"),
    [
        (Work(2_000_000_000), 2.0, False),
        (Work(1_000, 3_000_000_000_000), 3.0, True),
        (Work(4_000_000_000, 3_000_000_000_000), 4.0, False),
        (Work(1_000_000_000, 10**15, torch.float16), 1.0, False),  # a rate nobody knows bounds nothing
        (Work(0), 0.0, False),
    ],
)
def test_floor(work: Work, seconds: float, arithmetic: bool) -> None:
    assert floor_seconds(MACHINE, work) == pytest.approx(seconds)
    assert is_arithmetic_bound(MACHINE, work) is arithmetic


def test_shares_and_throughput_of_a_row() -> None:
    timing = Timing("opzoo", "fwd", Quantiles(3.0, 4.0, 8.0), Work(2_000_000_000), peak_bytes=7, ratio=1.5)
    result = Result("add", "x", gate_error=0.0, timings=[timing])
    time, rate = report.csv_rows(result, MACHINE, "0")
    assert time["floor_share"] == rate["floor_share"] == pytest.approx(0.5)
    assert (time["p20"], time["p50"], time["p80"]) == pytest.approx((3e6, 4e6, 8e6))
    assert rate["unit"] == "GB/s"
    assert (rate["p20"], rate["p50"], rate["p80"]) == pytest.approx((0.25, 0.5, 2 / 3))


def test_quantiles() -> None:
    assert quantile([3.0], 0.8) == 3.0
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == pytest.approx(2.5)
    assert quantiles([float(x) for x in range(11)]) == Quantiles(p20=2.0, p50=5.0, p80=8.0)
    samples = torch.rand(101).tolist()
    assert quantile(samples, 0.2) == pytest.approx(float(torch.quantile(torch.tensor(samples), 0.2)))


class FixedClock:
    """Each call 'takes' what it returns."""

    def __init__(self) -> None:
        self.order: list[Any] = []

    def seconds(self, call: Any) -> float:
        self.order.append(call)
        return float(call())


@pytest.mark.parametrize(
    ("seconds", "repeats"), [(10.0, MIN_REPEATS), (0.005, 20), (1e-9, MAX_REPEATS)], ids=["long", "budget", "short"]
)
def test_calls_take_turns_within_the_budget(seconds: float, repeats: int) -> None:
    clock = FixedClock()
    calls = [lambda: seconds, lambda: seconds]
    samples = interleaved(clock, calls, budget=20 * 2 * 0.005 * 1.0001)
    assert [len(of_one) for of_one in samples] == [repeats, repeats]
    assert clock.order[2 * WARM_UP :] == calls * repeats


def test_relative_error() -> None:
    exact = torch.tensor([2.0, -4.0], dtype=torch.float64)
    assert relative_error(torch.tensor([2.0, -3.0]), exact) == 0.25
    assert relative_error(torch.zeros(3), exact) == float("inf")
    assert relative_error(torch.tensor([float("nan"), -4.0]), exact) == float("inf")
    assert relative_error(torch.tensor([0.5]), torch.zeros(1).double()) == 0.5


def test_sampled_rows_hold_both_ends() -> None:
    rows = sampled_rows(1000, 16, CPU)
    assert rows[0] == 0 and rows[-1] == 999 and 2 < len(rows) <= 16
    assert sampled_rows(1, 16, CPU).tolist() == [0]


@pytest.mark.parametrize("case", find_cases("quick", "cpu"), ids=lambda case: f"{case.op}-{case.id}")
def test_data_repeats_and_is_never_zero(case: Case) -> None:
    first, second = case.tensors(CPU), case.tensors(CPU)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) and bool(a.any())


def test_detector_boxes_look_like_a_detectors() -> None:
    boxes = detector_boxes(5000, seeded(CPU))
    sides = boxes[:, 2:] - boxes[:, :2]
    assert bool((sides >= 0).all()) and bool((boxes[:, 2] <= 1333).all()) and bool((boxes[:, 3] <= 800).all())
    low, high = sides.flatten().quantile(0.05), sides.flatten().quantile(0.95)
    assert 8 < low < 20 and 150 < high < 300
    iou = nms_cases._iou(boxes, boxes)
    assert (iou > 0.5).sum(1).float().mean() > 3  # each has neighbours to suppress


@pytest.mark.parametrize("classes", [None, 3])
def test_the_definition_of_nms_tells_right_from_wrong(classes: int | None) -> None:
    generator = seeded(CPU)
    boxes, scores = detector_boxes(400, generator), torch.rand(400, generator=generator)
    labels = None if classes is None else torch.randint(classes, (400,), generator=generator)
    keep = greedy(boxes, scores, labels)
    assert 0 < len(keep) < 400
    assert nms_cases.wrong_boxes(keep, boxes, scores, labels) == 0
    dropped = torch.tensor(sorted(set(range(400)) - set(keep.tolist())))
    assert nms_cases.wrong_boxes(keep[:-1], boxes, scores, labels) > 0
    assert nms_cases.wrong_boxes(keep.flip(0), boxes, scores, labels) > 0
    assert nms_cases.wrong_boxes(torch.cat([keep, dropped[:1]]), boxes, scores, labels) > 0
    assert nms_cases.wrong_boxes(torch.cat([keep, keep[-1:]]), boxes, scores, labels) > 0


def greedy(boxes: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
    overlaps = nms_cases._iou(boxes, boxes) > nms_cases.THRESHOLD
    if labels is not None:
        overlaps &= labels[:, None] == labels[None, :]
    kept: list[int] = []
    for i in scores.argsort(descending=True).tolist():
        if not overlaps[i, kept].any():
            kept.append(i)
    return torch.tensor(kept)


def test_touched_pixels_match_painting_the_boxes() -> None:
    rois = roi_align_cases._rois(20, 2, 25, 38, seeded(CPU))
    painted = torch.zeros(2, 25, 38, dtype=torch.bool)
    for image, x1, y1, x2, y2 in (rois * torch.tensor([1, 0.25, 0.25, 0.25, 0.25])).tolist():
        painted[int(image), int(y1) : -int(-y2 // 1), int(x1) : -int(-x2 // 1)] = True
    assert roi_align_cases.touched_pixels(torch.Size((2, 8, 25, 38)), rois) == int(painted.sum())


def test_gate_accepts_the_real_operator_in_half() -> None:
    case = add_cases._contiguous(12, torch.bfloat16)
    assert 0 < check(case, case.tensors(CPU)) < 2**-8


def test_gate_refuses_float16_rounding_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    case = add_cases._contiguous(12, torch.float32)
    monkeypatch.setattr(opzoo, "add", lambda a, b: (a + b).half().float())
    with pytest.raises(GateError, match="output: error"):
        check(case, case.tensors(CPU))


def test_this_machine_can_be_measured() -> None:
    machine = machine_for(CPU)
    assert 1e8 < machine.bandwidth < 1e13 and machine.rates[torch.float32] > 1e8
    assert "measured now" in machine.source and "thread" in machine.name


@pytest.mark.parametrize("target", ["all.png", "folder"])
def test_chart(target: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    spread = Quantiles(1.0, 1.0, 1.0)
    results = [
        Result(op, "case", timings=[Timing("opzoo", what, spread, ratio=2.0) for what in ("fwd", "bwd")])
        for op in ("add", "nms")
    ] + [Result("matmul", "case", "FAILED")]
    written = report.plot(results, tmp_path / target, MACHINE)
    names = [path.name for path in written]
    assert names == (["all.png"] if target == "all.png" else ["add.svg", "nms.svg"])
    assert all(path.stat().st_size > 1000 for path in written)
