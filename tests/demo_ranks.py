"""Train the example's detector in several processes and write down each one's losses; for ``torchrun``.

    torchrun --standalone --nproc-per-node 2 tests/demo_ranks.py BACKEND FILE

``losses_in_one_process`` does the same arithmetic without other processes: each process sees a share of a
batch, its batch norm that share alone, and gradients are averaged over the shares.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from detect_digits import to_batch
from digits.data import Scenes, make_scenes, split_digits
from digits.model import Detector

import opzoo

STEPS, SHARE = 6, 2


class Loss(nn.Module):
    """The detector's total loss as a ``forward``, which is what ``DistributedDataParallel`` wraps."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        # In double precision: a rounding then tips no NMS, and what is left of a difference is a mistake.
        self.detector = Detector(opzoo).double().to(device).train()

    def forward(self, images: Tensor, boxes: list[Tensor], labels: list[Tensor]) -> Tensor:
        return torch.stack(list(self.detector.losses(images, boxes, labels).values())).sum()


def draw(shares: int) -> Scenes:
    return make_scenes(split_digits()[0], STEPS * SHARE * shares, seed=3)


def loss_of_share(model: nn.Module, scenes: Scenes, step: int, share: int, shares: int, device: torch.device) -> Tensor:
    """Of one share of one step's batch; its random samples depend on the two numbers alone."""
    first = (step * shares + share) * SHARE
    chosen = slice(first, first + SHARE)
    torch.manual_seed(step * shares + share)
    images = to_batch(scenes.images[chosen], device, torch.float64)
    return model(
        images, [b.to(device).double() for b in scenes.boxes[chosen]], [t.to(device) for t in scenes.labels[chosen]]
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def losses_in_one_process(shares: int, device: torch.device) -> list[list[float]]:
    """``STEPS`` rows with the loss of every share."""
    model, scenes = Loss(device), draw(shares)
    optimizer, curve = optimizer_of(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [loss_of_share(model, scenes, step, share, shares, device) for share in range(shares)]
        (torch.stack(losses).sum() / shares).backward()
        optimizer.step()
        curve.append([loss.item() for loss in losses])
    return curve


def losses_of_ranks(device: torch.device) -> list[list[float]]:
    """The same rows from the processes of the group, known to all of them."""
    rank, shares = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Loss(device), device_ids=[device.index] if device.type == "cuda" else None)
    optimizer, curve, scenes = optimizer_of(model), [], draw(shares)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of_share(model, scenes, step, rank, shares, device)
        loss.backward()
        optimizer.step()
        everyones = [torch.empty_like(loss) for _ in range(shares)]
        dist.all_gather(everyones, loss.detach())
        curve.append([other.item() for other in everyones])
    return curve


def main(backend: str, file: str) -> None:
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    curve = losses_of_ranks(device)
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(curve))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
