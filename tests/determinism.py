"""``python tests/determinism.py [--runs 100] [--device cuda]``: every operator again and again, to the last bit.

Each case of the contract suite runs forward and backward on inputs many times as long, ``--runs`` times
in all, in turn with 1, 2, 3 and 8 threads on the CPU. One bit that differs is a failure. Two documented
exceptions: of a backward on CUDA that sums in a varying order the forward alone is compared, and what
multiplies with torch (deform_conv2d on the CPU) is compared among runs of as many threads.
``--report FILE`` adds the counts of this run to a CSV file.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import hashlib
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from campaign import commit
from contract import forward_backward, grown, outputs
from helpers import Case, contract_cases
from torch import Tensor

THREADS = (1, 2, 3, 8)
DTYPES = (torch.float32, torch.bfloat16)


def digest(tensors: list[Tensor]) -> str:
    """Of the bits, so that NaN and negative zero count."""
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def differing(case: Case, dtype: torch.dtype, device: torch.device, runs: int, times: int = 32) -> set[int]:
    """The thread counts of runs that gave other bits than the first."""
    tensors = grown(case, device, dtype, times)
    forward_only = device.type == "cuda" and not case.deterministic_backward
    before, wrong = torch.get_num_threads(), set()
    first: dict[int, str] = {}
    try:
        for number in range(runs):
            threads = THREADS[number % len(THREADS)] if device.type == "cpu" else before
            torch.set_num_threads(threads)
            if forward_only:
                bits = digest(outputs(case.call(*tensors)))
            else:
                bits = digest([t for part in forward_backward(case, case.call, tensors) for t in part])
            if bits != first.setdefault(0 if case.same_for_any_threads else threads, bits):
                wrong.add(threads)
    finally:
        torch.set_num_threads(before)
    return wrong


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--report", type=Path, help="CSV file to add the counts to")
    options = parser.parse_args(given)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    device, failed, cases = torch.device(options.device), 0, contract_cases()
    for case in cases:
        for dtype in DTYPES:
            if wrong := differing(case, dtype, device, options.runs):
                failed += 1
                print(f"{case.id} in {dtype}: other bits with {sorted(wrong)} threads")
    operators = len({case.op for case in cases})
    print(f"{operators} operators, {len(cases) * len(DTYPES)} inputs, {options.runs} runs each, {failed} differ")
    if options.report:
        name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        row = {"date": datetime.date.today().isoformat(), "commit": commit(), "torch": torch.__version__}
        row |= {"device": name, "operators": str(operators), "inputs": str(len(cases) * len(DTYPES))}
        row |= {"runs": str(options.runs), "threads": " ".join(map(str, THREADS)) if options.device == "cpu" else ""}
        row["differing"] = str(failed)
        new = not options.report.exists()
        with options.report.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
