"""Operators in the workers of a DataLoader, forked and spawned from a process that has used them already."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from loading import Pooled
from torch.utils.data import DataLoader


def set_two_threads(worker: int) -> None:
    torch.set_num_threads(2)


@pytest.mark.parametrize(
    ("method", "workers", "start"),
    [
        # A worker has one thread. With more of them in a forked one, torch's own operators wait for ever on the
        # threads that its parent had, and so would these, which share torch's threads.
        pytest.param("fork", 2, None, id="fork"),
        pytest.param("spawn", 1, set_two_threads, id="spawn"),
    ],
)
def test_workers_compute_what_their_parent_does(method: str, workers: int, start: Callable[[int], None] | None) -> None:
    """A pool of opzoo's own would not survive the fork; the loader would then time out."""
    data, before = Pooled(), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        expected = [data[index] for index in range(len(data))]
    finally:
        torch.set_num_threads(before)
    loader = DataLoader(
        data,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=method,
        timeout=60,
        worker_init_fn=start,
    )
    for got, wanted in zip(loader, expected, strict=True):
        assert torch.equal(got, wanted)
