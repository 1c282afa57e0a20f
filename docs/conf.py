"""Sphinx's configuration of the site: `make docs`. Pages are plain Markdown at their places in the repository."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from flowchart import draw

project = "tir_dagster"
author = "The tir_dagster authors"
release = metadata.version("tir_dagster")
extensions = ["myst_parser"]
root_doc = "docs/index"
# The source folder is the repository, so that links between its pages mean the same here and there.
include_patterns = ["docs/**", "examples/*/README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = [".*", "build", "tir_dagster*", "benchmarks", "scripts", "docs/*.py", "**/.*", "**/target"]
suppress_warnings: list[str] = []
nitpicky = True
myst_heading_anchors = 4
# Code blocks of commands and their output have no colours of their own.
highlight_language = "none"

html_theme = "furo"
html_title = f"tir_dagster {release}"
html_static_path = ["style"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False

_CHART = re.compile(r"^```mermaid\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_MORE = "% pages that no other section names\n"


def _with_charts(text: str) -> str:
    """Replace each flowchart by its drawing: Mermaid itself would come from another server."""
    return _CHART.sub(lambda chart: f"{draw(chart[1])}\n", text)


def _with_all_pages(text: str, pages: set[str]) -> str:
    """Add to the last section of the start page what no other one names."""
    named = {
        name if name.startswith("/") else f"/docs/{name}" for name in re.findall(r"^([\w/.-]+)$", text, re.MULTILINE)
    }
    rest = sorted(page for page in ({f"/{page}" for page in pages} - named) if page != "/docs/index")
    if not rest:
        return text.replace(_MORE, "")
    section = "\n".join(["```{toctree}", ":hidden:", ":caption: More", "", *rest, "```", ""])
    return text.replace(_MORE, section)


def _read(app: Any, page: str, content: list[str]) -> None:
    if page == root_doc:
        content[0] = _with_all_pages(content[0], set(app.env.found_docs))
    content[0] = _with_charts(content[0])


def _redirect(app: Any, error: Exception | None) -> None:
    if error is None:
        text = '<!doctype html><title>tir_dagster</title><meta http-equiv="refresh" content="0; url=docs/index.html">'
        (Path(app.outdir) / "index.html").write_text(text, encoding="utf-8")


def setup(app: Any) -> None:
    app.connect("source-read", _read)
    app.connect("build-finished", _redirect)
