"""Write the tables of measured figures from docs/benchmarks/*.csv.

    python tools/benchmark_tables.py

Rewrites docs/benchmarks/README.md (every row of every file, a table per operator, which other pages
include by the comments around it) and the part of README.md and README.zh-CN.md between the table
markers (a selection of the H200's rows).
"""

from __future__ import annotations

import csv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "benchmarks"

# What the front page shows: (operator, case, pass).
SELECTED = [
    ("roi_align", "fp32 NCHW 7x7 sr2 R1000", "fwd"),
    ("roi_align", "fp32 NCHW 7x7 sr2 R1000", "bwd"),
    ("roi_align", "fp32 NCHW 14x14 sr2 R1000", "fwd"),
    ("roi_align", "fp32 NCHW 14x14 sr2 R1000", "bwd"),
    ("roi_align", "fp16 NHWC 7x7 sr2 R1000", "fwd"),
    ("roi_align", "fp16 NHWC 7x7 sr2 R1000", "bwd"),
    ("roi_align", "bf16 NHWC 14x14 sr2 R1000", "fwd"),
    ("nms", "N5000 iou.5", "fwd"),
    ("nms", "N100000 iou.5", "fwd"),
    ("batched_nms", "N20000 80cls", "fwd"),
    ("deform_conv2d", "fp32 NCHW N8 256->256 64x64", "fwd"),
    ("deform_conv2d", "fp16 NCHW N8 256->256 64x64", "bwd"),
    ("matmul", "fp32 4096^3", "fwd"),
    ("add", "fp32 2^28", "fwd"),
]

# Whose memory is a figure of its own, where the device tells it.
WITH_MEMORY = ("deform_conv2d", "models")

HEADINGS = {
    "README.md": ("operator", "case", "pass", "opzoo, us", "peer, us", "ratio"),
    "README.zh-CN.md": ("算子", "用例", "方向", "opzoo，微秒", "对照，微秒", "倍数"),
}
CAPTIONS = {
    "README.md": "{device}, torch {torch}, opzoo {commit}. The peer is torchvision, for add and matmul torch (cuBLAS); "
    "bf16, which torchvision does not have, is compared with its fp16.",
    "README.zh-CN.md": "{device}，torch {torch}，opzoo {commit}。对照为 torchvision，"
    "add 与 matmul 的对照为 torch（cuBLAS）；torchvision 不支持 bf16，故与其 fp16 比较。",
}


def times(path: Path) -> dict[tuple[str, str, str], dict[str, dict[str, str]]]:
    """(op, case, pass) -> implementation -> its row of times, in the order of the file."""
    table: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            if row["metric"] == "time":
                table.setdefault((row["op"], row["case"], row["pass"]), {})[row["impl"]] = row
    return table


def number(text: str) -> str:
    value = float(text)
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def markdown(headings: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * 3 + ["---:"] * (len(headings) - 3), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def peer_of(entry: dict[str, dict[str, str]]) -> dict[str, str] | None:
    return next((row for impl, row in entry.items() if impl != "opzoo"), None)


def front_page(name: str) -> str:
    table = times(FOLDER / "h200.csv")
    rows = []
    commits = dict.fromkeys(table[key]["opzoo"]["commit"] for key in SELECTED)
    for key in SELECTED:
        ours, peer = table[key]["opzoo"], peer_of(table[key])
        assert peer is not None, key
        op, case, direction = key
        rows.append(
            [f"`{op}`", case, direction, number(ours["p50"]), number(peer["p50"]), f"{float(ours['ratio']):.2f}x"]
        )
    caption = CAPTIONS[name].format(**{**table[SELECTED[0]]["opzoo"], "commit": ", ".join(commits)})
    before, rest = (ROOT / name).read_text(encoding="utf-8").split("<!-- table:begin -->")
    after = rest.split("<!-- table:end -->")[1]
    text = f"<!-- table:begin -->\n{markdown(HEADINGS[name], rows)}\n\n{caption}\n<!-- table:end -->"
    return before + text + after


def memory(entry: dict[str, dict[str, str]]) -> str:
    sides = [row["peak_bytes"] for row in (entry["opzoo"], peer_of(entry)) if row]
    return ", ".join(number(str(int(side) / 2**20)) for side in sides if side)


def cells(key: tuple[str, str, str], entry: dict[str, dict[str, str]]) -> list[str]:
    op, case, direction = key
    ours, peer = entry["opzoo"], peer_of(entry)
    return [
        f"`{op}`",
        case,
        direction,
        number(ours["p50"]),
        f"{peer['impl']} {number(peer['p50'])}" if peer else "",
        f"{float(ours['ratio']):.2f}x" if ours["ratio"] else "",
        f"{100 * float(ours['floor_share']):.1f} %" if ours["floor_share"] else "",
    ]


def origin(entry: dict[str, dict[str, str]]) -> str:
    return "{device}, torch {torch}, opzoo {commit}".format(**entry["opzoo"])


def section(entries: dict[tuple[str, str, str], dict[str, dict[str, str]]]) -> str:
    """The table of one operator."""
    headings = ["operator", "case", "pass", "opzoo", "peer", "ratio", "floor"]
    rows = [cells(key, entry) for key, entry in entries.items()]
    memories = [memory(entry) if key[0] in WITH_MEMORY else "" for key, entry in entries.items()]
    if any(memories):
        headings.append("memory")
        rows = [[*row, text] for row, text in zip(rows, memories, strict=True)]
    return markdown(tuple(headings), rows)


def all_rows() -> str:
    parts = [
        "# Measured figures\n\n"
        "Written by `tools/benchmark_tables.py` from the CSV files beside this page. Medians in microseconds; the peer "
        "ran in the same process on the same data; floor is the share of the time that the bytes or the arithmetic "
        "need at least; memory is what a call adds at its fullest, opzoo's and the peer's, in MiB. "
        "[How it is measured](../howto/benchmark.md).\n"
    ]
    for path in sorted(FOLDER.glob("*.csv")):
        table = times(path)
        first = origin(next(iter(table.values())))
        parts.append(f"\n## {first}\n")
        for op in dict.fromkeys(op for op, _, _ in table):
            entries = {key: entry for key, entry in table.items() if key[0] == op}
            text, place = section(entries), f"{path.stem} {op}"
            origins = list(dict.fromkeys(map(origin, entries.values())))
            if origins != [first]:
                text = f"Measured on {' and '.join(origins)}.\n\n{text}"
            parts.append(f"### {op}, {path.stem}\n\n<!-- {place} -->\n\n{text}\n\n<!-- end of {place} -->\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(all_rows(), encoding="utf-8")
    for page in HEADINGS:
        (ROOT / page).write_text(front_page(page), encoding="utf-8")
