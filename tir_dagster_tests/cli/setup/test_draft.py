"""Drafts as text: what is written reads back as what was checked."""

from __future__ import annotations

import pytest
import yaml

from tir_dagster.cli.setup.draft import _field

QUERIES = [
    "SELECT A\nFROM T",
    "  SELECT A\nFROM T",
    "SELECT SPLIT_PART(A, '\t', 1)\nFROM T",
    "SELECT 'a  \nb' AS A\nFROM T",
    "SELECT A -- a: b #c\n\nFROM T\n",
]


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_of_several_lines_reads_back_to_the_letter(query: str):
    lines = [f"    {line}".rstrip() for line in _field("query", query)]
    assert yaml.safe_load("\n".join(lines)) == {"query": query}


def test_a_plain_query_stays_readable():
    assert _field("query", "SELECT A\nFROM T") == ["query: |2-", "  SELECT A", "  FROM T"]
