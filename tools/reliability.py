"""Write docs/reliability.md from the result files below docs/reliability/.

    python tools/reliability.py

The table's rows are what was asked to be run; a row without a result says so. ``faults.csv`` is kept by hand:
each fault that the tools found, and the test of its kind.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reliability"
PAGE = ROOT / "docs" / "reliability.md"

COMMANDS = {
    "campaign": "python tests/campaign.py --device {device} --cases {cases} --report docs/reliability/campaign.csv",
    "determinism": "python tests/determinism.py --device {device} --report docs/reliability/determinism.csv",
    "sanitizers": "python tools/sanitize.py --report docs/reliability/sanitizers.csv",
    "large": "python -m pytest --runslow tests/test_large.py",
}

HEAD = """\
# Reliability

Written by `tools/reliability.py` from the files in `docs/reliability/`. What is promised stands in
`SECURITY.md`.

A **case** of the campaign is one call of a public function, a module or a `torch.ops.opzoo` operator, drawn at random:
right arguments, every layout, NaN, infinity and denormals, wrong ranks, sizes, dtypes, devices, objects and numbers,
gradients, inference mode, meta tensors. It passes if the answer is that of `opzoo.reference`, within rounding, or
an error of the documented kind that names the operator. On the CPU cases run in forks, between pages that cannot be
read.

On an H200, before the present form of these tools (commit e1f3d85, December 2026), the suite of 5149 CUDA tests
passed but for 9 failures mended since, and compute-sanitizer's memcheck (0 errors) and racecheck (0 hazards) ran over
small shapes of every operator.
"""

# Where the answer need not be the reference's: operator, what is not compared, why.
RULES = (
    (
        "all",
        "sums that may overflow, and gradients that NaN or infinity reach",
        "the order of sums and products decides between a number, infinity and NaN",
    ),
    (
        "`roi_align`, `multi_scale_roi_align`",
        "a NaN or infinite pixel of weight 0",
        "it reaches only the averages that give it another weight; 0 times infinity is NaN in the reference",
    ),
    (
        '`roi_align` with `"max"`',
        "which of several equal samples gets the gradient",
        "the first here, torch's choice in the reference; the operator below is compared",
    ),
    (
        "`deform_conv2d`, `ms_deform_attn`",
        "whether a result is NaN or infinite where the reference's is one of the two",
        "a pixel at the border of the map is also read with weight 0",
    ),
    (
        "`carafe`, `ms_deform_attn`",
        "results with an infinite or NaN weight",
        "one that lies outside the map counts for nothing here",
    ),
    (
        "`ms_deform_attn`",
        "the gradient to `value` of NaN locations",
        "NaN here, nothing in `grid_sample`",
    ),
    (
        "`sigmoid_focal_loss`",
        "`gamma` above 10000; labels above 10 or below -10",
        "such a power of a rounded number may be anything; labels go from 0 to 1",
    ),
    (
        "RoIs on an adaptive grid",
        "boxes of more than 300 map pixels",
        "the reference would need gigabytes",
    ),
)


def rows(name: str) -> list[dict[str, str]]:
    path = FOLDER / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def number(text: str) -> str:
    return f"{int(text):,}"


def where(row: dict[str, str]) -> str:
    return f"{row['date']}, {row['commit']}"


def campaign(device: str, cases: int) -> list[str]:
    command = COMMANDS["campaign"].format(device=device, cases=cases)
    found = [row for row in rows("campaign") if (row["device"] == "CPU") == (device == "cpu")]
    what = f"campaign on {'the CPU' if device == 'cpu' else 'CUDA'}"
    if not found:
        return [f"| {what} | not run | | `{command}` |"]
    result = []
    for row in found:
        others: dict[str, int] = json.loads(row["others"])
        errors = sum(count for name, count in others.items() if name.startswith("error"))
        text = (
            f"{number(row['cases'])} cases, seed {row['seed']}: {number(row['equal to the reference'])} equal to the "
            f"reference ({number(row['values compared'])} values), {errors:,} documented errors, "
            f"{others.get('meta', 0):,} forms on meta, {others.get('no reference', 0):,} without a reference; "
            f"**{row['faults']} faults, {row['crashes']} crashes**"
        )
        command = COMMANDS["campaign"].format(device=device, cases=row["cases"])
        result.append(f"| {what} | {text} | {where(row)} | `{command} --seed {row['seed']}` |")
    return result


def determinism(device: str) -> list[str]:
    command = COMMANDS["determinism"].format(device=device)
    found = [row for row in rows("determinism") if (row["device"] == "CPU") == (device == "cpu")]
    what = f"same bits on {'the CPU' if device == 'cpu' else 'CUDA'}"
    if not found:
        return [f"| {what} | not run | | `{command}` |"]
    return [
        f"| {what} | {row['operators']} operators, {row['inputs']} inputs, {row['runs']} runs each"
        + (f" with {row['threads'].replace(' ', ', ')} threads" if row["threads"] else "")
        + f": **{row['differing']} differ** (`deform_conv2d` on the CPU among runs of as many threads) "
        + f"| {where(row)} | `{command}` |"
        for row in found
    ]


def sanitizers() -> list[str]:
    found = rows("sanitizers")
    command = COMMANDS["sanitizers"]
    if not found:
        return [f"| ASan and UBSan | not run | | `{command}` |"]
    return [
        f"| ASan and UBSan | tests of {row['operators']} operator folders, every single wrong argument and "
        f"{number(row['campaign cases'])} campaign cases: **{row['reports']} reports, {row['failed commands']} failed "
        f"commands** | {where(row)} | `{command}` |"
        for row in found
    ]


def large(device: str) -> list[str]:
    command = f"{COMMANDS['large']} -k {device}"
    what = f"more than 2^31 elements on {'the CPU' if device == 'cpu' else 'CUDA'}"
    found = [row for row in rows("large") if row["device"] == device]
    if not found:
        return [f"| {what} | not run | | `{command}` |"]
    return [
        f"| {what} | {row['passed']} tests passed, {row['failed']} failed; largest: {row['largest']} | {where(row)} "
        f"| `{command}` |"
        for row in found
    ]


def page() -> str:
    table = ["## What was run", "", "| what | result | date, commit | command |", "| --- | --- | --- | --- |"]
    table += campaign("cpu", 250_000) + campaign("cuda", 50_000) + sanitizers()
    table += determinism("cpu") + determinism("cuda") + large("cpu") + large("cuda")
    faults = ["## Faults found and mended", "", "| operator | fault | test of its kind |", "| --- | --- | --- |"]
    faults += [f"| {row['operator']} | {row['fault']} | `{row['test']}` |" for row in rows("faults")]
    rules = ["## Where the answer need not be the reference's", ""]
    rules += ["| operator | what is not compared | why |", "| --- | --- | --- |"]
    rules += [f"| {' | '.join(rule)} |" for rule in RULES]
    return "\n".join([HEAD, *table, "", *faults, "", *rules, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
