"""Models in the benchmark: what their gate refuses, and that they run."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import opzoo
from opzoo.bench import deform_resnet, detectors, models
from opzoo.bench.__main__ import main
from opzoo.bench.gate import GateError
from opzoo.bench.models import Model, ModelCase
from opzoo.bench.runner import Options, find_all, run_case
from opzoo.bench.timer import CpuClock, interleaved

pytest.importorskip("torchvision")

CPU = torch.device("cpu")
LAYER = importlib.import_module("opzoo.ops.deform_conv2d")


@contextlib.contextmanager
def on_reference() -> Iterator[None]:
    """A peer that takes half types on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LAYER, "deform_conv2d", opzoo.reference.deform_conv2d)
        yield


def small(dtype: torch.dtype, theirs: models.Context, wrong: Any = None) -> tuple[ModelCase, Model]:
    """One layer and a loss; ``wrong`` is what opzoo's operator is taken for."""
    torch.manual_seed(0)
    layer = opzoo.ModulatedDeformConv2dPack(4, 6, 3, padding=1)
    nn.init.normal_(layer.conv_offset.weight, std=0.2)
    module = nn.Sequential(layer, nn.ReLU())
    images = torch.randn(2, 4, 9, 8)

    def loss(dtype: torch.dtype) -> torch.Tensor:
        with models.autocast(CPU, dtype):
            return module(images.double() if dtype == torch.float64 else images).float().square().mean()

    @contextlib.contextmanager
    def ours() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            if wrong is not None:
                patch.setattr(LAYER, "deform_conv2d", wrong)
            yield

    model = Model(module, loss, {"train": lambda: loss(dtype).backward()}, ours, theirs, {"layer": layer})
    return ModelCase("small", dtype, lambda device: model), model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_accepts_the_operator(dtype: torch.dtype) -> None:
    theirs = deform_resnet.on_torchvision if dtype == torch.float32 else on_reference
    assert models.check(*small(dtype, theirs)) < 1e-12


def call(scale: float = 1.0, detach: int | None = None, below: torch.dtype | None = None) -> Any:
    """opzoo's operator with a fault: in its value, in one gradient, or in float64 not at all."""
    true = opzoo.deform_conv2d

    def wrong(*args: Any) -> torch.Tensor:
        operands = list(args)
        if below is None or operands[0].dtype == below or torch.is_autocast_enabled("cpu"):
            if detach is not None:
                operands[detach] = operands[detach].detach()
            return true(*operands) * scale
        return true(*operands)

    return wrong


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (call(scale=1 + 1e-5), "loss|weight|bias"),
        (call(detach=1), "conv_offset"),  # the offsets, of whose gradients the mask's remains
        (call(detach=7), "conv_offset"),
        (call(scale=1.5, below=torch.float32), "loss"),
        (call(detach=7, below=torch.float32), "layer.conv_offset"),
    ],
)
def test_gate_refuses_a_wrong_operator(wrong: Any, where: str) -> None:
    with pytest.raises(GateError, match=f"({where}).*: error .*, allowed "):
        models.check(*small(torch.float32, deform_resnet.on_torchvision, wrong))


def test_gate_refuses_a_wrong_half_operator() -> None:
    with pytest.raises(GateError, match=r"layer.conv_offset.\w+: error .*, allowed "):
        models.check(*small(torch.bfloat16, on_reference, call(detach=7, below=torch.bfloat16)))


def test_errors() -> None:
    one, two = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert models.errors({"loss": one, "a": two}, {"loss": one, "a": one}) == {"loss": 0.0, "a": pytest.approx(0.1)}
    assert models.errors({"loss": one}, {"loss": one, "a": one}) == {"a": float("inf")}
    assert models.errors({"loss": one * torch.nan}, {"loss": one})["loss"] == float("inf")
    tiny = {"a": one, "b": one * 1e-9}  # the rounding of something that cancels
    assert models.errors({"a": one, "b": -tiny["b"]}, tiny)["b"] < 1e-3


def test_a_wrong_model_gets_no_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    case, _ = small(torch.float32, deform_resnet.on_torchvision, call(scale=1.1))
    monkeypatch.setattr("opzoo.bench.__main__.find_all", lambda which, device: [case])
    assert main(["models", "--device", "cpu", "--in-process", "--quick"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed and "vs torchvision" not in printed


def test_the_deformable_resnet_runs() -> None:
    before = vars(LAYER)["deform_conv2d"]
    (case,) = deform_resnet.quick()
    result = run_case(case, Options("cpu", "quick"))
    assert result.status == "ok", result.message
    assert [(timing.impl, timing.what) for timing in result.timings] == [("opzoo", "train"), ("torchvision", "train")]
    assert result.timings[0].ratio and vars(LAYER)["deform_conv2d"] is before


def test_a_detector_passes_its_gate_and_detects() -> None:
    """The times would be those of the other model's test over again."""
    (case,) = detectors.quick()
    model = case.build(CPU)
    assert models.check(case, model) < 1e-6
    for context in (model.ours, model.theirs):
        with context():
            model.passes["detect"]()


def test_models_are_listed_beside_operators() -> None:
    for device in ("cpu", "cuda"):
        names = [case.id for case in find_all("full", device) if case.op == "models"]
        assert len(set(names)) == len(names) and any("resnet50-dcnv2" in name for name in names)
    assert "resnet50-dcnv2 NHWC bf16 N8 512x512" in names
    assert not models.find_models("tiny", "cpu")


def test_contexts_are_entered_outside_the_time() -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        seen.append("in")
        yield
        seen.append("out")

    class Clock(CpuClock):
        def seconds(self, call: Any) -> float:
            seen.append("start")
            call()
            return 1.0

    interleaved(Clock(), [lambda: seen.append("call")], 1.0, [context], warm_up=1)
    assert seen[:4] == ["in", "start", "call", "out"] and len(seen) == 4 * (1 + 5)
