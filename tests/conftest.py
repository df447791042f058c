"""Fixtures: where a test runs, and that it runs the same every time."""

from __future__ import annotations

import random

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("opzoo", derandomize=True, deadline=None, max_examples=60)
hypothesis.settings.load_profile("opzoo")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="also run tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--runslow"):
            item.add_marker(pytest.mark.skip(reason="slow: needs --runslow"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device there is; on a machine with several GPUs a random one, so that guards are exercised."""
    if request.param == "cuda":
        return torch.device("cuda", random.randrange(torch.cuda.device_count()))
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo() -> None:
    """For tests that compile. Not for every test: a reset takes 0.2 s."""
    torch._dynamo.reset()
