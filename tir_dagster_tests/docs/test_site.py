"""The site of `make docs`: it builds without a warning, so no link is broken, and it needs nothing from other servers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tir_dagster_tests.browser import chromium, look

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
from flowchart import draw  # noqa: E402 - docs is no package


def picture() -> str:
    """The rooms of the code and their imports, which another test compares with the code."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return page.partition("```mermaid\n")[2].partition("```")[0]


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "--fail-on-warning",
        "--keep-going",
        "--quiet",
        "--doctree-dir",
        target / "trees",
    ]
    done = [*command, "--conf-dir", source / "docs", source, target / "site"]
    return subprocess.run(done, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("docs")
    done = build(ROOT, target)
    assert done.returncode == 0, done.stderr
    return target / "site"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as made:
        yield made


def pages(site: Path) -> dict[str, str]:
    return {str(page.relative_to(site)): page.read_text(encoding="utf-8") for page in site.rglob("*.html")}


def test_the_site_loads_nothing_from_other_servers(site):
    loading = re.compile(r"""<(?:script|img|iframe|link)[^>]*\b(?:src|href)="(?:https?:)?//""")
    assert [name for name, text in pages(site).items() if loading.search(text)] == []
    styles = {file.name: file.read_text(encoding="utf-8") for file in site.rglob("*.css")}
    assert [name for name, text in styles.items() if re.search(r"(?:url\(|@import )['\"]?(?:https?:)?//", text)] == []


def test_every_page_is_in_the_navigation_and_the_search(site):
    start = pages(site)["docs/index.html"]
    written = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md"), ROOT / "SECURITY.md"]
    shown = {str(page.relative_to(ROOT).with_suffix(".html")) for page in written} - {"docs/index.html"}
    links = {os.path.normpath(f"docs/{link}") for link in re.findall(r'href="([^"#]+\.html)', start)}
    assert shown - links == set()
    assert "purged_extract" in (site / "searchindex.js").read_text(encoding="utf-8")


def test_charts_are_drawn_in_colours_of_the_page(site):
    text = pages(site)["docs/architecture.html"]
    assert 'class="flowchart"' in text
    assert "flowchart TD" not in text, "Mermaid's text is shown in place of its picture"
    assert {*re.findall(r"\w+", picture())} - {"flowchart", "TD", "HTTP"} <= {*re.findall(r">(\w+)</text>", text)}


@pytest.mark.parametrize("page", ["docs/index", "docs/first-hour", "docs/reference/cli", "docs/architecture"])
def test_pages_can_be_read_light_and_dark_narrow_and_wide(site, browser, page):
    assert look(browser, (site / f"{page}.html").as_uri(), page.replace("/", " ")) == []


def test_a_broken_link_fails_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    for name in ("conf.py", "flowchart.py"):
        (tmp_path / "docs" / name).write_bytes((ROOT / "docs" / name).read_bytes())
    (tmp_path / "docs" / "index.md").write_text(
        "# Start\n\n[there](other.md#nowhere)\n\n% pages that no other section names\n"
    )
    (tmp_path / "docs" / "other.md").write_text("# Other\n")
    (tmp_path / "docs" / "style").mkdir()
    done = build(tmp_path, tmp_path / "build")
    assert done.returncode != 0
    assert "nowhere" in done.stderr


def test_boxes_of_a_chart_do_not_overlap_and_edges_go_forward():
    drawn = draw(picture())
    boxes = [
        tuple(map(int, box)) for box in re.findall(r'<rect x="(-?\d+)" y="(-?\d+)" width="(\d+)" height="(\d+)"', drawn)
    ]
    apart = [
        a[0] + a[2] < b[0] or b[0] + b[2] < a[0] or a[1] + a[3] < b[1] or b[1] + b[3] < a[1]
        for place, a in enumerate(boxes)
        for b in boxes[:place]
    ]
    assert len(boxes) > 10
    assert all(apart)


@pytest.mark.parametrize("text", ["flowchart BT\n a --> b", "flowchart TD\n a --- b", "flowchart TD\n subgraph x"])
def test_a_chart_that_cannot_be_drawn_is_refused(text):
    with pytest.raises(ValueError, match=r"is no edge|is not flowchart"):
        draw(text)
