"""Print the requirements of the named extras of pyproject.toml, one per line."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def requirements(extras: list[str]) -> list[str]:
    # By regular expression: tomllib is not in Python 3.10.
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    section = re.search(r"\[project\.optional-dependencies\]\n(.*?)\n\n", text, re.DOTALL)
    if section is None:
        sys.exit("pyproject.toml has no [project.optional-dependencies]")
    table = dict(re.findall(r"^(\w+) = \[(.*)\]$", section.group(1), re.MULTILINE))
    return sorted({name for extra in extras for name in re.findall(r'"([^"]+)"', table[extra])})


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
