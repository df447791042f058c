"""The documentation runs: Python blocks of the pages, examples of the docstrings, links and their anchors.

A block below ``<!-- not run: reason -->`` is left out, and one that needs a GPU where there is none.
The blocks of a file share a namespace, in order.
"""

from __future__ import annotations

import doctest
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from test_repo import TRACKED

import opzoo

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if page.exists()]
MARKDOWN = sorted(path for path in TRACKED if path.suffix == ".md")

NOT_RUN = re.compile(r"<!--\s*not run:\s*\S.*-->")
NEEDS_GPU = re.compile(r"[\"']cuda(:\d+)?[\"']|\.cuda\(|torch\.cuda\.(?!is_available)")


@dataclass
class Block:
    line: int  # of its first line of code, counted from 1
    code: str
    skipped: bool


def blocks_of(text: str) -> list[Block]:
    """The fenced ``python`` blocks of a page, indented ones included."""
    found: list[Block] = []
    lines = text.splitlines()
    before, at = "", 0
    while at < len(lines):
        opening = re.match(r"(\s*)(`{3,}|~{3,})\s*\{?(?:code-block\}\s*)?(\w*)", lines[at])
        if not opening:
            before = lines[at] if lines[at].strip() else before
            at += 1
            continue
        indent, fence, language = opening.groups()
        end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == fence), len(lines))
        if language in ("python", "py"):
            body = [line.removeprefix(indent) for line in lines[at + 1 : end]]
            found.append(Block(at + 2, "\n".join(body) + "\n", bool(NOT_RUN.search(before))))
        before, at = "", end + 1
    return found


def test_blocks_are_found() -> None:
    page = (
        "text\n```python\na = 1\n```\n<!-- not run: needs weights -->\n\n```python\nb\n```\n"
        "- item\n  ```py\n  c = a\n  ```\n```bash\nls\n```\nlast\n\n```python\nd\n```\n"
    )
    assert [(b.line, b.code, b.skipped) for b in blocks_of(page)] == [
        (3, "a = 1\n", False),
        (8, "b\n", True),
        (12, "c = a\n", False),
        (20, "d\n", False),
    ]


def run_page(page: Path, text: str) -> int:
    namespace: dict[str, object] = {"__name__": "__main__"}
    ran = 0
    for block in blocks_of(text):
        if block.skipped:
            continue
        if NEEDS_GPU.search(block.code) and "is_available" not in block.code and not torch.cuda.is_available():
            continue
        try:  # the padding makes a traceback point at the line of the page
            if block.code.lstrip().startswith(">>>"):
                run_examples(block.code, f"{page.name}:{block.line}", namespace)
            else:
                exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)
        except Exception as error:
            raise AssertionError(f"{page}, block at line {block.line}: {error!r}") from error
        ran += 1
    return ran


def run_examples(text: str, name: str, namespace: dict[str, object]) -> int:
    """``>>>`` examples; the count that ran. Whitespace is free, because torch wraps as it likes."""
    test = doctest.DocTestParser().get_doctest(text, namespace, name, name, 0)
    report: list[str] = []
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, tried = doctest.DocTestRunner(optionflags=flags).run(test, out=report.append, clear_globs=False)
    assert failed == 0, "".join(report)
    return tried


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    run_page(page, page.read_text(encoding="utf-8"))


def test_a_wrong_page_fails(tmp_path: Path) -> None:
    """The runner itself: an exception and a wrong printed value both count."""
    for code in ("1 / 0", ">>> 1 + 1\n3"):
        with pytest.raises(AssertionError, match="line 2"):
            run_page(tmp_path / "page.md", f"```python\n{code}\n```\n")
    assert run_page(tmp_path / "page.md", "```python\nx = 1\n```\n```python\nassert x == 1\n```\n") == 2


PUBLIC = [name for name in opzoo.__all__ if callable(getattr(opzoo, name))]


def _docstrings(value: object) -> list[str]:
    texts = [inspect.getdoc(value) or ""]
    if isinstance(value, type):
        texts += [inspect.getdoc(method) or "" for method in vars(value).values() if inspect.isfunction(method)]
    return [text for text in texts if text]


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_examples(name: str) -> None:
    value = getattr(opzoo, name)
    torch.manual_seed(0)
    ran = sum(run_examples(text, f"opzoo.{name}", {"torch": torch, "opzoo": opzoo}) for text in _docstrings(value))
    if inspect.isfunction(value) and value.__module__.startswith("opzoo.ops."):
        assert ran, f"opzoo.{name} has no example"


LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+[\"'][^)]*)?\)|(?:src|href)=\"([^\"]+)\"")
# What a fresh clone has: a link to a build product works on one machine only.
IN_REPOSITORY = {place.resolve() for path in TRACKED for place in (path, *path.parents) if place.is_relative_to(ROOT)}


