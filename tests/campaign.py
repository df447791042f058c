"""``python tests/campaign.py [--device cuda] [--cases N] [--seed S]``: random calls of everything, answers looked at.

Drives every public function, module and ``torch.ops.opzoo`` operator, backward ones included, with
arguments that are right, laid out in every way, full of NaN, infinity and denormals, or wrong. A call must
return what :mod:`opzoo.reference` returns, within rounding, or raise a documented error: TypeError,
ValueError or RuntimeError in words of its own that name the operator; memory that is not there is an
error too. On the CPU calls run in forks, on tensors between pages that cannot be read. A case is
its seed and number alone: ``--only N`` runs one again and prints its traceback.

``--report FILE`` adds the counts of this run to a CSV file.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import csv
import datetime
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

sys.path.insert(0, str(Path(__file__).parent))
from campaign_draw import Arguments, Draw, lay_out, spoil
from campaign_expected import Expected, adjoint, difference, is_finite
from campaign_modules import targets
from campaign_targets import Target
from contract import outputs
from isolation import Guarded, in_forks, limit_memory

BATCH = 500  # cases per fork
TARGETS = targets()
# Words of the allocator, whose errors are documented as they are, and of torch's own argument parser, which
# names operator and argument.
MEMORY = re.compile(
    r"can't allocate memory|out of memory|(Storage size|Stride) calculation overflowed|integer multiplication overfl"
)
PARSER = re.compile(r"opzoo::\w+\(\) (expected|is missing|Expected|got)")
FOREIGN = re.compile(r"illegal memory access|device-side assert|INTERNAL ASSERT|view size is not compatible")


def arguments(seed: int, number: int, device: str) -> tuple[Target, Arguments, list[str], str]:
    """The target, its arguments, what is unusual about them and the mode of a case."""
    draw = Draw(seed * 1_000_003 + number, device)
    target = draw.choice(TARGETS)
    args = target.draw(draw)
    chance = draw.random()
    done = lay_out(draw, args) if chance < 0.4 or chance > 0.9 else []
    spoilt = spoil(draw, args) if chance > 0.3 else []
    modes = ["plain", "plain", "inference", "meta"] + ["grad"] * (3 if target.differentiable else 0)
    return target, args, done + [f"!{what}" for what in spoilt], draw.choice(modes)


def judge_error(target: Target, error: Exception, unusual: list[str], mode: str) -> str:
    """``error``'s kind, or ``FAULT`` and what is wrong with it."""
    text = str(error)
    if FOREIGN.search(text):
        return f"FAULT {type(error).__name__}: {text}"
    if "Cannot copy out of meta tensor" in text and any(" on meta" in what for what in unusual):
        return "error: a gradient between devices"  # torch's own backward of a meta tensor beside a number
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and MEMORY.search(text)):
        return "error: out of memory"
    if not isinstance(error, (TypeError, ValueError, RuntimeError)):
        return f"FAULT undocumented {type(error).__name__}: {text}"
    stem = target.name.lstrip("_")
    named = "opzoo" in text and (stem in text or stem.removesuffix("_backward") in text)
    if not (named or PARSER.search(text)):
        return f"FAULT does not name the operator: {type(error).__name__}: {text}"
    if mode != "meta" and not any(what.startswith("!") for what in unusual):
        return f"FAULT right arguments are refused: {type(error).__name__}: {text}"
    return f"error: {type(error).__name__}"


def compare(what: str, results: list[Tensor], expected: Expected) -> tuple[int, str]:
    if len(results) != len(expected):
        return 0, f"FAULT {what}: {len(results)} results, expected {len(expected)}"
    compared = 0
    for position, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        if wanted is None:
            continue
        compared += result.numel()
        if wrong := difference(result, wanted):
            return compared, f"FAULT {what} {position} ({result.dtype}): {wrong}"
    return compared, ""


def look(target: Target, args: Arguments, results: list[Tensor]) -> tuple[int, str]:
    """The number of values compared with the reference, and what is wrong."""
    try:
        expected = target.expect(**{k: tree_map_only(Tensor, Tensor.detach, v) for k, v in args.items()})
    except Exception as error:
        return 0, f"no reference: {type(error).__name__}: {str(error)[:100]}"
    return (0, "no reference: too large") if expected is None else compare("result", results, expected)


def call_with_grad(target: Target, args: Arguments, draw: Draw) -> tuple[int, str]:
    """Forward and backward; both answers compared where the values are finite and moderate."""
    can = [n for n in target.differentiable if args.get(n) is not None and isinstance(args[n], (Tensor, list))]
    if args.get("pool_mode") == "max" and "boxes" in can:
        can.remove("boxes")
    leaves = {
        n: tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), args[n]) for n in can
    }
    result = target.call(**{**args, **leaves})
    results = outputs(result)
    compared, wrong = look(target, args, results)
    flat = [t for t in outputs(leaves) if t.requires_grad]
    if wrong or len(results) != 1 or not results[0].requires_grad or not flat:
        return compared, wrong
    grad = draw.normal(*results[0].shape, dtype=results[0].dtype)
    wanted = tuple(n for n in can if any(t.requires_grad for t in outputs(leaves[n])))
    found = torch.autograd.grad(results, flat, grad)
    if args.get("pool_mode") == "max":
        return compared, wrong  # of equal samples the reference leaves the choice to torch
    assert target.reference is not None
    if not is_finite(list(args.values())):
        return compared, wrong
    linear = tuple(n for n in target.differentiable if n not in target.coordinates)
    try:
        expected = adjoint(target.reference, args, wanted, linear, grad, target.coordinates)
    except Exception as error:
        return compared, f"no reference: gradient: {type(error).__name__}: {str(error)[:100]}"
    more, wrong = compare(f"gradient of {wanted}", list(found), expected)
    return compared + more, wrong


