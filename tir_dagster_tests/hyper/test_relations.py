"""Rows that refer to each other in an extract of several tables: what breaks a relationship is counted."""

from __future__ import annotations

from pathlib import Path

from tir_dagster.hyper.engine import connect
from tir_dagster.hyper.relations import Reference, count_repeated, count_without_partner

REFERENCE = Reference(("Extract", "SALES"), ("REGION",), ("Extract", "REGIONS"), ("NAME",))


def related(folder: Path) -> Path:
    """Two tables of a file that people built: its texts have collations, each table its own."""
    path = folder / "related.hyper"
    with connect(path, create=True) as connection:
        for command in (
            'CREATE SCHEMA "Extract"',
            'CREATE TABLE "Extract"."SALES" ("REGION" TEXT COLLATE "en_US")',
            'CREATE TABLE "Extract"."REGIONS" ("NAME" TEXT COLLATE "en_US_CI")',
            """INSERT INTO "Extract"."SALES" VALUES ('north'), ('South'), ('west'), (NULL)""",
            """INSERT INTO "Extract"."REGIONS" VALUES ('north'), ('south'), ('SOUTH'), (NULL), (NULL)""",
        ):
            connection.execute_command(command)
    return path


def test_a_partner_has_the_same_value_as_the_source_compares_it(tmp_path):
    assert count_without_partner(related(tmp_path), REFERENCE) == 2


def test_values_that_are_equal_in_tableau_are_repeated(tmp_path):
    assert count_repeated(related(tmp_path), REFERENCE) == 1
