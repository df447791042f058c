"""Train a small two-stage detector on opzoo's operators, measure it, and hold it against torchvision's.

    python examples/detect_digits.py

Scenes of handwritten digits are drawn from scikit-learn's images, so nothing is downloaded. The detector uses
``opzoo.DeformConv2d`` in its backbone, ``opzoo.nms`` on its proposals, ``opzoo.RoIAlign`` to look at them and
``opzoo.batched_nms`` on the result. It trains in about three minutes on two CPU cores; a GPU is used if there
is one. Afterwards its weights are loaded into the same model on ``torchvision.ops``, which has to find the same.

The exit status is 1 if mAP at IoU 0.5 is below 0.80 on held-out scenes or if the two models disagree.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from digits.data import NUM_CLASSES, Scenes, make_scenes, split_digits
from digits.evaluate import Parity, compare, mean_average_precision
from digits.model import Detections, Detector
from digits.plot import plot_detections
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

BATCH = 8
MIN_MAP = 0.80
# A tie within rounding may tip an NMS decision in float32, hardly ever in float64: there, all must agree.
TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-6}
MIN_AGREEMENT = {torch.float32: 0.99, torch.float64: 1.0}
OPERATORS = {"opzoo": "opzoo", "torchvision": "torchvision.ops"}


@dataclass(frozen=True)
class Report:
    """What a run found out."""

    mean_ap: float
    parity: dict[torch.dtype, Parity]

    @property
    def parity_ok(self) -> bool:
        return all(p.agree >= MIN_AGREEMENT[dtype] * p.total for dtype, p in self.parity.items())

    @property
    def ok(self) -> bool:
        return self.mean_ap >= MIN_MAP and self.parity_ok


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600, help=f"training steps of {BATCH} scenes")
    parser.add_argument("--scenes", type=int, default=1200, help="training scenes to draw")
    parser.add_argument("--held-out", type=int, default=200, help="held-out scenes to judge by")
    parser.add_argument("--seed", type=int, default=0, help="of the scenes, the weights and the sampling")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("out/digits.png"), help="where to write the picture")
    parser.add_argument("--operators", choices=OPERATORS, default="opzoo", help="whose operators to train with")
    return parser.parse_args(argv)


def to_batch(images: Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 ``Tensor[N, 3, H, W]`` to 0..1 on ``device``."""
    return images.to(device, dtype) / 255


def train(model: Detector, scenes: Scenes, steps: int, device: torch.device) -> None:
    """AdamW with a one-cycle learning rate over batches drawn at random."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.15)
    boxes = [b.to(device) for b in scenes.boxes]
    labels = [label.to(device) for label in scenes.labels]
    model.train()
    with tqdm(range(steps), desc="train", unit="step", mininterval=1.0) as bar:
        for step in bar:
            batch = torch.randint(len(scenes), (BATCH,)).tolist()
            losses = model.losses(
                to_batch(scenes.images[batch], device), [boxes[i] for i in batch], [labels[i] for i in batch]
            )
            loss = torch.stack(list(losses.values())).sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            schedule.step()
            if step % 10 == 0:
                bar.set_postfix({name: f"{value.item():.3f}" for name, value in losses.items()}, refresh=False)


def detect(
    model: Detector, scenes: Scenes, device: torch.device, dtype: torch.dtype = torch.float32
) -> list[Detections]:
    """The detections of every scene, on the CPU, computed in ``dtype``."""
    model.to(dtype).eval()
    found = [d for chunk in scenes.images.split(25) for d in model(to_batch(chunk, device, dtype))]
    return [Detections(*(field.cpu() for field in d)) for d in found]


def check_parity(model: Detector, scenes: Scenes, device: torch.device) -> dict[torch.dtype, Parity]:
    """Compare ``model`` with the same weights on torchvision's operators, in single and double precision."""
    peer = Detector(importlib.import_module("torchvision.ops")).to(device)
    peer.load_state_dict(model.state_dict())
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # TF32 would blow a last digit up a thousandfold
        return {
            dtype: compare(detect(model, scenes, device, dtype), detect(peer, scenes, device, dtype), tolerance)
            for dtype, tolerance in TOLERANCE.items()
        }


def run(args: argparse.Namespace) -> Report:
    """Draw, train, judge, compare, plot; print a summary."""
    device = torch.device(args.device)
    seconds: dict[str, float] = {}
    started = time.perf_counter()

    def finish(phase: str) -> None:
        nonlocal started
        seconds[phase] = time.perf_counter() - started
        started = time.perf_counter()

    training_digits, held_out_digits = split_digits()
    scenes = make_scenes(training_digits, args.scenes, seed=2 * args.seed)
    held_out = make_scenes(held_out_digits, args.held_out, seed=2 * args.seed + 1)
    finish("draw scenes")

    torch.manual_seed(args.seed)
    model = Detector(importlib.import_module(OPERATORS[args.operators])).to(device)
    train(model, scenes, args.steps, device)
    finish("train")

    found = detect(model, held_out, device)
    mean_ap, per_class = mean_average_precision(found, held_out.boxes, held_out.labels, NUM_CLASSES)
    finish("detect")

    parity = check_parity(model, held_out, device)
    finish("compare")

    shown = Scenes(held_out.images[:8], held_out.boxes[:8], held_out.labels[:8])
    title = f"Handwritten digits in scenes kept from training, found on {args.operators}'s operators"
    plot_detections(args.out, shown, found, f"{title}. mAP@0.5 = {mean_ap:.3f} over {len(held_out)} scenes")
    finish("plot")

    report = Report(mean_ap, parity)
    print(f"\noperators  {args.operators} on {device}, compared with torchvision")
    print("time       " + ", ".join(f"{phase} {value:.1f} s" for phase, value in seconds.items()))
    print("AP@0.5     " + "  ".join(f"{c}: {ap:.3f}" for c, ap in enumerate(per_class)))
    print(f"mAP@0.5    {mean_ap:.4f} on {len(held_out)} held-out scenes (at least {MIN_MAP:.2f} wanted)")
    for dtype, p in parity.items():
        name = str(dtype).removeprefix("torch.")
        print(f"parity     {name}: {p.agree} of {p.total} detections agree, largest difference {p.difference:.1e}")
    print(f"picture    {args.out}")
    print("result     " + ("ok" if report.ok else "FAILED"))
    return report


def main(argv: list[str] | None = None) -> int:
    return 0 if run(parse_args(argv)).ok else 1


if __name__ == "__main__":
    sys.exit(main())
