"""The example's detector in processes of its own: trained by two of them, and run by one that lacks its code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import opzoo

for package in ("sklearn", "matplotlib", "tqdm"):
    pytest.importorskip(package)

import demo_ranks  # noqa: E402  (makes examples/ importable)
from digits.data import make_scenes, split_digits  # noqa: E402
from digits.evaluate import compare  # noqa: E402
from digits.model import Detections, Detector  # noqa: E402

HERE = Path(__file__).resolve().parent
PACKAGE = str(Path(opzoo.__file__).parents[1])


def environment() -> dict[str, str]:
    """For a child that finds opzoo, and nothing of the examples."""
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return {**os.environ, "PYTHONPATH": PACKAGE, "OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def test_two_processes_learn_as_one(backend: str, tmp_path: Path) -> None:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    file = tmp_path / "losses.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    child = subprocess.Popen(
        [*torchrun, str(HERE / "demo_ranks.py"), backend, str(file)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        device = torch.device("cpu" if backend == "gloo" else "cuda:0")
        alone = torch.tensor(demo_ranks.losses_in_one_process(2, device), dtype=torch.float64)
        printed, _ = child.communicate(timeout=240)
    finally:
        child.terminate()  # a torchrun that waits ends its ranks
        child.wait(60)
    assert child.returncode == 0, printed[-4000:]
    together = torch.tensor(json.loads(file.read_text()), dtype=torch.float64)
    assert together.shape == (demo_ranks.STEPS, 2) and together.isfinite().all()
    torch.testing.assert_close(together, alone, rtol=1e-8, atol=0)
    assert (alone.diff(dim=0).abs() > 1e-3).all()  # the steps changed something


class Flat(nn.Module):
    """The detections of all images as one tuple of tensors: a package knows no ``Detections``."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(field for found in self.detector(images) for field in found)


def example_detector() -> Detector:
    """In double precision, where no rounding tips an NMS; unlike at the start its offsets are not zero."""
    torch.manual_seed(0)
    detector = Detector(opzoo).double().eval()
    with torch.no_grad():
        for parameter in detector.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    detector.region_head.SCORE = 0.5  # some images then have few detections
    return detector


RUN_PACKAGE = """
import sys
import torch
import opzoo

package = torch._inductor.aoti_load_package(sys.argv[1])
torch.save([package(images) for images in torch.load(sys.argv[2])], sys.argv[3])
assert not {"digits", "detect_digits"} & set(sys.modules)
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs g++")
def test_package_runs_in_a_fresh_process(tmp_path: Path) -> None:
    flat = Flat(example_detector())
    images = (make_scenes(split_digits()[1], 4, seed=1).images.double() / 255).split(1)
    expected = [flat(image) for image in images]
    program = torch.export.export(flat, (images[0],))
    # Without layout optimization: on the CPU torch 2.14 takes a convolution's result for contiguous where the size of
    # its batch is known at run time only, and then computes something else.
    options = {"layout_optimization": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    package, given, found = (str(tmp_path / name) for name in ("detector.pt2", "images.pt", "found.pt"))
    torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=options)
    torch.save(images, given)
    child = subprocess.run(
        [sys.executable, "-c", RUN_PACKAGE, package, given, found],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    theirs, ours = ([Detections(*fields) for fields in fields_of] for fields_of in (torch.load(found), expected))
    assert len({len(d.scores) for d in ours}) > 1, "every image has as many detections"
    assert compare(theirs, ours, 1e-9).identical