def without_code(text: str) -> str:
    return re.sub(r"^\s*(`{3,}|~{3,}).*?^\s*\1", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str, depth: int) -> set[str]:
    """Of the headings down to a level, as GitHub and MyST name them, and those set by hand."""
    outside, found = without_code(text), set()
    for marks, title in re.findall(r"^(#{1,6}) +(.+?) *#*$", outside, re.MULTILINE):
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = next(i for i in range(len(found) + 1) if (f"{slug}-{i}" if i else slug) not in found)
        if len(marks) <= depth:
            found.add(f"{slug}-{number}" if number else slug)
    by_hand = re.findall(r"^\(([\w-]+)\)=$|<a (?:id|name)=\"([\w-]+)\"", outside, re.MULTILINE)
    return found | {name for pair in by_hand for name in pair if name}


def depth_of(page: Path) -> int:
    """The site makes anchors of a few levels, GitHub of all."""
    depth = re.search(r"myst_heading_anchors = (\d)", (ROOT / "docs" / "conf.py").read_text(encoding="utf-8"))
    assert depth is not None
    return int(depth[1]) if page.is_relative_to(ROOT / "docs") else 6


def broken_links(page: Path, text: str, exists: Callable[[Path], bool] = Path.exists) -> list[str]:
    broken = []
    for match in LINK.finditer(re.sub(r"`[^`\n]*`", "", without_code(text))):
        target = match[1] or match[2]
        if re.match(r"[a-z][a-z0-9+.-]*:|//", target, re.IGNORECASE):
            continue
        name, _, anchor = unquote(target).partition("#")
        path = page.parent / name if name else page
        if name and not exists(path):
            broken.append(target)
        elif anchor and path.suffix == ".md":
            there = path.read_text(encoding="utf-8") if name else text
            if anchor not in anchors(there, depth_of(path.resolve())):
                broken.append(target)
    return broken


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not broken_links(page, text, lambda path: path.resolve() in IN_REPOSITORY)


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text(
        "# A `b`: c\n\n(by-hand)=\n## Same\n\n## Same\n\n```bash\n# no heading\n```\n", encoding="utf-8"
    )
    page = (
        "# 有 标题\n\n[a](there.md#a-b-c) ![b](gone.png) [c](https://x.y/z) [d](#e) `[f](code.md)` [g](<gone two.md>)"
        "[[h]](no.md 'i') [j](there.md#same-1) [k](there.md#same-2) [l](#有-标题) [m](there.md#no-heading)"
        " [n](there.md#by-hand)"
    )
    assert broken_links(tmp_path / "page.md", page) == [
        *("gone.png", "#e", "no.md", "there.md#same-2", "there.md#no-heading")
    ]


# The site

SITE = sorted((ROOT / "docs").rglob("*.md"))


def test_every_page_is_in_one_toctree() -> None:
    docs, listed = ROOT / "docs", []
    for page in SITE:
        trees = re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        entries = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
        listed += [(page.parent / entry).relative_to(docs).as_posix() for entry in entries]
    pages = [page.relative_to(docs).with_suffix("").as_posix() for page in SITE]
    assert sorted([*listed, "index"]) == sorted(pages)


def test_site_builds(tmp_path: Path) -> None:
    """As ``make docs`` does: a warning is an error. Every public name has its place on one page."""
    for module in ("sphinx", "myst_parser", "pydata_sphinx_theme"):
        pytest.importorskip(module)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "trees")]
    run = subprocess.run(
        [*command, str(ROOT / "docs"), str(tmp_path / "site")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    html = "".join(page.read_text(encoding="utf-8") for page in (tmp_path / "site" / "ops").glob("*.html"))
    operators = [name for name in PUBLIC if getattr(opzoo, name).__module__.startswith("opzoo.ops.")]
    assert operators and all(html.count(f'id="opzoo.{name}"') == 1 for name in operators)


PICTURES = ROOT / "docs" / "pictures"


def words(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text(encoding="utf-8"))


@pytest.mark.parametrize("script", sorted(PICTURES.glob("[!_]*.py")), ids=lambda script: script.stem)
def test_pictures(script: Path, tmp_path: Path) -> None:
    """Each script draws, and the committed picture says what it would say now: numbers of the CSV included."""
    pytest.importorskip("matplotlib")
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    drawn = sorted(tmp_path.glob("*.svg"))
    assert drawn, "no picture"
    for picture in drawn:
        committed = PICTURES / picture.name
        assert words(picture) and words(picture) == words(committed), f"run make pictures: {committed.name} is old"


def test_every_picture_has_a_page() -> None:
    shown = {name for page in SITE for name in re.findall(r"pictures/([\w-]+\.svg)", page.read_text(encoding="utf-8"))}
    assert shown == {picture.name for picture in PICTURES.glob("*.svg")}