@contextlib.contextmanager
def guarded(args: Arguments) -> Iterator[Arguments]:
    memory = Guarded()
    try:
        yield tree_map_only(Tensor, memory.copy, args)
    finally:
        memory.free()


def run_case(seed: int, number: int, device: str) -> str:
    """How case ``number`` went: ``values N``, ``error: Kind``, ``no reference: why`` or ``FAULT why``."""
    target, args, unusual, mode = arguments(seed, number, device)
    draw = Draw(seed * 1_000_003 + number + 500_000_003, device)
    try:
        with guarded(args) as own:
            if mode == "grad" and target.differentiable:
                compared, wrong = call_with_grad(target, own, draw)
            elif mode == "meta":
                return look_at_meta(target, args)
            else:
                context = torch.inference_mode() if mode == "inference" else torch.no_grad()
                with context:
                    results = outputs(target.call(**own))
                    if device == "cuda":
                        torch.cuda.synchronize()
                compared, wrong = look(target, own, results) if not any(t.is_meta for t in results) else (0, "meta")
    except Exception as error:
        return judge_error(target, error, unusual, mode)
    return wrong or f"values {compared}"


def as_meta(t: Tensor) -> Tensor:
    """On meta with the same strides; ``to`` would pack those that overlap."""
    if t.layout != torch.strided:
        return t.to("meta")
    t = t.resolve_neg()
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def look_at_meta(target: Target, args: Arguments) -> str:
    """All tensors on meta: the form of the real answer, or an error where the real call raises."""
    meta = {name: tree_map_only(Tensor, as_meta, value) for name, value in args.items()}
    with torch.no_grad():
        try:
            fakes = outputs(target.call(**meta))
        except Exception as error:
            return judge_error(target, error, ["!"], "meta")
        try:
            real = outputs(target.call(**args))
        except Exception:
            return "meta"  # refused for its values
    for fake, value in zip(fakes, real, strict=True):
        if fake.shape != value.shape or fake.dtype != value.dtype or fake.stride() != value.stride():
            return (
                f"FAULT meta {list(fake.shape)} {fake.stride()} {fake.dtype}, real {list(value.shape)} {value.stride()}"
            )
    return "meta"


def describe(seed: int, number: int, device: str) -> str:
    target, args, unusual, mode = arguments(seed, number, device)

    def short(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return f"[{', '.join(map(short, value))}]" if isinstance(value, list) else repr(value)[:40]

    inside = ", ".join(f"{name}={short(value)}" for name, value in args.items())
    call = getattr(target.call, "__qualname__", None) or str(target.call)
    return f"case {number}: {target.name} by {call} ({inside}) {mode}; {'; '.join(unusual)}"


def run(seed: int, cases: range, device: str) -> tuple[collections.Counter[str], list[tuple[int, str]]]:
    """Counts by outcome, and the faults with their numbers."""
    counts: collections.Counter[str] = collections.Counter()
    faults = []
    for start in range(cases.start, cases.stop, BATCH):
        batch = range(start, min(start + BATCH, cases.stop))

        def work(number: int) -> str:
            return run_case(seed, number, device)

        answers = in_forks(batch, work) if device == "cpu" else [work(number) for number in batch]
        for number, answer in zip(batch, answers, strict=True):
            counts["cases"] += 1
            if answer.startswith("values "):
                counts["equal to the reference"] += 1
                counts["values compared"] += int(answer.split()[1])
            elif answer.startswith("died: SIGALRM") and any(
                what.startswith("!") for what in arguments(seed, number, device)[2]
            ):
                counts["stopped: as much work as the numbers say"] += 1
            elif answer.startswith(("FAULT", "died")):
                counts["crashes" if answer.startswith("died") else "faults"] += 1
                faults.append((number, answer))
            else:
                counts[answer if answer.startswith("error") else answer.split(":")[0]] += 1
                if answer.startswith("no reference"):
                    counts[answer] += 1
    return counts, faults


def commit() -> str:
    root = Path(__file__).parents[1]
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    return found.stdout.strip()


COLUMNS = ("cases", "equal to the reference", "values compared", "faults", "crashes")


def write_report(path: Path, device: str, seed: int, counts: collections.Counter[str]) -> None:
    """One more row; errors by kind as JSON in the last column."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    row = {"date": datetime.date.today().isoformat(), "commit": commit(), "torch": torch.__version__, "device": name}
    row |= {"seed": str(seed)} | {column: str(counts[column]) for column in COLUMNS}
    others = {k: v for k, v in sorted(counts.items()) if k not in COLUMNS and not k.startswith("no reference:")}
    row["others"] = json.dumps(others)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this case alone, in this process")
    parser.add_argument("--report", type=Path, help="CSV file to add the counts to")
    options = parser.parse_args(given)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # no pool of threads for a fork to lose
    if options.only is not None:
        print(describe(options.seed, options.only, options.device))
        print(run_case(options.seed, options.only, options.device))
        return 0
    if options.device == "cpu":
        limit_memory()
    began = time.monotonic()
    counts, faults = run(options.seed, range(options.first, options.first + options.cases), options.device)
    for number, answer in faults[:50]:
        print(f"{answer}\n    {describe(options.seed, number, options.device)}")
    for name, count in sorted(counts.items()):
        print(f"{count:10d} {name}")
    print(f"seed {options.seed}, {time.monotonic() - began:.0f} s, {len(faults)} faults and crashes")
    if options.report:
        write_report(options.report, options.device, options.seed, counts)
    return 1 if faults or not counts["values compared"] else 0


if __name__ == "__main__":
    os.environ.setdefault("TORCH_SHOW_CPP_STACKTRACES", "0")
    sys.exit(main(sys.argv[1:]))
