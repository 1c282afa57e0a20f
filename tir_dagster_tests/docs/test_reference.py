"""The reference pages are those of the code: written from it (TIR_WRITE_DOCS=1 writes them anew), or compared with it."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path

import pytest

from tir_dagster.spec.reading import json_schema
from tir_dagster_tests.docs.reference import PAGES

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
WRITE = "TIR_WRITE_DOCS"


def compare(file: Path, text: str) -> None:
    if os.environ.get(WRITE):
        file.write_text(text, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == text, f"write {file.name} anew: make docs-tables"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_written_from_the_code_is_up_to_date(name):
    compare(REFERENCE / name, PAGES[name]())


def test_the_schema_in_the_docs_is_that_of_the_code():
    compare(REFERENCE / "extracts.schema.json", json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n")


def constants(pattern: str) -> set[str]:
    """The texts of the product, without the sandbox, that have this form."""
    package = ROOT / "tir_dagster"
    return {
        node.value
        for file in package.rglob("*.py")
        if "sandbox" not in file.relative_to(package).parts
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(pattern, node.value)
    }


def named(page: str, pattern: str) -> set[str]:
    return set(re.findall(rf"`({pattern})`", (REFERENCE / page).read_text(encoding="utf-8")))


def test_the_page_of_metadata_names_the_keys_that_the_code_writes():
    # What ends with _ is the beginning of a key.
    written = {key for key in constants(r"tir/[a-z_]+") if not key.endswith("_")}
    assert named("metadata.md", "tir/[a-z_]+") == written
