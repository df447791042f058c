"""``python -m opzoo.new_op NAME``: write every file of a working elementwise operator, to be changed from there.

The templates are ``opzoo/scaffold/*.tmpl``; ``@name@`` stands for NAME and ``@Name@`` for its CamelCase.
"""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

FILES = {
    "op.h": "opzoo/csrc/{0}/{0}.h",
    "op_plan.h": "opzoo/csrc/{0}/{0}_plan.h",
    "op.cpp": "opzoo/csrc/{0}/{0}.cpp",
    "op_cpu.cpp": "opzoo/csrc/{0}/{0}_cpu.cpp",
    "op_kernel.cuh": "opzoo/csrc/{0}/{0}_kernel.cuh",
    "op_cuda.cu": "opzoo/csrc/{0}/{0}_cuda.cu",
    "ops.py": "opzoo/ops/{0}.py",
    "reference.py": "opzoo/reference/{0}.py",
    "test.py": "tests/test_{0}.py",
    "case.py": "tests/cases/{0}.py",
    "mutant.py": "tests/mutants/{0}.py",
    "bench.py": "opzoo/bench/cases/{0}.py",
    "page.md": "docs/ops/{0}.md",
}
EXPORTS = {"opzoo/__init__.py": "opzoo.ops", "opzoo/reference/__init__.py": "opzoo.reference"}
PAGES = "docs/ops/index.md"


def problem(name: str, root: Path) -> str | None:
    """Why no operator can be called ``name`` in the checkout at ``root``; None when one can."""
    if not (root / "setup.py").is_file() or not (root / "opzoo" / "csrc").is_dir() or not (root / "tests").is_dir():
        return f"{root} is not a source checkout of opzoo: clone the repository and install it with pip install -e ."
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        return f"NAME must be a snake_case identifier such as leaky_relu, got {name!r}"
    if keyword.iskeyword(name):
        return f"NAME must not be a keyword of Python, got {name!r}"
    if name in ("opzoo", "torch", "common"):
        return f"{name} means something else in the sources: choose another NAME"
    exported = [path for path in EXPORTS if f'"{name}"' in (root / path).read_text(encoding="utf-8")]
    module = [path for path in (f"opzoo/{name}", f"opzoo/{name}.py", f"opzoo/csrc/{name}") if (root / path).exists()]
    files = [path for path in (target.format(name) for target in FILES.values()) if (root / path).exists()]
    taken = [*exported, *module, *files]
    return f"{name} exists already, in {taken[0]}: choose another NAME" if taken else None


def with_export(text: str, package: str, name: str) -> str:
    """``text`` of an ``__init__.py`` with the import of ``name`` and its line in ``__all__``, both kept sorted."""
    lines = text.splitlines()
    imports = [i for i, line in enumerate(lines) if line.startswith(f"from {package}.")]
    line = f"from {package}.{name} import {name}"
    lines.insert(next((i for i in imports if lines[i].split()[1] > f"{package}.{name}"), imports[-1] + 1), line)
    start = lines.index("__all__ = [") + 1
    end = lines.index("]", start)
    later = (i for i in range(start, end) if lines[i].strip(' ",')[0].islower() and lines[i].strip(' ",') > name)
    lines.insert(next(later, end), f'    "{name}",')
    return "\n".join(lines) + "\n"


def with_page(text: str, name: str) -> str:
    """``text`` of the list of operator pages with the page of ``name`` last in its table and in its toctree."""
    lines = text.rstrip("\n").splitlines()
    row = max(i for i, line in enumerate(lines) if line.startswith("| [")) + 1
    lines.insert(row, f"| [{name}]({name}.md) | | |")
    lines.insert(len(lines) - 1, name)  # before the fence that closes the toctree
    return "\n".join(lines) + "\n"


def write(name: str, root: Path) -> list[str]:
    """Write all files of the operator and return their paths."""
    camel = "".join(part.capitalize() for part in name.split("_"))
    written = []
    for template, target in FILES.items():
        text = (Path(__file__).parent / "scaffold" / f"{template}.tmpl").read_text(encoding="utf-8")
        path = root / target.format(name)
        path.parent.mkdir(exist_ok=True)
        text = text.replace("@name@", name).replace("@Name@", camel)
        # NAME decides where the operator's own headers stand among the others.
        text = re.sub(r'(#include "[^"]*"\n)+', lambda block: "".join(sorted(block[0].splitlines(True))), text)
        path.write_text(text, encoding="utf-8")
        written.append(target.format(name))
    for target, package in EXPORTS.items():
        path = root / target
        path.write_text(with_export(path.read_text(encoding="utf-8"), package, name), encoding="utf-8")
    pages = root / PAGES
    pages.write_text(with_page(pages.read_text(encoding="utf-8"), name), encoding="utf-8")
    return written


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m opzoo.new_op", description="Write a new operator to change.")
    parser.add_argument("name", metavar="NAME", help="snake_case name of the operator")
    name = parser.parse_args(argv).name
    wrong = problem(name, ROOT)
    if wrong:
        print(f"opzoo.new_op: {wrong}", file=sys.stderr)
        return 1
    print("\n".join(write(name, ROOT)))
    print(f"Next: make build, then pytest tests/test_{name}.py; docs/howto/add_an_operator.md says what to change.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
