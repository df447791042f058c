"""The site: ``make docs``. Pages are the Markdown files of this folder; the API comes from docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import opzoo

project = "opzoo"
copyright = "the opzoo authors, Apache-2.0"
version = release = opzoo.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["pictures"]

myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "pydata_sphinx_theme"
html_title = f"opzoo {version}"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["opzoo.css"]
html_sidebars = {page: [] for page in ("index", "install", "quickstart", "design", "changelog", "benchmarks/README")}
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "pygments_light_style": "friendly",
    "pygments_dark_style": "github-dark",
}


def public_names(module: str) -> list[str]:
    """What ``opzoo`` exports of an operator's file, functions first, each in the order of the file."""
    own = [
        (name, value)
        for name, value in vars(importlib.import_module(module)).items()
        if name in opzoo.__all__ and getattr(value, "__module__", None) == module
    ]
    own.sort(key=lambda item: inspect.isclass(item[1]))
    return [name for name, _ in own]


def api_section(module: str) -> str:
    lines = ["", "## API", "", "```{eval-rst}", ".. py:currentmodule:: opzoo", ""]
    for name in public_names(module):
        if inspect.isclass(getattr(opzoo, name)):
            lines += [f".. autoclass:: opzoo.{name}", "   :members: forward", ""]
        else:
            lines += [f".. autofunction:: opzoo.{name}", ""]
    return "\n".join([*lines, "```", ""])


def add_api(app: Any, page: str, source: list[str]) -> None:
    """An operator's page ends with the docstrings of its file, which are written once."""
    folder, _, stem = page.rpartition("/")
    if folder == "ops" and stem != "index":
        source[0] += api_section(f"opzoo.ops.{stem}")


def code_links(app: Any, document: Any) -> None:
    """A link to a file of the repository that is no page here becomes its path, in code type."""
    from docutils import nodes

    here = Path(app.srcdir)
    pages = {path.relative_to(here).with_suffix("").as_posix() for path in here.rglob("*.md")}
    for link in [*document.findall(lambda node: node.tagname in ("download_reference", "pending_xref"))]:
        target = str(link.get("reftarget", "")).partition("#")[0]
        if "/" not in target and not target.endswith((".md", ".csv", ".py")):
            continue
        page = here / document.settings.env.docname
        path = (page.parent / target).resolve()
        inside = path.is_relative_to(here) and path.relative_to(here).with_suffix("").as_posix() in pages
        if path.exists() and not inside and path.is_relative_to(here.parent):
            link.replace_self(nodes.literal(text=str(path.relative_to(here.parent))))


CHINESE = "[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"


def join_chinese_lines(app: Any, document: Any) -> None:
    """A browser shows the end of a line as a space, which Chinese does not have between its words."""
    from docutils import nodes

    for text in [*document.findall(nodes.Text)]:
        siblings = text.parent.children
        at = next(i for i, node in enumerate(siblings) if node is text)  # texts of the same words are equal
        if text.astext() == "\n" and 0 < at < len(siblings) - 1:
            before, after = siblings[at - 1].astext(), siblings[at + 1].astext()
            if re.match(CHINESE, before[-1:]) and re.match(CHINESE, after):
                del text.parent[at]


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", add_api)
    app.connect("doctree-read", code_links)
    app.connect("doctree-read", join_chinese_lines)
    return {"parallel_read_safe": True}
