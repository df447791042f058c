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
    "compute_sanitizer": "python tools/gpu_check.py memcheck racecheck initcheck synccheck coverage",
    "sanitizers": "python tools/sanitize.py --report docs/reliability/sanitizers.csv",
    "large": "python -m pytest --runslow tests/test_large.py",
    "matrix": "python tools/matrix.py --suite --csv docs/reliability/matrix.csv",
    "wheel": "python tools/wheel_audit.py --report docs/reliability/wheel.csv dist/*.whl dist/*.tar.gz",
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

# What the suite holds at every commit beside values: what, and the test.
HELD = (
    (
        "the example's detector trained by two processes, DistributedDataParallel under `torchrun` (gloo; NCCL where "
        "there are two GPUs): the losses of one process",
        "tests/test_demo_processes.py::test_two_processes_learn_as_one",
    ),
    (
        "its AOTInductor package in a process without its code: the detections of eager",
        "tests/test_demo_processes.py::test_package_runs_in_a_fresh_process",
    ),
    (
        "DataLoader workers, forked and spawned from a process that used the operators: its values, no hang",
        "tests/test_workers.py::test_workers_compute_what_their_parent_does",
    ),
    (
        "eight Python threads at once: the bits of one",
        "tests/test_campaign.py::test_python_threads_at_once",
    ),
    (
        "`torch.compile` of every function of boxes: two compilations for seven counts of boxes",
        "tests/test_recompiles.py::test_no_recompile_per_count",
    ),
    (
        "one compilation where the count is marked dynamic",
        "tests/test_recompiles.py::test_one_compilation_where_the_count_is_marked",
    ),
    (
        "the modes `default`, `reduce-overhead` and `max-autotune`: the values of eager",
        "tests/test_recompiles.py::test_every_mode",
    ),
    (
        "pickle, `copy.deepcopy` and `torch.save` of every module",
        "tests/test_contract_transforms.py::test_module_copies",
    ),
    (
        "`state_dict` of every module, through a file",
        "tests/test_contract_transforms.py::test_module_state_dict",
    ),
    (
        "memory that an operator allocates is full of NaN: no NaN in a result",
        "tests/test_contract.py::test_poisoned_allocations",
    ),
    (
        "a torch below the floor: one sentence",
        "tests/test_info.py::test_users_of_an_old_torch_get_one_sentence",
    ),
    (
        "a missing or old driver, a GPU of another architecture, a newer glibc: one sentence each",
        "tests/test_info.py::test_diagnosis",
    ),
    ("a `_C` that is missing: one sentence", "tests/test_info.py::test_not_built"),
    (
        "an sdist made without CUDA: every source, CUDA's too",
        "tests/test_wheel_audit.py::test_sdist_holds_every_source",
    ),
)

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


def compute_sanitizer() -> list[str]:
    what, command = "compute-sanitizer over every CUDA kernel", COMMANDS["compute_sanitizer"]
    found = rows("compute_sanitizer")
    if not found:
        return [f"| {what} | not run in this form | | `{command}` |"]
    return [
        f"| {what} | {row['tool']} on {row['device']}, {number(row['calls'])} calls: **{row['reports']} reports** "
        f"| {where(row)} | `{command}` |"
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


def matrix() -> list[str]:
    what, command = "one wheel, its suite in clean environments", COMMANDS["matrix"]
    found = rows("matrix")
    if not found:
        return [f"| {what} | not run | | `{command}` |"]
    numpy = {row["numpy"]: f"`{row['numpy']}`" for row in found} | {"none": "no NumPy"}
    places = [
        f"Python {row['python']}, {row['torch'].replace('==', ' ')}, {numpy[row['numpy']]}: "
        f"{number(row['passed'])} passed"
        for row in found
    ]
    failed = sum(row["ok"] != "True" for row in found)
    return [f"| {what} | {'; '.join(places)}; **{failed} of {len(found)} environments failed** | | `{command}` |"]


def wheel() -> list[str]:
    what, command = "wheel and sdist: symbols, abi3audit, auditwheel, a build from the sdist", COMMANDS["wheel"]
    found = rows("wheel")
    if not found:
        return [f"| {what} | not run | | `{command}` |"]
    return [
        f"| {what} | `{row['wheel']}` ({row['kernels']} kernels, {number(row['bytes'])} bytes); the sdist built for "
        f"the CPU and run with Python {row['environment'].replace('/', ', ').replace('==', ' ')}: "
        f"**{row['problems']} problems** | {where(row)} | `{command}` |"
        for row in found
    ]


def page() -> str:
    table = ["## What was run", "", "| what | result | date, commit | command |", "| --- | --- | --- | --- |"]
    table += campaign("cpu", 250_000) + campaign("cuda", 50_000) + sanitizers()
    table += compute_sanitizer()
    table += determinism("cpu") + determinism("cuda") + large("cpu") + large("cuda")
    table += matrix() + wheel()
    held = ["## What the suite holds at every commit", "", "| what | test |", "| --- | --- |"]
    held += [f"| {what} | `{test}` |" for what, test in HELD]
    faults = ["## Faults found and mended", "", "| operator | fault | test of its kind |", "| --- | --- | --- |"]
    faults += [f"| {row['operator']} | {row['fault']} | `{row['test']}` |" for row in rows("faults")]
    rules = ["## Where the answer need not be the reference's", ""]
    rules += ["| operator | what is not compared | why |", "| --- | --- | --- |"]
    rules += [f"| {' | '.join(rule)} |" for rule in RULES]
    return "\n".join([HEAD, *table, "", *held, "", *faults, "", *rules, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
